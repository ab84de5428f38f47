"""What a communication backend must implement: :class:`CommBackend`, and the :class:`Group` that
it makes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from bmt_core.comm.host_addresses import Hosts

ReduceOp = Literal["sum", "avg", "max", "min", "prod"]
REDUCE_OPS: tuple[ReduceOp, ...] = ("sum", "avg", "max", "min", "prod")


class Work(Protocol):
    """An operation that was started and may not have finished.

    It may have a method ``is_completed() -> bool``, which another thread may ask whether the
    operation has ended well. Otherwise it counts as under way until :meth:`wait` has returned.
    """

    def wait(self) -> None:
        """Make the current stream (CUDA) or the calling thread (CPU) wait until the operation
        has finished.
        """


class Finished:
    """The :class:`Work` of an operation that has finished."""

    def wait(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """Return True."""
        return True


class AllOf:
    """The :class:`Work` of several operations."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for each."""
        for work in self._works:
            work.wait()


def is_completed(work: Work) -> bool:
    """Whether ``work`` is known to have ended well, without waiting."""
    ask = getattr(work, "is_completed", None)
    return ask is not None and bool(ask())


class Group(ABC):
    """An ordered set of ranks that communicate; this process is ``ranks[rank]``.

    Every operation takes contiguous tensors on the run's device or on the CPU, writes its result
    into one of them and returns a :class:`Work`. The caller keeps the tensors alive until it has
    waited. All members call the collectives, in the same order. A send and a receive involve two
    members, but each member's first operation on a group waits until every other member has started
    its first one.
    """

    ranks: tuple[int, ...]
    rank: int
    is_interruptible: ClassVar[bool] = False
    """Whether :meth:`interrupt` ends a wait. Before each collective of other groups on the CPU, a
    run that compares calls waits in the store until all members have come.
    """

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(ranks={self.ranks}, rank={self.rank})"

    @abstractmethod
    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        """Fill 1-D ``output`` (size * n elements) with the 1-D ``input`` (n) of every rank, in
        rank order.

        ``input`` may be this rank's slice of ``output``.
        """

    @abstractmethod
    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp = "sum"
    ) -> Work:
        """Reduce 1-D ``input`` (size * n) over the ranks and leave slice ``rank`` in 1-D
        ``output`` (n).

        If ``output`` is float32 and ``input`` a half type, the half type is sent and summed in
        float32, in rank order.
        """

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """Reduce ``tensor`` over the ranks, in place, with the same result on every rank."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Work:
        """Copy ``tensor`` of ``ranks[root]`` to every rank, in place."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, dst: int) -> Work:
        """Send ``tensor`` to ``ranks[dst]``, which receives it in the same order."""

    @abstractmethod
    def recv(self, tensor: torch.Tensor, src: int) -> Work:
        """Receive into ``tensor`` from ``ranks[src]``.

        A backend may run operations in the order of their start, as NCCL does. There a receive
        holds up what is started after it, so ranks that send to each other use :meth:`exchange`.
        """

    def exchange(
        self, sends: Sequence[tuple[torch.Tensor, int]], recvs: Sequence[tuple[torch.Tensor, int]]
    ) -> Work:
        """Start sends and receives, each given as ``(tensor, peer)``. They must not block each
        other in any order.

        This method starts one after the other, which is right for a backend that runs started
        operations independently. A backend that runs operations in order, as NCCL does, must
        override it and start them as one group.
        """
        return AllOf([*[self.recv(*recv) for recv in recvs], *[self.send(*send) for send in sends]])

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Work:
        """Send ``inputs[r]`` to ``ranks[r]`` and fill ``outputs[r]`` with what it sends to this
        rank, its own included.
        """
        outputs[self.rank].copy_(inputs[self.rank])
        others = [peer for peer in range(self.size) if peer != self.rank]
        return self.exchange(
            [(inputs[peer], peer) for peer in others], [(outputs[peer], peer) for peer in others]
        )

    def interrupt(self) -> None:  # noqa: B027 - a backend may do without
        """Make all operations on the CPU raise, those that block and all later ones, because the
        run has failed. Another thread calls it. By default it does nothing.
        """


@dataclass(frozen=True, kw_only=True)
class CommContext:
    """What a backend is constructed with. ``store`` is None in a run of one rank; ``timeout`` is
    in seconds.

    ``hosts`` are those of all ranks; None if they are not known.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    store: Store | None
    timeout: float
    hosts: Hosts | None = None


class CommBackend(ABC):
    """Makes groups. A subclass has a unique ``name`` and is announced by the hook
    ``bmt_comm_backends``.
    """

    name: ClassVar[str]
    allows_copies: ClassVar[bool] = False
    """Whether bmt-tp may exchange rows by copies between GPUs of one host instead of calling this
    backend. Subclasses do not inherit it.
    """

    def __init__(self, context: CommContext) -> None:
        self.context = context

    @abstractmethod
    def new_group(self, ranks: tuple[int, ...], name: str) -> Group:
        """Connect the group of ``ranks`` (ascending, at least two, this rank among them) and
        return it.

        Each member calls it before its first operation on the group, so it may wait for the other
        members. It must not wait for ranks outside the group, which may never make the call.
        ``name`` is the same on all members and differs between groups, even if they have the same
        members. Members may have made different numbers of groups before, so they must find each
        other by ``name``, not by counting. The first call, at the start, is for the group of
        all ranks.
        """

    def abort(self, failure: str) -> None:  # noqa: B027 - a backend may do without
        """Make all operations on devices end, with wrong results, because the run has failed.
        Another thread calls it. By default it does nothing, and they end when the backend
        ends them.
        """

    @abstractmethod
    def close(self) -> None:
        """Free all resources. Nothing is called afterwards."""
