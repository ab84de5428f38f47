"""``ParameterLayout``: the names and shapes of a rank's parameters, which must be the same on all
ranks that share them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch

from bmt_core.comm.objects import all_gather_object
from bmt_core.run.runtime import current, is_initialized
from bmt_params.guards.equal_values import digest_of, first_difference
from bmt_params.parameter import DistributedParameter
from bmt_params.parameter_holders import own_axes


class LayoutSummary(NamedTuple):
    """What a rank tells the others about its :class:`ParameterLayout`."""

    own_axes: frozenset[str]
    digest: int


class ParameterLayout:
    """Names, shapes, dtypes and localities of ``named`` parameters on this rank, without values.

    ``own_axes`` are the axes along which any of the parameters is the rank's own, so that ranks
    along them may have others.
    """

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(named)
        self.own_axes = own_axes(parameters.values())
        self._text = "\n".join(
            _described(name, p)
            for name, p in parameters.items()
            if isinstance(p, torch.nn.Parameter)
        )

    @cached_property
    def summary(self) -> LayoutSummary:
        """The axes, and a digest of the rest."""
        return LayoutSummary(self.own_axes, digest_of(self._text))

    def difference(self, summaries: Sequence[LayoutSummary]) -> str:
        """Return a sentence about the first parameter that ranks have differently though they share
        it; "" if there is none.

        ``summaries`` are those of all ranks. Ranks communicate only if there is a difference; all
        return the same.
        """
        if not is_initialized():
            return ""
        run, axes = current(), all_own_axes(summaries)
        # Along the other axes each rank may have parameters of its own.
        shared = [name for name in run.topology.sizes if name not in axes]
        pairs = ((ranks[0], rank) for ranks in run.topology.ranks(shared) for rank in ranks)
        differing = next(
            (pair for pair in pairs if summaries[pair[0]].digest != summaries[pair[1]].digest), None
        )
        if differing is None:
            return ""
        texts = all_gather_object(self._text, run.world)
        first, other = differing
        of_first, of_other = first_difference(texts[first], texts[other])
        return f"Rank {first} has {of_first} where rank {other} has {of_other}."


def all_own_axes(summaries: Iterable[LayoutSummary]) -> frozenset[str]:
    """Return the axes along which any rank has parameters of its own."""
    return frozenset[str]().union(*(summary.own_axes for summary in summaries))


def _described(name: str, parameter: torch.Tensor) -> str:
    if not isinstance(parameter, DistributedParameter):
        return f"{name} of shape {tuple(parameter.shape)} and {parameter.dtype}"
    localities = "".join(f", {locality}" for locality in parameter.locality)
    return f"{name} of shape {tuple(parameter.whole_shape)} and {parameter.dtype}{localities}"
