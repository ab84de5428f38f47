"""Trainings that save their state on one grid of ranks and go on from it on another: what moves,
and what comes of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from bmt_checkpoint import load_checkpoint, save_checkpoint
from bmt_core.comm.objects import all_gather_object
from bmt_core.run.collectives import all_reduce
from bmt_core.run.runtime import current
from bmt_optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager
from bmt_optim.lr_scheduler import Cosine
from bmt_pipeline import PipelineModel, PipelineTransformerBlockList
from bmt_testing import run_ranks
from bmt_tp import ColumnParallelLinear, RowParallelLinear, VPEmbedding
from bmt_zero import Block
from bmtrain.loss import FusedCrossEntropy

AXES = ("pp", "replica", "dp", "tp")
FEATURES, VOCABULARY, SEQUENCE, GLOBAL_BATCH = 24, 48, 24, 24  # multiples of every size of an axis
STEPS = 3  # before the save, and after it


@dataclass(frozen=True)
class Grid:
    """A grid of ranks, with settings of the model on it."""

    sizes: tuple[int, ...]
    levels: tuple[int, ...]
    offloads: bool
    states_over_all: bool = False

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes)


class Layer(nn.Module):
    """A feed-forward block of parallel layers, with a parameter of one element, a frozen one and
    a buffer.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES, dtype=dtype)
        self.up = ColumnParallelLinear(FEATURES, 2 * FEATURES, dtype=dtype)
        self.down = RowParallelLinear(2 * FEATURES, FEATURES, dtype=dtype)
        self.gain = nn.Parameter(torch.ones(1, dtype=dtype))
        self.fixed = nn.Parameter(torch.ones(7, dtype=dtype), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.fill_(VOCABULARY)
        added: torch.Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + self.gain * self.fixed[:1] * added


class Model(PipelineModel):
    """Ids (batch, sequence) to logits (batch, sequence, vocabulary / tp), with the table of the
    input at the output.
    """

    def __init__(self, grid: Grid, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = VPEmbedding(VOCABULARY, FEATURES, dtype=dtype)
        made = [
            lambda level=level: Block(Layer(dtype), zero_level=level, mode="PIPE")
            for level in grid.levels
        ]
        self.layers = PipelineTransformerBlockList(made, batch_dim=1)

    def before_layers(self, ids: torch.Tensor) -> torch.Tensor:
        topology = current().topology
        embedded: torch.Tensor = self.table(
            ids.t().chunk(topology.axis_size("tp"))[topology.axis_rank("tp")]
        )
        return embedded

    def after_layers(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.table(hidden, projection=True).transpose(0, 1)
        return logits


@dataclass(frozen=True)
class Record:
    """What a training had when it was saved or loaded, and what the steps after that came to."""

    before: dict[str, Any]
    losses: list[float]
    noise: list[list[float]]  # per step, what each rank drew
    after: dict[str, Any]


def save_on(
    grid: Grid, folder: Path, dtype: torch.dtype, device: str = "cpu", *, non_blocking: bool = False
) -> Record:
    """Train, save to ``folder``, and go on, on the ranks of ``grid``."""
    return _run(grid, device, train_and_save, str(folder), grid, dtype, non_blocking)


def load_on(
    grid: Grid, folders: Iterable[Path], dtype: torch.dtype, device: str = "cpu"
) -> list[Record]:
    """Load each of ``folders`` and go on, on the ranks of ``grid``."""
    return _run(grid, device, load_and_train, [str(folder) for folder in folders], grid, dtype)


def differences(
    loaded: Record, saved: Record, uninterrupted: Record, dtype: torch.dtype
) -> list[str]:
    """Compare what was ``loaded``, on one grid, with what was ``saved``, on any, and with the run
    that only that grid made.

    What is loaded is equal to the last bit. So is what follows, on the grid that saved it; on
    another one gradients are summed in another order, and were before.
    """
    found = [f"when loaded: {text}" for text in unequal(loaded.before, saved.before, 0.0)]
    tolerance = 0.0 if saved is uninterrupted else 1e-3 if dtype == torch.float32 else 0.1
    found += [
        f"after {STEPS} steps: {text}"
        for text in unequal(loaded.after, uninterrupted.after, tolerance)
    ]
    found += [f"losses: {text}" for text in unequal(loaded.losses, uninterrupted.losses, tolerance)]
    if saved is uninterrupted and loaded.noise != saved.noise:
        found.append(f"random numbers: {loaded.noise} and {saved.noise}")
    return found


def train_and_save(folder: str, grid: Grid, dtype: torch.dtype, non_blocking: bool) -> Record:
    model, manager = _make(grid, dtype, seed=1)
    torch.rand(3 * current().rank)  # every rank is at a number of its own
    _train(model, manager, range(STEPS))
    before = _everything(model, manager)
    save_checkpoint(folder, model, manager, step=STEPS, non_blocking=non_blocking)
    return _go_on(before, model, manager)


def load_and_train(folders: list[str], grid: Grid, dtype: torch.dtype) -> list[Record]:
    records = []
    for folder in folders:
        model, manager = _make(grid, dtype, seed=2)
        assert load_checkpoint(folder, model, manager)["step"] == STEPS
        records.append(_go_on(_everything(model, manager), model, manager))
    return records


def _run(grid: Grid, device: str, function: Any, *arguments: Any) -> Any:
    pp, _, dp, tp = grid.sizes
    sizes = {"pipe_size": pp, "tp_size": tp, "shard_size": dp}
    states = "all" if grid.states_over_all else None
    init = {"device": device, "timeout": 120, "optimizer_shards": states, **sizes}
    return run_ranks(function, grid.ranks, *arguments, init=init, timeout=600)[0]


def _make(grid: Grid, dtype: torch.dtype, seed: int) -> tuple[Model, OptimManager]:
    with torch.device(current().device):
        model = Model(grid, dtype)
    for name, p in model.named_parameters():
        generator = torch.Generator().manual_seed(seed)
        generator.manual_seed(seed + sum(name.encode()))
        whole = torch.randn(p.whole_shape, generator=generator).mul_(0.3).to(dtype)  # type: ignore[attr-defined]
        with torch.no_grad():
            p.copy_(p.local_part(p.own_slice(whole)))  # type: ignore[operator]
    kind = AdamOffloadOptimizer if grid.offloads else AdamOptimizer
    is_bias = [name.endswith("bias") for name, _ in model.named_parameters()]
    groups = [
        {
            "params": [
                p for p, chosen in zip(model.parameters(), is_bias, strict=True) if chosen == wanted
            ],
            **options,
        }
        for wanted, options in ((False, {"weight_decay": 0.1}), (True, {"weight_decay": 0.0}))
    ]
    optimizer = kind(groups, lr=0.02, eps=1e-2)
    manager = OptimManager(loss_scale=256.0, loss_scale_steps=2)
    manager.add_optimizer(optimizer, Cosine(optimizer, 0.02, warmup_iter=2, end_iter=20))
    return model, manager


def _train(model: Model, manager: OptimManager, steps: range) -> list[tuple[float, float]]:
    topology, loss_of = current().topology, FusedCrossEntropy(parallel=True)
    found = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        data = torch.randint(VOCABULARY, (GLOBAL_BATCH, SEQUENCE + 1), generator=generator).to(
            current().device
        )
        own = data.chunk(topology.data_size)[topology.data_rank]
        manager.zero_grad()
        loss = loss_of(model(own[:, :-1]).flatten(0, 1), own[:, 1:].flatten())
        manager.backward(loss)
        manager.clip_grad_norm(manager.optimizers[0].param_groups, 1.0)
        manager.step()
        found.append((float(all_reduce(loss.detach().float(), "avg")), torch.rand(()).item()))
    return found


def _go_on(before: dict[str, Any], model: Model, manager: OptimManager) -> Record:
    found = _train(model, manager, range(STEPS, 2 * STEPS))
    noise = all_gather_object([draw for _, draw in found], current().world)
    return Record(before, [loss for loss, _ in found], noise, _everything(model, manager))


def _everything(model: Model, manager: OptimManager) -> dict[str, Any]:
    """All numbers of a run by name, whole, in host memory; those of the optimizer on rank 0."""
    manager.read_outcome()
    parts = all_gather_object(
        {name: value.cpu().clone() for name, value in model.state_dict().items()}, current().world
    )
    model_state = {name: value for part in parts for name, value in part.items()}
    state = manager.state_dict(gather_opt=True, named_parameters=list(model.named_parameters()))
    for group in state["logical"]["groups"][0]:
        group["params"] = sorted(group["params"])
    return {"model": model_state, "optimizer": tree_map_only(torch.Tensor, torch.Tensor.cpu, state)}


def unequal(one: Any, other: Any, tolerance: float = 0.0, name: str = "") -> list[str]:
    """Return the names of what differs by more than ``tolerance`` in nested values; 0.0: of what
    differs in a bit.
    """
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return [f"{name} has {sorted(map(str, one.keys() ^ other.keys()))} on one side only"]
        return [
            text
            for key in one
            for text in unequal(one[key], other[key], tolerance, f"{name}/{key}")
        ]
    if (
        isinstance(one, (list, tuple))
        and isinstance(other, (list, tuple))
        and len(one) == len(other)
    ):
        pairs = enumerate(zip(one, other, strict=True))
        return [text for i, pair in pairs for text in unequal(*pair, tolerance, f"{name}/{i}")]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return [
                f"{name}: {one.dtype} {tuple(one.shape)} and {other.dtype} {tuple(other.shape)}"
            ]
        is_close = torch.allclose(one.double(), other.double(), rtol=tolerance, atol=tolerance)
        is_equal = is_close if tolerance else torch.equal(one, other)
        largest = (one.double() - other.double()).abs().max() if one.numel() else 0
        return [] if is_equal else [f"{name} differs by up to {largest:.3g}"]
    if isinstance(one, float) and isinstance(other, float) and tolerance:
        is_equal = math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)
    else:
        is_equal = one == other
    return [] if is_equal else [f"{name}: {one} and {other}"]
