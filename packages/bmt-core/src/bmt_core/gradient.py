"""Gradients of shards: exact accumulation of half-precision gradients behind an ordinary ``.grad``.

[Note: gradient accumulation] ``p.grad`` has the dtype of ``p``, so that every optimizer can use it. Adding many small
gradients in a half type stalls (1 + 256 is 256 in bfloat16), so the running sum is kept in float32 beside it, and
``p.grad`` is that sum, rounded. The sum counts only while ``p.grad`` is what it was when we left it: a gradient that
the user set to None, zeroed, or clipped in place is the truth, and the sum starts again from it. That is what makes
``zero_grad`` in both its forms, and any optimizer's own, right.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class GradientWitness:
    """Remembers in which state the gradients of some parameters were left, to tell later whether anybody touched them.

    Ranks must come to the same answer, or they would reduce different things. A rank's part may be empty, and empty
    tensors have no address; they still have a storage and a version, so these are compared.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], left: Sequence[torch.Tensor | None]) -> None:
        self._parameters = parameters
        # The storage is kept, so that no other gradient can have it while we compare; not the tensor, which autograd
        # could then not take over as it is and would have to copy.
        self._left = [None if g is None else (g.untyped_storage(), g.storage_offset(), g._version) for g in left]

    def unchanged(self) -> bool:
        """Whether every gradient is still the memory that was left, unmodified."""
        return all(
            left is None or (parameter.grad is not None and _is_at(parameter.grad, *left))
            for parameter, left in zip(self._parameters, self._left, strict=True)
        )


def _is_at(grad: torch.Tensor, storage: torch.UntypedStorage, offset: int | torch.SymInt, version: int) -> bool:
    return (
        grad._version == version and grad.storage_offset() == offset and grad.untyped_storage()._cdata == storage._cdata
    )


class GradientSum:
    """The float32 running sum behind the gradients of ``parameters``, whose parts lie in one flat tensor.

    ``pieces`` are the lengths of the consecutive pieces of the flat tensor, and ``indices[i]`` tells which of them is
    parameter i.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], pieces: Sequence[int], indices: Sequence[int]) -> None:
        self._parameters = parameters
        self._pieces = list(pieces)
        self._indices = indices
        self._total: torch.Tensor | None = None
        self._witness: GradientWitness | None = None

    def forget_if_cleared(self) -> None:
        """Free the sum when the gradients it stands behind are gone."""
        if self._total is not None and all(p.grad is None for p in self._parameters):
            self._total = self._witness = None

    def add(self, reduced: torch.Tensor, needed: Sequence[bool]) -> list[torch.Tensor | None]:
        """Add flat ``reduced`` (one more gradient) and return what autograd shall *put into* ``.grad``.

        Called inside a backward pass whose leaves are the parameters. For a half type the present ``.grad`` is taken
        over and set to None, and the returned tensors replace it; for a type that is its own summation type autograd
        adds. ``needed[i]`` False: the parameter takes no gradient now.
        """
        dtype = self._parameters[0].dtype
        if reduced.dtype == dtype:
            return self._needed(reduced, needed)
        if not all(needed):
            # The sum is what stands behind .grad: what this pass does not add there is no part of it.
            torch._foreach_zero_([view for view, wanted in zip(self.views(reduced), needed, strict=True) if not wanted])
        if any(p.grad is not None for p in self._parameters):
            total = self._present()
            total += reduced
        else:
            total = reduced
        for parameter, wanted in zip(self._parameters, needed, strict=True):
            if wanted:
                parameter.grad = None
        views = self._needed(total.to(dtype), needed)
        self._total, self._witness = total, GradientWitness(self._parameters, views)
        return views

    def rounded(self, reduced: torch.Tensor, needed: Sequence[bool]) -> list[torch.Tensor | None]:
        """Return ``reduced`` as gradients of the parameters' dtype, without touching ``.grad`` (``torch.autograd.grad``)."""
        return self._needed(reduced.to(self._parameters[0].dtype), needed)

    def _present(self) -> torch.Tensor:
        if self._total is not None and self._witness is not None and self._witness.unchanged():
            return self._total
        total = torch.zeros(sum(self._pieces), dtype=torch.float32, device=self._parameters[0].device)
        for parameter, view in zip(self._parameters, self.views(total), strict=True):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
        return total

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return each parameter's part of ``flat``."""
        pieces = torch.split(flat, self._pieces)
        return [pieces[index] for index in self._indices]

    def _needed(self, flat: torch.Tensor, needed: Sequence[bool]) -> list[torch.Tensor | None]:
        return [view if wanted else None for view, wanted in zip(self.views(flat), needed, strict=True)]


def accumulates(leaf: torch.nn.Parameter) -> bool:
    """Whether the backward pass under way will add to ``leaf.grad``, as opposed to ``torch.autograd.grad``, which returns it."""
    if not leaf.requires_grad:  # frozen since forward: autograd passes it over
        return False
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # how torch says that the leaf's gradient is captured and not accumulated
        return False
