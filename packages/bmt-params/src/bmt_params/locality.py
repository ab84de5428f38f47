"""``Locality``: how a parameter lies along one axis of the rank grid."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch

from bmt_core.errors import ConfigError
from bmt_core.run.bmtrain_names import TENSOR_AXIS

Gradients = Literal["share", "whole"]


@dataclass(frozen=True)
class Locality:
    """How a parameter lies along ``axis``. Without a Locality, a parameter is sharded along the
    axis, and its gradient summed.

    There are four cases:

    - ``Locality("tensor", split_dim=0)``: each rank along the axis has an equal slice of one
      tensor, cut along that dim. ``sections`` are the sizes of consecutive parts of the dim, each
      of which is cut by itself: the queries, keys and values of one fused matrix, of which each
      rank has the same heads. Without, the dim is cut as a whole.
    - ``Locality("tensor", gradients="whole")``: each rank has the same values and computes the
      whole gradient, so gradients are not summed along the axis.
    - ``Locality("tensor", gradients="share")``: each rank has the same values and computes a part
      of the gradient, so that the parts are summed and the parameter is sharded along the axis, as
      without a Locality.
    - ``Locality("stage")``: each rank along the axis has a parameter of its own, under a name of
      its own.

    >>> Locality("tensor", split_dim=1).is_sharded, Locality("tensor", gradients="share").is_sharded
    (False, True)
    """

    axis: str
    _: KW_ONLY
    split_dim: int | None = None
    gradients: Gradients | None = None
    sections: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.sections and self.split_dim is None:
            raise ConfigError(
                f"sections along {self.axis!r} say how split_dim is cut, and split_dim is"
                " not given."
            )
        if self.split_dim is not None and self.gradients is not None:
            raise ConfigError(
                f"Along {self.axis!r} a parameter is either cut (split_dim={self.split_dim}) or"
                f" replicated (gradients={self.gradients!r}). Give one of the two."
            )
        if self.split_dim is not None and self.split_dim < 0:
            raise ConfigError(
                f"split_dim along {self.axis!r} must be 0 or more, not {self.split_dim}."
            )
        if self.gradients not in (None, "share", "whole"):
            raise ConfigError(
                f"gradients along {self.axis!r} must be 'share' or 'whole', not {self.gradients!r}."
            )

    @property
    def is_sharded(self) -> bool:
        """Whether the parameter is sharded along the axis and its gradient summed, as without
        a Locality.
        """
        return self.gradients == "share"

    @property
    def is_own(self) -> bool:
        """Whether each rank along the axis has a parameter of its own."""
        return self.split_dim is None and self.gradients is None

    def cut(self, whole: torch.Tensor, index: int, size: int) -> torch.Tensor:
        """Return slice ``index`` of ``size`` of ``whole``, which is cut along :attr:`split_dim`; a
        view if there are no sections.

        >>> Locality("tensor", split_dim=0, sections=(4, 2)).cut(torch.arange(6), 1, 2)
        tensor([2, 3, 5])
        """
        assert self.split_dim is not None
        sections = (
            torch.split(whole, list(self.sections), self.split_dim) if self.sections else [whole]
        )
        own = [
            s.narrow(self.split_dim, index * (length := s.shape[self.split_dim] // size), length)
            for s in sections
        ]
        return own[0] if len(own) == 1 else torch.cat(own, self.split_dim)

    def ranges(self, shape: Sequence[int], index: int, size: int) -> list[tuple[int, int]]:
        """Return the consecutive ranges of the elements of :meth:`cut` in a flattened tensor
        of ``shape``.

        >>> Locality("tensor", split_dim=1).ranges((2, 6), 1, 3)
        [(2, 4), (8, 10)]
        """
        assert self.split_dim is not None
        length, element = shape[self.split_dim], math.prod(shape[self.split_dim + 1 :])
        own, offset = [], 0
        for section in self.sections or (length,):
            part = section // size
            own.append(((offset + index * part) * element, (offset + (index + 1) * part) * element))
            offset += section
        rows = range(math.prod(shape[: self.split_dim]))
        return [
            (row * length * element + start, row * length * element + end)
            for row in rows
            for start, end in own
        ]

    def join(self, slices: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole tensor from its ``slices``; the inverse of :meth:`cut`.

        >>> locality = Locality("tensor", split_dim=0, sections=(4, 2))
        >>> locality.join([torch.tensor([0, 1, 4]), torch.tensor([2, 3, 5])])
        tensor([0, 1, 2, 3, 4, 5])
        """
        assert self.split_dim is not None
        if not self.sections:
            return torch.cat(list(slices), self.split_dim)
        lengths = [section // len(slices) for section in self.sections]
        parts = zip(*[torch.split(part, lengths, self.split_dim) for part in slices], strict=True)
        return torch.cat([piece for section in parts for piece in section], self.split_dim)


def tensor_locality(tp_mode: bool, tp_split_dim: int) -> tuple[Locality, ...]:
    """Return the localities that ``tp_mode`` and ``tp_split_dim`` stand for.

    With ``tp_split_dim=-1`` each rank's gradient is a share: BMTrain sums the gradients of such a
    parameter over tp.

    >>> tensor_locality(True, 0)[0].split_dim, tensor_locality(True, -1)[0].gradients
    (0, 'share')
    """
    if not tp_mode:
        return ()
    if tp_split_dim < 0:
        return (Locality(TENSOR_AXIS, gradients="share"),)
    return (Locality(TENSOR_AXIS, split_dim=tp_split_dim),)


def local_axes_of(localities: Iterable[Locality]) -> frozenset[str]:
    """Return the axes along which a parameter of these ``localities`` is not sharded."""
    return frozenset(locality.axis for locality in localities if not locality.is_sharded)


def check_locality(localities: Sequence[Locality], dims: int) -> tuple[Locality, ...]:
    """Return ``localities`` of a parameter of ``dims`` dims, or raise :class:`ConfigError`."""
    for locality in localities:
        if not isinstance(locality, Locality):
            raise TypeError(
                f"locality is a sequence of Locality, with a {type(locality).__name__} in it."
            )
        if locality.split_dim is not None and locality.split_dim >= dims:
            raise ConfigError(
                f"{locality} cuts dim {locality.split_dim}, and the parameter has {dims} dims."
            )
    axes = [locality.axis for locality in localities]
    twice = sorted({axis for axis in axes if axes.count(axis) > 1})
    if twice:
        raise ConfigError(
            f"The locality along {', '.join(map(repr, twice))} is given twice. Give it once."
        )
    return tuple(localities)


@contextmanager
def local_along(axes: Iterable[str]) -> Iterator[None]:
    """Inside, new parameters are this rank's own along ``axes``: ranks at other places along these
    axes do not make them.

    A pipeline stage makes its layers inside, from modules that know nothing of stages. Without it,
    a new parameter would be sharded over all ranks, and ranks of other stages would keep parts of
    other layers' values.
    """
    token = _own_along.set((*_own_along.get(), *axes))
    try:
        yield
    finally:
        _own_along.reset(token)


_own_along: ContextVar[tuple[str, ...]] = ContextVar("own_along", default=())


def made_local(
    localities: tuple[Locality, ...], axes: Iterable[str] | None = None
) -> tuple[Locality, ...]:
    """Return ``localities``, and the rank's own along those of ``axes`` that these do not mention;
    by default along the axes of :func:`local_along`.
    """
    known = {locality.axis for locality in localities}
    own = dict.fromkeys(_own_along.get() if axes is None else axes)
    return localities + tuple(Locality(axis) for axis in own if axis not in known)
