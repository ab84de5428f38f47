"""``Prefetch``: starts gathers before they are needed.

[Note: what comes next] A step is a sequence of events: the forward of a block begins, or the
backward of a block begins. The expected next event is the one that followed the last two events
when this pair was last seen. For a new pair it is, in forward, the next block of the list, and in
backward, the block whose forward ran before this one's. That covers loops and repeated, skipped and
frozen blocks without special cases. A wrong expectation costs one gather and nothing else. It
depends only on the calls made so far, so every rank expects the same event and issues the
same collectives.

The call of the outermost module is an event too. It needs no gather itself, but the first block,
which follows it, is gathered while the layers before that block compute.

No forward is expected after a backward: the optimizer is about to change the parameters.
"""

from __future__ import annotations

import itertools
import weakref
from typing import NamedTuple, Protocol

from torch import nn

from bmt_core.comm.annotate import PLACES

HOPS = 4  # how many expected events to follow from the current one


class Prefetched(Protocol):
    """The interface of a block for prefetching."""

    number: int
    following: int | None
    """The block after this one in a list."""
    preceding: int | None
    """The block whose forward ran before this one's."""

    name: str
    """What errors call the block."""

    @property
    def is_sharded(self) -> bool:
        """Whether the block ever needs a gather."""

    def bytes_to_gather(self, *, is_backward: bool) -> int:
        """How many bytes of memory a gather for the next forward or backward would allocate now."""

    def gather_ahead(self, *, is_backward: bool) -> bool:
        """Start to gather the parameters for the next forward or backward, and hold them. False:
        not possible now. Collective.
        """

    def release_ahead(self) -> None:
        """Undo :meth:`gather_ahead`."""

    def reset(self) -> None:
        """Keep nothing gathered, and gather again before the next use."""


class Event(NamedTuple):
    """The forward or backward of block ``number`` begins; a negative number stands for the call of
    an outermost module.
    """

    number: int
    is_backward: bool


class PassOfBlock:
    """The forward or backward of ``block``, and what messages call it."""

    def __init__(self, block: Prefetched, *, is_backward: bool) -> None:
        self.event = Event(block.number, is_backward)
        self.text = f"in the {'backward' if is_backward else 'forward'} of {block.name}"


class Prefetch:
    """Predicts the next blocks and gathers their parameters ahead, up to ``budget`` bytes, but at
    least those of one block.
    """

    def __init__(self, budget: int | None) -> None:
        self._budget = budget
        # Not a WeakValueDictionary, whose get() is a function of Python.
        self._blocks: dict[int, weakref.ref[Prefetched]] = {}
        self._after: dict[tuple[Event | None, Event], Event] = {}
        self._are_some_gone = False  # blocks, whose events are still in these
        self._before: Event | None = None
        self._now: Event | None = None
        self._ahead: list[int] = []
        self._passes: dict[int, tuple[PassOfBlock, PassOfBlock]] = {}
        self._has_sharded = False  # whether any block ever needs a gather
        self._numbers = itertools.count(-1, -1)
        self._calls: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()

    def add(self, block: Prefetched) -> None:
        """Register ``block``, by a weak reference, to be gathered ahead. Again when its name has
        changed.
        """
        if self._are_some_gone:
            self._forget_gone()
        blocks, passes, number = self._blocks, self._passes, block.number
        run = weakref.ref(self)

        def forget(_: object) -> None:
            blocks.pop(number, None)
            passes.pop(number, None)
            if (prefetch := run()) is not None:
                prefetch._are_some_gone = True

        blocks[number] = weakref.ref(block, forget)
        passes[number] = (
            PassOfBlock(block, is_backward=False),
            PassOfBlock(block, is_backward=True),
        )
        self._has_sharded = self._has_sharded or block.is_sharded

    def enters(self, block: Prefetched, *, is_backward: bool) -> None:
        """Note that this rank comes to the forward or backward of ``block``: all later calls are
        made there.
        """
        PLACES.now = self._passes[block.number][is_backward].text

    def begins(self, block: Prefetched, *, is_backward: bool) -> None:
        """Note that forward or backward of ``block`` begins, and start the gathers for the expected
        next events. Collective.
        """
        event = self._passes[block.number][is_backward].event
        if self._now is not None:
            self._after[self._before, self._now] = event
            if not is_backward and not self._now.is_backward:
                block.preceding = self._now.number
        self._before, self._now = self._now, event
        self._gather_ahead(block)

    def call_begins(self, module: nn.Module) -> None:
        """Note that the call of the outermost ``module`` begins, and start the gathers for the
        expected next events. Collective.
        """
        event = Event(self._calls.setdefault(module, next(self._numbers)), False)
        if self._now is not None:
            self._after[self._before, self._now] = event
        # The events in the call do not depend on the events before it.
        self._before, self._now = None, event
        self._gather_ahead(None)

    def call_ends(self) -> None:
        """Note that the call of the outermost module has ended."""
        PLACES.now = ""

    def drop(self) -> None:
        """Free parameters that were gathered ahead and not used. Called at the end of a
        backward pass.
        """
        PLACES.now = ""
        self._go_on_with([])

    def reset(self) -> None:
        """Reset every block. Called after a backward pass has failed."""
        self._go_on_with([])
        for reference in list(self._blocks.values()):
            if (block := reference()) is not None:
                block.reset()

    def _gather_ahead(self, current: Prefetched | None) -> None:
        if not self._has_sharded:
            return
        ahead: list[int] = []
        spent = 0
        for block, is_backward in self._expected():
            size = (
                0
                if block is current or block.number in ahead
                else block.bytes_to_gather(is_backward=is_backward)
            )
            if spent and size and (self._budget is None or spent + size > self._budget):
                break
            # Not if its parameters were given other memory, which only its own call takes over.
            if not block.gather_ahead(is_backward=is_backward):
                break
            spent += size
            ahead.append(block.number)
        self._go_on_with(ahead)

    def _go_on_with(self, ahead: list[int]) -> None:
        before, self._ahead = self._ahead, ahead
        for number in before:
            block = self._blocks.get(number, _gone)()
            if number not in ahead and block is not None:
                block.release_ahead()

    def _expected(self) -> list[tuple[Prefetched, bool]]:
        """Return the blocks of the expected next events, and whether it is their backward
        that begins.
        """
        expected: list[tuple[Prefetched, bool]] = []
        before, now = self._before, self._now
        for _ in range(HOPS):
            assert now is not None
            following = self._after.get((before, now)) or self._first_guess(now)
            if following is None or (now.is_backward and not following.is_backward):
                break
            block = self._blocks.get(following.number, _gone)()
            if block is not None:
                expected.append((block, following.is_backward))
            elif following.number >= 0:  # a block that is gone
                break
            before, now = now, following
        return expected

    def _forget_gone(self) -> None:
        """Forget what followed the events of blocks that are gone: a program may make one model
        after another. Nobody asks for it, so ranks whose blocks go at different times still expect
        the same.
        """
        self._are_some_gone = False
        self._after = {
            (before, now): following
            for (before, now), following in self._after.items()
            if now.number < 0 or now.number in self._blocks
        }

    def _first_guess(self, now: Event) -> Event | None:
        block = self._blocks.get(now.number, _gone)()
        number = None if block is None else block.preceding if now.is_backward else block.following
        return None if number is None else Event(number, now.is_backward)


def _gone() -> None:
    """What stands for the reference to a block that is gone."""
