"""Results of all ranks for a program: the mean loss, and gathered values for evaluation."""

from __future__ import annotations

import math
from numbers import Real

import torch

from bmt_core.comm.annotate import annotate
from bmt_core.comm.autograd import gather_stacked
from bmt_core.comm.objects import all_gather_object
from bmt_core.comm.protocols import Group
from bmt_core.run.collectives import all_reduce
from bmt_core.run.runtime import current
from bmt_core.torch_internals import never_compiled


def sum_loss(loss: torch.Tensor, comm: Group | None = None) -> torch.Tensor:
    """Return the *mean* of ``loss`` over the ranks (BMTrain's name), for logging; differentiable.
    Collective.
    """
    with annotate("for the mean of a loss", is_compared=False):
        return all_reduce(loss, "avg", comm)


def mean_loss(
    loss_sum: torch.Tensor | float, count: torch.Tensor | float | None = None
) -> torch.Tensor:
    """Return the mean loss over the tokens of all ranks, on every rank, for logs and evaluation;
    differentiable. Collective.

    ``loss_sum`` is the sum of the losses of this rank's tokens, ``count`` their number, which may
    be 0; the mean is NaN if no rank has any. Without ``count`` it is the mean over the ranks, as
    :func:`sum_loss`; ``ValueError`` where ranks compute parts of one sequence (``cp_size``).
    """
    total = torch.as_tensor(loss_sum, device=current().device)
    if count is None and (parts := current().topology.parts_axes):
        raise ValueError(
            f"The losses of ranks along {parts[0]!r} are parts of one sum. Give the number of this"
            " rank's target tokens, too: mean_loss(loss_sum, count=tokens)."
        )
    if count is None:
        return sum_loss(total)
    with annotate("for the mean of a loss", is_compared=False):
        mean = all_reduce(total.double()) / all_reduce(as_count(count, total.device))
    return mean.to(torch.promote_types(total.dtype, torch.float32))


def as_count(count: object, device: torch.device, subject: str = "count must be") -> torch.Tensor:
    """Return ``count``, a number of tokens, as a 0-dim float64 tensor on ``device``.

    ``ValueError``, which begins with ``subject``, if it is no number and no 0-dim tensor, or a
    number that is negative, infinite or NaN. Of a tensor, which the host does not read, such a
    value becomes NaN.
    """
    if isinstance(count, torch.Tensor) and count.dim() == 0 and not count.is_complex():
        on_device = count.detach().to(device, torch.float64, non_blocking=device.type == "cuda")
        return on_device.masked_fill(~((on_device >= 0) & on_device.isfinite()), math.nan)
    if isinstance(count, Real):
        number = float(count)
        if not 0 <= number < math.inf:
            raise ValueError(f"{subject} 0 or more, not {count}.")
        return torch.full((), number, dtype=torch.float64, device=device)
    what = tuple(count.shape) if isinstance(count, torch.Tensor) else f"a {type(count).__name__}"
    raise ValueError(f"{subject} a number or a 0-dim tensor, not {what}.")


@never_compiled
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
