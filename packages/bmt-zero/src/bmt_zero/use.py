"""``Use``: one call of a block, from its forward to the end of its backward, and the autograd nodes around it.

[Note: the two nodes] ``Enter`` makes the full parameters out of the shards; ``Leave`` passes the outputs on. In
backward ``Leave`` runs before anything inside the block and ``Enter`` after everything: it is the oldest node of the
block, and the engine runs the youngest ready node first. So ``Leave`` gathers, and ``Enter`` reduces and frees, at
the right moment whatever the graph around looks like: frozen or skipped blocks, a block used twice, several graphs,
``retain_graph``, ``autograd.grad``. An empty tensor, the token, goes from ``Enter`` to ``Leave``: a block whose
outputs got a gradient reduces, even if none of its parameters took part on this rank, so that all ranks reduce alike.

``Enter`` also takes an empty leaf of the block's own. A backward pass that would accumulate into that leaf, which nobody
knows, accumulates into all: the ordinary ``backward()``, told from ``autograd.grad`` and ``backward(inputs=...)`` at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from bmt_core.params.gradient_sum import accumulates
from bmt_zero.engine import engine
from bmt_zero.full_gradients import FullGradients
from bmt_zero.once import once
from bmt_zero.placement import Placement

if TYPE_CHECKING:
    from bmt_zero.flat import FlatShard
    from bmt_zero.recompute import Recomputation
    from bmt_zero.state import BlockState


class Use:
    """Holds a block's parameters in memory while one call needs them, and takes its gradients."""

    def __init__(self, block: BlockState) -> None:
        self.block = block
        self.flats = list(block.flats)
        self.schedule = block.schedule
        self.hook: RemovableHandle | None = None
        self.writes_directly = True
        self.recomputation: weakref.ref[Recomputation] | None = None
        self.hooks: Any = None  # of autograd, where the block's forward began, while it runs
        self.is_called_again = (
            block.is_called_again
        )  # whether backward calls parts of the block: see bmt_zero.placement
        self.foreign: dict[int, torch.Tensor] = {}  # of a block that is called again: what it does not shard, by its id
        self._placement: Placement | None = None
        self._engine = engine()
        self._holds = False
        self._pass: int | None = None  # the backward pass in which the block's part has begun
        self._generations: list[int] = []
        self._gradients: dict[int, FullGradients] = {}

    @property
    def is_running(self) -> bool:
        """Whether the block's forward runs, so that a backward pass under way is one inside of it (``torch.autograd.grad``).

        The parameters are there then and must stay, and the gradients are forward's own.
        """
        return self.block.use is self

    def begin_forward(self) -> None:
        """Have the parameters gathered. Collective."""
        self._acquire(observe=self.schedule.first_forward, is_backward=False)
        self._generations = [flat.generation for flat in self.flats]

    def pin(self) -> None:
        """Hold the parameters, which are there."""
        for flat in self.flats:
            flat.hold()
        self._holds = True

    def end_forward(self, *, backward_follows: bool) -> None:
        """Let go what need not stay until the backward."""
        if not backward_follows or 3 in [flat.level for flat in self.flats]:
            self.let_go()

    def begin_backward(self) -> None:
        """Have the parameters gathered again, with the values that forward saw. Collective."""
        if self.is_running:
            return
        this_pass = torch._C._current_graph_task_id()
        if self._pass == this_pass:
            return
        self._gradients.clear()
        self.call_at_end()
        if self.schedule.first_backward:
            for flat in self.flats:
                flat.observe()
        if self._generations != [flat.generation for flat in self.flats]:
            raise RuntimeError(
                "The parameters of a block were changed between its forward and its backward, so its gradients would be wrong."
                " Run backward before the optimizer's step, or run forward again."
            )
        self._acquire(observe=False, is_backward=True)
        self._pass = this_pass
        if self.is_called_again:
            self._displace()
            self._placement = self.block.place(self.flats, self.foreign)

    def call_at_end(self) -> None:
        """Have :meth:`end_pass` called when the backward pass under way is over."""
        torch.autograd.Variable._execution_engine.queue_callback(self.end_pass)

    def place_for_gradient(self, flat: int, index: int) -> tuple[torch.Tensor, bool] | None:
        """Return where a layer may write its gradient: see :meth:`FullGradients.place`."""
        if not self.writes_directly or self.is_running:
            return None
        return self._gradients_of(flat).place(index)

    def end_backward(self, grads: Sequence[torch.Tensor | None], needed: Sequence[bool], *, leaf: torch.Tensor) -> Any:
        """Reduce the full gradients; return those of the shards that autograd is to have. Collective."""
        try:
            return self._reduce(grads, needed, is_plain=accumulates(leaf))
        finally:
            self._gradients.clear()
            self._pass = None
            self.let_go()

    def let_go(self) -> None:
        """Stop holding the parameters; harmless when nothing is held."""
        self._displace()
        if self._holds:
            self._holds = False
            for flat in self.flats:
                flat.release()

    def end(self) -> None:
        """The graph is gone: hold nothing, watch nothing."""
        self.let_go()
        self._gradients.clear()
        if self.hook is not None:
            self.hook.remove()

    def end_pass(self) -> None:
        """The backward pass is over: gradients are complete, and nothing stays gathered, whatever happened in the block."""
        self._pass = None
        recomputation = None if self.recomputation is None else self.recomputation()
        if recomputation is not None:
            recomputation.clear()
        self.end()
        for flat in self.flats:
            flat.sum.finish()
        self._engine.prefetch.drop()
        self._engine.in_flight.let_go()

    def __del__(self) -> None:
        # The graph is gone without a backward: an output that nobody used, an exception.
        self.end()

    def _displace(self) -> None:
        if self._placement is not None:
            placement, self._placement = self._placement, None
            self.block.displace(placement)

    def _acquire(self, *, observe: bool, is_backward: bool) -> None:
        was_held = self._holds
        held: list[FlatShard] = []
        try:
            for flat in self.flats:
                if observe:
                    flat.observe()
                flat.start_gather()
                flat.hold()
                held.append(flat)
            self._engine.prefetch.begins(self.block, is_backward=is_backward)
            for flat in self.flats:
                flat.arrive()
        except BaseException:
            for flat in held:
                flat.release()
            raise
        self._holds = True
        if was_held:
            for flat in self.flats:
                flat.release()

    def _gradients_of(self, flat: int) -> FullGradients:
        if flat not in self._gradients:
            self._gradients[flat] = FullGradients(self.flats[flat], self._engine.in_flight)
        return self._gradients[flat]

    def _reduce(self, grads: Sequence[torch.Tensor | None], needed: Sequence[bool], *, is_plain: bool) -> list[Any]:
        results: list[torch.Tensor | None] = []
        if self._placement is not None:
            grads = self._placement.add_to(grads)
        position = 0
        for number, flat in enumerate(self.flats):
            own = slice(position, position + len(flat.parameters))
            position = own.stop
            if any(needed[own]):
                results += self._reduce_flat(number, grads[own], needed[own], is_plain=is_plain)
            else:
                results += [None] * len(flat.parameters)
        return results

    def _reduce_flat(
        self, number: int, grads: Sequence[torch.Tensor | None], needed: Sequence[bool], *, is_plain: bool
    ) -> Sequence[torch.Tensor | None]:
        flat = self.flats[number]
        full = self._gradients_of(number)
        nothing = [None] * len(needed)
        # Which leaves this pass adds to: all of them in backward(), none in autograd.grad(), some in backward(inputs=…).
        if is_plain:
            taking = [need and p.requires_grad for need, p in zip(needed, flat.parameters, strict=True)]
        else:
            taking = [need and accumulates(p) for need, p in zip(needed, flat.parameters, strict=True)]
        if True not in taking:
            return flat.sum.rounded(flat.reduce_now(full.complete(grads, needed)), needed)
        buffer = full.complete(grads, taking)
        if flat.is_hooked():
            return flat.sum.seen_by_hooks(flat.reduce_now(buffer), taking)
        if not self.schedule.last_backward and not flat.sum.is_taking:
            flat.hold_back(buffer, taking)
            return nothing
        self.call_at_end()
        self._engine.in_flight.keep(self.block.number, *flat.reduce(buffer, taking))
        return nothing


class Enter(torch.autograd.Function):
    """(use, leaf, shards…) -> (token, full parameters…): see [Note: the two nodes]."""

    @staticmethod
    def forward(ctx: Any, use: Use, leaf: torch.Tensor, *shards: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.use = use
        ctx.leaf = leaf
        fulls = [view for flat in use.flats for view in flat.views()]
        ctx.mark_non_differentiable(*[full for full, s in zip(fulls, shards, strict=True) if not s.requires_grad])
        return torch.empty(0, device=shards[0].device), *fulls

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, *ctx.use.end_backward(grads[1:], ctx.needs_input_grad[2:], leaf=ctx.leaf)


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
    @once
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.use.begin_backward()
        token = torch.empty(0, device=ctx.token_device) if ctx.needs_input_grad[1] else None
        return None, token, *grads
