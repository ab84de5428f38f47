"""The two autograd nodes around a block, which begin and end its backward.

[Note: the two nodes] In forward, ``Enter`` turns the shards into whole parameters, and ``Leave`` passes the outputs on. In backward
``Leave`` runs before every node inside the block, and ``Enter`` after all of them: it is the block's oldest node, and torch runs
the youngest ready node first. So ``Leave`` gathers, and ``Enter`` reduces and frees. Both run at the right time in any graph, with
frozen or skipped blocks, a block used twice, several graphs, ``retain_graph``, ``autograd.grad``. An empty tensor, the token, goes
from ``Enter`` to ``Leave``. Because of the token a block whose outputs got a gradient always reduces, even if none of its
parameters took part on this rank, so that all ranks make the same collectives.

``Enter`` also takes an empty leaf of the block's own. Only an ordinary ``backward()`` accumulates into this leaf, because it
accumulates into all leaves; ``autograd.grad`` and ``backward(inputs=...)`` do not.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from bmt_core.modules.first_derivatives import first_derivatives_only
from bmt_core.torch_internals import accumulates_at
from bmt_zero.schedule.block_call import BlockCall


class Enter(torch.autograd.Function):
    """(call, leaf, shards…) -> (token, whole parameters…): see [Note: the two nodes]."""

    @staticmethod
    def forward(ctx: Any, call: BlockCall, leaf: torch.Tensor, *shards: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        fulls = [view for group in call.groups for view in group.views()]
        ctx.mark_non_differentiable(*[full for full, s in zip(fulls, shards, strict=True) if not s.requires_grad])
        return torch.empty(0, device=shards[0].device), *fulls

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, *grads: Any) -> Any:
        of_leaf, _ = ctx.next_functions[0]
        return None, None, *ctx.call.end_backward(grads[1:], ctx.needs_input_grad[2:], accumulates_at(of_leaf))


class Leave(torch.autograd.Function):
    """(call, token, outputs…) -> outputs…: see [Note: the two nodes]."""

    @staticmethod
    def forward(ctx: Any, call: BlockCall, token: torch.Tensor, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.token_device = token.device
        # Detached, because code after the block may modify an output in place.
        return tuple(output.detach() for output in outputs)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.call.begin_backward()
        token = torch.empty(0, device=ctx.token_device) if ctx.needs_input_grad[1] else None
        return None, token, *grads


class EndAtInputs:
    """Ends a call when the gradients of its inputs are computed. Refers to it weakly, because the hook may outlive the graph."""

    def __init__(self, call: BlockCall) -> None:
        self._call = weakref.ref(call)

    def __call__(self, grads: Any) -> None:
        call = self._call()
        if call is not None:
            call.end()
