"""The seam between a Block and the linear layers in it that compute gradients themselves.

A Block reduces the gradients of its parameters from one flat tensor. A layer whose backward function computes the
gradient of its weight can let the Block put the product there, instead of into memory of its own that would be copied.
Such a layer has a class attribute ``layer_gradients = None``; while whole parameters are in the Block's modules, the Block
sets it on the layer. The layer has a parameter ``weight`` (out, in) and maybe a ``bias`` (out,).
"""

from __future__ import annotations

from typing import Protocol

import torch


class GradientWriter(Protocol):
    """What one call of a layer is told, and tells. The layer saves one tensor for backward, ``input``, and not its weight,
    whose object it keeps: the Block has its values there when backward runs.
    """

    def begin_forward(self, input: torch.Tensor) -> None:
        """Learn that the layer is about to save ``input`` and then to compute.

        A recomputation for which that is the last tensor ends here, before the product is computed again.
        """

    def end_forward(self) -> None:
        """Learn that the layer has computed its output."""

    def begin_backward(self) -> None:
        """Have the values of the weight there."""

    def weight_gradient(self, grad: torch.Tensor, input: torch.Tensor, *, is_lent: bool = False) -> torch.Tensor | None:
        """Write ``gradᵀ input`` of (n, out) and (n, in) where it is reduced from, or return it for autograd.

        ``is_lent``: after this call, somebody else may write to the memory of ``grad`` and ``input``.
        """

    def bias_gradient(self, grad: torch.Tensor) -> torch.Tensor | None:
        """Write the sum of the rows of ``grad`` (n, out) where it is reduced from, or return it for autograd."""


class LayerGradients(Protocol):
    """What a Block sets as ``layer_gradients`` on a layer."""

    def writer(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> GradientWriter | None:
        """Return what this call uses; None where autograd is to do everything (no gradients, autocast, hooks on the weight)."""


class GradientPlaces(Protocol):
    """Where the gradients of a block's parameters are reduced from, for layers inside of compiled code, which knows no Blocks."""

    def place_for(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Return where the gradient of ``weight``, a whole parameter, may be computed; None: anywhere else.

        Whoever gets a place returns it to autograd as the gradient. Nobody else gets it in the same backward.
        """


class RunningBackward:
    """The block whose backward runs, if any. Not thread-local: on GPUs autograd runs in threads of its own."""

    places: GradientPlaces | None = None


running_backward = RunningBackward()
