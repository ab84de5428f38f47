"""Parameter groups with and without weight decay, chosen by whole shapes, because every rank's
slice has one dimension.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch

from bmt_params.guards.ndim_groups import note_groups_by_shape
from bmt_params.parameter import DistributedParameter


def param_groups(
    model: torch.nn.Module, *, weight_decay: float, no_decay: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """Return two groups of all parameters of ``model`` for an optimizer: with ``weight_decay``,
    and without.

    The group without has the parameters whose whole shape has fewer than two dimensions (biases,
    norms), and those with a name that matches a pattern of ``no_decay`` (see :mod:`fnmatch`; a tied
    parameter has several names). Either group may be empty. Nothing is communicated.

    >>> model = torch.nn.Sequential(torch.nn.Embedding(7, 2), torch.nn.Linear(2, 3))
    >>> groups = param_groups(model, weight_decay=0.1, no_decay=("0.*",))
    >>> [(group["weight_decay"], [tuple(p.shape) for p in group["params"]]) for group in groups]
    [(0.1, [(3, 2)]), (0.0, [(7, 2), (3,)])]
    """
    if isinstance(no_decay, str):
        raise TypeError(f"no_decay takes several patterns: pass ({no_decay!r},).")
    patterns = tuple(no_decay)
    is_exempt: dict[torch.nn.Parameter, bool] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        matches = any(fnmatchcase(name, pattern) for pattern in patterns)
        is_exempt[p] = is_exempt.get(p, len(_whole_shape(p)) < 2) or matches
    note_groups_by_shape(is_exempt)
    decayed = [p for p, exempt in is_exempt.items() if not exempt]
    others = [p for p, exempt in is_exempt.items() if exempt]
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def _whole_shape(p: torch.nn.Parameter) -> torch.Size:
    return p.whole_shape if isinstance(p, DistributedParameter) else p.shape
