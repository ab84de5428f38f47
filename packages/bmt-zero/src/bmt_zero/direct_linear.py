"""Linear layers whose backward writes the weight gradient directly into the flat tensor that
is reduced.

Autograd would compute each gradient in memory of its own, and all gradients would then be copied
into the flat tensor. Here the product writes into the flat tensor. It is the product that autograd
would compute, of the same operands in the same layout.

[Note: save before computing] A recomputation stops once it has computed the last tensor that
backward needs, so that it skips the block's last product. But hooks see the tensors that a custom
function saves only after its forward has returned. So the layer tells the recomputation before it
computes which tensor it will save.

The weight is not saved for backward, because saved tensors pass through the recomputation's hooks.
Backward reads the gathered weight instead.

[Note: small weights] The layer's forward and backward in Python take the host longer than the copy
of a small gradient takes the device. So small weights are left to autograd, at levels 2 and 3 and
outside of pipelines: there a Block adds no half-type gradients to a float32 sum, which rounds
differently, and nothing is postponed by a schedule. It depends on nothing that may change between
forward and backward, because torch's checkpoint around a Block must save the same in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import nn
from torch.nn.functional import linear

from bmt_core.errors import BmtError
from bmt_core.torch_internals import are_transforms_active, has_gradient_hooks
from bmt_params.guards.first_derivatives import first_derivatives_only
from bmt_params.shard import summation_dtype
from bmt_zero.kept_results import PRODUCTS, SavedTensors

SMALL = 1 << 20
"""Weights of fewer elements are small: see [Note: small weights]."""


class ParameterIndex(NamedTuple):
    """Which of the block's parameters a weight or bias is: the index of its group, and its index in
    the group.
    """

    group: int
    parameter: int


class GradientCall(Protocol):
    """The interface of one call of a block for its layers."""

    takes_small: bool
    """Whether layers pass it the gradients of small weights, too: see [Note: small weights]."""

    def begin_backward(self) -> None:
        """Gather the whole parameters, unless they are there."""

    def accept(self, index: ParameterIndex, gradient: DeferredGradient) -> bool:
        """Write ``gradient`` into the tensor that is reduced, or keep it for later. False: the
        layer must return it instead.
        """


class RunningCall:
    """The call of a block whose forward code runs, if any, and its recomputation, if it has one."""

    call: GradientCall | None = None
    recomputation: SavedTensors | None = None
    takes_small = False
    """What the call whose backward began last says, for a part of the block that
    ``torch.utils.checkpoint`` recomputes in it: layers must save the same as in forward.
    """


class DirectLinear:
    """An object that a block sets on a linear layer while its modules hold whole parameters.

    On an ``nn.Linear`` it is the ``forward``. On a layer that computes its gradients itself it is
    the ``layer_gradients``: see :class:`bmt_params.modules.layer_gradients.LayerGradients`.
    """

    def __init__(
        self,
        running: RunningCall,
        layer: nn.Module,
        weight: ParameterIndex,
        bias: ParameterIndex | None,
    ) -> None:
        self._running = running
        self._parameters: dict[str, Any] = layer._parameters
        self.weight = weight
        self.bias = bias

    def writer(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> _Writer | None:
        return _Writer(self, self._running) if _is_plain(input, weight, bias) else None

    def __call__(
        self,
        input: torch.Tensor,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the layer's output. ``weight`` and ``bias``: given by what keeps it."""
        is_given = weight is not None
        if weight is None:
            weight, bias = self._parameters["weight"], self._parameters["bias"]
        if torch.compiler.is_compiling():  # a compiled part of an uncompiled block
            return linear(input, weight, bias)
        call, recomputation = self._running.call, self._running.recomputation
        if recomputation is not None and recomputation.kept is not None and not is_given:
            return recomputation.kept.call(  # type: ignore[no-any-return]
                recomputation, PRODUCTS, linear, self, (input, weight, bias), place=self.weight
            )
        # See [Note: small weights].
        is_left_to_autograd = weight.numel() < SMALL and not (call or self._running).takes_small
        if is_left_to_autograd or not _is_plain(input, weight, bias):
            return linear(input, weight, bias)
        if recomputation is None:
            return _Linear.apply(input, weight, bias, self, call)  # type: ignore[no-any-return, no-untyped-call]
        before = recomputation.before_layer(input)
        output: torch.Tensor = _Linear.apply(input, weight, bias, self, call)  # type: ignore[no-untyped-call]
        recomputation.after_layer(before)
        return output


