"""The options of parameter groups (learning rates, weight decay, ...); a saved group is identified
by its parameters' names.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bmt_core.comm.objects import all_gather_object
from bmt_core.errors import CheckpointError
from bmt_optim.current_run import world
from bmt_optim.managed_optimizer import ManagedOptimizer
from bmt_params.parameter_holders import in_one_order

Groups = list[list[dict[str, Any]]]
"""The groups of each optimizer: their options, and under ``"params"`` the names of
their parameters.
"""


def named_groups(
    optimizers: Sequence[ManagedOptimizer], names: Mapping[torch.nn.Parameter, str]
) -> Groups:
    """Return the groups of ``optimizers``, each with the names of its parameters on all ranks.
    Collective.
    """
    own = [
        [[names[p] for p in group["params"]] for group in optimizer.param_groups]
        for optimizer in optimizers
    ]
    exchanged: list[tuple[list[list[list[str]]], list[list[dict[str, Any]]]]]
    exchanged = all_gather_object((own, _counted(optimizers)), world())
    reports = [names for names, _ in exchanged]
    counts = [[len(groups) for groups in report] for report in reports]
    if counts != counts[:1] * len(counts):  # the same on every rank
        raise CheckpointError(
            f"Ranks have other numbers of parameter groups per optimizer: {counts}. Make"
            " them alike."
        )
    counted = [
        [
            dict(ChainMap(*(of_rank[i][j] for _, of_rank in exchanged)))
            for j in range(len(optimizer.param_groups))
        ]
        for i, optimizer in enumerate(optimizers)
    ]
    return [
        [
            {
                **{
                    key: _copied(value, None)
                    for key, value in {**_options(group), **counted[i][j]}.items()
                },
                "params": in_one_order([report[i][j] for report in reports]),
            }
            for j, group in enumerate(optimizer.param_groups)
        ]
        for i, optimizer in enumerate(optimizers)
    ]


def _counted(optimizers: Sequence[ManagedOptimizer]) -> list[list[dict[str, Any]]]:
    return [
        [optimizer.counted_options(j) for j in range(len(optimizer.param_groups))]
        for optimizer in optimizers
    ]


def matching_groups(saved: Groups, here: Groups) -> Groups:
    """Return ``saved`` in the order of ``here``: groups match if they have the same parameters, in
    whatever order.

    Raises :class:`CheckpointError` if no saved group has the parameters of a group here.
    """
    if len(saved) != len(here):
        raise CheckpointError(
            f"The state is of {len(saved)} optimizers, and here there are {len(here)}."
        )
    return [_matching(i, *groups) for i, groups in enumerate(zip(saved, here, strict=True))]


def check_options(optimizers: Sequence[ManagedOptimizer], matched: Groups) -> None:
    """Raise :class:`CheckpointError` if some options are of another kind of optimizer."""
    for i, (optimizer, groups) in enumerate(zip(optimizers, matched, strict=True)):
        for group in groups:
            complaint = optimizer.complaint_about_options(group)
            if complaint is not None:
                raise CheckpointError(
                    f"The state of optimizer {i}, group {_listed(group)}, {complaint}."
                )


def load_options(optimizers: Sequence[ManagedOptimizer], matched: Groups) -> None:
    """Give every group the options of its match; options that the state lacks stay as they are."""
    for optimizer, groups in zip(optimizers, matched, strict=True):
        for target, saved in zip(optimizer.param_groups, groups, strict=True):
            target.update(
                {key: _copied(value, target.get(key)) for key, value in _options(saved).items()}
            )
        optimizer.note_loaded_options()


def _matching(
    number: int, saved: list[dict[str, Any]], here: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    if any("params" not in group for group in saved):
        raise CheckpointError(
            f"The state of optimizer {number} names no parameters in its parameter groups. Save it"
            " again with this version."
        )
    left = list(saved)
    found = []
    for position, group in enumerate(here):
        match = next((g for g in left if set(g["params"]) == set(group["params"])), None)
        if match is None:
            raise CheckpointError(
                f"Group {position} of optimizer {number} has the parameters {_listed(group)}, and"
                " the state has no such group. Its groups are"
                f" {' and '.join(map(_listed, saved)) or 'none'}. Group the parameters as when it"
                " was saved."
            )
        left.remove(match)
        found.append(match)
    if left:
        raise CheckpointError(
            f"The state of optimizer {number} has one more group than here: {_listed(left[0])}."
            " Group the parameters as when it was saved."
        )
    rates = [float(group.get("initial_lr", 0)) for group in saved]
    is_moved = any(one is not other for one, other in zip(found, saved, strict=True))
    if is_moved and len(set(rates)) > 1:
        raise CheckpointError(
            f"The groups of optimizer {number} are in another order than when its state was saved,"
            f" and a scheduler holds their learning rates ({rates}) by position. Make them in this"
            f" order: {', '.join(map(_listed, saved))}."
        )
    return found


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _copied(value: Any, replaced: Any) -> Any:
    """Return a copy of a tensor, such as a learning rate, which schedules change in place, on the
    device of ``replaced``.
    """
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to(
        replaced.device if isinstance(replaced, torch.Tensor) else "cpu", copy=True
    )


def _listed(group: Mapping[str, Any]) -> str:
    names = list(group["params"])
    more = f", ... ({len(names)})" if len(names) > 3 else ""
    return f"[{', '.join(names[:3])}{more}]"
