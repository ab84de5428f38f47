"""``inspect`` in trainings by ZeRO and pipelines, against plain torch on one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from pipeline_trainings import Piped, Plain, loss_of, mask_of
from pipeline_trainings import text as pipeline_text
from torch import nn

from bmt_core.run.runtime import current
from bmt_optim import OptimManager
from bmt_pipeline import train_step
from bmt_testing import run_ranks
from bmt_zero import Block, TransformerBlockList, no_sync
from bmtrain.inspect import inspect_model, inspect_tensor, record_tensor

Summary = list[dict[str, Any]]


def statistics_of(name: str, value: torch.Tensor, grad: torch.Tensor | None) -> dict[str, Any]:
    value = value.detach()
    found = {"std": value.std(), "mean": value.mean(), "max": value.max(), "min": value.min()}
    found |= {"grad_std": torch.tensor(0.0), "grad_mean": torch.tensor(0.0)}
    if grad is not None:
        found |= {"grad_std": grad.std(), "grad_mean": grad.mean()}
    return {
        "name": name,
        "shape": tuple(value.shape),
        **{key: number.item() for key, number in found.items()},
    }


def same(found: Summary, wanted: Summary) -> None:
    assert [item["name"] for item in found] == [item["name"] for item in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one == {
            k: v if isinstance(v, (str, tuple)) else pytest.approx(v, rel=1e-7, abs=1e-9)
            for k, v in other.items()
        }


@contextmanager
def recording(
    recorded: list[tuple[str, torch.Tensor]],
) -> Iterator[Callable[[torch.Tensor, str], None]]:
    """Yield what plain torch does in the place of ``record_tensor``."""
    counts: dict[str, int] = {}

    def record(x: torch.Tensor, name: str) -> None:
        if x.requires_grad:
            x.retain_grad()
        recorded.append((f"{counts.get(name, 0)}.{name}", x))
        counts[name] = counts.get(name, 0) + 1

    yield record


def watch(model: nn.Module, record: Callable[[torch.Tensor, str], None]) -> None:
    """Record the outputs of the modules whose last name is in ``KINDS``, under that name; also
    where they are recomputed.
    """
    for path, module in model.named_modules():
        if (name := KINDS.get(path.rpartition(".")[2])) is not None:
            module.register_forward_hook(
                lambda _module, _args, output, name=name: record(output, name)
            )


def expected_of_blocks() -> tuple[Summary, Summary]:
    model = nn.Sequential(*[Mlp(n) for n in range(3)])
    tensors: list[tuple[str, torch.Tensor]] = []
    with recording(tensors) as record:
        watch(model, record)
        losses = [model(x).pow(2).mean() for x in BATCH]
        (losses[0] + losses[1]).backward()
    of_model = [
        statistics_of(name, p, p.grad) for name, p in model.named_parameters(remove_duplicate=False)
    ]
    return [statistics_of(name, x, x.grad) for name, x in tensors], of_model


class Mlp(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.up, self.down = (
            nn.Linear(5, 9, dtype=torch.float64),
            nn.Linear(9, 5, dtype=torch.float64),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


KINDS = {"up": "wide", "down": "narrow"}
BATCH = torch.randn(2, 8, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def sharded(level: int, use_checkpoint: bool) -> tuple[Summary, Summary]:
    """Two micro-batches, of which the first holds its gradients back."""
    model = TransformerBlockList(
        [Block(Mlp(n), use_checkpoint=use_checkpoint, zero_level=level) for n in range(3)]
    )
    watch(model, record_tensor)
    topology, manager = current().topology, OptimManager()
    own = [x.chunk(topology.data_size)[topology.data_rank].to(current().device) for x in BATCH]
    with inspect_tensor() as inspector:
        with no_sync(model):
            manager.backward(model(own[0]).pow(2).mean())
        if level < 2:  # those above reduce in any case
            assert inspect_model(model, "0.up.weight")[0]["grad_std"] > 0
        manager.backward(model(own[1]).pow(2).mean())
    return inspector.get_summary(), inspect_model(model, "*")


@pytest.mark.parametrize(
    ("ranks", "level", "use_checkpoint"),
    [(1, 3, True), (2, 0, True), (4, 1, False), (2, 2, False), (4, 3, False)],
)
def test_sharded_blocks_at_every_level(ranks: int, level: int, use_checkpoint: bool) -> None:
    wanted, of_model = expected_of_blocks()
    for found, parameters in run_ranks(sharded, ranks, level, use_checkpoint):
        same(found, wanted)
        same(parameters, of_model)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_on_gpus_where_torch_recomputes_in_other_threads(use_checkpoint: bool) -> None:
    wanted, of_model = expected_of_blocks()
    for found, parameters in run_ranks(sharded, 2, 3, use_checkpoint, init={"device": "cuda"}):
        same(found, wanted)
        same(parameters, of_model)


class RecordingPlain(Plain):
    def __init__(self, layers: int, record: Any) -> None:
        super().__init__(layers)
        self.record = record

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = nn.functional.embedding(ids, self.embedding)
        self.record(x, "x")
        for layer in self.layers:
            x = layer(x, mask_of(ids).to(x.dtype), self.shift)
            self.record(x, "x")
        logits = x @ self.embedding.t()
        self.record(logits, "x")
        return logits


class RecordingPiped(Piped):
    """Every tensor has the same name: its number says whether the order is that of the
    whole model.
    """

    def before_layers(self, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, *others = super().before_layers(ids)
        record_tensor(x, "x")
        return x, *others

    def after_layers(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().after_layers(hidden)
        record_tensor(logits, "x")
        return logits


def pipelined(schedule: str | None, options: dict[str, Any]) -> tuple[Summary, Summary]:
    model = RecordingPiped(5, 3, True, **options)
    for layer in model.modules():
        if hasattr(layer, "norm"):
            layer.register_forward_hook(lambda _module, _args, output: record_tensor(output, "x"))
    topology, manager = current().topology, OptimManager()
    ids, targets = (part[0] for part in pipeline_text())
    with inspect_tensor() as inspector:
        if schedule is None:
            own = [x.chunk(topology.data_size)[topology.data_rank] for x in (ids, targets)]
            manager.backward(loss_of(model(own[0]), own[1]))
        else:
            size, index = topology.axis_size("dp"), topology.axis_rank("dp")
            batch = ids.chunk(size)[index], targets.chunk(size)[index]
            train_step(model, loss_of, batch, schedule, 4, manager=manager)
    return inspector.get_summary(), inspect_model(model, "*")


@pytest.mark.parametrize(
    ("ranks", "schedule", "options"),
    [(2, None, {}), (4, "interleaved", {"chunks": 2})],
    ids=["list-2", "interleaved-4"],
)
def test_layers_of_a_pipeline(ranks: int, schedule: str | None, options: dict[str, Any]) -> None:
    tensors: list[tuple[str, torch.Tensor]] = []
    ids, targets = (part[0] for part in pipeline_text())
    with recording(tensors) as record:
        model = RecordingPlain(5, record).double()
        loss_of(model(ids), targets).backward()
    wanted = [statistics_of(name, x, x.grad) for name, x in tensors]
    of_model = [statistics_of(name, p, p.grad) for name, p in model.named_parameters()]
    init = {"pipe_size": 2, "num_micro_batches": 4}
    for found, parameters in run_ranks(pipelined, ranks, schedule, options, init=init):
        same(found, wanted)
        same(parameters, of_model)
