"""Loss scaling, clipping and every optimizer over the stages of a pipeline, and checkpoints that
another grid goes on with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_trainings import Plain, loss_of, mask_of, text
from torch import nn

from bmt_checkpoint import load_checkpoint, save_checkpoint
from bmt_core.comm.objects import all_gather_object
from bmt_core.run.collectives import all_reduce
from bmt_core.run.runtime import current
from bmt_optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager
from bmt_params import DistributedParameter
from bmt_pipeline import PipelineModel, PipelineTransformerBlockList, train_step
from bmt_testing import run_ranks

LAYERS, OVERFLOW, MAX_NORM, STEPS = 5, 1, 0.2, 4
ADAM = {"lr": 0.02, "eps": 1e-2}
OPTIMIZERS: dict[str, Any] = {
    "adam": AdamOptimizer,
    "offload": AdamOffloadOptimizer,
    "torch.optim.AdamW": torch.optim.AdamW,
}
State = dict[str, torch.Tensor]


class Piped(PipelineModel):
    """``Plain`` of raw layers, with the embedding tied to the head."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        plain = Plain(LAYERS).to(dtype)
        self.embedding = DistributedParameter(plain.embedding.data)
        self.shift = DistributedParameter(plain.shift.data)
        self.layers = PipelineTransformerBlockList(list(plain.layers))

    def before_layers(self, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = nn.functional.embedding(ids, self.embedding)
        return x, mask_of(ids).to(x.dtype), self.shift

    def after_layers(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.embedding.t()


def expected(dtype: torch.dtype, optimizer: str) -> tuple[list[float], State]:
    """The losses and norms of the steps that do not overflow, and the parameters at the end."""
    model: Any = Plain(LAYERS).to(dtype)
    kind = torch.optim.AdamW if optimizer == "torch.optim.AdamW" else torch.optim.Adam
    made, numbers = kind(model.parameters(), **ADAM), []
    for step, (ids, targets) in enumerate(zip(*text(), strict=True)):
        if step == OVERFLOW:
            continue
        made.zero_grad()
        loss = loss_of(model(ids).float(), targets)
        loss.backward()
        numbers += [
            float(loss.detach()),
            float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)),
        ]
        made.step()
    return numbers, dict(model.state_dict())


def trained(
    dtype: torch.dtype, optimizer: str, schedule: str | None, steps: range, folder: str
) -> tuple[list[float], State, int]:
    """Take ``steps``, each of other micro-batches, from a checkpoint in ``folder`` or to one. Also:
    how many were skipped.
    """
    model, topology, numbers = Piped(dtype), current().topology, []
    manager = OptimManager(loss_scale=1024.0)
    manager.add_optimizer(OPTIMIZERS[optimizer](model.parameters(), **ADAM))
    if steps.start:
        load_checkpoint(folder, model, manager)
    batches = list(zip(*text(), strict=True))
    for step in steps:
        overflows = step == OVERFLOW and topology.axis_rank("dp") == 0

        def loss_fn(
            logits: torch.Tensor,
            targets: torch.Tensor,
            factor: float = float("inf") if overflows else 1.0,
        ) -> Any:
            return loss_of(logits.float(), targets) * factor

        manager.zero_grad()
        if schedule is None:
            ids, targets = [x.chunk(topology.data_size)[topology.data_rank] for x in batches[step]]
            loss = loss_fn(model(ids), targets)
            manager.backward(loss)
        else:
            ids, targets = [
                x.chunk(topology.axis_size("dp"))[topology.axis_rank("dp")] for x in batches[step]
            ]
            loss = train_step(
                model, loss_fn, (ids, targets), schedule, (4, 2, 1, 8)[step], manager=manager
            )
        norm = manager.clip_grad_norm(model.parameters(), MAX_NORM)
        manager.step()
        if step != OVERFLOW:
            numbers += [float(all_reduce(loss.detach(), "avg")), float(norm)]
    manager.read_outcome()
    if not steps.start:
        save_checkpoint(folder, model, manager, step=steps.stop)
    states = all_gather_object(dict(model.state_dict()), current().world)
    return (
        numbers,
        {name: value for state in states for name, value in state.items()},
        manager.skipped_steps,
    )


