"""The last batch of an evaluation, which accelerate fills up with rows from the beginning so that
all ranks have equally many.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.state import GradientState
from accelerate.utils import find_batch_size

from bmt_core import rank, sum_loss, world_size


def own_rows(inputs: Any, batch_size: int) -> int | None:
    """Return how many rows of ``inputs`` are no repetitions; None if no rank's batch has any, or
    its rows are not those of the data set.

    The ranks' batches of ``batch_size`` rows follow each other, as accelerate's
    ``gather_for_metrics`` expects, which drops the repetitions from the end.
    """
    state, size = GradientState(), find_batch_size(inputs)
    if not state.end_of_dataloader or size is None or size > batch_size:
        return None
    if not 0 < state.remainder < size * world_size():
        return None
    return max(0, min(int(size), int(state.remainder) - rank() * int(size)))


def first_rows(inputs: dict[str, Any], rows: int) -> dict[str, Any]:
    """Return the first ``rows`` of a batch; of none, the first one without targets, because every
    rank calls the model.
    """
    size = find_batch_size(inputs)
    cut = {
        name: value[: max(rows, 1)]
        if isinstance(value, torch.Tensor) and value.dim() and len(value) == size
        else value
        for name, value in inputs.items()
    }
    for name in ("labels", "shift_labels") if rows == 0 else ():
        if name in cut:
            cut[name] = torch.full_like(cut[name], -100)
    return cut


def loss_of_rows(loss: torch.Tensor, rows: int, *, is_counted: bool) -> torch.Tensor:
    """Return the loss of all ranks' ``rows`` together. Collective.

    ``is_counted``: each rank's ``loss`` is its sum, divided by the targets of a rank on average;
    else the mean of its rows.
    """
    share = loss if is_counted else loss * rows
    found = sum_loss(torch.where(torch.tensor(rows > 0, device=loss.device), share, 0.0))
    return found if is_counted else found * world_size() / GradientState().remainder
