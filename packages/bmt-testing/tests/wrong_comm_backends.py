"""Communication backends that break one rule of the conformance kit each, and a plugin that
offers them.

All pass what they are asked on to ``torch``'s backend but for the mistake.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import ClassVar

import torch

from bmt_core.comm import CommBackend, CommContext, Group, ReduceOp, TorchBackend, Work
from bmt_core.comm.observer import RunObserver
from bmt_core.plugins.hookspecs import hookimpl
from bmt_core.run.runtime import current


class Passing(Group):
    """Passes every operation on to the group ``inner``."""

    def __init__(self, inner: Group, world_size: int) -> None:
        self.inner, self.ranks, self.rank = inner, inner.ranks, inner.rank
        self.world_size = world_size

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        return self.inner.all_gather(output, input)

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp = "sum"
    ) -> Work:
        return self.inner.reduce_scatter(output, input, op)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        return self.inner.all_reduce(tensor, op)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Work:
        return self.inner.broadcast(tensor, root)

    def send(self, tensor: torch.Tensor, dst: int) -> Work:
        return self.inner.send(tensor, dst)

    def recv(self, tensor: torch.Tensor, src: int) -> Work:
        return self.inner.recv(tensor, src)

    def exchange(
        self, sends: Sequence[tuple[torch.Tensor, int]], recvs: Sequence[tuple[torch.Tensor, int]]
    ) -> Work:
        return self.inner.exchange(sends, recvs)


class CopyWhenDone:
    """Copies ``source`` to ``target`` when ``work`` has finished."""

    def __init__(self, work: Work, source: torch.Tensor, target: torch.Tensor) -> None:
        self.work, self.source, self.target = work, source, target

    def wait(self) -> None:
        self.work.wait()
        self.target.copy_(self.source)


class LosesTheLast(Passing):
    """Gathers in pairs of elements."""

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        if input.numel() <= 128:
            return super().all_gather(output, input)
        cut = input.clone()
        cut[input.numel() // 2 * 2 :] = 0
        return super().all_gather(output, cut)


class SumsForAverages(Passing):
    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp = "sum"
    ) -> Work:
        return super().reduce_scatter(output, input, "sum" if op == "avg" else op)


class AddsHalves(Passing):
    """Adds in the type that is sent, whatever the output is."""

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp = "sum"
    ) -> Work:
        if input.dtype == output.dtype:
            return super().reduce_scatter(output, input, op)
        half = torch.empty_like(output, dtype=input.dtype)
        return CopyWhenDone(super().reduce_scatter(half, input, op), half, output)


class LargestFromZero(Passing):
    """Begins a maximum with zero."""

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        return super().all_reduce(tensor.clamp_(min=0) if op == "max" else tensor, op)


class AlwaysFromTheFirst(Passing):
    """Has one root for groups of more than two ranks."""

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Work:
        is_tried = tensor.numel() in (1, 3, 8, 129) and self.size > 2
        return super().broadcast(tensor, 0 if is_tried else root)


class SendsFloats(Passing):
    """Sends whole numbers as float32."""

    def send(self, tensor: torch.Tensor, dst: int) -> Work:
        if tensor.dtype == torch.int64:
            return super().send(tensor.float().to(torch.int64), dst)
        return super().send(tensor, dst)


class SortsPeers(Passing):
    """Receives from ranks in ascending order into the tensors as they are listed."""

    def exchange(
        self, sends: Sequence[tuple[torch.Tensor, int]], recvs: Sequence[tuple[torch.Tensor, int]]
    ) -> Work:
        peers = sorted(peer for _, peer in recvs)
        sorted_recvs = [(tensor, peer) for (tensor, _), peer in zip(recvs, peers, strict=True)]
        return super().exchange(sends, sorted_recvs)


class ForgetsSlices(Passing):
    """Reduces a copy of what does not begin its memory, and leaves it there."""

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        return super().all_reduce(tensor.clone() if tensor.storage_offset() else tensor, op)


class AveragesOverAll(Passing):
    """Divides by the number of all ranks, of which a group may have some."""

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        if op == "avg":
            tensor *= self.size / self.world_size
        return super().all_reduce(tensor, op)


class OneBuffer(Passing):
    """Has memory for one operation under way."""

    buffer = torch.zeros(0)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        if tensor.dtype != torch.float32 or tensor.numel() != 7:
            return super().all_reduce(tensor, op)
        if not self.buffer.numel():
            self.buffer = torch.zeros(7)
        super().all_reduce(tensor, op).wait()
        self.buffer.copy_(tensor)
        return CopyWhenDone(super().all_reduce(torch.zeros(1)), self.buffer, tensor)


class Silent:
    """Passes over the error of an operation."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def wait(self) -> None:
        try:
            self.work.wait()
        except Exception as error:
            print(error)


