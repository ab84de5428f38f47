"""What several tests of the watch use: a quick one, and parts of one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch.distributed as dist

import bmt_core
from bmt_core.comm.observer import ObserverContext
from bmt_watch import call_check, call_watch
from bmt_watch.call_log import (
    NOT_COMPARED,
    CallLog,
    Text,
)
from bmt_watch.observer import CallObserver
from bmt_watch.run_end import RunEnd


@contextlib.contextmanager
def quick_watch() -> Iterator[None]:
    """Everything a tenth as long as it is, so that the tests are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_watch, "PERIOD", call_watch.PERIOD / 10)
        patch.setattr(call_watch, "LOOK_AFTER", call_watch.LOOK_AFTER / 10)
        patch.setattr(call_watch, "WARN_AFTER", call_watch.WARN_AFTER / 100)
        patch.setattr(call_check, "FIRST_CALLS", 5)
        yield


def observer() -> CallObserver:
    found = bmt_core.current().observer
    assert isinstance(found, CallObserver)
    return found


def context_of(
    store: dist.Store, rank: int = 1, world_size: int = 2, server_rank: int | None = None
) -> ObserverContext:
    return ObserverContext(
        rank=rank,
        world_size=world_size,
        store=store,
        server="node0",
        server_rank=server_rank,
        has_several_hosts=False,
        timeout=60,
        check_calls=None,
    )


def watch_of(
    store: dist.Store, rank: int = 1, world_size: int = 2, server_rank: int | None = None
) -> call_watch.CallWatch:
    context = context_of(store, rank, world_size, server_rank)
    return call_watch.CallWatch(context, store, CallLog(), RunEnd(context))


def queue(log: CallLog, number: int, shown: str, compared: str | None = None) -> None:
    """Note a call of the first group as one on a GPU after the first ones."""
    text = Text.of(shown, shown if compared is None else compared, "")
    log.queued[0] = number, text
    log.add(0, number, text, NOT_COMPARED)
