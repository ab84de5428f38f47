"""The batch of a step belongs to a whole pipeline: what its ranks may pass, and how it
is divided.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from pipeline_trainings import GRIDS, Bare, Piped, Plain, loss_of, outcome, text, whole_gradients
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from bmt_core.errors import ConfigError
from bmt_core.run.runtime import current, is_initialized
from bmt_optim import OptimManager
from bmt_pipeline import PipelineModel, PipelineTransformerBlockList, eval_step, train_step
from bmt_testing import on_ranks, run_ranks
from bmt_zero import Block
from cells import cells, run_cells

Batch = tuple[Any, Any] | None


def first_batch(num_replicas: int, rank: int) -> Batch:
    ids, targets = (x[0] for x in text())
    data = TensorDataset(ids, targets)
    sampler: Any = DistributedSampler(data, num_replicas, rank, shuffle=False)
    return next(iter(DataLoader(data, batch_size=8 // num_replicas, sampler=sampler)))


def sampled(is_of_all_ranks: bool, call: Callable[..., torch.Tensor]) -> float | str:
    topology = current().topology
    if is_of_all_ranks:
        batch = first_batch(current().world_size, current().rank)
    else:
        batch = first_batch(topology.axis_size("dp"), topology.axis_rank("dp"))
    model = Piped(4, 3, True)
    found: float | str = outcome(lambda: float(call(model, loss_of, batch, num_micro_batches=2)))
    return found


@pytest.mark.parametrize("grid", ["pp 2 x dp 2", "pp 4"])
def test_a_sampler_over_all_ranks_is_refused_and_one_over_the_pipelines_is_right(grid: str) -> None:
    ranks, stages = GRIDS[grid]
    pipelines = ranks // stages
    ids, targets = (x[0] for x in text())
    cells = list(itertools.product((True, False), (train_step, eval_step)))
    for (is_of_all_ranks, call), found in run_cells(
        sampled, ranks, cells, init={"pipe_size": stages}
    ):
        for rank, said in enumerate(found):
            first = rank % pipelines
            if is_of_all_ranks:
                assert said.startswith(
                    f"ConfigError: Rank {first + pipelines} passes other inputs than rank {first},"
                    " and both are stages"
                ), call
                assert "rank=topology.axis_rank('dp')" in said
            else:
                own = slice(first, 8, pipelines)
                loss = loss_of(Plain(4).double()(ids[own]), targets[own])
                assert said == pytest.approx(float(loss.detach()), rel=1e-6), call


def passed(form: str, batch: Any) -> Batch:
    """What this rank passes of ``batch``."""
    stage, last = current().topology.axis_rank("pp"), current().topology.axis_size("pp") - 1
    inputs, targets = batch
    if form == "what is read":
        if 0 < stage < last:
            return None
        return inputs if stage == 0 else None, targets if stage == last else None
    if form == "other targets on the first stage":
        return inputs, targets + (stage == 0)
    return inputs + (stage == last and bool(inputs.any())), targets


def steps_of(form: str) -> list[float | str]:
    model, zeros = Piped(4, 3, True), torch.zeros(4, 3, dtype=torch.long)
    batches = [(zeros, zeros), *(tuple(x[step][:4] for x in text()) for step in range(2))]

    def step(batch: Any) -> float:
        return float(train_step(model, loss_of, passed(form, batch), num_micro_batches=4))

    return [outcome(partial(step, batch)) for batch in batches]


def test_ranks_may_pass_none_for_what_they_do_not_read() -> None:
    first, *others = run_ranks(steps_of, 4, "what is read", init={"pipe_size": 4})
    assert others == [first] * 3 and all(isinstance(loss, float) for loss in first)


def test_a_batch_that_differs_is_refused_also_after_a_first_step_on_zeros() -> None:
    for first, *others in run_ranks(steps_of, 2, "zeros first", init={"pipe_size": 2}):
        assert isinstance(first, float)
        assert all("Rank 1 passes other inputs than rank 0" in str(each) for each in others)


def test_targets_that_differ_are_refused_although_the_first_stage_does_not_read_them() -> None:
    form = "other targets on the first stage"
    for messages in run_ranks(steps_of, 2, form, init={"pipe_size": 2}):
        assert all("Rank 0 passes other targets than rank 1" in str(each) for each in messages)


FEATURES = 5


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.linear = nn.Linear(FEATURES, FEATURES).double()

    def forward(self, x: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
        out: torch.Tensor = x + torch.tanh(self.linear(x if table is None else x + table))
        return out


class SequenceFirst(PipelineModel):
    """Hidden states are (sequence, batch, features); so are inputs, unless they
    are ``transposed``.
    """

    def __init__(self, layers: list[nn.Module], *, transposed: bool = False) -> None:
        super().__init__()
        self.layers: Any = (
            PipelineTransformerBlockList(layers, batch_dim=1) if is_initialized() else layers
        )
        self.transposed = transposed

    def before_layers(self, x: torch.Tensor) -> torch.Tensor:
        return (x.transpose(0, 1) if self.transposed else x).cumsum(0)

    def after_layers(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.cumsum(0).sum((0, 2))


class WithTable(PipelineModel):
    """Adds a table of all rows in each layer."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers: Any = (
            PipelineTransformerBlockList(layers, batch_related=[]) if is_initialized() else layers
        )

    def before_layers(
        self, table: torch.Tensor, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return x, table

    def after_layers(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.square().sum((1, 2))


def layers_of_four() -> list[nn.Module]:
    return [Layer(number) for number in range(4)]


def drawn(*shape: int, number: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def mean_product(out: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over rows; ``targets`` are (rows,) or (positions, rows)."""
    return (out * targets).sum(0 if targets.dim() == 1 else (0, 1)) / len(out)


Step = tuple[Callable[[list[nn.Module]], PipelineModel], Any, Any, dict[str, Any]]
"""The model, the inputs, the targets, and the arguments that say where the batch is."""

STEPS: dict[str, Step] = {
    "sequence first": (
        SequenceFirst,
        drawn(6, 8, FEATURES),
        drawn(2, 8, number=1),
        {"batch_dim": 1},
    ),
    "targets by rows": (
        SequenceFirst,
        drawn(6, 8, FEATURES),
        drawn(8, number=1),
        {"batch_dim": (1, 0)},
    ),
    "as many positions as rows": (
        SequenceFirst,
        drawn(8, 4, FEATURES),
        drawn(2, 4, number=1),
        {"batch_dim": 1},
    ),
    "batch first": (
        lambda layers: SequenceFirst(layers, transposed=True),
        drawn(8, 6, FEATURES),
        drawn(8),
        {},
    ),
    "batch first, as many positions as rows": (
        *(lambda layers: SequenceFirst(layers, transposed=True), drawn(8, 4, FEATURES), drawn(8)),
        {"batch_dim": 0},
    ),
    "table": (
        WithTable,
        (drawn(8, FEATURES), drawn(8, 8, FEATURES)),
        drawn(8),
        {"batch_related": [1]},
    ),
}


def plain_step(name: str) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the gradients of plain torch."""
    make, inputs, targets, _ = STEPS[name]
    layers = layers_of_four()
    model = make(layers)
    hidden = model.before_layers(*(inputs if isinstance(inputs, tuple) else (inputs,)))
    x, *rest = hidden if isinstance(hidden, tuple) else (hidden,)
    for layer in layers:
        x = layer(x, *rest)
    loss = mean_product(model.after_layers(x), targets)
    loss.backward()
    named = {
        f"layers.{number}.{k}": p.grad
        for number, one in enumerate(layers)
        for k, p in one.named_parameters()
    }
    return float(loss.detach()), {name: grad for name, grad in named.items() if grad is not None}


def pipelined_step(name: str, is_declared: bool = True) -> Any:
    """The losses of training and of evaluation, those of a call of the model, and the gradients."""
    make, inputs, targets, where = STEPS[name]
    options = where if is_declared else {}
    model, batch = make(layers_of_four()), (inputs, targets)
    losses = [float(eval_step(model, mean_product, batch, 2, **options))]
    options = {**options, "manager": OptimManager()}
    losses.append(float(train_step(model, mean_product, batch, "1f1b", 2, **options)))
    gradients = whole_gradients(model)
    with torch.no_grad():  # every rank of the pipeline has the same batch
        out = model(*(inputs if isinstance(inputs, tuple) else (inputs,)))
    return [*losses, float(mean_product(out, targets))], gradients


def test_a_step_divides_the_batch_where_it_is_declared() -> None:
    for (name,), found in run_cells(pipelined_step, 2, zip(STEPS), init={"pipe_size": 2}):
        loss, gradients = plain_step(name)
        assert {key for _, of_rank in found for key in of_rank} == gradients.keys(), name
        for losses, of_rank in found:
            assert losses == pytest.approx([loss] * 3, rel=1e-6), name
            torch.testing.assert_close(of_rank, {key: gradients[key] for key in of_rank})


@on_ranks(2, init={"pipe_size": 2})
@cells(
    "name, rows",
    [
        ("sequence first", "3 rows along dim 0 of inputs of shape (3, 8, 5)"),
        ("as many positions as rows", "4 rows along dim 0 of inputs of shape (4, 4, 5)"),
        (
            "batch first, as many positions as rows",
            "4 rows along dim 0 of inputs of shape (4, 4, 5)",
        ),
    ],
)
def test_inputs_that_may_be_sequence_first_are_refused_unless_that_is_declared(
    name: str, rows: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"of a micro-batch with {rows}. Say")):
        pipelined_step(name, is_declared=False)


class Writing(nn.Module):
    """Writes to its second argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        shift += 1
        out: torch.Tensor = self.linear(x) + shift
        return out


@on_ranks(2, init={"pipe_size": 2})
@pytest.mark.parametrize("step", [train_step, eval_step])
def test_layers_may_write_to_an_input_that_all_micro_batches_get(
    step: Callable[..., torch.Tensor],
) -> None:
    torch.manual_seed(0)
    layers, x, shift = [Writing(), Writing()], torch.randn(8, 4), torch.zeros(1, 4)
    plain = layers[1](layers[0](x, shift), shift).square().mean()
    model = Bare([Block(layer, False, mode="PIPE") for layer in layers])
    batch = (x, torch.zeros(1, 4)), torch.zeros(8, 4)
    found = step(model, nn.functional.mse_loss, batch, num_micro_batches=4, batch_related=[0])
    torch.testing.assert_close(found, plain.detach())