class SwallowsErrors(Passing):
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        return Silent(super().all_reduce(tensor, op))


class Endless:
    """A work that does not end when it is interrupted."""

    def __init__(self, inner: Work) -> None:
        self.inner = inner

    def wait(self) -> None:
        try:
            self.inner.wait()
        except RuntimeError:
            if type(current().observer) is RunObserver:
                raise
            threading.Event().wait()


class ClaimsInterrupts(Passing):
    """Says that its waits can be interrupted, and goes on waiting."""

    is_interruptible = True

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        return Endless(super().all_reduce(tensor, op))


class OnDevice(Passing):
    def __init__(self, inner: Group, device: torch.device) -> None:
        super().__init__(inner, inner.size)
        self.device = device

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        if tensor.device != self.device:
            raise ValueError(f"The tensor is on {tensor.device}, not on {self.device}.")
        return super().all_reduce(tensor, op)


class Right(CommBackend):
    """Breaks no rule. Others break one by their groups, of the class ``group``."""

    name = "right"
    breaks: ClassVar[str] = ""
    group: ClassVar[type[Passing]] = Passing

    def __init__(self, context: CommContext) -> None:
        super().__init__(context)
        self.inner = TorchBackend(context)

    def new_group(self, ranks: tuple[int, ...], name: str) -> Group:
        return self.group(self.inner.new_group(ranks, name), self.context.world_size)

    def close(self) -> None:
        self.inner.close()


class NeedsAStore(Right):
    """Expects a store, which a run of one rank does not have."""

    name = "needs_a_store"
    breaks = "a_run_of_one_rank_starts"

    def __init__(self, context: CommContext) -> None:
        if context.store is None:
            raise ValueError("There is no store.")
        super().__init__(context)


class ForgetsTheCpu(Right):
    """Takes tensors on the run's device only."""

    name = "forgets_the_cpu"
    breaks = "tensors_may_be_on_the_cpu"
    device_type = "cuda"

    def new_group(self, ranks: tuple[int, ...], name: str) -> Group:
        return OnDevice(self.inner.new_group(ranks, name), self.context.device)


BROKEN = {
    "claims_interrupts": (
        ClaimsInterrupts,
        "ranks_that_wait_for_each_other_in_different_calls_are_named",
    ),
    "loses_the_last": (LosesTheLast, "all_gather_fills_the_output_in_the_order_of_ranks"),
    "sums_for_averages": (SumsForAverages, "reduce_scatter_leaves_each_rank_its_slice"),
    "adds_halves": (AddsHalves, "reduce_scatter_of_halves_into_float32_adds_in_float32"),
    "largest_from_zero": (LargestFromZero, "all_reduce_leaves_the_same_on_every_rank"),
    "always_from_the_first": (AlwaysFromTheFirst, "broadcast_copies_from_each_root"),
    "sends_floats": (SendsFloats, "receives_get_what_was_sent_in_its_order"),
    "sorts_peers": (SortsPeers, "an_exchange_with_several_ranks_does_not_block"),
    "forgets_slices": (ForgetsSlices, "tensors_may_be_slices_of_bigger_ones"),
    "averages_over_all": (AveragesOverAll, "groups_of_some_ranks_work_beside_each_other"),
    "one_buffer": (OneBuffer, "operations_may_be_waited_for_in_any_order"),
    "swallows_errors": (SwallowsErrors, "a_failure_of_one_rank_reaches_all"),
}
WRONG: tuple[type[Right], ...] = (
    Right,
    NeedsAStore,
    ForgetsTheCpu,
    *[
        type(group.__name__, (Right,), {"name": name, "breaks": rule, "group": group})
        for name, (group, rule) in BROKEN.items()
    ],
)


@hookimpl
def bmt_comm_backends() -> list[type[CommBackend]]:
    return [*WRONG]
