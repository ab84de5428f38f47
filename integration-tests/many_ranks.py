"""What many ranks cost the rendezvous store: at the start, in a checked call of all ranks, while
they train, and while they wait for a rank that does not come.

The real code of the protocols runs over a store in memory: start and calls with each rank in a
thread of this process and ``--latency`` seconds a request, the watches of calls one after another.
As a program it prints a table::

    python integration-tests/many_ranks.py --ranks 8,64,256,1024

A read of a key is two requests, as of torch's ``TCPStore``, which waits for the key first.

Not simulated: connecting to the store, importing, and the connections of a group, which gloo and
NCCL make. What bmt asks the store before they do is the meeting of the group's members.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist

from bmt_core.comm import host_addresses
from bmt_core.comm.call_check import CallCheck, GroupCalls
from bmt_core.comm.call_watch import LOOK_AFTER, CallWatch
from bmt_core.comm.rank_states import Call
from bmt_core.plugins.comparison import compare_across_ranks
from bmt_core.plugins.registry import Registry
from bmt_core.run.start_section import start_section

TIMEOUT = 120.0
CALLS = 20
"""How many calls of a group are compared on GPUs with 1,024 ranks."""


class MemoryStore:
    """The requests of a ``torch.distributed.Store``, answered from a dictionary, each after
    ``latency`` seconds.
    """

    def __init__(self, latency: float) -> None:
        self.latency = latency
        self.requests_of: Counter[threading.Thread] = Counter()
        self.keys_read = 0
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._waiters: dict[str, list[_Waiter]] = {}

    @property
    def requests(self) -> int:
        return self.requests_of.total()

    def set(self, key: str, value: str) -> None:
        with self._request():
            self._write(key, value)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self._wait(keys, TIMEOUT)
        with self._request(len(keys)):
            return [self._values[key] for key in keys]

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        self._wait(keys, timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        with self._request(len(keys)):
            return all(key in self._values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self._request(1):
            if self._values.get(key, b"") == expected.encode():
                self._write(key, desired)
            return self._values.get(key, b"")

    def add(self, key: str, number: int) -> int:
        with self._request(1):
            total = int(self._values.get(key, b"0")) + number
            self._write(key, str(total))
            return total

    def delete_key(self, key: str) -> bool:
        with self._request():
            return self._values.pop(key, None) is not None

    @contextmanager
    def _request(self, keys_read: int = 0) -> Iterator[None]:
        time.sleep(self.latency)
        with self._lock:
            self.requests_of[threading.current_thread()] += 1
            self.keys_read += keys_read
            yield

    def _write(self, key: str, value: str) -> None:
        self._values[key] = value.encode()
        for waiter in self._waiters.pop(key, ()):
            waiter.missing -= 1
            if waiter.missing == 0:
                waiter.done.set()

    def _wait(self, keys: Sequence[str], seconds: float) -> None:
        with self._request(len(keys)):
            missing = [key for key in keys if key not in self._values]
            waiter = _Waiter(len(missing))
            for key in missing:
                self._waiters.setdefault(key, []).append(waiter)
        if missing and not waiter.done.wait(seconds):
            raise dist.DistStoreError(f"{missing[0]} did not come")


class _Waiter:
    """A request that is answered when ``missing`` more keys have come."""

    def __init__(self, missing: int) -> None:
        self.missing = missing
        self.done = threading.Event()


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds, requests to the store, and keys that these read."""

    seconds: float
    requests: int
    most: int
    """Requests of the rank that makes most of them."""
    keys: int
    texts: dict[int, str] = field(default_factory=dict)
    """By rank, what its part raised."""


def on_all_ranks(ranks: int, latency: float, part: Callable[[MemoryStore, int], object]) -> Cost:
    """Run ``part(store, rank)`` for every rank at the same time."""
    store = MemoryStore(latency)
    texts: dict[int, str] = {}

    def run(rank: int) -> None:
        try:
            part(store, rank)
        except Exception as error:
            texts[rank] = str(error)

    threading.stack_size(256 * 1024)
    # Threads that wait for the interpreter's lock ask for it at this interval, so a thousand of
    # them would take a core. Each gives it back soon: it waits for the store most of the time.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.1)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    seconds = time.monotonic() - started
    return Cost(
        seconds=seconds,
        requests=store.requests,
        most=max(store.requests_of.values()),
        keys=store.keys_read,
        texts=texts,
    )


