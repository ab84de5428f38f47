"""Collectives on the rows (dim 0) of activations: gather and split, and their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from bmt_core.comm.autograd import gather_stacked
from bmt_core.comm.protocols import Group
from bmt_core.torch_internals import never_compiled
from bmt_params.guards.same_data import Occasions
from bmt_tp.feature_exchange import exchanged
from bmt_tp.row_comparison import check_same_gradient, is_time_to_compare
from bmt_tp.tensor_group import tensor_group


@never_compiled
def own_rows(x: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows (T/W, ...) of rows (T, ...) that all ranks have. Backward gathers
    gradients: a collective.
    """
    own: torch.Tensor = _OwnRows.apply(x, tensor_group())  # type: ignore[no-untyped-call]
    return own


@never_compiled
def gather_rows(x: torch.Tensor, occasions: Occasions) -> torch.Tensor:
    """Gather the rows (T/W, ...) of each rank into all rows (T, ...).

    For inputs of code that computes the same on all ranks: backward takes this rank's rows of the
    gradient, and compares that of all ranks when one of the ``occasions`` has come. Collective.
    Volume: (W - 1)/W of the result.
    """
    compares = torch.is_grad_enabled() and is_time_to_compare(occasions)
    gathered: torch.Tensor = _GatherRows.apply(x, tensor_group(), compares)  # type: ignore[no-untyped-call]
    return gathered


def gather_input_rows(x: torch.Tensor) -> torch.Tensor:
    """Gather the rows (T/W, ...) of each rank into all rows (T, ...), as the input of products that
    are split over the ranks.

    Each rank computes other output features from the rows, so backward sums the gradients of all
    ranks, in float32, and gives each rank its rows of the sum. Forward and backward are collective.
    Volume: (W - 1)/W of the result in each direction.
    """
    if torch.compiler.is_compiling():
        compiled: torch.Tensor = _gathered_rows(x)
        return compiled
    gathered: torch.Tensor = _GatherInputRows.apply(x)  # type: ignore[no-untyped-call]
    return gathered


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return _part(x, group).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return gather_stacked(grads[0], ctx.group).flatten(0, 1), None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, compares: bool) -> torch.Tensor:
        ctx.group, ctx.compares = group, compares
        return gather_stacked(x, group).flatten(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.compares:
            check_same_gradient(grads[0], "the layers that a plan splits")
        return _part(grads[0], ctx.group), None, None


class _GatherInputRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return gather_stacked(x, tensor_group()).flatten(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return _sum(grads[0])


def _part(x: torch.Tensor, group: Group) -> torch.Tensor:
    length = len(x) // group.size
    return x[group.rank * length : (group.rank + 1) * length]


def _sum(x: torch.Tensor) -> torch.Tensor:
    group = tensor_group()
    parts = x.contiguous().view(group.size, len(x) // group.size, *x.shape[1:])
    return exchanged(parts, group).sum(0)


# gather_input_rows as custom operators, for torch.compile: see bmt_tp/compiled_linear.py.


@torch.library.custom_op("bmt_tp::gathered_rows", mutates_args=())
def _gathered_rows(x: torch.Tensor) -> torch.Tensor:
    return gather_stacked(x, tensor_group()).flatten(0, 1)


@torch.library.custom_op("bmt_tp::summed_rows", mutates_args=())
def _summed_rows(x: torch.Tensor) -> torch.Tensor:
    return _sum(x)


@_gathered_rows.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((tensor_group().size * x.shape[0], *x.shape[1:]))


@_summed_rows.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.shape[0] // tensor_group().size, *x.shape[1:]))


def _differentiated(ctx: Any, grad: torch.Tensor) -> Any:
    return _summed_rows(grad)


_gathered_rows.register_autograd(_differentiated)
