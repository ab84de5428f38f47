"""Linear layers whose backward writes the weight's gradient where it is reduced from.

Autograd would make each gradient in memory of its own, to be copied into the flat tensor that is reduced: one more pass
over all gradients. Here the product writes into the flat tensor. It is the same product, of the same operands in the same
layout, that autograd would compute.

[Note: save before computing] A recomputation stops when the last tensor that backward needs is there again, so that a
block's last product is not computed a second time. What a custom function saves is seen only after its forward returned.
So the layer tells the recomputation what it is going to save before it computes.

The weight is no saved tensor, which hooks would have to carry through recomputation: backward reads it where it is gathered.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import linear

from bmt_zero.once import once
from bmt_zero.placement import present_hooks

if TYPE_CHECKING:
    from bmt_zero.state import BlockState
    from bmt_zero.use import Use


class Place:
    """Which parameter of which flat shard the weight, or the bias, of a layer is."""

    def __init__(self, flat: int, index: int) -> None:
        self.flat = flat
        self.index = index


class DirectLinear:
    """The forward of one ``nn.Linear`` inside a block, while the block runs."""

    def __init__(self, state: BlockState, layer: nn.Linear, weight: Place, bias: Place | None) -> None:
        self._state = weakref.ref(state)
        self._parameters: dict[str, Any] = layer._parameters
        self.weight = weight
        self.bias = bias

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """See ``torch.nn.functional.linear``."""
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        state = self._state()
        use = None if state is None else state.use
        if torch.compiler.is_compiling():
            return linear(input, weight, bias)
        if use is not None and not use.is_called_again:
            use.is_called_again = not torch.is_grad_enabled() or present_hooks() != use.hooks
        if not _is_plain(input, weight, bias):
            return linear(input, weight, bias)
        if use is None:  # called again by backward: what it saves must be what forward saved
            return _Linear.apply(input, weight, bias, self, None)  # type: ignore[no-any-return, no-untyped-call]
        recomputation = None if use.recomputation is None else use.recomputation()
        before = 0 if recomputation is None else recomputation.before_layer(input)
        output: torch.Tensor = _Linear.apply(input, weight, bias, self, use)  # type: ignore[no-untyped-call]
        if recomputation is not None:
            recomputation.after_layer(before, 1)
        return output


class _Linear(torch.autograd.Function):
    """``linear`` with the backward of [Note: save before computing]."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        layer: DirectLinear,
        use: Use | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(input)
        ctx.weight, ctx.layer, ctx.use = weight, layer, use
        # Detached: the product of more than two dimensions is a view, and what follows may modify it in place.
        return linear(input, weight, bias).detach()

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.use is not None:
            ctx.use.begin_backward()  # a side door, see bmt_zero.saved, may have come first
        (input,), weight = ctx.saved_tensors, ctx.weight
        grad = grads[0].reshape(-1, weight.shape[0])
        for_input, for_weight, for_bias, *_ = ctx.needs_input_grad
        of_input = grad.mm(weight).view(input.shape) if for_input else None
        of_weight, of_bias = None, None
        if for_weight:
            flat = input.reshape(-1, weight.shape[1])
            of_weight = _written(ctx.use, ctx.layer.weight, _WeightGradient(grad, flat))
        if for_bias:
            of_bias = _written(ctx.use, ctx.layer.bias, _BiasGradient(grad))
        return of_input, of_weight, of_bias, None, None


class _WeightGradient:
    def __init__(self, grad: torch.Tensor, input: torch.Tensor) -> None:
        self._factors = grad.t(), input

    def made(self) -> torch.Tensor:
        return torch.mm(*self._factors)

    def into(self, place: torch.Tensor) -> None:
        torch.mm(*self._factors, out=place)

    def added_to(self, place: torch.Tensor) -> None:
        place.addmm_(*self._factors)


class _BiasGradient:
    def __init__(self, grad: torch.Tensor) -> None:
        self._grad = grad

    def made(self) -> torch.Tensor:
        return self._grad.sum(0)

    def into(self, place: torch.Tensor) -> None:
        torch.sum(self._grad, 0, out=place)

    def added_to(self, place: torch.Tensor) -> None:
        place += self._grad.sum(0)


def _written(use: Use | None, place: Place, gradient: _WeightGradient | _BiasGradient) -> torch.Tensor | None:
    """Write ``gradient`` where it is reduced from, or return it when autograd must see it."""
    found = None if use is None else use.place_for_gradient(place.flat, place.index)
    if found is None:
        return gradient.made()
    where, is_there = found
    if is_there:
        gradient.added_to(where)
    else:
        gradient.into(where)
    return None


def direct_linears(state: BlockState, module: nn.Module, places: dict[int, tuple[int, int]]) -> list[Any]:
    """Return ``(layer's __dict__, its DirectLinear)`` for each layer in ``module`` that may write its gradients itself.

    ``places`` says where the parameter with that id lies: ``(number of the flat shard, index in it)``. A weight that
    several layers share is left to autograd.
    """
    layers = [m for m in module.modules() if type(m).forward is nn.Linear.forward and "forward" not in m.__dict__]
    weights = [id(layer._parameters.get("weight")) for layer in layers]
    found = []
    for layer, weight in zip(layers, weights, strict=True):
        bias = layer._parameters.get("bias")
        if weight not in places or weights.count(weight) > 1 or (bias is not None and id(bias) not in places):
            continue
        of_bias = None if bias is None else Place(*places[id(bias)])
        assert isinstance(layer, nn.Linear)
        found.append((layer.__dict__, DirectLinear(state, layer, Place(*places[weight]), of_bias)))
    return found


def _is_plain(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether the product is what autograd would compute: no autocast, no transforms, no subclasses, no hooks."""
    return (
        torch.is_grad_enabled()
        and weight.requires_grad
        and type(input) is torch.Tensor
        and type(weight) is torch.Tensor
        and input.dtype == weight.dtype
        and input.ndim > 1
        and weight._backward_hooks is None
        and (bias is None or bias._backward_hooks is None)
        and not torch.is_autocast_enabled(input.device.type)
        and not torch._C._are_functorch_transforms_active()
    )
