"""``RankPool``: runs a function on several worker processes, which are the ranks of a run."""

from __future__ import annotations

import atexit
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from torch.distributed import TCPStore

from bmt_testing.gpus import place_on_host
from bmt_testing.job import END, KEEP, FunctionReference, Job, pickled
from bmt_testing.largest_run import note_run
from bmt_testing.outcome import Outcome, RankFailure
from bmt_testing.workers import SharedRun, Worker, Workers

T = TypeVar("T")

GRACE = 20.0
"""Seconds until the other ranks are killed when one rank has failed. Only tests in which a rank
hangs wait that long.
"""

_NO_SETTINGS: Mapping[str, Any] = {}
_KEPT_POOLS = 3  # those of 1, 2 and 4 ranks, which most tests use
_pools: dict[int, RankPool] = {}


class RankPool:
    """``world_size`` processes that run functions as the ranks of a run, one run after another.

    The processes are started when first needed and import torch once. A process that died or was
    killed is replaced. Each run has its own rendezvous store, on a port that the operating
    system chose.

    On the CPU, calls one after another with equal options share a run, which is started once. Each
    begins as in a run of its own: with the seed of the start, and without what the others have
    made. After one that fails the run ends.
    """

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise ValueError(f"A pool needs at least one rank; world_size is {world_size}.")
        self.world_size = world_size
        self._workers = Workers()

    def run(
        self,
        fn: Callable[..., T],
        *args: Any,
        timeout: float = 60.0,
        grace: float = GRACE,
        env: Mapping[str, str] | None = None,
        init: Mapping[str, Any] | None = _NO_SETTINGS,
        own_run: bool = False,
        **kwargs: Any,
    ) -> list[T]:
        """Call ``fn(*args, **kwargs)`` on every rank and return the results in rank order.

        ``fn`` is a function at the top level of its module. It runs between
        ``init_distributed(**init)`` and ``shutdown()``, on the CPU unless ``init`` names a
        ``device``; with ``init=None`` it starts the run itself. Arguments are pickled; modules
        among them, as in ``init={"plugins": [module]}``, are imported by every rank: ValueError for
        one that cannot be. ``env`` is added to the environment of every rank for this run. With
        ``own_run`` no other call shares the run. Ranks that have not finished after ``timeout``
        seconds, or ``grace`` seconds after another rank failed, are killed. Raises
        :class:`RankFailure` when any rank did not return.
        """
        outcomes = self.outcomes(
            fn,
            *args,
            timeout=timeout,
            grace=grace,
            env=env,
            init=init,
            own_run=own_run,
            **kwargs,
        )
        if any(outcome.failed for outcome in outcomes):
            raise RankFailure(fn.__qualname__, outcomes)
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        grace: float = GRACE,
        env: Mapping[str, str] | None = None,
        init: Mapping[str, Any] | None = _NO_SETTINGS,
        own_run: bool = False,
        **kwargs: Any,
    ) -> list[Outcome]:
        """Like :meth:`run`, but return how each rank ended and do not raise: for tests in which
        ranks are to fail.
        """
        function, arguments = FunctionReference.to(fn), pickled((args, kwargs, init))
        note_run(self.world_size)
        key, run = None, None
        if not own_run and init is not None and init.get("device", "cpu") == "cpu":
            key = pickled((init, env)), timeout, grace
            run = self._workers.shared_run
        if run is not None and run.key == key and run.is_alive():
            store, workers, jobs = run.store, run.workers, run.jobs
        else:
            # Served by this process, so that it outlives every rank; under torchrun the agent
            # serves it.
            store = serve_store(timedelta(seconds=timeout + grace))
            workers, jobs = self._workers.take(self.world_size), 0
        for rank, worker in enumerate(workers):
            rank_env = {**_rank_environment(rank, self.world_size, store.port), **(env or {})}
            worker.start(
                Job(
                    rank=rank,
                    function=function,
                    arguments=arguments,
                    env=rank_env,
                    is_shared=key is not None,
                    jobs_before=jobs,
                )
            )
        is_kept = _finish(workers, timeout, grace, is_shared=key is not None)
        self._workers.shared_run = SharedRun(key, store, workers, jobs + 1) if is_kept else None
        outcomes = [worker.outcome for worker in workers]
        if is_kept and any(outcome.failed for outcome in outcomes):
            self._workers.end_shared_run()
        return outcomes

    def close(self) -> None:
        """End the processes. A later run starts new ones."""
        self._workers.close()


def rank_pool(world_size: int) -> RankPool:
    """Return the pool of ``world_size`` ranks, one per size. Pools of the last three sizes keep
    their processes.
    """
    pool = _pools.pop(world_size, None) or RankPool(world_size)
    _pools[world_size] = pool  # the last one
    if len(_pools) > _KEPT_POOLS:
        _pools.pop(next(iter(_pools))).close()
    return pool


def run_ranks(fn: Callable[..., T], world_size: int, *args: Any, **options: Any) -> list[T]:
    """Call ``fn(*args)`` on ``world_size`` ranks of the shared pool: see :meth:`RankPool.run` for
    the options.
    """
    return rank_pool(world_size).run(fn, *args, **options)


def serve_store(patience: timedelta) -> TCPStore:
    """Serve a store on a port of 127.0.0.1 that the operating system chooses.

    On a socket that torch opens, ranks have IPv6 addresses. Torch looks up their names, which are
    not in /etc/hosts, so each start would wait for the name server.
    """
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    port = listener.getsockname()[1]
    return TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=patience,
        master_listen_fd=listener.detach(),  # the store closes it
    )


def _finish(
    workers: Sequence[Worker], timeout: float, grace: float, *, is_shared: bool = False
) -> bool:
    """Wait until every worker has finished its job or died. Kill those that run out of time. Return
    whether the run ``is_shared`` and goes on, because no rank has failed.
    """
    deadline, why = time.monotonic() + timeout, f"Killed after {timeout:g} s."
    busy: dict[Connection[bytes, bytes], Worker] = {worker.connection: worker for worker in workers}
    waiting = list(workers) if is_shared else []  # to hear what becomes of the run
    has_failure = is_kept = False
    while busy:
        # A process that dies closes its end of the pipe, which makes the connection ready.
        ready = wait(busy, max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for end in ready:
            assert isinstance(end, Connection)
            busy[end].receive()
            if not busy[end].is_busy:
                del busy[end]
        if not has_failure and any(worker.has_failed for worker in workers):
            has_failure = True
            end_of_grace = time.monotonic() + grace
            if end_of_grace < deadline:
                deadline, why = end_of_grace, f"Killed {grace:g} s after another rank had failed."
        answered = [worker for worker in waiting if worker.has_answered]
        if answered and (has_failure or len(answered) == len(workers)):
            is_kept = not has_failure
            for worker in answered:
                worker.send(KEEP if is_kept else END)
            waiting = [worker for worker in waiting if worker not in answered]
    for worker in busy.values():
        worker.give_up(why)
    return is_kept and not busy


def _rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return what torchrun sets for a rank."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        **place_on_host(rank, world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


@atexit.register
def _close_pools() -> None:
    for pool in _pools.values():
        pool.close()
