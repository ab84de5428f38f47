"""How fast several ways of sharding train over a slow link between two hosts of two ranks each.

    python integration-tests/slow_link.py --rate 1gbit --delay 0.2ms

The hosts are namespaces of this machine (tools/hosts.py: it takes root), and their ranks share its
cores. All ways train the same GPT of 16 million parameters in float32 on batches of the same size,
without recomputation. They take turns in one run, after a warm-up step each, so that a change of
the machine's load meets all of them. One table is printed: tokens per second of the median round,
and how much the first host sent to the other in a step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import bmtrain as bmt
from bmt_pipeline import PipelineModel, train_step

TOOL = Path(__file__).resolve().parents[1] / "tools" / "hosts.py"
HOSTS, RANKS_PER_HOST = 2, 2
VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 2048, 384, 6, 8, 64
SEQUENCES = 8
"""Of the batch of all ranks."""
Step = Callable[[torch.Tensor], object]


def make_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(
        WIDTH, HEADS, 4 * WIDTH, dropout=0, norm_first=True, batch_first=True
    )


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1])
        return self.token(tokens) + self.position(positions)


class Model(nn.Module):
    """The model, with layers that ``wrap`` has seen."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module] = lambda layer: layer) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.layers = nn.ModuleList(wrap(make_layer()) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class Stages(PipelineModel):
    """The same model, with layers that lie on the stages of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding()
        make_block = partial(_block, mode="PIPE")
        self.layers = bmt.PipelineTransformerBlockList([make_block] * LAYERS)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def before_layers(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embedding(tokens)

    def after_layers(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)


def _block(layer: nn.Module | None = None, mode: Literal["BLOCK", "PIPE"] = "BLOCK") -> nn.Module:
    return bmt.Block(layer or make_layer(), use_checkpoint=False, mode=mode)


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def sharded_by_bmt() -> Step:
    model = bmt.BMTrainModelWrapper(Model(_block))
    return _step(model, torch.optim.AdamW(model.parameters()))


def pipelined() -> Step:
    """Each pipeline has a stage on every host, and a batch of its own."""
    model = bmt.BMTrainModelWrapper(Stages())
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(torch.optim.AdamW(model.parameters()))
    topology = bmt.current().topology
    number, pipelines = topology.axis_rank("dp"), topology.axis_size("dp")

    def step(tokens: torch.Tensor) -> None:
        own = tokens.chunk(pipelines)[number]
        train_step(model, loss_of, (own, own), "1f1b", 4, manager=manager)
        manager.step()
        manager.zero_grad()

    return step


def sharded_by_torch(*sizes: int) -> Step:
    names = ("replica", "shard")[-len(sizes) :]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _step(model, torch.optim.AdamW(model.parameters()))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(tokens: torch.Tensor) -> None:
        own = tokens.chunk(bmt.world_size())[bmt.rank()]
        loss_of(model(own), own).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


WAYS: dict[str, tuple[dict[str, Any], Callable[[], Step]]] = {
    "bmt ZeRO-3 over 4 ranks": ({}, sharded_by_bmt),
    "FSDP2 over 4 ranks": ({}, partial(sharded_by_torch, HOSTS * RANKS_PER_HOST)),
    "bmt shard_size=2": ({"shard_size": RANKS_PER_HOST}, sharded_by_bmt),
    "bmt shard_size=2, optimizer states over all": (
        {"shard_size": RANKS_PER_HOST, "optimizer_shards": "all"},
        sharded_by_bmt,
    ),
    "FSDP2, mesh of 2 x 2 (HSDP)": ({}, partial(sharded_by_torch, HOSTS, RANKS_PER_HOST)),
    "bmt pipe_size=2, ZeRO-3 inside": ({"pipe_size": HOSTS}, pipelined),
}


def seconds_and_bytes(way: str, steps: int) -> tuple[float, float]:
    """Return the seconds of a step, and how many bytes this host sent in it; collective.

    FSDP2 trains in a run of bmt too: it uses that run's process group.
    """
    settings, make_step = WAYS[way]
    bmt.init_distributed(device="cpu", gradients="mean", **settings)
    step = make_step()
    tokens = torch.randint(
        VOCABULARY, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(0)
    )
    step(tokens)
    dist.barrier()
    begin, sent = time.perf_counter(), bytes_sent()
    for _ in range(steps):
        step(tokens)
    dist.barrier()
    found = (time.perf_counter() - begin) / steps, (bytes_sent() - sent) / steps
    bmt.shutdown()
    return found


def bytes_sent() -> int:
    """Return what this host has sent since it was made."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "eth0":
            return int(counts.split()[8])
    raise RuntimeError("this host has no interface eth0")


def measure(rounds: int, steps: int) -> None:
    """Measure all ways on one of the ranks; rank 0 prints the table."""
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            found[way].append(seconds_and_bytes(way, steps))
    if os.environ["RANK"] != "0":
        return
    count = sum(p.numel() for p in Model().parameters())
    print(f"{count / 1e6:.1f} million parameters, {SEQUENCES * LENGTH} tokens per step")
    print("| | tokens/s (slowest to fastest round) | MB sent by a host per step |")
    print("|---|---|---|")
    for way, rows in found.items():
        speeds = sorted(SEQUENCES * LENGTH / seconds for seconds, _ in rows)
        sent = statistics.median(count for _, count in rows) / 1e6
        print(
            f"| {way} | {statistics.median(speeds):.0f} ({speeds[0]:.0f} to {speeds[-1]:.0f}) |"
            f" {sent:.1f} |"
        )


def main() -> None:
    """Start the ranks on the hosts, or be one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", help="of the link, such as 1gbit (default: no limit)")
    parser.add_argument("--delay", help="of the link, such as 0.2ms (default: none)")
    parser.add_argument("--steps", type=int, default=3, help="per way and round")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if "RANK" in os.environ:
        measure(options.rounds, options.steps)
        return
    command = [sys.executable, str(TOOL), f"--hosts={HOSTS}"]
    command += [] if options.rate is None else ["--rate", options.rate]
    command += [] if options.delay is None else ["--delay", options.delay]
    launch = (
        f'exec "$0" -m torch.distributed.run --nnodes={HOSTS} --nproc_per_node={RANKS_PER_HOST}'
        ' --rdzv-backend=c10d --rdzv-endpoint="$FIRST_HOST:29500" "$@"'
    )
    ranks = [str(Path(__file__).resolve())]
    ranks += [f"--rounds={options.rounds}", f"--steps={options.steps}"]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # In the place of this process, so that a signal ends the hosts, too.
    os.execv(sys.executable, [*command, "--", "sh", "-c", launch, sys.executable, *ranks])


if __name__ == "__main__":
    main()
