"""Loss scaling, clipping and every optimizer over the stages of a pipeline, and checkpoints that
another grid goes on with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_trainings import Piped, Plain, loss_of, of_pipeline, outcome, text
from torch import nn

from bmt_checkpoint import load_checkpoint, save_checkpoint
from bmt_core.comm.objects import all_gather_object
from bmt_core.run.collectives import all_reduce
from bmt_core.run.runtime import current
from bmt_optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager
from bmt_pipeline import train_step
from bmt_testing import run_ranks

LAYERS, OVERFLOW, MAX_NORM, STEPS = 5, 1, 0.2, 4
ADAM = {"lr": 0.02, "eps": 1e-2}
OPTIMIZERS: dict[str, Any] = {
    "adam": AdamOptimizer,
    "offload": AdamOffloadOptimizer,
    "torch.optim.AdamW": torch.optim.AdamW,
}
State = dict[str, torch.Tensor]


def trainable(model: torch.nn.Module, tuned: str) -> list[Any]:
    """Freeze all parameters but those whose names begin with ``tuned``; return these, as a group,
    which may be empty.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(tuned))
    return [{"params": [parameter for parameter in model.parameters() if parameter.requires_grad]}]


def expected(dtype: torch.dtype, optimizer: str, tuned: str) -> tuple[list[float], State]:
    """The losses and norms of the steps that do not overflow, and the parameters at the end."""
    model: Any = Plain(LAYERS).to(dtype)
    kind = torch.optim.AdamW if optimizer == "torch.optim.AdamW" else torch.optim.Adam
    made, numbers = kind(trainable(model, tuned), **ADAM), []
    for step, (ids, targets) in enumerate(zip(*text(), strict=True)):
        if step == OVERFLOW:
            continue
        made.zero_grad()
        loss = loss_of(model(ids).float(), targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        numbers += [float(loss.detach()), float(norm)]
        made.step()
    return numbers, dict(model.state_dict())


def trained(
    dtype: torch.dtype, optimizer: str, schedule: str | None, tuned: str, steps: range, folder: str
) -> tuple[list[float], State, int]:
    """Take ``steps``, each of other micro-batches, from a checkpoint in ``folder`` or to one. Also:
    how many were skipped.
    """
    model, topology, numbers = Piped(LAYERS, None, True, dtype=dtype), current().topology, []
    manager = OptimManager(loss_scale=1024.0)
    made = OPTIMIZERS[optimizer](trainable(model, tuned), **ADAM)
    manager.add_optimizer(made)
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
            batch: Any = of_pipeline(*batches[step])
            loss = train_step(model, loss_fn, batch, schedule, (4, 2, 1, 8)[step], manager=manager)
        norm = manager.clip_grad_norm(made.param_groups, MAX_NORM)
        manager.step()
        if step != OVERFLOW:
            numbers += [float(all_reduce(loss.detach(), "avg")), float(norm)]
    manager.read_outcome()
    if not steps.start:
        save_checkpoint(folder, model, manager, step=steps.stop)
    states = all_gather_object(dict(model.state_dict()), current().world)
    whole = {name: value for state in states for name, value in state.items()}
    return numbers, whole, manager.skipped_steps


F32, BF16, FINE_TUNED = torch.float32, torch.bfloat16, "layers.4."


@pytest.mark.parametrize(
    ("dtype", "optimizer", "schedule", "tuned", "grids"),
    [
        (F32, "adam", "1f1b", "", [(4, 2), (4, 4)]),
        (F32, "offload", None, "", [(4, 2), (1, 1)]),
        (BF16, "torch.optim.AdamW", "zero-bubble", "", [(4, 2), (1, 1)]),
        # Of the last layer alone, which one stage has: the others take part.
        (F32, "adam", "1f1b", FINE_TUNED, [(4, 4), (1, 1)]),
        (F32, "offload", "1f1b", FINE_TUNED, [(2, 2), (1, 1)]),
        (F32, "torch.optim.AdamW", "1f1b", FINE_TUNED, [(2, 2), (1, 1)]),
    ],
)
def test_another_grid_goes_on_as_plain_torch(
    dtype: torch.dtype, optimizer: str, schedule: str | None, tuned: str, grids: Any, tmp_path: Path
) -> None:
    """Two steps on ranks and stages, of which one overflows on a part of the ranks, and two more on
    others.
    """
    numbers, state = expected(dtype, optimizer, tuned)
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    before, after = (
        run_ranks(
            *(trained, ranks, dtype, optimizer, schedule, tuned, steps, str(tmp_path)),
            init={"pipe_size": stages, "num_micro_batches": 4, "timeout": 60},
            timeout=120,
        )
        for (ranks, stages), steps in zip(grids, (range(2), range(2, STEPS)), strict=True)
    )
    assert {skipped for _, _, skipped in before} == {1}
    for rank, (found, values, _) in enumerate(after):
        assert before[0][0] + found == pytest.approx(numbers, rel=tolerance), rank
        torch.testing.assert_close(values, state, rtol=tolerance, atol=tolerance)


def made_of_nothing() -> str:
    return str(outcome(lambda: type(AdamOptimizer([])).__name__))


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
    refused = "ValueError: optimizer got an empty parameter list"
    assert made_of_nothing() == refused
    assert run_ranks(made_of_nothing, 2) == [refused] * 2
    assert run_ranks(made_of_nothing, 2, init={"pipe_size": 2}) == ["AdamOptimizer"] * 2
