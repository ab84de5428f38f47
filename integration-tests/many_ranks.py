"""What many ranks cost the rendezvous store: at the start, in a checked call of all ranks, when
they save, while they train, and while they wait for a rank that does not come.

The real code of the protocols runs over a store in memory: start and calls with each rank in a
thread of this process and ``--latency`` seconds a request, the watches of calls one after another.
As a program it prints a table::

    python integration-tests/many_ranks.py --ranks 8,64,256,1024

A read of a key is two requests, as of torch's ``TCPStore``, which waits for the key first.

torch's monitors of NCCL, in native code, are counted by the interval that bmt gives them: while the
groups connect, the calls are checked, and ranks train and wait, they take their part of what the
store can answer.

Not simulated: connecting to the store, importing, and the connections that gloo and NCCL make. What
they ask the store is the exchange of gloo's addresses and the one of torch's own group, which are
here, and NCCL's identifier, which each rank reads.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist

from bmt_core.comm import host_addresses, torch_backend
from bmt_core.comm.gloo_addresses import GlooAddresses
from bmt_core.comm.observer import ObserverContext
from bmt_core.plugins.comparison import RankReport, check_reports
from bmt_core.plugins.registry import Registry
from bmt_core.run.rendezvous import _earlier_processes
from bmt_core.run.start_section import start_section
from bmt_watch import call_watch
from bmt_watch.call_check import GroupCalls, first_calls_of
from bmt_watch.call_log import UNKNOWN, CallLog, Text
from bmt_watch.call_watch import CallWatch
from bmt_watch.observer import CallObserver
from bmt_watch.rank_states import Call
from bmt_watch.run_end import RunEnd

TIMEOUT = 120.0
CALLS_OF_A_SAVE = 22
"""Calls of CPU tensors by which ranks agree on a checkpoint of a model and its optimizer."""


class MemoryStore:
    """The requests of a ``torch.distributed.Store``, answered from a dictionary, each after
    ``latency`` seconds. A store that has a ``rate`` answers so many requests a second, one after
    another.
    """

    def __init__(self, latency: float, rate: float = math.inf) -> None:
        self.requests_of: Counter[threading.Thread] = Counter()
        self.keys_read = 0
        self._server = _Server(latency, 1 / rate)

    def clone(self) -> MemoryStore:
        """Return another connection to the same store, whose requests are counted apart."""
        store = MemoryStore(0.0)
        store._server = self._server
        return store

    @property
    def requests(self) -> int:
        return self.requests_of.total()

    def set(self, key: str, value: str | bytes) -> None:
        with self._request() as values:
            self._write(values, key, value)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self._wait(keys, TIMEOUT)
        with self._request(len(keys)) as values:
            return [values[key] for key in keys]

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        self._wait(keys, timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        with self._request(len(keys)) as values:
            return all(key in values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self._request(1) as values:
            if key not in values and expected:
                return expected.encode()  # as torch's stores do
            if values.get(key, b"") == expected.encode():
                self._write(values, key, desired)
            return values[key]

    def add(self, key: str, number: int) -> int:
        with self._request(1) as values:
            total = int(values.get(key, b"0")) + number
            self._write(values, key, str(total))
            return total

    def delete_key(self, key: str) -> bool:
        with self._request() as values:
            return values.pop(key, None) is not None

    @contextmanager
    def _request(self, keys_read: int = 0) -> Iterator[dict[str, bytes]]:
        self._server.take_turn()
        with self._server.lock:
            self.requests_of[threading.current_thread()] += 1
            self.keys_read += keys_read
            yield self._server.values

    def _write(self, values: dict[str, bytes], key: str, value: str | bytes) -> None:
        values[key] = value if isinstance(value, bytes) else value.encode()
        for waiter in self._server.waiters.pop(key, ()):
            waiter.missing -= 1
            if waiter.missing == 0:
                waiter.done.set()

    def _wait(self, keys: Sequence[str], seconds: float) -> None:
        with self._request(len(keys)) as values:
            missing = [key for key in keys if key not in values]
            waiter = _Waiter(len(missing))
            for key in missing:
                self._server.waiters.setdefault(key, []).append(waiter)
        if missing and not waiter.done.wait(seconds):
            raise dist.DistStoreError(f"{missing[0]} did not come")


class _Server:
    """What the connections to one store share."""

    def __init__(self, latency: float, seconds_per_request: float) -> None:
        self.values: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.waiters: dict[str, list[_Waiter]] = {}
        self._latency = latency
        self._seconds_per_request = seconds_per_request
        self._free = 0.0  # when the last request that has come is answered

    def take_turn(self) -> None:
        """Return when those that have come before are answered, and the request and its answer
        have taken their way.
        """
        with self.lock:
            now = time.monotonic()
            self._free = max(now, self._free) + self._seconds_per_request
            seconds = self._free - now + self._latency
        time.sleep(seconds)


class _Waiter:
    """A request that is answered when ``missing`` more keys have come."""

    def __init__(self, missing: int) -> None:
        self.missing = missing
        self.done = threading.Event()


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds, requests to the store, and keys that these read, without those of the watches."""

    seconds: float
    requests: int
    most: int
    """Requests of the rank that makes most of them."""
    most_of_others: int
    """The same without rank 0."""
    keys: int
    texts: dict[int, str] = field(default_factory=dict)
    """By rank, what its part raised."""


