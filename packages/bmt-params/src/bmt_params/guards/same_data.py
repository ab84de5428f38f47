"""Comparisons of tensors among ranks that see the same data, such as those along ``tp``.

Along such an axis the ranks are given, hold and compute either the same values, or parts. Which of
the two a parameter or a layer expects is declared; if the program does something else, it trains
another model, and nothing fails. So tensors are compared in the first steps, and now and then
afterwards.

[Note: fingerprints] Three numbers stand for a tensor: its norm, and its products with two fixed
random vectors. Tensors whose numbers agree are equal. They need not agree to the last bit, because
some operations on GPUs add in any order.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

import torch

from bmt_core.comm.annotate import annotate
from bmt_core.comm.autograd import gather_stacked
from bmt_core.comm.objects import all_gather_object
from bmt_core.comm.protocols import Group
from bmt_core.run.runtime import Runtime

_PERIOD = 1 << 20  # elements, after which the random vectors are repeated
_AT_ONCE = 16 * _PERIOD  # elements; bounds the float64 copy to 128 MiB
_OF_INTEGERS = 1e-12  # fingerprints of equal integers may be rounded differently
NUMBERS = 3
"""How many numbers :func:`fingerprint` returns."""
SAME_LOSS = (
    "These ranks compute one model on the same data. A term of the loss that is computed from a"
    " rank's own rows, inside of split layers, or the loss of another model on data of a rank's"
    " own, must be averaged over these ranks first:"
    " all_reduce(term, 'avg', comm=current().topology.group(axes)) is differentiable."
)
"""The advice of errors about losses that differ."""


class Occasions:
    """Says when to compare something that happens again and again: at the times 1, 2, 4, 8, ...
    below ``period``, and at its multiples; and at each of the first ``at_first`` times.

    >>> occasions = Occasions()
    >>> [time for time in range(1, 10) if occasions.has_come()]
    [1, 2, 4, 8]
    """

    def __init__(self, period: int = 1000, at_first: int = 1) -> None:
        self._period = period
        self._at_first = at_first
        self._time = 0

    def has_come(self) -> bool:
        """Count one more time, and return whether to compare at this time."""
        self._time += 1
        is_power_of_two = self._time & (self._time - 1) == 0
        return (
            self._time <= self._at_first
            or self._time % self._period == 0
            or (self._time < self._period and is_power_of_two)
        )


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers (3,), in float64, that stand for ``tensor``: see [Note: fingerprints].

    >>> fingerprint(torch.tensor([3, -4]))[0]
    tensor(5., dtype=torch.float64)
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.detach().resolve_conj())
    flat = tensor.detach().reshape(-1)
    square = torch.zeros((), dtype=torch.float64, device=tensor.device)
    # What the same random numbers multiply is added first: few, large operations.
    total = torch.zeros(min(len(flat), _PERIOD), dtype=torch.float64, device=tensor.device)
    for part in torch.split(flat, _AT_ONCE):
        values = part.to(torch.float64)
        square += values.dot(values)
        periods = len(values) // _PERIOD
        if periods:
            total += values[: periods * _PERIOD].view(periods, _PERIOD).sum(0)
        rest = values[periods * _PERIOD :]
        total[: len(rest)] += rest
    products = _weights(tensor.device)[:, : len(total)] @ total
    return torch.cat([square.sqrt().unsqueeze(0), products])


def fingerprints_of_ranks(tensors: list[torch.Tensor], group: Group, purpose: str) -> torch.Tensor:
    """Return the fingerprints (ranks, tensors, 3) of each rank's ``tensors``, on the host.
    Collective over ``group``.

    ``purpose`` says in errors what the collective is for. On CUDA the host waits for the device.
    """
    with torch.no_grad(), annotate(purpose):
        return gather_stacked(torch.stack([fingerprint(tensor) for tensor in tensors]), group).cpu()


def agree(found: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Return for each of n tensors whether its fingerprints on several ranks, ``found`` (ranks, n,
    3), agree.

    ``tolerance`` is relative to the norm. A tensor with infinite or NaN elements agrees with none,
    not even with itself.

    >>> agree(torch.tensor([[[5.0, 1.0, 2.0]], [[5.0, 1.0, 2.1]]]), 1e-3)
    tensor([False])
    """
    largest = found.amax(0)
    return ((largest - found.amin(0)) <= tolerance * largest[:, :1]).all(-1)


def differ(found: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Return for each of n tensors whether its fingerprints, as in :func:`agree`, are finite on all
    ranks and do not agree.
    """
    return torch.isfinite(found).all(-1).all(0) & ~agree(found, tolerance)


def check_same(
    named: Iterable[tuple[str, torch.Tensor]],
    group: Group,
    *,
    tolerance: float,
    what: str,
    advice: str,
) -> None:
    """Raise ``ValueError`` on all ranks of ``group`` if their tensors differ, or their names,
    shapes or dtypes.

    ``tolerance`` is relative to the norm, and for tensors of floating point only: integers must be
    equal. Tensors with infinite or NaN elements are not compared.
    ``what`` says in the error what the tensors are, and ``advice`` is its last sentence.
    Collective; the host waits for the device.
    """
    own = [
        _Entry(
            name,
            tuple(tensor.shape),
            str(tensor.dtype),
            tolerance if tensor.is_floating_point() or tensor.is_complex() else _OF_INTEGERS,
            fingerprint(tensor).tolist(),
        )
        for name, tensor in named
    ]
    with annotate(f"to compare {what}"):
        of_ranks = all_gather_object(own, group)
    for rank, others in zip(group.ranks[1:], of_ranks[1:], strict=True):
        difference = _difference(of_ranks[0], others)
        if difference:
            raise ValueError(
                f"Ranks {', '.join(map(str, group.ranks))} must have the same {what}, and"
                f" {difference} on rank {rank} from those on rank {group.ranks[0]}. {advice}"
            )


class LossComparison:
    """Compares the losses of ranks that must compute the same one, as occasions come. A run has
    one: ``current().state(LossComparison)``.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.axes: set[str] = set()
        """Along which all ranks must compute the same loss; empty: there is nothing to check. Set
        by packages that split models so.
        """
        self._topology = runtime.topology
        self._occasions = Occasions()

    def check(self, loss: torch.Tensor) -> None:
        """Raise ``ValueError`` if ``loss`` differs along :attr:`axes`. Collective over these
        ranks.
        """
        if self._occasions.has_come():
            group = self._topology.group(self.axes)
            check_same([("loss", loss)], group, tolerance=1e-6, what="loss", advice=SAME_LOSS)


class _Entry(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: str
    tolerance: float
    numbers: list[float]


def _difference(first: list[_Entry], others: list[_Entry]) -> str:
    """Return what differs, as the middle of a sentence; empty if nothing does."""
    if [entry.name for entry in first] != [entry.name for entry in others]:
        return (
            f"their names differ ({', '.join(e.name for e in others)} and"
            f" {', '.join(e.name for e in first)})"
        )
    for ours, theirs in zip(first, others, strict=True):
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            kinds = f"{theirs.shape} {theirs.dtype} and {ours.shape} {ours.dtype}"
            return f"the shape or dtype of {ours.name} differs ({kinds})"
        both = torch.tensor([[ours.numbers], [theirs.numbers]], dtype=torch.float64, device="cpu")
        if differ(both, ours.tolerance):
            return f"the values of {ours.name} differ"
    return ""


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """Return two vectors of random numbers, which are the same on every rank and in every run."""
    # On the CPU, because other devices draw other numbers.
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(2, _PERIOD, generator=generator, dtype=torch.float64, device="cpu").to(
        device
    )