def start(
    store: Any, rank: int, *, ranks: int, registry: Registry, fails: int | None = None
) -> None:
    """What ``init_distributed`` asks the store on ``rank``."""
    section = partial(start_section, store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    with section("settings and plugins"):
        if rank == fails:
            raise ValueError("cannot start")
    settings = {"seed": "0", "zero_level": "3"}
    compare_across_ranks(
        registry, settings, store=store, rank=rank, world_size=ranks, timeout=TIMEOUT
    )
    with section("choices"):
        pass
    with section("connections"):
        host_addresses.check_host_addresses(store, rank, ranks)


def cost_of_start(ranks: int, latency: float, *, fails: int | None = None) -> Cost:
    """Start ``ranks`` ranks on hosts of 8; ``fails`` is a rank that cannot."""
    names = {f"rank-{rank}": f"host-{rank // 8}" for rank in range(ranks)}

    def name_of() -> str:
        return names[threading.current_thread().name]

    registry = Registry.load()

    def part(store: MemoryStore, rank: int) -> None:
        threading.current_thread().name = f"rank-{rank}"
        start(store, rank, ranks=ranks, registry=registry, fails=fails)

    with (
        mock.patch.object(host_addresses.socket, "gethostname", name_of),
        mock.patch.object(host_addresses, "_own_address", lambda host: None),
    ):
        return on_all_ranks(ranks, latency, part)


def cost_of_comparing(ranks: int, *, absent: int, timeout: float) -> Cost:
    """Compare plugins and settings of ``ranks`` ranks, of which ``absent`` never comes."""
    registry = Registry.load()

    def part(store: MemoryStore, rank: int) -> None:
        if rank != absent:
            compare_across_ranks(
                registry, {}, store=cast(Any, store), rank=rank, world_size=ranks, timeout=timeout
            )

    return on_all_ranks(ranks, 0.0, part)


def cost_of_checked_calls(ranks: int, latency: float, *, calls: int = 1) -> Cost:
    """Enter ``calls`` calls of all ranks as on a GPU, where each waits until all have entered
    the call.
    """

    def enter(group: GroupCalls) -> None:
        for _ in range(calls):
            group.enter_on_device(("all_gather",), torch.ones(4))

    return _cost_of_a_group(ranks, latency, enter)


def cost_of_meeting(ranks: int, latency: float) -> Cost:
    """Meet as the members of a group of all ranks do before they connect it."""
    return _cost_of_a_group(ranks, latency, GroupCalls.connect)


def _cost_of_a_group(ranks: int, latency: float, use: Callable[[GroupCalls], None]) -> Cost:
    def part(store: MemoryStore, rank: int) -> None:
        check = CallCheck(
            cast(Any, _Clonable(store)),
            rank=rank,
            world_size=ranks,
            always=False,
            timeout=TIMEOUT,
            server="host-0",
            server_rank=None,
        )
        group = check.group("dp/main/0", tuple(range(ranks)))
        assert group is not None
        use(group)

    with (
        mock.patch.object(CallWatch, "start", lambda watch: None),
        mock.patch.object(dist, "PrefixStore", lambda prefix, store: store),
    ):
        return on_all_ranks(ranks, latency, part)


class _Clonable:
    """A store whose copy for another thread is another one: the watch, which does not run here,
    writes its first state there, and is not counted.
    """

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def clone(self) -> MemoryStore:
        return MemoryStore(latency=0.0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What the watches of all ranks ask the store while the last rank computes, in a second."""

    requests_in_training: float
    requests: float
    """While the others wait for the last one, as are ``keys``."""
    keys: float
    texts: list[str]
    """By rank, what an error after the timeout would say."""


def watch_of(store: MemoryStore, rank: int, ranks: int) -> CallWatch:
    """Return the watch of ``rank``, whose thread does not run."""
    return CallWatch(
        cast(Any, store), rank=rank, world_size=ranks, server="host-0", server_rank=None
    )


def cost_of_watching(ranks: int) -> Watched:
    """Let the watches of ``ranks`` ranks work, and after some time let all but the last wait in
    a call.
    """
    store = MemoryStore(latency=0.0)
    watches = [watch_of(store, rank, ranks) for rank in range(ranks)]

    def in_a_second() -> tuple[float, float]:
        before = store.requests, store.keys_read
        for watch in watches:
            assert watch.tick()
        period = watches[0].period
        return (store.requests - before[0]) / period, (store.keys_read - before[1]) / period

    requests_in_training, _ = in_a_second()
    group = tuple(range(ranks))
    call = Call(group="dp/main/0", ranks=group, number=7, text="all_gather, 16 bytes")
    for watch in watches[:-1]:
        watch.entered["dp/main/0"], watch.last = 7, call
        watch.waiting = call, time.monotonic() - LOOK_AFTER
    in_a_second()
    requests, keys = in_a_second()
    texts = [str(watch.error_of_timeout(call, 10.0)) for watch in watches[:-1]]
    return Watched(
        requests_in_training=requests_in_training, requests=requests, keys=keys, texts=texts
    )


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", default="8,64,256,1024")
    parser.add_argument("--latency", type=float, default=0.001, help="seconds (default: 0.001)")
    options = parser.parse_args(arguments)
    print(
        "| ranks | start: seconds | requests | most of a rank | keys read"
        " | connecting a group: seconds | requests | most of a rank"
        f" | {CALLS} checked calls: seconds | requests | most of a rank | requests a second"
        " | training: requests a second | waiting: requests a second | keys read a second |"
    )
    print("|" + "---|" * 15, flush=True)
    for ranks in map(int, options.ranks.split(",")):
        start_ = cost_of_start(ranks, options.latency)
        meeting = cost_of_meeting(ranks, options.latency)
        calls = cost_of_checked_calls(ranks, options.latency, calls=CALLS)
        watched = cost_of_watching(ranks)
        for cost in (start_, meeting, calls):
            assert not cost.texts, cost.texts
        print(
            f"| {ranks} | {start_.seconds:.2f} | {start_.requests} | {start_.most} | {start_.keys}"
            f" | {meeting.seconds:.2f} | {meeting.requests} | {meeting.most}"
            f" | {calls.seconds:.2f} | {calls.requests} | {calls.most}"
            f" | {calls.requests / calls.seconds:.0f} | {watched.requests_in_training:.0f}"
            f" | {watched.requests:.0f} | {watched.keys:.0f} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
