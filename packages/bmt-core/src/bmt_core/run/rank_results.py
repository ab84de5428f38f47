"""Results of all ranks for a program: the mean loss, and gathered values for evaluation."""

from __future__ import annotations

import torch

from bmt_core.comm.autograd import gather_stacked
from bmt_core.comm.call_check import call_purpose
from bmt_core.comm.objects import all_gather_object
from bmt_core.comm.protocols import Group
from bmt_core.run.collectives import all_reduce
from bmt_core.run.runtime import current


def sum_loss(loss: torch.Tensor, comm: Group | None = None) -> torch.Tensor:
    """Return the *mean* of ``loss`` over the ranks (BMTrain's name), for logging; differentiable.
    Collective.
    """
    with call_purpose("for the mean of a loss", is_compared=False):
        return all_reduce(loss, "avg", comm)


def gather_result(result: torch.Tensor) -> torch.Tensor:
    """Return every rank's ``result``, concatenated along dim 0 on every rank, where the tensor was
    (CPU or device). Collective.

    ``result`` may be of any dtype and need not be contiguous; a 0-dim tensor counts as one element.
    Dim 0 may differ between ranks, as in the last batch of an evaluation; the other dims and the
    dtype must not: ``ValueError`` on every rank.
    """
    group = current().world
    rows = result.detach()[None] if result.dim() == 0 else result.detach()
    kinds = all_gather_object((str(rows.dtype), tuple(rows.shape)), group)
    if len({(dtype, shape[1:]) for dtype, shape in kinds}) > 1:
        shown = ", ".join(
            f"{shape} {dtype} on rank {rank}" for rank, (dtype, shape) in enumerate(kinds)
        )
        raise ValueError(
            f"gather_result needs tensors that differ in dim 0 only, and they are {shown}."
        )
    lengths = [shape[0] for _, shape in kinds]
    padded = rows.new_zeros((max(lengths), *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    return torch.cat(
        [part[:length] for part, length in zip(gather_stacked(padded, group), lengths, strict=True)]
    )
