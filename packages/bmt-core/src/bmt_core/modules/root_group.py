"""``Together``: parameters outside of Blocks that are gathered by one collective, ahead of their use, and reduced by one.

Each of them is sharded by itself, so the parts of all are copied into one tensor that is gathered, and the parameters out of
what arrives: with embeddings and head in mind, large tensors and few, once per step.

[Note: gradients that are missing] A parameter that took no part in the loss has no gradient in plain torch, on one rank or
many. But what takes part may depend on a rank's data, and an optimizer must not step a part here and leave it there. So
each rank sends along, per parameter, whether it has a gradient. Only where the own one is missing the host has to look.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from bmt_core.params.parameter import DistributedParameter, take_now
from bmt_core.params.shard import summation_dtype
from bmt_core.run.lanes import Mark
from bmt_core.run.runtime import current
from bmt_core.torch_internals import accumulates

_ALIGNMENT = 512  # bytes, for the parts in the flat tensors


class Together:
    """``parameters`` of one dtype that are sharded over one group of several ranks.

    ``was_read`` will hold the ids of those that the call read. The others have no gradient.
    """

    def __init__(self, parameters: Sequence[DistributedParameter], was_read: Container[int]) -> None:
        self.parameters = list(parameters)
        self.versions = [parameter._version for parameter in parameters]
        self._was_read = was_read
        self._group = parameters[0].group
        self._dtype = parameters[0].dtype
        self._lanes = current().lanes
        self._longest = [parameter._shard.longest for parameter in parameters]
        step = _ALIGNMENT // self._dtype.itemsize
        lengths = [-(-longest // step) * step for longest in self._longest]
        self._starts = list(itertools.accumulate(lengths, initial=0))
        self._length = self._starts.pop()
        self._under_way: tuple[torch.Tensor, torch.Tensor, Mark] | None = None

    def start(self) -> None:
        """Start to gather. Collective."""
        for parameter in self.parameters:
            if parameter._sum is not None:
                parameter._sum.forget_if_cleared()
            parameter._wait_for_updates()
        parts = [parameter.detach() for parameter in self.parameters]
        own = torch.empty(self._length, dtype=self._dtype, device=parts[0].device)
        places = [own[start:][: part.numel()] for start, part in zip(self._starts, parts, strict=True)]
        torch._foreach_copy_(places, parts)
        lane = self._lanes.gather
        lane.after(lane.here())
        with lane.memory():
            gathered = torch.empty(self._group.size * self._length, dtype=self._dtype, device=own.device)
        self._under_way = own, gathered, lane.run(lambda: self._group.all_gather(gathered, own))

    def take(self) -> list[torch.Tensor]:
        """Return the whole parameters that :meth:`start` began to gather, part of the autograd graph."""
        fulls: tuple[torch.Tensor, ...] = _GatherTogether.apply(self, *self.parameters)  # type: ignore[no-untyped-call]
        return list(fulls)

    def abandon(self) -> None:
        """Free what was gathered and not taken."""
        if self._under_way is not None:
            self._under_way[2].wait()
            self._under_way = None

    def arrived(self) -> list[torch.Tensor]:
        """Return the whole parameters, in memory of their own."""
        assert self._under_way is not None
        _, gathered, mark = self._under_way
        mark.wait()
        rows = gathered.view(self._group.size, self._length)
        fulls = []
        for parameter, start, longest in zip(self.parameters, self._starts, self._longest, strict=True):
            parts = rows[:, start : start + longest].clone(memory_format=torch.contiguous_format)
            fulls.append(parameter._shard.joined(parts.view(-1)))
        lane = self._lanes.gather
        lane.after(lane.here())  # [Note: buffer lifetime] in bmt_core.run.lanes
        self._under_way = None
        return fulls

    def reduce(self, grads: Sequence[torch.Tensor | None], needed: Sequence[bool]) -> list[torch.Tensor | None]:
        """Reduce whole gradients in the lane; return what autograd is to have itself, of which the sums took none. Collective."""
        length = self._length + len(grads)  # the parts, and whether each gradient is there
        sent = self._sent(grads, length)
        received = torch.empty(length, dtype=_summed(sent.dtype), device=sent.device)
        pairs = zip(self.parameters, self._starts, strict=True)
        parts = [received[start:][: parameter.numel()] for parameter, start in pairs]
        wanted = [need and id(p) in self._was_read for need, p in zip(needed, self.parameters, strict=True)]
        is_plain = all(
            not want or (grad is not None and _is_plain(parameter))
            for want, grad, parameter in zip(wanted, grads, self.parameters, strict=True)
        )
        lane = self._lanes.reduce
        group = lane.group(self._group)
        adding = _Adding(self.parameters, parts, wanted) if is_plain else None
        lane.after(lane.here())
        mark = lane.run(lambda: group.reduce_scatter(received, sent.view(-1)), None if adding is None else adding.add)
        lane.keep((sent, received), mark)
        if adding is not None:
            adding.ready_at(mark)
            torch.autograd.Variable._execution_engine.queue_callback(adding.finish)
            return [None] * len(grads)
        mark.wait()
        if any(want and grad is None for want, grad in zip(wanted, grads, strict=True)):
            # The host waits: see [Note: gradients that are missing].
            present = received[self._length :].tolist()
            wanted = [want and number != 0 for want, number in zip(wanted, present, strict=True)]
        return [
            take_now(parameter, part) if want else None
            for parameter, part, want in zip(self.parameters, parts, wanted, strict=True)
        ]

    def _sent(self, grads: Sequence[torch.Tensor | None], length: int) -> torch.Tensor:
        """Return what every rank is to get, one row each: its parts of the gradients, and which are there."""
        wire = torch.float32 if current().settings.reduce_dtype == "fp32" else self._dtype
        wire = torch.promote_types(wire, self._dtype)
        sent = torch.zeros(self._group.size, length, dtype=wire, device=self.parameters[0].device)
        for number, (parameter, grad) in enumerate(zip(self.parameters, grads, strict=True)):
            if grad is not None:
                start = self._starts[number]
                rows = sent[:, start : start + self._longest[number]]
                parameter._shard.spread(grad.to_dense() if grad.is_sparse else grad, rows)
                sent[:, self._length + number] = 1
        return sent


class _Adding:
    """The sums of gradients that one reduction brings."""

    def __init__(
        self, parameters: Sequence[DistributedParameter], parts: Sequence[torch.Tensor], wanted: Sequence[bool]
    ) -> None:
        chosen = [(p._gradient_sum(), part) for p, part, want in zip(parameters, parts, wanted, strict=True) if want]
        self._sums = [gradient for gradient, _ in chosen]
        self._steps = [gradient.take(part, [True]) for gradient, part in chosen]

    def add(self) -> None:
        """Add what has arrived, in the lane."""
        for step in self._steps:
            if step is not None:
                step()

    def ready_at(self, mark: Mark) -> None:
        """Say when :meth:`add` is done."""
        for gradient in self._sums:
            gradient.ready_at(mark)
        self._mark = mark

    def finish(self) -> None:
        """The pass is over: put the sums into ``.grad``."""
        self._mark.wait()
        for gradient in self._sums:
            gradient.finish()


class _GatherTogether(torch.autograd.Function):
    """(together, parts…) -> whole parameters…"""

    @staticmethod
    def forward(ctx: Any, together: Together, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.together = together
        fulls = together.arrived()
        ctx.mark_non_differentiable(*[full for full, p in zip(fulls, parts, strict=True) if not p.requires_grad])
        return tuple(fulls)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *ctx.together.reduce(grads, ctx.needs_input_grad[1:])


def _is_plain(parameter: DistributedParameter) -> bool:
    """Whether the pass under way adds to ``.grad``, and nobody watches."""
    return accumulates(parameter) and not parameter._backward_hooks and not parameter._post_accumulate_grad_hooks


def _summed(wire: torch.dtype) -> torch.dtype:
    return wire if current().settings.reduce_dtype == "param" else summation_dtype(wire)