class _Linear(torch.autograd.Function):
    """``linear`` whose backward passes its gradients to ``call``.

    ``call`` is None in a part of the block that ``torch.utils.checkpoint`` recomputes in backward:
    then the gradients are returned.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        layer: DirectLinear,
        call: GradientCall | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(input)
        ctx.weight, ctx.layer, ctx.call = weight, layer, call
        # Detached: the product of more than two dimensions is a view, and later code may modify it
        # in place.
        return linear(input, weight, bias).detach()

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.call is not None:
            # Backward may have reached this layer without passing the block's outputs.
            ctx.call.begin_backward()
        (input,), weight = ctx.saved_tensors, ctx.weight
        grad = grads[0].reshape(-1, weight.shape[0])
        for_input, for_weight, for_bias, *_ = ctx.needs_input_grad
        grad_input = grad.mm(weight).view(input.shape) if for_input else None
        grad_weight, grad_bias = None, None
        if for_weight:
            flat = input.reshape(-1, weight.shape[1])
            # The order of factors is autograd's, so that the bits are its, too.
            grad_weight = _written(ctx.call, ctx.layer.weight, WeightGradient(grad.t(), flat))
        if for_bias:
            grad_bias = _written(ctx.call, ctx.layer.bias, BiasGradient(grad))
        return grad_input, grad_weight, grad_bias, None, None


class _Writer:
    """See :class:`bmt_params.modules.layer_gradients.GradientWriter`. Without ``call`` it returns
    gradients: see :class:`_Linear`.
    """

    def __init__(self, layer: DirectLinear, running: RunningCall) -> None:
        self._layer = layer
        self._call = running.call
        self._recomputation = running.recomputation
        self._before = 0

    def begin_forward(self, input: torch.Tensor) -> None:
        if self._recomputation is not None:
            self._before = self._recomputation.before_layer(input)

    def end_forward(self) -> None:
        if self._recomputation is not None:
            self._recomputation.after_layer(self._before)
            # Autograd keeps this object, which must not keep the recomputed tensors.
            self._recomputation = None

    def begin_backward(self) -> None:
        if self._call is not None:
            self._call.begin_backward()

    def weight_gradient(
        self, grad: torch.Tensor, input: torch.Tensor, *, is_temporary: bool = False
    ) -> torch.Tensor | None:
        gradient = WeightGradient(grad.t(), input)
        gradient.is_temporary = is_temporary
        return _written(self._call, self._layer.weight, gradient)

    def bias_gradient(self, grad: torch.Tensor) -> torch.Tensor | None:
        assert self._layer.bias is not None
        return _written(self._call, self._layer.bias, BiasGradient(grad))


class DeferredGradient:
    """A gradient that is not computed yet. ``factors[0]`` is the gradient of the layer's output."""

    is_temporary = False
    """Whether the memory of the factors may be overwritten once the layer's backward
    has returned.
    """
    _versions: list[int]

    def __init__(self, *factors: torch.Tensor) -> None:
        self.factors = factors

    def computed(self) -> torch.Tensor:
        """Return the gradient."""
        raise NotImplementedError

    def write_to(self, destination: torch.Tensor) -> None:
        """Write the gradient into ``destination``."""
        raise NotImplementedError

    def add_to(self, destination: torch.Tensor) -> None:
        """Add the gradient to ``destination``."""
        raise NotImplementedError

    def joined(self, others: Iterable[Self]) -> Self:
        """Return the sum of this gradient and ``others`` of the same parameter, as one gradient
        over all their rows.
        """
        raise NotImplementedError

    def keep(self, may_be_freed: Callable[[torch.Tensor], bool]) -> None:
        """Keep the factors until after the backward pass. Copy those whose memory ``may_be_freed``
        by then.
        """
        grad, *inputs = [
            factor.clone() if self.is_temporary or may_be_freed(factor) else factor
            for factor in self.factors
        ]
        # Inputs are detached, which frees their graph. The gradient has no graph, and the object
        # itself is kept: torch does not reuse its memory as .grad of a leaf while there is a second
        # reference to it.
        self.factors = grad, *[input.detach() for input in inputs]
        self._versions = [factor._version for factor in self.factors]

    def check(self) -> None:
        """Raise if a factor was modified in place since :meth:`keep`."""
        if self._versions != [factor._version for factor in self.factors]:
            shapes = " and ".join(str(tuple(factor.shape)) for factor in self.factors)
            raise BmtError(
                "A tensor that a postponed weight gradient is computed from was modified by an"
                f" in-place operation after the backward pass; it is one of shape {shapes}. Call"
                " compute() before, use the out-of-place operation, or clone."
            )


