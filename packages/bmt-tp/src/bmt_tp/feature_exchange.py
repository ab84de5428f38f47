"""Collectives on the features (the last dim) of activations: gather, split, and all-to-all from
rows to features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from bmt_core.comm.autograd import gather_stacked
from bmt_core.comm.protocols import Group
from bmt_core.torch_internals import never_compiled
from bmt_params.locality import Locality
from bmt_tp.row_comparison import check_same_gradient, is_time_to_compare
from bmt_tp.tensor_group import AXIS


@never_compiled
def gather_features(
    x: torch.Tensor, group: Group, sections: Sequence[int] = (), *, compares: bool | None
) -> torch.Tensor:
    """Gather the features (..., F/W) of all ranks into (..., F). Backward keeps this rank's slice
    of the gradient. Collective.

    ``sections``: how the features are split, see :class:`Locality`. ``compares``: backward makes
    sure that all ranks have the same gradient; None: if the time has come. Volume: (W - 1)/W of
    the result.
    """
    if compares is None:
        compares = is_time_to_compare(None)
    gathered: torch.Tensor = _GatherFeatures.apply(x, group, _cut(x, sections), compares)  # type: ignore[no-untyped-call]
    return gathered


@never_compiled
def own_features(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return this rank's slice (..., F/W) of features (..., F) that all ranks have. Backward
    gathers gradients: a collective.
    """
    own: torch.Tensor = _OwnFeatures.apply(x, group, _cut(x, ()))  # type: ignore[no-untyped-call]
    return own


@never_compiled
def rows_to_features(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Exchange this rank's rows with all features (T/W, ..., F) for all rows with its features (T,
    ..., F/W). Collective.

    An all-to-all; backward is the reverse one. Volume: (W - 1)/W of ``x`` in each direction.
    """
    features: torch.Tensor = _RowsToFeatures.apply(x, group)  # type: ignore[no-untyped-call]
    return features


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: Group, locality: Locality, compares: bool
    ) -> torch.Tensor:
        ctx.group, ctx.locality, ctx.compares = group, locality, compares
        return locality.join(gather_stacked(x, group).unbind(0))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.compares:
            check_same_gradient(grads[0], "a column-parallel layer")
        return ctx.locality.cut(grads[0], ctx.group.rank, ctx.group.size), None, None, None


class _OwnFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, locality: Locality) -> torch.Tensor:
        ctx.group, ctx.locality = group, locality
        return locality.cut(x, group.rank, group.size).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.locality.join(gather_stacked(grads[0], ctx.group).unbind(0)), None, None


class _RowsToFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return exchanged(torch.stack(x.chunk(group.size, -1)), group).flatten(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        parts = exchanged(torch.stack(grads[0].chunk(ctx.group.size, 0)), ctx.group)
        return torch.cat(parts.unbind(0), -1), None


def exchanged(parts: torch.Tensor, group: Group) -> torch.Tensor:
    """Send ``parts[r]`` to rank r and return what each rank sent to this one, (W, ...)."""
    received = torch.empty_like(parts)
    group.all_to_all(received.unbind(0), parts.unbind(0)).wait()
    return received


def _cut(x: torch.Tensor, sections: Sequence[int]) -> Locality:
    return Locality(AXIS, split_dim=x.dim() - 1, sections=tuple(sections))
