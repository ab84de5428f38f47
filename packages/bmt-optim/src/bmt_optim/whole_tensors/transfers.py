"""``Transfers``: brings parts of tensors to their owners and back, in a lane beside the
computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from bmt_core.comm.protocols import Finished, Group
from bmt_core.run.lanes import Mark
from bmt_core.run.runtime import current
from bmt_optim.whole_tensors.layout import TensorLayout

LANE = "whole"


class ToOwner(NamedTuple):
    """A tensor to bring to the rank at index ``owner``; ``part`` are this rank's elements, 1-D."""

    layout: TensorLayout
    owner: int
    part: torch.Tensor


class FromOwner(NamedTuple):
    """A tensor whose new values go to ``part``, 1-D, on every rank; ``values`` is whole on the
    owner, None elsewhere.
    """

    layout: TensorLayout
    owner: int
    part: torch.Tensor
    values: torch.Tensor | None


class Gathered:
    """Tensors on their way to owners. ``wait()`` returns each whole on its owner, and None in its
    place elsewhere.
    """

    def __init__(
        self,
        mark: Mark,
        layouts: Sequence[TensorLayout],
        slices: Sequence[list[torch.Tensor] | None],
    ) -> None:
        self._mark = mark
        self._layouts = layouts
        self._slices = slices

    def wait(self) -> list[torch.Tensor | None]:
        """Return the tensors. The lane's memory is valid until
        :meth:`Transfers.computation_is_done` is called.
        """
        self._mark.wait()
        pairs = zip(self._layouts, self._slices, strict=True)
        return [None if slices is None else layout.joined(slices) for layout, slices in pairs]


class Scattered:
    """New values on their way to the ranks. They are kept until :meth:`wait`, because the lane
    reads them.
    """

    def __init__(self, mark: Mark, kept: object) -> None:
        self._mark = mark
        self._kept = kept

    def wait(self) -> None:
        """Wait until the values have arrived on this rank, and its own were sent."""
        self._mark.wait()
        self._kept = None


class Transfers:
    """Sends and receives among ``team``. Every rank of it calls the same methods, in the same
    order, with its own parts.

    A tensor of n bytes that is sharded over N ranks costs (N-1)/N * n bytes to its owner, and as
    many back.
    """

    def __init__(self, team: Group) -> None:
        self._team = team
        self._is_connected = False
        if team.size > 1:
            self._lane = current().lanes.named(LANE)
            self._group = self._lane.group(team)

    def connect(self) -> None:
        """Connect all ranks of the team, before some of them have nothing to send. Collective at
        the first call.
        """
        if self._team.size > 1 and not self._is_connected:
            self._group.all_reduce(torch.zeros(1, device=current().device)).wait()
            self._is_connected = True

    def computation_is_done(self) -> None:
        """Make the lane wait for the computation so far: see [Note: buffer lifetime] in
        :mod:`bmt_core.run.lanes`.
        """
        if self._team.size > 1:
            self._lane.follow()

    def gather(self, requests: Sequence[ToOwner]) -> Gathered:
        """Start to bring each tensor to its owner, in the dtype of its part."""
        sends: list[tuple[torch.Tensor, int]] = []
        recvs: list[tuple[torch.Tensor, int]] = []
        slices = [self._requested(request, sends, recvs) for request in requests]
        return Gathered(
            self._exchange(sends, recvs), [request.layout for request in requests], slices
        )

    def scatter(self, requests: Sequence[FromOwner]) -> Scattered:
        """Start to bring the new values of each tensor to the ranks, after the computation
        so far.
        """
        sends: list[tuple[torch.Tensor, int]] = []
        recvs: list[tuple[torch.Tensor, int]] = []
        own = self._team.rank
        for layout, owner, part, values in requests:
            if owner != own:
                if part.numel():
                    recvs.append((part, owner))
                continue
            assert values is not None
            slices = layout.cut(values)
            for i, piece in enumerate(layout.pieces):
                elements = slices[piece.slice][piece.start : piece.end]
                if i != own and piece.numel:
                    sends.append((elements, i))
                elif piece.numel and elements.data_ptr() != part.data_ptr():
                    part.copy_(elements)
        self.computation_is_done()
        return Scattered(self._exchange(sends, recvs), sends)

    def _requested(
        self,
        request: ToOwner,
        sends: list[tuple[torch.Tensor, int]],
        recvs: list[tuple[torch.Tensor, int]],
    ) -> list[torch.Tensor] | None:
        """Add what this rank sends and receives for ``request``; return the slices, which are being
        filled, on its owner.
        """
        layout, owner, part = request
        sources, own = layout.sources(owner), self._team.rank
        if own != owner:
            if own in sources:
                sends.append((part, owner))
            return None
        if layout.is_whole_on(owner):
            return [part]
        numel = layout.slice_shape.numel()
        with self._lane.memory():
            slices = [
                torch.empty(numel, dtype=part.dtype, device=part.device)
                for _ in range(layout.num_slices)
            ]
        for i in sources:
            piece = layout.pieces[i]
            target = slices[piece.slice][piece.start : piece.end]
            if i == own:
                with self._lane.memory():
                    target.copy_(part)
            else:
                recvs.append((target, i))
        return slices

    def _exchange(
        self, sends: list[tuple[torch.Tensor, int]], recvs: list[tuple[torch.Tensor, int]]
    ) -> Mark:
        if not sends and not recvs:
            # The owner's own copies may be all there is.
            return self._lane.run(Finished) if self._team.size > 1 else Finished()
        return self._lane.run(lambda: self._group.exchange(sends, recvs))
