"""Checks that ranks along ``tp`` give a parallel layer what it expects: rows of their own, or the
same rows, equally many, and the same gradient of an output that all of them have whole.

A layer that gathers rows multiplies the rows of all ranks. If each rank passes the whole batch,
every product is computed on as many copies of the batch as there are ranks: outputs are right, and
gradients too large by that factor. A layer that does not gather computes other features of the same
rows on each rank. A layer whose output every rank has whole takes for granted that all compute the
same loss from it. These are compared as occasions come, in training only. Each layer counts its own
occasions: one count for all of them would meet the same few layers in every step.
"""

from __future__ import annotations

import torch

from bmt_core.comm.annotate import annotate
from bmt_core.comm.objects import all_gather_object
from bmt_core.errors import ConfigError
from bmt_core.torch_internals import never_compiled
from bmt_params.guards.same_data import Occasions, agree, differ, fingerprints_of_ranks
from bmt_tp.tensor_group import tensor_ranks

_SAME = 1e-12  # relative to the norm: equal rows give equal fingerprints
_ALIKE = 1e-3  # rows of one rank that vary by less are alike
_DIFFERENT = 1e-2  # more than rows of one batch differ that each rank has computed by itself


def is_time_to_compare(own: Occasions | None) -> bool:
    """Count one more call of a layer, whose own count is ``own``, and return whether to compare its
    rows.

    Functions and compiled code have no layer, and None is the count of all of these.
    """
    ranks = tensor_ranks()
    return ranks.size > 1 and (own or ranks.row_occasions).has_come()


def check_same_shape(input: torch.Tensor) -> None:
    """Raise ``ValueError`` on all ranks along ``tp`` if they pass inputs of different shapes to a
    layer that exchanges rows: each would take others for as many as its own. Collective.
    """
    group = tensor_ranks().group
    with annotate("to compare shapes of a parallel layer's input"):
        shapes = all_gather_object(tuple(input.shape), group)
    if len(set(shapes)) > 1:
        shown = ", ".join(f"{s} on rank {r}" for r, s in zip(group.ranks, shapes, strict=True))
        raise ValueError(
            f"The ranks along 'tp' passed inputs of different shapes to a parallel layer: {shown}."
            f" All must pass equally many rows: pad them to a multiple of {group.size} before they"
            " are divided."
        )


@never_compiled
def check_own_rows(rows: torch.Tensor, layer: str) -> None:
    """Raise :class:`ConfigError` on all ranks along ``tp`` if all pass the same ``rows`` to a layer
    that gathers them, unless :func:`~bmt_tp.tensor_group.allow_equal_rows` was called.

    Rows that are all alike say nothing. Collective.
    """
    ranks = tensor_ranks()
    if not ranks.refuses_equal_rows:
        return
    found = fingerprints_of_ranks(
        [rows, rows - rows[:1]], ranks.group, "to compare rows of a parallel layer"
    )
    length, variation = found[0, :, 0]
    if not agree(found, _SAME).all() or variation <= _ALIKE * length:
        return
    raise ConfigError(
        f"All {ranks.size} ranks along 'tp' passed the same rows {tuple(rows.shape)} to {layer},"
        f" which gathers rows: each expects rows of its own, 1/{ranks.size} of dim 0, and gradients"
        f" would be {ranks.size} times too large. Give each rank its part, utils.tp_split_tensor(x,"
        " 0), or take layers that do not gather: ColumnParallelLinear(gather_input=False) and"
        " RowParallelLinear(all_reduce_output=True), with whole(module) for the plain modules"
        " around. If these are rows of their own that rightly are equal, as those of a sequence"
        " that repeats itself, call bmt_tp.allow_equal_rows() after init_distributed()."
    )


@never_compiled
def check_same_rows(rows: torch.Tensor, layer: str) -> None:
    """Raise :class:`ConfigError` on all ranks along ``tp`` if they pass different ``rows`` to a
    layer that does not gather them. Collective.
    """
    group = tensor_ranks().group
    found = fingerprints_of_ranks([rows], group, "to compare rows of a parallel layer")
    if not differ(found, _DIFFERENT):
        return
    raise ConfigError(
        f"The ranks along 'tp' passed different rows {tuple(rows.shape)} to {layer}, which does not"
        " gather rows: all expect the same ones. Give these ranks the same data"
        " (current().topology.data_rank says which) and the same first values, or, if each has"
        " rows of its own, take gather_input=True."
    )


@never_compiled
def check_same_gradient(grad: torch.Tensor, layer: str) -> None:
    """Raise :class:`ConfigError` on all ranks along ``tp`` if they have different gradients
    ``grad`` of an output of ``layer`` that all of them have whole. Collective.
    """
    purpose = "to compare gradients of a parallel layer's output"
    if not differ(fingerprints_of_ranks([grad], tensor_ranks().group, purpose), _DIFFERENT):
        return
    raise ConfigError(
        f"The ranks along 'tp' have computed different gradients of the output {tuple(grad.shape)}"
        f" of {layer}, which each of them has whole: they must compute the same loss from it. Give"
        " these ranks the same labels (current().topology.data_rank says which) and the same random"
        " numbers. If a rank's loss is that of rows of its own, take layers that leave each rank"
        " its rows."
    )
