"""``PendingUpdates`` without a run: who waits for what, and how long things are kept."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bmt_core.run.lanes import Lane
from bmt_core.run.topology import Topology
from bmt_zero.parameter_group import MOST, DataVersion, PendingUpdates


class Waited:
    """A mark that counts how often it was waited for."""

    def __init__(self) -> None:
        self.times = 0

    def wait(self) -> None:
        self.times += 1


class Failed(Waited):
    """The mark of an update that failed."""

    def wait(self) -> None:
        raise ArithmeticError("no such number")

    def wait_despite_error(self) -> None:
        self.times += 1


class Thing:
    """Something that is kept."""


GRID = Topology({"pp": 1, "dp": 1, "tp": 1})


def made() -> PendingUpdates:
    return PendingUpdates(Lane("gather", GRID))


def test_the_lane_waits_for_all_updates_once_and_the_computation_as_often_as_it_asks() -> None:
    updates, marks = made(), [Waited(), Waited()]
    for mark in marks:
        updates.add(mark)
    updates.wait()
    updates.wait()
    updates.hold_up_lane()
    updates.hold_up_lane()
    updates.wait()
    assert [mark.times for mark in marks] == [4, 4]
    updates.forget_awaited()
    updates.wait()
    assert [mark.times for mark in marks] == [4, 4]


def test_who_replaces_the_values_waits_for_updates_that_failed_and_for_those_after_them() -> None:
    updates, marks = made(), [Failed(), Waited()]
    for mark in marks:
        updates.add(mark)
    with pytest.raises(ArithmeticError):
        updates.wait()
    updates.wait(despite_errors=True)
    assert [mark.times for mark in marks] == [1, 1]


def test_what_an_update_reads_is_kept_until_somebody_has_waited_for_it() -> None:
    updates, thing = made(), Thing()
    reference = weakref.ref(thing)
    updates.add(Waited())
    updates.keep_alive(thing)
    updates.add(Waited())
    del thing
    updates.forget_awaited()
    gc.collect()
    assert reference() is not None
    updates.hold_up_lane()
    updates.forget_awaited()
    gc.collect()
    assert reference() is None


def test_a_second_note_of_one_update_keeps_what_the_first_one_said_it_reads() -> None:
    flat: Any = SimpleNamespace(parameters=[torch.zeros(1)])
    version, thing = DataVersion(flat, Lane("gather", GRID)), Thing()
    reference = weakref.ref(thing)
    version.note_update(Waited(), thing)
    version.note_update(None, None)
    del thing
    gc.collect()
    assert reference() is not None


def test_updates_that_nobody_waits_for_do_not_pile_up() -> None:
    updates, marks, things = made(), [Waited() for _ in range(20)], [Thing() for _ in range(20)]
    references = [weakref.ref(thing) for thing in things]
    for mark in marks:
        updates.add(mark)
        updates.keep_alive(things.pop())
    gc.collect()
    assert sum(reference() is not None for reference in references) <= MOST
    updates.wait()
    assert all(mark.times for mark in marks)
