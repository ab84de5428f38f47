"""``BlockEngine``: runs the calls of one block.

[Note: the two nodes] In forward, ``Enter`` turns the shards into whole parameters, and ``Leave``
passes the outputs on. In backward ``Leave`` runs before every node inside the block, and ``Enter``
after all of them: it is the block's oldest node, and torch runs the youngest ready node first. So
``Leave`` gathers, and ``Enter`` reduces and frees. Both run at the right time in any graph, with
frozen or skipped blocks, a block used twice, several graphs, ``retain_graph``, ``autograd.grad``.
An empty tensor, the token, goes from ``Enter`` to ``Leave``. Because of the token a block whose
outputs got a gradient always reduces, even if none of its parameters took part on this rank, so
that all ranks make the same collectives.

``Enter`` also takes an empty leaf of the block's own. Only an ordinary ``backward()`` accumulates
into this leaf, because it accumulates into all leaves; ``autograd.grad`` and
``backward(inputs=...)`` do not.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from bmt_core.errors import ConfigError
from bmt_core.torch_internals import (
    accumulates_at,
    has_gradient_hooks,
    without_torch_functions,
)
from bmt_params.guards.first_derivatives import no_second_derivatives
from bmt_params.modules.block_use import BlockUse
from bmt_params.modules.outermost_call import gather_once
from bmt_params.nested import map_tensors, tensors_in
from bmt_zero.block_call import BlockCall, Phase
from bmt_zero.block_state import BlockSettings, BlockState, SlotValues
from bmt_zero.compiled_keep import Form
from bmt_zero.keep import BlockKeep, Choice
from bmt_zero.param_dtype import cast_floats
from bmt_zero.recomputation import Recomputation, saved_for_backward


class BlockEngine:
    """Runs a block, with or without recomputation (``use_checkpoint``), compiled or not. ``use``:
    its calls' place in the step. ``keep``: what the recomputation does not compute again.
    ``host_bytes``: how many bytes of host memory its inputs may wait in, with those of all others.
    """

    def __init__(
        self, settings: BlockSettings, use_checkpoint: bool, keep: BlockKeep | None, host_bytes: int
    ) -> None:
        self.use_checkpoint = use_checkpoint
        self.host_bytes = host_bytes
        self.keep = keep
        self.form: Form = ""
        """What the compiled code of the present call keeps."""
        self.compile = settings.compile
        self.use = BlockUse()
        self.state = BlockState(settings)
        self.running = self.state.running
        """Its ``call`` is not None while the block's own code runs, with whole parameters in its
        modules.
        """
        self._leaf: torch.Tensor | None = None

    def __reduce__(self) -> Any:
        # A copy lays out its own parameters at its first call.
        settings = replace(self.state.settings, level=self.state.level)
        return BlockEngine, (settings, self.use_checkpoint, self.keep, self.host_bytes)

    def run(
        self,
        module: nn.Module,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return ``function(*args, **kwargs)``, which calls ``module`` with whole parameters.
        Collective.
        """
        state = self.state
        with without_torch_functions():
            state.run.end_failed_passes()
            state.refresh(module)
            for group in state.groups:
                # So that zero_grad() frees held-back sums before activations take memory.
                group.ledger.notice_cleared()
            # After refresh(), because the call keeps the groups that the block has now.
            call = BlockCall(state, self.use)
            call.begin_forward()
        succeeded = backward_follows = False
        try:
            if state.input_dtype is not None:
                args, kwargs = cast_floats(state.input_dtype, (args, kwargs))
            with without_torch_functions():
                token, whole = self._enter(call)
            # The same slots are emptied at the end, whatever forward does to the modules.
            slots, writes = state.slots, call.writes
            slots.put(whole)
            try:
                outputs = self._forward(call, module, function, args, kwargs)
            finally:
                slots.take_out(whole)
            # Gathers write through a second tensor, so only user code raises this count.
            if writes != call.writes:
                raise ConfigError(
                    f"The forward of {type(module).__name__} wrote to a gathered parameter, and the"
                    " write would be lost. Change parameters after the optimizer's step, through"
                    " model.parameters(), where each rank has its part."
                )
            if has_gradient_hooks(whole.own):
                call.writes_directly = False  # hooks on whole parameters must see their gradients
            outputs, backward_follows = _leave(call, token, (args, kwargs), outputs)
            if type(outputs) is list:
                state.run.warn_once_of_list_output(module)
            succeeded = True
            return outputs
        except RuntimeError as error:
            _explain_write(error, module, state.parameters())
            raise
        finally:
            call.end_forward(succeeded=succeeded, backward_follows=backward_follows)

    def _enter(self, call: BlockCall) -> tuple[torch.Tensor | None, SlotValues]:
        state = self.state
        parameters = [parameter for group in call.groups for parameter in group.parameters]
        foreign = {id(slot.parameter): gather_once(slot.parameter) for slot in state.slots.foreign}
        if torch.is_grad_enabled():
            # Without a graph: whole_for_backward() gives each a node of its own.
            call.foreign = {key: full.detach() for key, full in foreign.items()}
        if not torch.is_grad_enabled() or True not in [
            parameter.requires_grad for parameter in parameters
        ]:
            return None, SlotValues(
                [view.detach() for group in call.groups for view in group.views()], foreign
            )
        if self._leaf is None:  # one per block: which pass accumulates does not depend on the call
            with torch.inference_mode(False):
                self._leaf = torch.empty(0, requires_grad=True, device="cpu")
        call.leaf = self._leaf
        token, *fulls = Enter.apply(call, self._leaf, *parameters)  # type: ignore[no-untyped-call]
        return token, SlotValues(fulls, foreign)

    def _forward(
        self,
        call: BlockCall,
        module: nn.Module,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        state, keep, has_gradients = self.state, self.keep, torch.is_grad_enabled()
        recomputes, self.form = self.use_checkpoint and has_gradients, ""
        if recomputes and self.compile:
            # The compiled code recomputes, except in a call that is measured for a budget.
            known: tuple[Form, object] | None = "", None
            if keep is not None:
                known = keep.begin_compiled_call(state.number, state.classes, (args, kwargs))
            recomputes = known is None
            if known is not None:
                self.form, call.kept_bytes = known
        if recomputes:
            kept = None
            if keep is not None:
                kept = keep.begin_call(
                    state.number,
                    state.classes,
                    (args, kwargs),
                    is_training=module.training,
                    is_compiled=self.compile,
                )
            recomputation = Recomputation(
                call, self._compute, function, state.buffers, args, kwargs, kept, self.host_bytes
            )
            outputs = recomputation.forward()
            if keep is not None and kept is not None:
                keep.end_forward(kept, recomputation.count, state.classes, module)
            return outputs
        # Only then are views of parameters saved whose memory is freed before backward.
        if state.level == 3 and state.is_sharded and has_gradients:
            with saved_for_backward(call):
                return self._compute(call, None, function, args, kwargs)
        return self._compute(call, None, function, args, kwargs)

    def _compute(
        self,
        call: BlockCall,
        recomputation: Recomputation | None,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        run, running = self.state.run, self.running
        # A call may run inside of another one: forward runs a backward pass, which recomputes.
        before = running.call, running.recomputation
        running.call, running.recomputation = call, recomputation
        groups = self.state.groups
        run.running.append(groups)
        try:
            return function(*args, **kwargs)
        finally:
            run.running.remove(groups)
            running.call, running.recomputation = before


def keep_in_blocks(engines: Iterable[BlockEngine], choice: Choice | None) -> None:
    """Let those of ``engines`` that recompute and keep nothing yet keep what ``choice`` says; bytes
    are those of all of them.
    """
    for engine in engines:
        if choice is not None and engine.use_checkpoint and engine.keep is None:
            engine.keep = BlockKeep(choice)


def _explain_write(
    error: RuntimeError, module: nn.Module, parameters: Sequence[nn.Parameter]
) -> None:
    """Raise :class:`ConfigError` if ``error`` is torch's about a write to one of ``parameters``,
    the outputs of :class:`Enter` after the first; add a note if it may be about a view of one.
    """
    written = re.match(r"Output (\d+) of (\w+) is a view .*modified inplace", str(error))
    if written is None:
        return
    remedy = (
        "Compute a new tensor from it (weight * 0.5 in place of weight.mul_(0.5)), or change"
        " parameters after the optimizer's step, through model.parameters(), where each rank has"
        " its part."
    )
    if written[2] != Enter.__name__:
        error.add_note(
            f"If this is a view of a parameter of {type(module).__name__}, the write would be lost:"
            f" in the forward of a Block parameters are gathered copies. {remedy}"
        )
        return
    parameter = parameters[int(written[1]) - 1]
    name = next(name for name, known in module.named_parameters() if known is parameter)
    # Without gradients torch writes, and refuses what is read next of the same memory.
    is_later = "has been modified" in str(error)
    what = f"a parameter, at the latest before it read {name!r}" if is_later else f"{name!r}"
    raise ConfigError(
        f"The forward of {type(module).__name__} wrote to {what} in place, and the write would be"
        f" lost: in the forward of a Block parameters are gathered copies. {remedy}"
    ) from error


def _leave(
    call: BlockCall, token: torch.Tensor | None, inputs: Any, outputs: Any
) -> tuple[Any, bool]:
    """Return ``outputs`` as they leave the block, and whether they are in a graph, so that backward
    may follow.
    """
    # A returned view of a parameter must stay valid when the buffer is freed.
    outputs = map_tensors(lambda t: t.clone() if call.state.may_free_memory_of(t) else t, outputs)
    tensors = tensors_in(outputs)
    gated = [output for output in tensors if output.requires_grad]
    if token is not None and not gated:
        # No parameter was used on this rank, but some may have been on others: the block must be in
        # the graph on all ranks.
        gated = [output for output in tensors if output.is_floating_point()]
    if not gated or not torch.is_grad_enabled():
        return outputs, False
    if token is None:
        # All parameters are frozen, so there is no Enter. The block's backward is over when its
        # inputs have their gradients.
        token = torch.empty(0, device=gated[0].device)
        sources = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
        # In autograd.grad() torch cannot watch several leaves. If an input is a leaf, the call ends
        # with the pass, soon after.
        if sources and True not in [source.is_leaf for source in sources]:
            call.input_hook = register_multi_grad_hook(sources, EndAtInputs(call))
    left = Leave.apply(call, token, *gated)  # type: ignore[no-untyped-call]
    passed = {id(old): new for old, new in zip(gated, left, strict=True)}
    return map_tensors(lambda t: passed.get(id(t), t), outputs), True


class Enter(torch.autograd.Function):
    """(call, leaf, shards…) -> (token, whole parameters…): see [Note: the two nodes]."""

    @staticmethod
    def forward(
        ctx: Any, call: BlockCall, leaf: torch.Tensor, *shards: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)  # None tells a missing gradient from zeros
        ctx.call = call
        fulls = [view for group in call.groups for view in group.views()]
        ctx.mark_non_differentiable(
            *[full for full, s in zip(fulls, shards, strict=True) if not s.requires_grad]
        )
        # The token is on the parameters' device: torch has a queue of nodes for each device, and
        # orders only the nodes of one queue.
        return torch.empty(0, device=shards[0].device), *fulls

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise no_second_derivatives()
        # An entry for each tensor, so not for the call; needs_input_grad has one for each argument.
        of_leaf, _ = ctx.next_functions[0]
        with without_torch_functions():
            return (
                None,
                None,
                *ctx.call.end_backward(
                    grads[1:], ctx.needs_input_grad[2:], accumulates_at(of_leaf)
                ),
            )


class Leave(torch.autograd.Function):
    """(call, token, outputs…) -> outputs…: see [Note: the two nodes]."""

    @staticmethod
    def forward(
        ctx: Any, call: BlockCall, token: torch.Tensor, *outputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.token_device = token.device
        # Detached, because code after the block may modify an output in place.
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise no_second_derivatives()
        with without_torch_functions():
            if ctx.call.phase is Phase.BACKWARD:  # begun without the outputs, or by another pass
                ctx.call.watch_end_of_pass()
            ctx.call.begin_backward()
        token = torch.empty(0, device=ctx.token_device) if ctx.needs_input_grad[1] else None
        return None, token, *grads


class EndAtInputs:
    """Ends a call when the gradients of its inputs are computed. Refers to it weakly, because the
    hook may outlive the graph.
    """

    def __init__(self, call: BlockCall) -> None:
        self._call = weakref.ref(call)

    def __call__(self, grads: Any) -> None:
        call = self._call()
        if call is not None:
            call.end()
