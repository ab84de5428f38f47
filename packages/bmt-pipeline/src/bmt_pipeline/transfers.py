"""``Transfers``: sends tensors from stage to stage while stages compute.

[Note: one lane per edge] A stage sends to a neighbour over a directed edge. No two edges at one
stage use the same lane (a stream with a communicator). Over an edge, sender and receiver use the
same order, in which the sender computes; both know it from the schedule. So no transfer waits for a
transfer over another edge, and two stages cannot block each other. Edges without a common stage may
share a lane: two lanes, or three for an odd number of stages, serve each direction.

[Note: the first step goes through host memory] CUDA loads a kernel when it is first launched, and
the launch then waits until the kernels that run have ended (measured for torch's kernels, products
of new sizes, and compiled code; CUDA_MODULE_LOADING=EAGER spares only the first of these). NCCL's
send and receive are kernels that run until the neighbour takes part. So two neighbours that each
launch a new kernel while a transfer waits for the other would wait for ever. Kernels are new in a
step with new shapes. In such a step tensors travel through host memory, by the group's transfers on
the CPU, and no kernel waits for another stage. Collectives do not have this problem: all their
ranks launch the same operations in the same order, so the rank that is furthest behind always finds
its partners' operations launched.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from bmt_core.comm.autograd import materialized
from bmt_core.comm.objects import SentObject, recv_object
from bmt_core.comm.protocols import Work
from bmt_core.run.lanes import CudaMark, Lane, Mark
from bmt_core.run.runtime import current
from bmt_pipeline.pipeline_ranks import own_stage, pipeline_group
from bmt_pipeline.wait_errors import waiting_for, waiting_for_all


class Arriving(NamedTuple):
    """Tensors that are being received, and the marks after which they may be read."""

    tensors: list[torch.Tensor]
    marks: list[Mark | Work]
    source: int


class Transfers:
    """Sends to and receives from the neighbours of this rank's stage. ``edges``: all edges of the
    schedule, on every stage.

    Making it is collective over the pipeline.
    """

    def __init__(self, edges: Collection[tuple[int, int]]) -> None:
        self._group = pipeline_group()
        self._stage = own_stage()
        self._device = current().device
        lanes = current().lanes
        self._lanes = {edge: lanes.named(_lane_name(*edge, self._group.size)) for edge in edges}
        self._sent: list[tuple[Mark | Work, torch.Tensor | None, int]] = []
        for name in sorted({lane.name for lane in self._lanes.values()}):
            # A lane's first operation waits for all members.
            lane = lanes.named(name)
            with lane.memory(), waiting_for_all("to begin a step"):
                lane.group(self._group).all_reduce(torch.zeros(1, device=self._device)).wait()
        for edge in edges:
            self._connect(edge)

    def send_layout(self, layout: Any, destination: int) -> None:
        """Start to send the layout of the tensors that follow to the stage ``destination``.

        This does not wait for that stage, which may itself be waiting for this stage to receive
        other tensors.
        """
        with waiting_for([destination], f"to take what stage {self._stage} sends"):
            self._sent.append((SentObject(layout, self._group, destination), None, destination))

    def receive_layout(self, source: int) -> Any:
        """Return what the stage ``source`` sends by :meth:`send_layout`."""
        with waiting_for([source], f"to send to stage {self._stage}"):
            return recv_object(self._group, source)

    def send(
        self, tensors: Sequence[torch.Tensor], destination: int, *, through_host: bool = False
    ) -> None:
        """Start to send ``tensors``, after all work that is queued on the computation's stream.

        ``through_host``: see [Note: the first step goes through host memory]. The receiver must say
        the same.
        """
        takes = f"to take what stage {self._stage} sends"
        if through_host:
            for tensor in tensors:
                on_host = materialized(tensor.detach()).cpu()
                with waiting_for([destination], takes):
                    started = self._group.send(on_host, destination)
                self._sent.append((started, on_host, destination))
            return
        self._sent = [sent for sent in self._sent if not _has_arrived(sent[0])]
        lane, group = self._lane((self._stage, destination))
        lane.follow()
        for tensor in tensors:
            tensor = materialized(tensor.detach())
            with waiting_for([destination], takes):
                mark = lane.run(lambda tensor=tensor: group.exchange([(tensor, destination)], []))  # type: ignore[misc]
            self._sent.append((mark, tensor, destination))

    def receive(
        self, like: Sequence[torch.Tensor], source: int, *, through_host: bool = False
    ) -> Arriving:
        """Start to receive tensors of the shapes and dtypes of ``like``, which must not be used
        before :meth:`wait`.
        """
        if through_host:
            on_host = [torch.empty(t.shape, dtype=t.dtype, device="cpu") for t in like]
            with waiting_for([source], f"to send to stage {self._stage}"):
                return Arriving(on_host, [self._group.recv(t, source) for t in on_host], source)
        lane, group = self._lane((source, self._stage))
        # The allocator may give memory that the computation's queued work still uses, so the lane
        # starts after that work.
        tensors = [torch.empty(t.shape, dtype=t.dtype, device=self._device) for t in like]
        lane.follow()
        with waiting_for([source], f"to send to stage {self._stage}"):
            marks = [lane.run(lambda t=t: group.exchange([], [(t, source)])) for t in tensors]  # type: ignore[misc]
        return Arriving(tensors, marks, source)

    def wait(self, arriving: Arriving) -> list[torch.Tensor]:
        """Make the computation wait for the tensors, and return them."""
        with waiting_for([arriving.source], f"to send to stage {self._stage}"):
            for mark in arriving.marks:
                mark.wait()
        return [tensor.to(self._device) for tensor in arriving.tensors]

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        sent, self._sent = self._sent, []
        for mark, _, destination in sent:
            with waiting_for([destination], f"to take what stage {self._stage} sends"):
                mark.wait()

    def _connect(self, edge: tuple[int, int]) -> None:
        """Make a first transfer over ``edge`` now: NCCL's first one between two ranks blocks each
        host until both take part.
        """
        if self._stage in edge:
            lane, group = self._lane(edge)
            source, destination = edge
            something = torch.zeros(1, device=self._device)
            sends = [(something, destination)] if self._stage == source else []
            receives = [(something, source)] if self._stage == destination else []
            lane.follow()
            lane.run(lambda: group.exchange(sends, receives)).wait()

    def _lane(self, edge: tuple[int, int]) -> tuple[Lane, Any]:
        lane = self._lanes[edge]
        return lane, lane.group(self._group)


def _has_arrived(mark: Mark | Work) -> bool:
    """Whether the send before ``mark`` is known to be over, so that its tensor may be freed. On the
    CPU this is never known.
    """
    return isinstance(mark, CudaMark) and mark.is_reached()


def _lane_name(source: int, destination: int, stages: int) -> str:
    """Return the name of the lane of an edge between neighbours in the ring of ``stages``.

    >>> [_lane_name(stage, (stage + 1) % 4, 4) for stage in range(4)]
    ['pipeline up 0', 'pipeline up 1', 'pipeline up 0', 'pipeline up 1']
    >>> _lane_name(2, 0, 3), _lane_name(1, 0, 3)
    ('pipeline up 2', 'pipeline down 1')
    """
    is_up = destination == (source + 1) % stages
    is_odd_turn = stages % 2 == 1 and {source, destination} == {0, stages - 1} and stages > 2
    return f"pipeline {'up' if is_up else 'down'} {2 if is_odd_turn else source % 2}"