@pytest.mark.parametrize(
    ("dtype", "optimizer", "schedule", "stages"),
    [
        (torch.float32, "adam", "1f1b", 4),
        (torch.float32, "offload", None, 1),
        (torch.bfloat16, "torch.optim.AdamW", "zero-bubble", 1),
    ],
)
def test_another_grid_goes_on_as_plain_torch(
    dtype: torch.dtype, optimizer: str, schedule: str | None, stages: int, tmp_path: Path
) -> None:
    """Two steps on pp 2 x dp 2, of which one overflows on a part of the ranks, and two more by
    ``stages`` ranks.
    """
    numbers, state = expected(dtype, optimizer)
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2

    def run(ranks: int, pipe_size: int, steps: range) -> Any:
        init = {"pipe_size": pipe_size, "num_micro_batches": 4, "timeout": 60}
        return run_ranks(
            trained, ranks, dtype, optimizer, schedule, steps, str(tmp_path), init=init, timeout=120
        )

    before, after = run(4, 2, range(2)), run(stages, stages, range(2, STEPS))
    assert [skipped for _, _, skipped in before] == [1] * 4
    for rank, (found, values, _) in enumerate(after):
        assert before[0][0] + found == pytest.approx(numbers, rel=tolerance), rank
        assert values.keys() == state.keys()
        for name, value in state.items():
            torch.testing.assert_close(values[name], value, rtol=tolerance, atol=tolerance)


FINE_TUNED = "layers.4."


def fine_tuned(optimizer: str, folder: str, steps: range) -> tuple[list[float], State]:
    """Train the last layer alone, which one stage has, from a checkpoint in ``folder`` or
    to one.
    """
    model, numbers = Piped(torch.float32), []
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(FINE_TUNED))
    trained: Any = [parameter for parameter in model.parameters() if parameter.requires_grad]
    manager = OptimManager(loss_scale=1024.0)
    if optimizer == "torch.optim.AdamW":
        trained = [{"params": trained}]
    manager.add_optimizer(OPTIMIZERS[optimizer](trained, **ADAM))
    if steps.start:
        load_checkpoint(folder, model, manager)
    batches = list(zip(*text(), strict=True))
    for step in steps:
        manager.zero_grad()
        loss = train_step(model, loss_of, batches[step], "1f1b", 4, manager=manager)
        norm = manager.clip_grad_norm(manager.optimizers[0].param_groups, MAX_NORM)
        manager.step()
        numbers += [float(loss), float(norm)]
    if not steps.start:
        save_checkpoint(folder, model, manager, step=steps.stop)
    states = all_gather_object(dict(model.state_dict()), current().world)
    return numbers, {name: value for state in states for name, value in state.items()}


@pytest.mark.parametrize(
    ("optimizer", "stages"), [("adam", 4), ("offload", 2), ("torch.optim.AdamW", 2)]
)
def test_stages_without_trainable_parameters_take_part_in_fine_tuning(
    optimizer: str, stages: int, tmp_path: Path
) -> None:
    model: Any = Plain(LAYERS)
    kind = torch.optim.AdamW if optimizer == "torch.optim.AdamW" else torch.optim.Adam
    tuned = [
        parameter for name, parameter in model.named_parameters() if name.startswith(FINE_TUNED)
    ]
    made, numbers = kind(tuned, **ADAM), []
    for ids, targets in zip(*text(), strict=True):
        model.zero_grad()
        loss = loss_of(model(ids), targets)
        loss.backward()
        numbers += [float(loss.detach()), float(nn.utils.clip_grad_norm_(tuned, MAX_NORM))]
        made.step()
    before = run_ranks(
        fine_tuned, stages, optimizer, str(tmp_path), range(2), init={"pipe_size": stages}
    )
    after = run_ranks(fine_tuned, 1, optimizer, str(tmp_path), range(2, STEPS))
    for found, _ in before:
        assert found + after[0][0] == pytest.approx(numbers, rel=1e-4)
    torch.testing.assert_close(after[0][1], dict(model.state_dict()), rtol=1e-4, atol=1e-4)


def made_of_nothing() -> str:
    try:
        return type(AdamOptimizer([])).__name__
    except ValueError as error:
        return str(error)


def torchs_made_of_nothing() -> str:
    with pytest.raises(ValueError, match="optimizer got an empty parameter list") as caught:
        torch.optim.AdamW(parameter for parameter in [] if parameter.requires_grad)
    with pytest.raises(TypeError):
        torch.optim.AdamW(torch.ones(1))
    return str(caught.value)


def test_an_optimizer_of_torch_without_parameters_says_what_a_stage_passes() -> None:
    assert run_ranks(torchs_made_of_nothing, 2) == ["optimizer got an empty parameter list"] * 2
    for message in run_ranks(torchs_made_of_nothing, 2, init={"pipe_size": 2}):
        assert message.endswith(
            'pass [{"params": [...]}] on every rank, or bmt.optim.param_groups(model).'
        )


def test_an_empty_optimizer_stays_an_error_where_all_ranks_have_parts_of_all_parameters() -> None:
    assert made_of_nothing() == "optimizer got an empty parameter list"
    assert run_ranks(made_of_nothing, 2) == ["optimizer got an empty parameter list"] * 2
    assert run_ranks(made_of_nothing, 2, init={"pipe_size": 2}) == ["AdamOptimizer"] * 2
