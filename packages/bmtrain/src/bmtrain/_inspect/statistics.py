"""Count, mean, variance, minimum and maximum of a tensor whose parts lie on several ranks,
in float64.

A part is described by its count n, mean m, sum of squared deviations s = Σ(x − m)², minimum and
maximum. Parts are put together by

    n = Σ nᵢ,    m = Σ nᵢ mᵢ / n,    s = Σ (sᵢ + nᵢ (mᵢ − m)²),

which, unlike a sum of squares, cancels nothing when the mean is large beside the deviations (Chan,
Golub, LeVeque 1979).
"""

from __future__ import annotations

from typing import Any

import torch

_PIECE = 1 << 22  # elements that are converted to float64 at a time
_COUNT, _MEAN, _SQUARES, _LEAST, _LARGEST, _HAS_GRADIENT, _GRADIENT_MEAN, _GRADIENT_SQUARES = range(
    8
)
_NO_GRADIENT = (0.0, 0.0, 0.0)
NOTHING = (0.0, 0.0, 0.0, torch.inf, -torch.inf, *_NO_GRADIENT)
"""The row of a rank that has no element of a tensor."""

Statistics = dict[str, Any]
"""The statistics of one tensor: ``name shape std mean max min grad_std grad_mean``."""


@torch.no_grad()
def moments(tensor: torch.Tensor) -> torch.Tensor:
    """Return count, mean, sum of squared deviations, minimum and maximum of ``tensor``, on its
    device. Does not wait for it.
    """
    if tensor.is_complex():
        raise TypeError(
            f"A tensor of {tensor.dtype} has no minimum. Inspect its real and imaginary parts."
        )
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    return _joined(
        torch.stack([_of_piece(piece) for piece in torch.split(dense.reshape(-1), _PIECE)])
    )


def row(values: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    """Return the row of numbers that describes a tensor, given its :func:`moments` and
    its gradient.
    """
    if gradient is None:
        return torch.cat([values, values.new_tensor(_NO_GRADIENT)])
    return torch.cat(
        [values, values.new_ones(1), moments(gradient)[_MEAN : _SQUARES + 1].to(values.device)]
    )


def joined(rows: torch.Tensor) -> torch.Tensor:
    """Return the row of the tensor whose parts have the given ``rows``.

    If only some parts have a gradient, that of the others counts as zero, because they took no part
    in the loss.
    """
    values = _joined(rows[:, :_HAS_GRADIENT])
    gradient = torch.cat([rows[:, :1], rows[:, _GRADIENT_MEAN:], rows[:, _LEAST : _LARGEST + 1]], 1)
    return torch.cat(
        [values, rows[:, _HAS_GRADIENT].amax()[None], _joined(gradient)[_MEAN : _SQUARES + 1]]
    )


def described(numbers: torch.Tensor, numel: int | None = None) -> dict[str, float]:
    """Return the statistics in a row of ``numbers``: ``std mean max min grad_std grad_mean``.

    ``numel`` is the number of elements of the whole tensor, if several ranks have counted the same
    ones. The standard deviation is unbiased, √(s / (n − 1)). Without a gradient ``grad_std`` and
    ``grad_mean`` are 0; without elements the others are NaN.
    """
    count, mean, squares, least, largest, has_gradient, gradient_mean, gradient_squares = numbers
    of_whole = count if numel is None else count.new_tensor(numel)
    to_variance = of_whole / count / (of_whole - 1)
    nothing = count.new_tensor(torch.nan)
    found = {
        "std": (squares * to_variance).sqrt(),
        "mean": mean if count else nothing,
        "max": largest if count else nothing,
        "min": least if count else nothing,
        "grad_std": (gradient_squares * to_variance).sqrt() if has_gradient else has_gradient,
        "grad_mean": gradient_mean if has_gradient else has_gradient,
    }
    return {name: float(value) for name, value in found.items()}


def equal_values(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Whether two rows say that the tensors are equal; NaN equals NaN."""
    return repr(one[:_HAS_GRADIENT]) == repr(other[:_HAS_GRADIENT])


def equal_gradients(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Whether two rows say that the gradients are equal."""
    return repr(one[_HAS_GRADIENT:]) == repr(other[_HAS_GRADIENT:])


def _of_piece(piece: torch.Tensor) -> torch.Tensor:
    wide = piece.to(torch.float64)
    if not piece.numel():
        return wide.new_tensor(NOTHING[:_HAS_GRADIENT])
    variance, mean = torch.var_mean(wide, correction=0)
    return torch.stack(
        [torch.full_like(mean, piece.numel()), mean, variance * piece.numel(), *wide.aminmax()]
    )


def _joined(rows: torch.Tensor) -> torch.Tensor:
    counts, means, squares, least, largest = rows.unbind(1)
    count = counts.sum()
    mean = (counts * means).sum() / count
    deviations = torch.where(counts > 0, squares + counts * (means - mean) ** 2, 0.0)
    # Of no elements; they may be joined with others.
    mean_or_zero = torch.where(count > 0, mean, 0.0)
    return torch.stack([count, mean_or_zero, deviations.sum(), least.amin(), largest.amax()])
