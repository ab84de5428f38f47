"""Optimizers over whole tensors with tensor parallelism, on the stages of a pipeline, and from one
grid to another.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_trainings import Piped, Plain, loss_of
from pipeline_trainings import text as text_of_layers
from tensor_trainings import GRIDS, text
from torch import nn
from tp_models import Net, fill, tp
from whole_trainings import KINDS, split

from bmt_checkpoint import load_checkpoint, save_checkpoint
from bmt_core.comm.objects import all_gather_object
from bmt_core.errors import ConfigError
from bmt_core.run import runtime
from bmt_core.run.collectives import all_reduce
from bmt_core.run.runtime import current
from bmt_optim import AdamW, OptimManager, whole
from bmt_params import DistributedParameter, Locality, init_parameters
from bmt_pipeline import train_step
from bmt_testing import on_ranks, run_ranks
from bmt_tp import RowParallelLinear
from bmt_zero import Block
from bmtrain.loss import FusedCrossEntropy

State = dict[str, torch.Tensor]
Result = tuple[list[float], State]
ADAMW = {"lr": 0.01, "eps": 1e-2, "weight_decay": 0.01}
LAYERS = 5


def assert_alike(found: Result, wanted: Result, tolerance: float) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def managed(kind: str, model: nn.Module) -> OptimManager:
    matrices, others = split(model)
    manager = OptimManager()
    manager.add_optimizer(whole(KINDS[kind], matrices, lr=0.02))
    manager.add_optimizer(AdamW(others or [{"params": []}], **ADAMW))
    return manager


def plain(
    kind: str, model: nn.Module, loss: Callable[[Any, Any, Any], torch.Tensor], data: Any
) -> Result:
    matrices, others = split(model)
    optimizers = [KINDS[kind](matrices, lr=0.02), torch.optim.AdamW(others, **ADAMW)]
    losses = []
    for ids, targets in zip(*data, strict=True):
        for optimizer in optimizers:
            optimizer.zero_grad()
        found = loss(model, ids, targets)
        found.backward()
        losses.append(float(found.detach()))
        for optimizer in optimizers:
            optimizer.step()
    return losses, dict(model.state_dict())


def dense(kind: str) -> Result:
    model = Net(torch.float64)
    model.load_state_dict(fill(model))

    def loss(model: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(ids.t()).flatten(0, 1), targets.flatten())

    return plain(kind, model, loss, text(2))


def of_split_layers(kind: str, level: int, folder: str, steps: tuple[int, int]) -> Result:
    """Take ``steps`` with layers that are split along tp, from a checkpoint in ``folder`` if they
    are not the first.
    """
    model = Net(torch.float64, wrap=lambda layer: Block(layer, zero_level=level))
    if not steps[0]:
        model.load_state_dict(fill(model))
    manager, topology = managed(kind, model), current().topology
    if steps[0]:
        load_checkpoint(folder, model, manager)
    loss_of_parts = FusedCrossEntropy(parallel=True)
    index, size = tp()
    losses = []
    for ids, targets in list(zip(*text(2), strict=True))[slice(*steps)]:
        own_ids, own_targets = [
            part.chunk(topology.data_size)[topology.data_rank] for part in (ids, targets)
        ]
        manager.zero_grad()
        logits = model(own_ids.t().chunk(size)[index])
        loss = loss_of_parts(logits.flatten(0, 1), own_targets.flatten())
        manager.backward(loss)
        losses.append(float(all_reduce(loss.detach(), "avg")))
        manager.step()
    if not steps[0]:
        save_checkpoint(folder, model, manager, step=steps[1])
    return losses, dict(model.state_dict())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("before", "after", "level"),
    [("tp 2", "tp 4", 3), ("tp 2 x dp 2", "dp 2", 3), ("dp 2", "tp 2 x dp 2", 0)],
)
def test_layers_that_are_split_train_as_dense_ones(
    kind: str, before: str, after: str, level: int, tmp_path: Path
) -> None:
    losses, state = dense(kind)
    found: list[float] = []
    for grid, steps in ((before, (0, 3)), (after, (3, 5))):
        ranks, tp_size = GRIDS[grid]
        results = run_ranks(
            of_split_layers, ranks, kind, level, str(tmp_path), steps, init={"tp_size": tp_size}
        )
        found += results[0][0]
    for result in results:
        assert_alike((found, result[1]), (losses, state), 2e-6)


def of_stages(kind: str, folder: str, steps: tuple[int, int], schedule: str | None) -> Result:
    """Take ``steps`` with layers on stages, from a checkpoint in ``folder`` if they are not
    the first.
    """
    model, topology = Piped(LAYERS, 3, False), current().topology
    manager = managed(kind, model)
    if steps[0]:
        load_checkpoint(folder, model, manager)
    losses = []
    for ids, targets in list(zip(*text_of_layers(), strict=True))[slice(*steps)]:
        manager.zero_grad()
        if schedule is None:
            own = [x.chunk(topology.data_size)[topology.data_rank] for x in (ids, targets)]
            loss = loss_of(model(own[0]), own[1])
            manager.backward(loss)
        else:
            own = [
                x.chunk(topology.axis_size("dp"))[topology.axis_rank("dp")] for x in (ids, targets)
            ]
            loss = train_step(model, loss_of, tuple(own), schedule, 4, manager=manager)  # type: ignore[arg-type]
        manager.step()
        losses.append(float(all_reduce(loss.detach(), "avg")))
    if not steps[0]:
        save_checkpoint(folder, model, manager, step=steps[1])
    states = all_gather_object(dict(model.state_dict()), current().world)
    return losses, {name: value for state in states for name, value in state.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("before", "after"), [((2, 2), (4, 4)), ((4, 2), (1, 1)), ((2, 1), (4, 2))]
)
def test_stages_train_as_one_process(
    kind: str, before: tuple[int, int], after: tuple[int, int], tmp_path: Path
) -> None:
    model = Plain(LAYERS).double()
    losses, state = plain(
        kind, model, lambda model, ids, targets: loss_of(model(ids), targets), text_of_layers()
    )
    found: list[float] = []
    for (ranks, stages), steps in ((before, (0, 2)), (after, (2, 4))):
        init = {"pipe_size": stages, "num_micro_batches": 4}
        schedule = "1f1b" if stages > 1 else None
        results = run_ranks(
            of_stages, ranks, kind, str(tmp_path), steps, schedule, init=init, timeout=120
        )
        found += results[0][0]
    for result in results:
        assert_alike((found, result[1]), (losses, state), 2e-6)


@on_ranks(2, init={"pipe_size": 2})
def test_together_is_refused_with_stages_on_all_of_them() -> None:
    model = Piped(2, 3, False)
    own = [
        p
        for p in model.parameters()
        if runtime.rank() == 0 or not any(loc.is_own for loc in p.locality)
    ]  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="along pp ranks have parameters of their own"):
        whole(KINDS["Normalized"], own, together=True)


LOCALITIES: dict[str, tuple[Locality, ...]] = {
    "rows": (Locality("tp", split_dim=0),),
    "columns": (Locality("tp", split_dim=1),),
    "sections": (Locality("tp", split_dim=1, sections=(4, 2)),),
    "copies": (Locality("tp", gradients="whole"),),
    "shares": (Locality("tp", gradients="share"),),
    "everywhere": (),
}


@pytest.mark.parametrize("together", [False, True])
@on_ranks(2, 4, init={"tp_size": 2})
def test_parameters_of_every_locality_are_joined_at_the_owner(together: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    wholes = {
        name: torch.randn(4, 6, generator=generator, dtype=torch.float64) for name in LOCALITIES
    }
    topology, parts = current().topology, {}
    for name, locality in LOCALITIES.items():
        value = wholes[name]
        for one in locality:
            if one.split_dim is not None:
                value = one.cut(value, topology.axis_rank("tp"), 2)
        p = parts[name] = DistributedParameter(value, locality=locality)
        assert p.cuts == [(one, 2) for one in locality if one.split_dim is not None]
    references = {name: nn.Parameter(value) for name, value in wholes.items()}
    plain = KINDS["Normalized"](references.values())
    optimizer = whole(KINDS["Normalized"], parts.values(), together=together)
    for _ in range(3):
        for name, p in parts.items():
            gradient = torch.randn(4, 6, generator=generator, dtype=torch.float64)
            references[name].grad, p.grad = gradient, p.local_part(p.own_slice(gradient)).clone()
        plain.step()
        optimizer.step()
    for name, p in parts.items():
        torch.testing.assert_close(
            p.gather_all_like(p.detach()), references[name].detach(), msg=name
        )


@on_ranks(2, init={"tp_size": 2})
def test_each_rank_may_have_one_column_of_a_matrix() -> None:
    layer = RowParallelLinear(2, 6, bias=False)
    init_parameters(layer)
    (p,) = layer.parameters()
    assert isinstance(p, DistributedParameter)
    before = p.gather_all().detach().clone()
    optimizer = whole(torch.optim.SGD, [p], lr=0.5)
    gradient = torch.arange(12.0).view(6, 2)
    for step in range(2):
        p.grad = p.local_part(p.own_slice(gradient)).clone()
        optimizer.step()
        torch.testing.assert_close(p.gather_all().detach(), before - 0.5 * (step + 1) * gradient)
