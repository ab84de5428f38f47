"""``CallObserver``: the observer of a run, which compares the calls of its groups and watches
them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, cast

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from bmt_core.comm.observer import Awaited, NoteCall, ObserverContext, RunObserver
from bmt_core.comm.protocols import Group
from bmt_core.user_warnings import warn_user
from bmt_watch.call_check import GroupCalls, first_calls_of
from bmt_watch.call_log import CallLog
from bmt_watch.call_watch import CallWatch, period_of
from bmt_watch.observed_group import ObservedGroup
from bmt_watch.run_end import RunEnd

VARIABLE = "BMT_CALL_HISTORY"


def observer_of(context: ObserverContext) -> CallObserver | None:
    """Return what watches a run; None if its calls are not to be compared.

    Raises :class:`ConfigError` if calls are to be recorded in a file that cannot be made.
    """
    store = context.store
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    in_file = isinstance(store, dist.FileStore)
    directory = os.environ.get(VARIABLE)
    if context.check_calls is False or (context.check_calls is None and in_file):
        if directory and context.rank == 0:
            warn_user(
                f"{VARIABLE} is set, and nothing is recorded: this run does not compare calls."
                " Leave out check_calls=False; with a file as rendezvous, pass check_calls=True."
            )
        return None
    return CallObserver(context, directory)


class CallObserver(RunObserver):
    """Compares the calls of a run's groups, and watches them. ``directory`` is where they are
    recorded.
    """

    def __init__(self, context: ObserverContext, directory: str | None = None) -> None:
        self.timeout = context.timeout
        always, world_size = bool(context.check_calls), context.world_size
        self.first_calls: float = float("inf") if always else first_calls_of(world_size)
        self.store: Any = dist.PrefixStore("calls", context.store)
        self.end = RunEnd(context)
        name = _name_of_run(context.store) if directory else ""
        period = period_of(world_size)
        self.log = CallLog(directory, name, rank=context.rank, world_size=world_size, period=period)
        # A store answers one thread at a time. Torch's stubs lack clone().
        self.watch = CallWatch(context, cast(Any, self.store).clone(), self.log, self.end)
        self._hook = register_optimizer_step_post_hook(self.log.end_of_step)
        self.watch.start()

    @property
    def failure(self) -> str | None:
        return self.end.failure

    @property
    def store_answers(self) -> bool:
        return not (self.end.store_is_gone or self.watch.waits_for_store)

    def observed(self, group: Group, name: str) -> Group:
        return ObservedGroup(group, self.group(name, group.ranks))

    def calls(self, name: str, ranks: tuple[int, ...]) -> NoteCall:
        return self.group(name, ranks).enter_on_device

    def group(self, name: str, ranks: tuple[int, ...]) -> GroupCalls:
        """Return the calls of the group ``name``, whose members are ``ranks``."""
        options = {"timeout": self.timeout, "first_calls": self.first_calls}
        return GroupCalls(self.watch, self.store, name, ranks, **options)

    def wait_for_failure(self) -> str | None:
        return self.watch.known_failure()

    def fail(self, why: str) -> None:
        if self.failure is None and not self.end.store_is_gone:
            self.end.fail(why, self.store.clone())

    def announce(self, error: str) -> None:
        """See :class:`RunObserver`. Called before this rank waits for its GPU.

        A store that is silent is not told: its host may be gone, and the answer would not come.
        """
        if self.failure is None and self.store_answers:
            self.end.fail_because_of(error, self.store)

    def on_failure(self, call: Callable[[str], None]) -> None:
        self.end.functions.append(call)
        if self.failure is not None:
            self.end.end_on_device(self.failure)

    def waits(self, awaited: Callable[[], Awaited | None]) -> None:
        self.watch.waits.append(awaited)

    def in_step(self, number: int, gives_up: str = "", stays_with: tuple[int, ...] = ()) -> None:
        self.log.step, self.log.given_up = number, (gives_up, stays_with)

    def leave(self, error: str) -> None:
        self._hook.remove()
        self.end.has_left = True
        self.watch.close(error)
        self.log.close()


def _name_of_run(store: Any) -> str:
    """Return the name of the directory of a run, in the order of time."""
    now, part = time.strftime("%Y%m%d-%H%M%S"), time.time_ns() // 1_000_000 % 1000
    name: bytes = store.compare_set("call history", "", f"{now}.{part:03d}-{os.urandom(2).hex()}")
    return name.decode()
