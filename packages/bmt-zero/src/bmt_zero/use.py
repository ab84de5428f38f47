"""``Use``: one call of a block, from its forward to the end of its backward, and the autograd nodes around it.

[Note: the two nodes] ``Enter`` makes the full parameters out of the shards; ``Leave`` passes the outputs on. In
backward ``Leave`` runs before anything inside the block and ``Enter`` after everything: it is the oldest node of the
block, and the engine runs the youngest ready node first. So ``Leave`` gathers, and ``Enter`` reduces and frees, at
the right moment whatever the graph around looks like: frozen or skipped blocks, a block used twice, several graphs,
``retain_graph``, ``autograd.grad``. An empty tensor, the token, goes from ``Enter`` to ``Leave``: a block whose
outputs got a gradient reduces, even if none of its parameters took part on this rank, so that all ranks reduce alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils.hooks import RemovableHandle

from bmt_core.block import BlockUse
from bmt_core.gradient import accumulates

if TYPE_CHECKING:
    from bmt_zero.flat import FlatShard


class Use:
    """Holds a block's parameters in memory while one call needs them, and takes its gradients."""

    def __init__(self, flats: Sequence[FlatShard], schedule: BlockUse) -> None:
        self.flats = list(flats)
        self.schedule = schedule
        self.hook: RemovableHandle | None = None
        self._holds = False
        self._generations: list[int] = []

    def begin_forward(self) -> None:
        """Have the parameters gathered. Collective."""
        self._acquire(observe=self.schedule.first_forward)
        self._generations = [flat.generation for flat in self.flats]

    def end_forward(self, *, backward_follows: bool) -> None:
        """Let go what need not stay until the backward."""
        if not backward_follows or any(flat.level == 3 for flat in self.flats):
            self.let_go()

    def begin_backward(self) -> None:
        """Have the parameters gathered again, with the values that forward saw. Collective."""
        if self.schedule.first_backward:
            for flat in self.flats:
                flat.observe()
        if self._generations != [flat.generation for flat in self.flats]:
            raise RuntimeError(
                "The parameters of a block were changed between its forward and its backward, so its gradients would be wrong."
                " Run backward before the optimizer's step, or run forward again."
            )
        if not self._holds:
            self._acquire(observe=False)

    def end_backward(self, grads: Sequence[torch.Tensor | None], needed: Sequence[bool]) -> list[torch.Tensor | None]:
        """Reduce the full gradients and return those of the shards, for autograd. Collective."""
        try:
            return self._reduce(grads, needed)
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Stop holding the parameters; harmless when nothing is held."""
        if self._holds:
            self._holds = False
            for flat in self.flats:
                flat.release()

    def end(self) -> None:
        """The backward is over: hold nothing, watch nothing."""
        self.let_go()
        if self.hook is not None:
            self.hook.remove()

    def __del__(self) -> None:
        # The graph is gone without a backward: an output that nobody used, an exception.
        self.end()

    def _acquire(self, *, observe: bool) -> None:
        acquired: list[FlatShard] = []
        try:
            for flat in self.flats:
                flat.acquire(observe=observe)
                acquired.append(flat)
        except BaseException:
            for flat in acquired:
                flat.release()
            raise
        self._holds = True

    def _reduce(self, grads: Sequence[torch.Tensor | None], needed: Sequence[bool]) -> list[torch.Tensor | None]:
        results: list[torch.Tensor | None] = []
        position = 0
        for flat in self.flats:
            count = len(flat.parameters)
            own = slice(position, position + count)
            position += count
            results += self._reduce_flat(flat, grads[own], needed[own])
        return results

    def _reduce_flat(
        self, flat: FlatShard, grads: Sequence[torch.Tensor | None], needed: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        if not any(needed):
            return [None] * len(needed)
        # Which leaves this pass adds to: all of them in backward(), none in autograd.grad(), some in backward(inputs=…).
        taking = [need and accumulates(p) for need, p in zip(needed, flat.parameters, strict=True)]
        if not any(taking):
            return flat.sum.rounded(flat.reduce(grads), needed)
        grads = [grad if take else None for grad, take in zip(grads, taking, strict=True)]
        if not self.schedule.last_backward and not flat.is_hooked():
            flat.hold(grads)
            return [None] * len(needed)
        return flat.sum.add(flat.reduce(grads), taking)


class Enter(torch.autograd.Function):
    """(use, shards…) -> (token, full parameters…): see [Note: the two nodes]."""

    @staticmethod
    def forward(ctx: Any, use: Use, *shards: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.use = use
        fulls = [view for flat in use.flats for view in flat.views()]
        ctx.mark_non_differentiable(*[full for full, s in zip(fulls, shards, strict=True) if not s.requires_grad])
        return torch.empty(0, device=shards[0].device), *fulls

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *ctx.use.end_backward(grads[1:], ctx.needs_input_grad[1:])


class Leave(torch.autograd.Function):
    """(use, token, outputs…) -> outputs…: see [Note: the two nodes]."""

    @staticmethod
    def forward(ctx: Any, use: Use, token: torch.Tensor, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.use = use
        ctx.token_device = token.device
        # Detached, not returned as they are: an output may be modified in place by the code after the block.
        return tuple(output.detach() for output in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.use.begin_backward()
        # Whatever happens inside the block, nothing stays gathered after the backward pass.
        torch.autograd.Variable._execution_engine.queue_callback(ctx.use.end)
        token = torch.empty(0, device=ctx.token_device) if ctx.needs_input_grad[1] else None
        return None, token, *grads
