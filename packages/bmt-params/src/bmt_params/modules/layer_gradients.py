"""The protocols by which linear layers with their own backward write weight gradients directly
where a Block reduces them.

A Block reduces the gradients of its parameters from one flat tensor. A layer whose backward
function computes the weight gradient can let the Block write the product into this tensor, which
saves a copy. Such a layer has a class attribute ``layer_gradients = None``. The Block sets it while
the layer holds whole parameters. The layer has a parameter ``weight`` (out, in) and may have a
``bias`` (out,).
"""

from __future__ import annotations

from typing import Protocol

import torch


class GradientWriter(Protocol):
    """Takes the gradients of one call of a layer.

    For backward the layer saves only ``input``. It keeps a reference to the weight without saving
    it, because the Block gathers the weight's values again before backward.
    """

    def begin_forward(self, input: torch.Tensor) -> None:
        """Call before the layer saves ``input`` and computes its output.

        A recomputation ends here if backward needs no tensor after ``input``.
        """

    def end_forward(self) -> None:
        """Call after the layer has computed its output."""

    def begin_backward(self) -> None:
        """Call before backward reads the weight: it is gathered unless it is there."""

    def weight_gradient(
        self, grad: torch.Tensor, input: torch.Tensor, *, is_temporary: bool = False
    ) -> torch.Tensor | None:
        """Write ``gradᵀ input``, of (n, out) and (n, in), into the tensor that is reduced, or
        return it for autograd.

        ``is_temporary``: the memory of ``grad`` and ``input`` may be overwritten after this call.
        """

    def bias_gradient(self, grad: torch.Tensor) -> torch.Tensor | None:
        """Write the sum of the rows of ``grad`` (n, out) into the tensor that is reduced, or return
        it for autograd.
        """


class LayerGradients(Protocol):
    """What a Block sets as ``layer_gradients`` on a layer."""

    def writer(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> GradientWriter | None:
        """Return the writer of this call; None if autograd must compute the gradients (none needed,
        autocast, hooks).
        """


class GradientBuffers(Protocol):
    """Gives layers in compiled code, where no ``layer_gradients`` is set, memory in the tensor that
    the block reduces.
    """

    def reserve_gradient(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Return memory for the gradient of ``weight``, a whole parameter; None if the caller must
        allocate its own.

        The caller returns this tensor to autograd as the gradient. It is given out once
        per backward.
        """


class RunningBackward:
    """``buffers`` of the block whose backward runs, if one does. Shared by threads: on GPUs
    autograd runs in its own threads.
    """

    buffers: GradientBuffers | None = None


running_backward = RunningBackward()
