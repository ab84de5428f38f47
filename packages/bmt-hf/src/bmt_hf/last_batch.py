"""The last batch of an evaluation, which accelerate fills up with rows from the beginning so that
all ranks have equally many.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.state import GradientState
from accelerate.utils import find_batch_size

from bmt_core import rank, sum_loss, world_size
from bmt_core.user_warnings import warn_user

_TARGETS = ("labels", "shift_labels")


def own_rows(inputs: Any, batch_size: int) -> int | None:
    """Return how many rows of ``inputs`` are no repetitions; None if no rank's batch has any, or
    its rows are not those of the data set.

    The ranks' batches of ``batch_size`` rows follow each other, as accelerate's
    ``gather_for_metrics`` expects, which drops the repetitions from the end.
    """
    state, size = GradientState(), find_batch_size(inputs)
    if not state.end_of_dataloader or size is None or size > batch_size:
        return None
    is_flat = _is_flat(inputs, batch_size)
    size = batch_size if is_flat else int(size)
    if not 0 < state.remainder < size * world_size():
        return None
    if is_flat and (found := int((inputs["position_ids"] == 0).sum())) != size:
        warn_user(
            f"The last batch of the evaluation has {size} rows in one, and {found} positions in it"
            " are 0, so that rows cannot be told from each other, and those that fill the batch up"
            " count in the loss, too. Evaluate a multiple of the rows that all ranks take at once."
        )
        return size
    return max(0, min(size, int(state.remainder) - rank() * size))


def first_rows(inputs: dict[str, Any], rows: int, batch_size: int) -> dict[str, Any]:
    """Return the first ``rows`` of a batch; of none, the first one without targets, because every
    rank calls the model. A batch that cannot be cut stays whole, without the other rows' targets.
    """
    size = find_batch_size(inputs)
    tensors = {
        name: value
        for name, value in inputs.items()
        if isinstance(value, torch.Tensor) and value.dim()
    }
    if _is_flat(inputs, batch_size):
        number = (inputs["position_ids"] == 0).cumsum(-1)  # of each token's row, from 1
        targets = _targets_where(number <= rows, tensors) if rows < batch_size else {}
        return {**inputs, **targets}
    if any(len(value) != size for value in tensors.values()) and _are_classes(tensors):
        # Such as the images of all rows: which of them are of which row, the model alone knows.
        return {**inputs, **_targets_where(torch.arange(size, device="cpu") < rows, tensors)}
    cut = {name: value[: max(rows, 1)] for name, value in tensors.items() if len(value) == size}
    for name in _TARGETS if rows == 0 else ():
        if name in cut:
            cut[name] = torch.full_like(cut[name], -100)
    return {**inputs, **cut}


def loss_of_rows(loss: torch.Tensor, rows: int, *, is_counted: bool) -> torch.Tensor:
    """Return the loss of all ranks' ``rows`` together. Collective.

    ``is_counted``: each rank's ``loss`` is its sum, divided by the targets of a rank on average;
    else the mean of its rows.
    """
    number = torch.tensor(float(rows), device=loss.device)
    found = sum_loss(torch.where(number > 0, loss if is_counted else loss * number, 0.0))
    return found if is_counted else found / sum_loss(number)


def _is_flat(inputs: Any, batch_size: int) -> bool:
    """Whether ``inputs`` are all rows of a batch in one, as of ``DataCollatorWithFlattening``."""
    # Where accelerate divides batches itself, the last one has fewer rows.
    is_full = not isinstance(GradientState().active_dataloader, DataLoaderDispatcher)
    return is_full and find_batch_size(inputs) == 1 < batch_size and "position_ids" in inputs


def _are_classes(tensors: dict[str, torch.Tensor]) -> bool:
    found = [tensors[name] for name in _TARGETS if name in tensors]
    return bool(found) and not any(targets.is_floating_point() for targets in found)


def _targets_where(
    is_own: torch.Tensor, tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the targets in ``tensors``, with -100 where ``is_own`` (first dims) is False."""
    found = {}
    for name in _TARGETS:
        if name in tensors:
            targets = tensors[name]
            shape = is_own.shape + (1,) * (targets.dim() - is_own.dim())
            found[name] = targets.masked_fill(~is_own.to(targets.device).view(shape), -100)
    return found
