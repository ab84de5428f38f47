"""Which ranks hold which parameters, if some are a rank's own along axes of the grid, as the layers
of a pipeline stage are.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import takewhile

import torch

from bmt_core.comm.objects import all_gather_object
from bmt_core.comm.protocols import Group
from bmt_core.comm.torch_backend import SingleGroup
from bmt_core.errors import CheckpointError
from bmt_core.run.runtime import current, is_initialized
from bmt_params.parameter import DistributedParameter


def own_axes(parameters: Iterable[torch.Tensor]) -> frozenset[str]:
    """Return the axes of several ranks along which any of ``parameters`` is the rank's own."""
    declared = {
        locality.axis
        for parameter in parameters
        if isinstance(parameter, DistributedParameter)
        for locality in parameter.locality
        if locality.is_own
    }
    return frozenset(axis for axis in declared if current().topology.axis_size(axis) > 1)


def group_of_owners(parameters: Iterable[torch.Tensor]) -> Group:
    """Return the group of ranks that together hold the whole model, of which this rank
    has ``parameters``.

    These are the ranks that differ from this one along the axes along which any rank has parameters
    of its own: one rank of each stage of a pipeline, or this rank alone if every rank has parts of
    all parameters. Collective over all ranks.
    """
    return (
        current().topology.group(axes_of_owners(parameters)) if is_initialized() else SingleGroup(0)
    )


def axes_of_owners(parameters: Iterable[torch.Tensor]) -> frozenset[str]:
    """Return the axes along which any rank has parameters of its own. Collective over all ranks.

    Along ``dp`` and ``replica``, either all ranks have parameters of their own or none has: a run
    with no other axis communicates nothing to find out.
    """
    run, axes = current(), own_axes(parameters)
    if run.topology.other_axes:
        axes = axes.union(*all_gather_object(axes, run.world))
    return axes


def first_holders(
    ranks: Sequence[int],
    names: Sequence[Sequence[str]],
    own_axes: Sequence[Mapping[str, Collection[str]]],
) -> dict[str, int]:
    """Return for each name the index in ``ranks`` of the first rank that has it, in the order of
    the whole model.

    ``names`` and ``own_axes`` have one entry per rank: its names, and the axes along which each
    parameter is its own. CheckpointError if a name stands for several parameters, or a rank lacks a
    parameter that it shares.
    """
    holders = {}
    for name in in_one_order(names):
        having = [rank for rank, found in zip(ranks, names, strict=True) if name in found]
        holders[name] = ranks.index(having[0])
        axes = own_axes[holders[name]].get(name)
        # None: it is no distributed parameter, and any rank may have it.
        expected = having if axes is None else ranks_beside(ranks, having[0], axes)
        if not set(having) <= set(expected):
            raise CheckpointError(
                f"Ranks {having} each have a parameter of their own, and all call it {name}. Give"
                " them different names: for example, number the layers of a pipeline stage from the"
                " first layer of the whole model."
            )
        if having != expected:
            raise CheckpointError(
                f"{name} is sharded over ranks {expected}, and only ranks {having} have it. Make it"
                " on all of them, or declare it local along the axis along which they differ:"
                " locality=[Locality(axis)]."
            )
    return holders


def ranks_beside(ranks: Sequence[int], rank: int, axes: Collection[str]) -> list[int]:
    """Return those of ``ranks`` that hold the same parameter as ``rank``, if it is a rank's own
    along ``axes``.
    """
    if not axes:
        return list(ranks)
    topology = current().topology
    return [
        other
        for other in ranks
        if all(topology.axis_rank(axis, other) == topology.axis_rank(axis, rank) for axis in axes)
    ]


def in_one_order(names: Sequence[Sequence[str]]) -> list[str]:
    """Merge the names that several ranks have, each in the order of its model, into the order of
    the whole model.

    Names that all ranks have divide each list into sections. In a section each rank's order is
    kept; among the ranks' next names the one with the lowest numbers comes first, because layers
    are numbered through the whole model.

    >>> first = ["embedding", "layers.0", "layers.2", "head"]
    >>> in_one_order([first, ["embedding", "layers.1", "layers.10", "head"]])
    ['embedding', 'layers.0', 'layers.1', 'layers.2', 'layers.10', 'head']
    """
    common = set(names[0]).intersection(*names[1:])
    merged: dict[str, None] = {}
    rest = [iter(of_rank) for of_rank in names]
    # None ends the section after the last common name.
    for last in [*(name for name in names[0] if name in common), None]:
        sections = [list(takewhile(partial(operator.ne, last), remaining)) for remaining in rest]
        merged.update(dict.fromkeys(heapq.merge(*sections, key=_numbers)))
        if last is not None:
            merged.setdefault(last)
    return list(merged)


def _numbers(name: str) -> list[int]:
    return [int(part) for part in name.split(".") if part.isdigit()]
