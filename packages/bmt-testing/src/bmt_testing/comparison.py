"""``differences``: what ranks have computed and plain torch has not, by more than rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

AMPLIFIED, AMPLIFIED_MOST = 8.0, 32.0
"""By how many times plain torch's own distance from the same training in float64 a value may differ
from plain torch.

And by how many if the ranks' training in float64 equals that of plain torch: Adam turns a gradient
that is nothing but rounding into a whole update.
"""


@dataclass
class Record:
    """What a training has computed: names and values, in order. Of gradients and
    parameters, whole.
    """

    values: list[tuple[str, torch.Tensor]] = field(default_factory=list)

    def add(self, name: str, value: torch.Tensor) -> None:
        """Append a copy of ``value``."""
        self.values.append((name, value.detach().cpu().clone()))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the values of each dtype as one tensor: pickling one takes longer than all that a
        small training computes of it.
        """
        flat: dict[torch.dtype, list[torch.Tensor]] = {}
        for _, value in self.values:
            flat.setdefault(value.dtype, []).append(value.reshape(-1))
        layout = [(name, value.dtype, value.shape) for name, value in self.values]
        return _unpacked, (layout, {dtype: torch.cat(each) for dtype, each in flat.items()})


def _unpacked(
    layout: list[tuple[str, torch.dtype, torch.Size]], flat: dict[torch.dtype, torch.Tensor]
) -> Record:
    sizes: dict[torch.dtype, list[int]] = {dtype: [] for dtype in flat}
    for _, dtype, shape in layout:
        sizes[dtype].append(shape.numel())
    parts = {dtype: iter(torch.split(flat[dtype], each)) for dtype, each in sizes.items()}
    return Record([(name, next(parts[dtype]).view(shape)) for name, dtype, shape in layout])


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A value ``name`` that is not as expected on ``rank``, or on no rank (None).

    ``problem`` says so in words if there is no such value on one side. ``expected`` and ``found``
    are those of the element ``index``, whose ``distance`` is largest; ``rounding`` is how far plain
    torch is from float64, where that was measured.
    """

    rank: int | None
    name: str
    problem: str = ""
    index: tuple[int, ...] = ()
    expected: float = math.nan
    found: float = math.nan
    distance: float = math.inf
    rounding: float = 0.0

    @property
    def amplification(self) -> float:
        """How many times the rounding of plain torch this is."""
        is_measured = self.rounding > 0 and math.isfinite(self.distance)
        return self.distance / self.rounding if is_measured else math.inf

    def __str__(self) -> str:
        where = "on no rank" if self.rank is None else f"rank {self.rank}"
        return f"{where}: {self.name} {self.problem or f'is off by {self.distance:.3g}'}"


def differences(
    expected: Sequence[Mapping[str, torch.Tensor]],
    found: Sequence[Mapping[str, torch.Tensor]],
    *,
    floor: Callable[[str, torch.Tensor], torch.Tensor | float],
    rounding: Callable[[], Sequence[Mapping[str, float]]],
    may_lack: bool,
) -> list[Difference]:
    """Return how what each rank has ``found`` differs from what is ``expected`` of it, first
    things first.

    By ``floor(name, value)`` a value may always differ, also element by element, and otherwise by
    :data:`AMPLIFIED` times ``rounding()``: how far plain torch is from the same training in
    float64, for each rank and value. It is called if need be. ``may_lack``: a rank may have only
    some of the values, as a stage of a pipeline.
    """
    unlike = [
        Difference(rank=rank, name=name, problem="is there, and in plain torch it is not")
        for rank, (wanted, own) in enumerate(zip(expected, found, strict=True))
        for name in own
        if name not in wanted
    ]
    every = dict.fromkeys(name for wanted in expected for name in wanted)
    seen = {name for own in found for name in own}
    measured: Sequence[Mapping[str, float]] | None = None
    for name in every:
        if name not in seen:
            unlike.append(Difference(rank=None, name=name, problem="is there, only in plain torch"))
            continue
        compared: tuple[Any, Any] = None, None  # the last two that are alike
        for rank, (wanted, own) in enumerate(zip(expected, found, strict=True)):
            if name not in wanted or (name not in own and may_lack):
                continue
            if name not in own:
                unlike.append(
                    Difference(rank=rank, name=name, problem="is missing, and plain torch has it")
                )
                continue
            value, other = wanted[name], own[name]
            if value.shape != other.shape:
                problem = (
                    f"has the shape {tuple(other.shape)}, and {tuple(value.shape)} in plain torch"
                )
                unlike.append(Difference(rank=rank, name=name, problem=problem))
                continue
            if value is compared[0] and torch.equal(other, compared[1]):
                continue  # as on the rank before
            exact, got = comparable(value), comparable(other)
            distance = _distance(got, exact)
            if (distance <= floor(name, exact)).all():
                compared = value, other
                continue
            measured = rounding() if measured is None else measured
            largest = _largest(name, rank, exact, got, distance, measured[rank].get(name, 0.0))
            if not largest.distance <= AMPLIFIED * largest.rounding:
                unlike.append(largest)
    return unlike


def rounding_of(
    found: Sequence[Mapping[str, torch.Tensor]], exact: Sequence[Mapping[str, torch.Tensor]]
) -> list[dict[str, float]]:
    """Return how far each value that plain torch has ``found`` is from that of the same training
    in float64.
    """
    return [
        {
            name: float(_distance(comparable(value), comparable(of_float64[name])).max())
            for name, value in values.items()
            if value.numel() and name in of_float64
        }
        for values, of_float64 in zip(found, exact, strict=True)
    ]


def may_be_rounding(unlike: Sequence[Difference]) -> bool:
    """Whether ``unlike`` may come of rounding that a training has amplified, so that float64
    must decide.
    """
    return all(difference.amplification <= AMPLIFIED_MOST for difference in unlike)


def comparable(value: torch.Tensor) -> torch.Tensor:
    """Return ``value`` in the dtype in which values are compared."""
    return value if value.dtype.is_complex else value.to(torch.float64)


def _distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return how far two tensors are from each other: 0 also where both are infinite."""
    return (one - other).abs().masked_fill(one == other, 0.0)


def _largest(
    name: str,
    rank: int,
    expected: torch.Tensor,
    found: torch.Tensor,
    distance: torch.Tensor,
    rounding: float,
) -> Difference:
    """Return the difference of the element that is farthest from what is expected, NaN first."""
    place = int(distance.nan_to_num(nan=math.inf).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), expected.shape))
    return Difference(
        rank=rank,
        name=name,
        index=index,
        expected=float(expected[index].real),
        found=float(found[index].real),
        distance=float(distance[index]),
        rounding=rounding,
    )
