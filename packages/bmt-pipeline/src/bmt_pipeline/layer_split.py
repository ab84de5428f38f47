"""``split_layers``: divides layers into the parts of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from bmt_core.errors import ConfigError


def split_layers(
    num_layers: int, parts: int, costs: Sequence[float] | None = None
) -> tuple[range, ...]:
    """Return the layers of each part: contiguous, in order, at least one each.

    Without ``costs`` the first num_layers % parts parts have one layer more than the others. With
    ``costs``, the time of each layer in any unit, the cost of the most expensive part is as small
    as possible.

    >>> split_layers(5, 2)
    (range(0, 3), range(3, 5))
    >>> split_layers(5, 2, costs=[3, 1, 1, 1, 2])
    (range(0, 2), range(2, 5))
    """
    if parts < 1:
        raise ConfigError(f"The number of parts must be at least 1, and got {parts}.")
    if parts > num_layers:
        raise ConfigError(
            f"{num_layers} layers cannot be split into {parts} parts. Use at most one part"
            " per layer."
        )
    if costs is None:
        each, longer = divmod(num_layers, parts)
        bounds = [part * each + min(part, longer) for part in range(parts + 1)]
    else:
        _check_costs(costs, num_layers)
        bounds = _balanced_bounds(costs, parts)
    return tuple(range(first, end) for first, end in pairwise(bounds))


def _check_costs(costs: Sequence[float], num_layers: int) -> None:
    if len(costs) != num_layers:
        raise ConfigError(
            f"There are {num_layers} layers and {len(costs)} costs. Give one cost per layer."
        )
    if min(costs) < 0:
        raise ConfigError(
            f"The cost of a layer must be 0 or more, and layer {costs.index(min(costs))}"
            f" has {min(costs)}."
        )


def _balanced_bounds(costs: Sequence[float], parts: int) -> list[int]:
    """Return the first layer of each part, and the number of layers, by dynamic programming over
    (parts so far, layers so far).

    Splits are compared by (largest cost of a part, sum of squared costs): the squares choose the
    more even of two splits with the same largest cost.
    """
    sums = [0.0, *accumulate(costs)]
    layers = len(costs)
    best: dict[int, tuple[float, float]] = {0: (0.0, 0.0)}
    begins: list[dict[int, int]] = []
    for part in range(1, parts + 1):
        worth: dict[int, tuple[float, float]] = {}
        begin: dict[int, int] = {}
        for end in range(part, layers - (parts - part) + 1):
            worth[end], negative = min(
                (_worth(best[start], sums[end] - sums[start]), -start)
                for start in range(part - 1, end)
                if start in best
            )
            begin[end] = -negative
        best = worth
        begins.append(begin)
    bounds = [layers]
    for begin in reversed(begins):
        bounds.append(begin[bounds[-1]])
    return bounds[::-1]


def _worth(before: tuple[float, float], cost: float) -> tuple[float, float]:
    return max(before[0], cost), before[1] + cost * cost
