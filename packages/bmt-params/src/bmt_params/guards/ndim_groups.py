"""Refuses parameter groups that were chosen by ``p.dim()`` or ``len(p.shape)``, which are 1 for
this rank's part of any parameter, or warns of them; ``p.ndim`` is right.

Scripts give matrices weight decay and vectors none. By ``p.dim() >= 2`` every sharded matrix is
among the vectors, and the model would be trained without decay. Groups by whole shapes can look the
same, if patterns of names take the matrices out. So :func:`note_groups_by_shape` marks the
parameters that were grouped by their whole shapes. Other options, such as a learning rate, do not
tell which group was meant for matrices; but that it is left empty is a sign.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from bmt_core.errors import ConfigError
from bmt_core.run.runtime import rank
from bmt_core.user_warnings import warn_user
from bmt_params.parameter import DistributedParameter


def note_groups_by_shape(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Note that ``parameters`` were grouped by their whole shapes, so that
    :func:`check_groups_by_ndim` accepts the groups.
    """
    for p in parameters:
        # One in a Block may become a DistributedParameter: see [Note: added parameters] there.
        p._is_grouped_by_shape = True  # type: ignore[attr-defined]


def check_groups_by_ndim(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise :class:`ConfigError` if ``p.dim() >= 2`` has put all sharded parameters into a group
    that decays less than another; warn on rank 0 if it may have left a group empty.

    Communicates nothing: all ranks have the same groups.
    """
    for number, group in enumerate(groups):
        others = [(i, other) for i, other in enumerate(groups) if _decay(other) > _decay(group)]
        # p.dim() puts nothing but ordinary matrices into the other groups.
        is_alone = all(
            len(p.shape) >= 2
            for i, other in enumerate(groups)
            if i != number
            for p in other["params"]
        )
        matrices, vectors = _sharded(group, is_matrix=True), _sharded(group, is_matrix=False)
        if (
            not others
            or not is_alone
            or not matrices
            or not vectors
            or any(len(p.shape) >= 2 for p in group["params"])
        ):
            continue
        where, other = others[0]
        raise ConfigError(
            f"Parameter group {number} (weight_decay={_decay(group)}) has all sharded parameters,"
            f" matrices and vectors together: {matrices[0].description}, {vectors[0].description},"
            f" ...; group {where} (weight_decay={_decay(other)}) has none. So they seem to be"
            " chosen by p.dim() or len(p.shape), which is 1 for each rank's part of any parameter."
            " Take p.ndim, that of the whole parameter, or use"
            f" bmt.optim.param_groups(model, weight_decay={_decay(other)}), which goes by whole"
            " shapes; its no_decay=(...) takes names of parameters that shall not decay."
        )
    _warn_of_empty_group(groups)


def _warn_of_empty_group(groups: Sequence[Mapping[str, Any]]) -> None:
    filled = [group for group in groups if group["params"]]
    matrices = _sharded(filled[0], is_matrix=True) if len(filled) == 1 else []
    for number, group in enumerate(groups) if matrices and rank() == 0 else ():
        other = filled[0]
        if not group["params"] and (
            group.get("lr") != other.get("lr") or _decay(group) > _decay(other)
        ):
            warn_user(
                f"Parameter group {number} (lr={group.get('lr')}, weight_decay={_decay(group)}) is"
                " empty, and one other group has all parameters, sharded matrices such as"
                f" {matrices[0].description} among them. If groups were chosen by p.dim() or"
                " len(p.shape), which is 1 for each rank's part, take p.ndim, that of the whole"
                " parameter. Otherwise leave the empty group out."
            )
            return


def _decay(group: Mapping[str, Any]) -> float:
    return float(group.get("weight_decay", 0))


def _sharded(group: Mapping[str, Any], *, is_matrix: bool) -> list[DistributedParameter]:
    shards = [
        p
        for p in group["params"]
        if isinstance(p, DistributedParameter) and not p._is_grouped_by_shape
    ]
    return [p for p in shards if (p.ndim >= 2) == is_matrix]