class WeightGradient(DeferredGradient):
    """The product of the transposed gradient of the output (out, n) and the input (n, in)."""

    def computed(self) -> torch.Tensor:
        return torch.mm(*self.factors)

    def write_to(self, destination: torch.Tensor) -> None:
        """See :class:`DeferredGradient`. On CUDA the product of half types is written to a float32
        destination without rounding.
        """
        grad, input = self.factors
        if destination.dtype == grad.dtype:
            torch.mm(grad, input, out=destination)
        elif grad.is_cuda:
            torch.mm(grad, input, out_dtype=destination.dtype, out=destination)
        else:  # torch has wide products of half types on CUDA only
            destination.copy_(torch.mm(grad, input))

    def add_to(self, destination: torch.Tensor) -> None:
        """See :class:`DeferredGradient`, and :meth:`write_to` about float32."""
        grad, input = self.factors
        if destination.dtype == grad.dtype:
            destination.addmm_(grad, input)
        elif grad.is_cuda:
            torch.addmm(destination, grad, input, out_dtype=destination.dtype, out=destination)
        else:
            destination += torch.mm(grad, input)

    def joined(self, others: Iterable[WeightGradient]) -> WeightGradient:
        grads, inputs = zip(*[gradient.factors for gradient in (self, *others)], strict=True)
        return WeightGradient(torch.cat([grad.t() for grad in grads]).t(), torch.cat(inputs))


class BiasGradient(DeferredGradient):
    """The sum of the rows of the gradient of the output (n, out), or of several such gradients."""

    def computed(self) -> torch.Tensor:
        first, *others = self.factors
        if not others:
            return first.sum(0)
        total = first.sum(0, dtype=summation_dtype(first.dtype))
        for other in others:
            total += other.sum(0, dtype=total.dtype)
        return total.to(first.dtype)

    def write_to(self, destination: torch.Tensor) -> None:
        if len(self.factors) == 1:
            torch.sum(self.factors[0], 0, out=destination)
        elif destination.dtype == summation_dtype(destination.dtype):
            self.add_to(destination.zero_())
        else:
            destination.copy_(self.computed())

    def add_to(self, destination: torch.Tensor) -> None:
        for grad in self.factors:
            destination += grad.sum(0, dtype=destination.dtype)

    def joined(self, others: Iterable[BiasGradient]) -> BiasGradient:
        return BiasGradient(
            *self.factors, *(factor for other in others for factor in other.factors)
        )


def _written(
    call: GradientCall | None, index: ParameterIndex, gradient: DeferredGradient
) -> torch.Tensor | None:
    """Pass ``gradient`` to ``call`` and return None, or compute and return it if autograd
    needs it.
    """
    return None if call is not None and call.accept(index, gradient) else gradient.computed()


def direct_linears(
    running: RunningCall, module: nn.Module, indices: Mapping[int, ParameterIndex]
) -> list[tuple[dict[str, Any], str, DirectLinear]]:
    """Return ``(layer.__dict__, name, DirectLinear)`` for each layer in ``module`` that may write
    its gradients itself.

    ``name`` is the attribute to set: ``forward`` for ``nn.Linear``, ``layer_gradients`` for a layer
    class that has it. ``indices`` gives the :class:`ParameterIndex` by the parameter's id. A weight
    that several layers share is left to autograd.
    """
    layers = [m for m in module.modules() if _attribute_of(m) is not None]
    weights = [id(layer._parameters.get("weight")) for layer in layers]
    found = []
    for layer, weight in zip(layers, weights, strict=True):
        bias = layer._parameters.get("bias")
        if (
            weight not in indices
            or weights.count(weight) > 1
            or (bias is not None and id(bias) not in indices)
        ):
            continue
        bias_index = None if bias is None else indices[id(bias)]
        name = _attribute_of(layer)
        assert name is not None
        found.append(
            (layer.__dict__, name, DirectLinear(running, layer, indices[weight], bias_index))
        )
    return found


def _attribute_of(module: nn.Module) -> str | None:
    if hasattr(type(module), "layer_gradients"):
        return "layer_gradients"
    is_linear = type(module).forward is nn.Linear.forward and "forward" not in module.__dict__
    return "forward" if is_linear else None


def _is_plain(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether the product is what autograd would compute: no autocast, no transforms, no
    subclasses, no hooks.
    """
    return (
        torch.is_grad_enabled()
        and weight.requires_grad
        and type(input) is torch.Tensor
        and type(weight) is torch.Tensor
        and input.dtype == weight.dtype
        and input.ndim > 1
        and not has_gradient_hooks([weight] if bias is None else [weight, bias])
        and not torch.is_autocast_enabled(input.device.type)
        and not are_transforms_active()
    )