def on_all_ranks(store: MemoryStore, ranks: int, part: Callable[[int], object]) -> Cost:
    """Run ``part(rank)`` for every rank at the same time. ``store`` counts their requests."""
    texts: dict[int, str] = {}

    def run(rank: int) -> None:
        try:
            part(rank)
        except Exception as error:
            texts[rank] = str(error)

    threading.stack_size(256 * 1024)
    # Threads that wait for the interpreter's lock ask for it at this interval, so a thousand of
    # them would take a core. Each gives it back soon: it waits for the store most of the time.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.1)
    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank-{rank}") for rank in range(ranks)
    ]
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
        most_of_others=max(store.requests_of[thread] for thread in threads[1:]),
        keys=store.keys_read,
        texts=texts,
    )


def context_of(store: MemoryStore, rank: int, ranks: int) -> ObserverContext:
    return ObserverContext(
        rank=rank,
        world_size=ranks,
        store=cast(Any, store),
        server="host-0",
        server_rank=None,
        has_several_hosts=False,
        timeout=TIMEOUT,
        check_calls=None,
    )


class Watches:
    """The watches of all ranks, whose threads run as in a training, through connections of their
    own.
    """

    def __init__(self, store: MemoryStore, ranks: int) -> None:
        self._store = store
        self._ranks = ranks
        self._checks: list[CallObserver] = []

    def check_of(self, rank: int) -> CallObserver:
        """Make what checks the calls of ``rank``, and start its watch."""
        context = context_of(self._store, rank, self._ranks)
        check = CallObserver(context)
        self._checks.append(check)
        return check

    def __enter__(self) -> Watches:
        self._patches = ExitStack()
        for module, name, value in (
            (dist, "PrefixStore", lambda prefix, store: store),
            # Of a process with as many threads as there are ranks it takes long.
            (call_watch, "_stack_of_program", str),
        ):
            self._patches.enter_context(mock.patch.object(module, name, value))
        return self

    def __exit__(self, *exception: object) -> None:
        self._patches.close()
        for check in self._checks:  # close() would tell the other ranks, one after another
            check.watch._is_stopping = True
            check.end.wake.set()
        for check in self._checks:
            check.watch._thread.join()


def start(
    watches: Watches,
    store: Any,
    rank: int,
    *,
    ranks: int,
    registry: Registry,
    fails: int | None = None,
) -> None:
    """What ``init_distributed`` asks the store on ``rank``, when it is connected to it."""
    section = partial(start_section, store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    assert _earlier_processes(store, rank) == []
    with section("settings and plugins", judge=check_reports) as reports:
        if rank == fails:
            raise ValueError("cannot start")
        settings = {"seed": "0", "zero_level": "3"}
        reports.own = RankReport.of(registry, settings).to_plain()
    with section("choices", judge=host_addresses.hosts_of) as reports:
        reports.own = host_addresses.name_and_address()
    hosts = host_addresses.Hosts(**reports.found)
    assert hosts.are_several == (ranks > 8)
    watches.check_of(rank)
    with section("connections"):
        hosts.check_addresses()
        store.set(f"of torch's own group/{rank}", bytes(154))
        exchange_addresses(store, "all", rank, ranks)
    with section("plugins that are told"):
        pass


def exchange_addresses(store: Any, group: str, rank: int, ranks: int) -> None:
    """What gloo asks the store when it connects ``group``: each rank has 154 bytes for the others,
    and then knows those of all.
    """
    addresses = GlooAddresses(store, group, rank=rank, size=ranks)
    addresses.set(f"{rank}", bytes([rank % 256]) * 154)
    other = (rank + 1) % ranks
    assert addresses.get(f"{other}") == bytes([other % 256]) * 154


def cost_of_start(
    ranks: int, latency: float, *, rate: float = math.inf, fails: int | None = None
) -> Cost:
    """Start ``ranks`` ranks on hosts of 8; ``fails`` is a rank that cannot."""

    def name_of() -> str:
        rank = threading.current_thread().name.removeprefix("rank-")
        return f"host-{int(rank) // 8}" if rank.isdecimal() else "host-0"

    registry, store = Registry.load(), MemoryStore(latency, rate)
    with (
        mock.patch.object(host_addresses.socket, "gethostname", name_of),
        mock.patch.object(host_addresses, "_own_address", lambda host: None),
        Watches(store, ranks) as watches,
    ):
        return on_all_ranks(
            store,
            ranks,
            lambda rank: start(watches, store, rank, ranks=ranks, registry=registry, fails=fails),
        )


def cost_of_a_missing_rank(ranks: int, *, absent: int, timeout: float) -> Cost:
    """Enter and leave a section with ``ranks`` ranks, of which ``absent`` never comes."""
    store: Any = MemoryStore(latency=0.0)
    # Those that come report together: a busy machine may start their threads within a second only.
    have_started = threading.Barrier(ranks - 1)

    def part(rank: int) -> None:
        if rank != absent:
            with start_section(
                "settings and plugins", store, rank=rank, world_size=ranks, timeout=timeout
            ):
                have_started.wait()

    return on_all_ranks(store, ranks, part)


def cost_of_checked_calls(
    ranks: int, latency: float, *, rate: float = math.inf, calls: int = 1
) -> Cost:
    """Enter ``calls`` calls of all ranks as on a GPU, where each waits until all have entered
    the call.
    """

    def enter(group: GroupCalls, rank: int) -> None:
        for _ in range(calls):
            group.enter_on_device(("all_gather",), torch.ones(4))

    return cost_of_a_group(ranks, enter, latency=latency, rate=rate)


def cost_of_compared_calls(
    ranks: int, latency: float, *, rate: float = math.inf, calls: int = CALLS_OF_A_SAVE
) -> Cost:
    """Enter ``calls`` calls of all ranks as on the CPU, where each is compared; what gloo sends
    beside that is left out.
    """

    def enter(group: GroupCalls, rank: int) -> None:
        for _ in range(calls):
            group.enter(("all_gather",), torch.ones(4))

    return cost_of_a_group(ranks, enter, latency=latency, rate=rate)


def cost_of_connecting(ranks: int, latency: float, *, rate: float = math.inf) -> Cost:
    """Meet as the members of a group of all ranks do before they connect it, and learn where gloo
    listens on each.
    """

    def connect(group: GroupCalls, rank: int) -> None:
        group.connect()
        exchange_addresses(group._store, "dp/main/0", rank, ranks)

    return cost_of_a_group(ranks, connect, latency=latency, rate=rate)


def cost_of_a_group(
    ranks: int,
    use: Callable[[GroupCalls, int], None],
    *,
    latency: float = 0.0,
    rate: float = math.inf,
) -> Cost:
    """Let every rank ``use`` its calls of the group of all ranks."""
    store = MemoryStore(latency, rate)
    with Watches(store, ranks) as watches:
        # Until all watches have begun to write.
        checks = [watches.check_of(rank) for rank in range(ranks)]
        time.sleep(1.5 * checks[0].watch.period)

        def part(rank: int) -> None:
            group = checks[rank].group("dp/main/0", tuple(range(ranks)))
            use(group, rank)

        return on_all_ranks(store, ranks, part)


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What the watches of all ranks and torch's monitors of NCCL ask the store in a second, while
    the last rank computes.
    """

    of_monitors: float
    """Those of the monitors, which ``requests_in_training`` and ``requests`` include."""
    requests_in_training: float
    requests: float
    """While the others wait for the last one, as are ``keys``."""
    keys: float
    texts: list[str]
    """By rank, what an error after the timeout would say."""


def watch_of(store: MemoryStore, rank: int, ranks: int) -> CallWatch:
    """Return the watch of ``rank``, whose thread does not run."""
    context = context_of(store, rank, ranks)
    return CallWatch(context, cast(Any, store), CallLog(), RunEnd(context))


def let_wait(watch: CallWatch, call: Call, since: float) -> None:
    """Let the rank of ``watch`` wait in ``call``."""
    text = Text.of(call.text, call.text, call.place)
    watch.log.add(watch.log.add_group(call.group, call.ranks), call.number, text, UNKNOWN)
    watch.log.last, watch.log.waiting = call, (call, since)


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
        let_wait(watch, call, time.monotonic() - call_watch.LOOK_AFTER * watch.period)
    in_a_second()
    requests, keys = in_a_second()
    texts = [str(watch.error_of_timeout(call, 10.0)) for watch in watches[:-1]]
    of_monitors = requests_of_monitors(ranks)
    return Watched(
        of_monitors=of_monitors,
        requests_in_training=requests_in_training + of_monitors,
        requests=requests + of_monitors,
        keys=keys,
        texts=texts,
    )


def requests_of_monitors(ranks: int) -> float:
    """Return how often torch's monitors of NCCL ask the store in a second: each does so once in the
    interval that bmt sets.
    """
    with torch_backend.limited_checks_of_nccl(ranks):
        return ranks * 1000 / int(os.environ["TORCH_NCCL_COORD_CHECK_MILSEC"])


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", default="8,64,256,1024")
    parser.add_argument("--latency", type=float, default=0.001, help="seconds (default: 0.001)")
    parser.add_argument(
        "--rate", type=float, default=2000, help="requests a second of a slow store (default: 2000)"
    )
    options = parser.parse_args(arguments)
    slow = f"at {options.rate:g} a second: seconds"
    print(
        f"| ranks | start: seconds | {slow} | requests | of rank 0 | of another rank | keys read"
        f" | connecting a group: seconds | {slow} | requests | most of a rank"
        f" | checked calls | seconds | {slow} | requests | most of a rank"
        f" | a save: seconds | {slow} | requests | most of a rank"
        " | training: requests a second | waiting: requests a second"
        " | of these, of torch's monitors of NCCL | keys read a second |"
    )
    print("|" + "---|" * 24, flush=True)
    for ranks in map(int, options.ranks.split(",")):
        number = first_calls_of(ranks)
        of_monitors = requests_of_monitors(ranks)
        costs = [
            measure(ranks, options.latency, rate=rate)
            for measure, slow_rate in (
                (cost_of_start, options.rate),  # the monitors begin at its end
                (cost_of_connecting, options.rate - of_monitors),
                (partial(cost_of_checked_calls, calls=number), options.rate - of_monitors),
                (cost_of_compared_calls, options.rate - of_monitors),
            )
            for rate in (math.inf, slow_rate)
        ]
        for cost in costs:
            assert not cost.texts, cost.texts
        start_, slow_start, connecting, slow_connecting, calls, slow_calls, save, slow_save = costs
        watched = cost_of_watching(ranks)
        print(
            f"| {ranks} | {start_.seconds:.2f} | {slow_start.seconds:.2f} | {start_.requests}"
            f" | {start_.most} | {start_.most_of_others} | {start_.keys}"
            f" | {connecting.seconds:.2f} | {slow_connecting.seconds:.2f} | {connecting.requests}"
            f" | {connecting.most} | {number} | {calls.seconds:.2f} | {slow_calls.seconds:.2f}"
            f" | {calls.requests} | {calls.most} | {save.seconds:.2f} | {slow_save.seconds:.2f}"
            f" | {save.requests} | {save.most} | {watched.requests_in_training:.0f}"
            f" | {watched.requests:.0f} | {watched.of_monitors:.0f} | {watched.keys:.0f} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
