"""``serve``: the loop of a rank's process, which runs one job after another and cleans up
after each.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest import mock

import torch
import torch.distributed

from bmt_testing.job import END, KEEP, Job
from bmt_testing.outcome import Outcome

READY = b"ready"
# Attributes of the run and of its topology, which a job may replace, and what they were before.
_at_start: list[tuple[dict[str, Any], dict[str, Any]]] = []


def serve(jobs: Connection[bytes, bytes], stacks: Connection[bytes, bytes]) -> None:
    """Run the jobs that arrive until the other end closes.

    ``READY`` is sent at the start. The answers to a job are its pickled :class:`Outcome`, a second
    one if cleaning up failed or an error could not be raised where it occurred, and ``READY``. A
    rank of a shared run waits after the first for ``KEEP`` or ``END``.
    """
    threading.Thread(target=_die_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    # On SIGTERM, which ends a hung rank, the stacks of its threads are written to the pipe. A
    # handler written in Python would not run while a collective blocks the main thread.
    faulthandler.register(signal.SIGTERM, file=stacks.fileno(), all_threads=True, chain=True)
    # Control-C in a terminal reaches every process, but only the parent should react.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    known = _freeze_modules(0)
    jobs.send_bytes(READY)
    while True:
        try:
            message = jobs.recv_bytes()
        except EOFError:
            return
        if message == END:  # a shared run was kept, and no job goes on with it
            _clean_up()
            jobs.send_bytes(READY)
            continue
        job: Job = pickle.loads(message)
        with _restored(), mock.patch.dict(os.environ, job.env), _lost_errors() as lost:
            # Sent before cleaning up, which may hang if other ranks have not failed.
            jobs.send_bytes(_pickled(_attempt(job)))
            try:
                if job.is_shared and jobs.recv_bytes() == KEEP:
                    _end_job()
                else:
                    _clean_up()
                for error in lost:
                    raise error
            except Exception as error:
                jobs.send_bytes(_pickled(Outcome.of_exception(job.rank, error)))
        known = _freeze_modules(known)
        jobs.send_bytes(READY)


def _freeze_modules(known: int) -> int:
    """Exempt loaded modules from garbage collection if there are more than ``known``; return how
    many there are. Modules are never garbage, and without them the collection after each job is 100
    times faster.
    """
    if len(sys.modules) > known:
        gc.collect()
        gc.freeze()
    return len(sys.modules)


def _attempt(job: Job) -> Outcome:
    try:
        return Outcome(rank=job.rank, value=_call(job))
    except BaseException as error:
        outcome = Outcome.of_exception(job.rank, error)
        sys.last_value = error  # as at the end of a program: shutdown() tells it the other ranks
        # The frames keep process groups alive. Other ranks notice the failure when their
        # sockets close.
        traceback.clear_frames(error.__traceback__)
        return outcome


def _call(job: Job) -> Any:
    function = job.function.resolve()
    args, kwargs, init = pickle.loads(job.arguments)
    if init is None:
        return function(*args, **kwargs)
    # Imported here, because tests of other things do not need it.
    from bmt_core.run.runtime import current, init_distributed

    if job.jobs_before > 0:
        _begin_job(f"job/{job.jobs_before}")
    else:
        init_distributed(**{"device": "cpu", **init})
        runtime = current()
        context = {"context": runtime.backend.context}
        _at_start[:] = [
            *((vars(each), dict(vars(each))) for each in (runtime, runtime.topology)),
            (vars(runtime.backend), context),
        ]
    return function(*args, **kwargs)


def _end_job() -> None:
    """End what the job has made in the run, as :func:`shutdown` does, and keep the connections."""
    runtime: Any = sys.modules["bmt_core.run.runtime"].current()
    runtime.registry.run_stopping(runtime)
    while runtime.at_shutdown:
        runtime.at_shutdown.pop()()
    runtime._states.clear()
    for attributes, before in _at_start:
        attributes.update(before)
    gc.collect()


def _begin_job(name: str) -> None:
    """Do in a run that goes on what a start does after the connections are there. What earlier jobs
    have set in the store is not seen.
    """
    module: Any = sys.modules["bmt_core.run.runtime"]
    runtime = module.current()
    context = runtime.backend.context
    if context.store is not None:
        store = torch.distributed.PrefixStore(name, context.store)
        runtime.backend.context = dataclasses.replace(context, store=store)
    module._seed(runtime.settings.seed)
    runtime.registry.run_started(runtime)


def _clean_up() -> None:
    """End what the job started, also if it failed."""
    runtime: Any = sys.modules.get("bmt_core.run.runtime")
    try:
        if runtime is not None:
            runtime.shutdown()
    finally:
        sys.last_value = None
        _forget_run(runtime)


def _forget_run(runtime: Any) -> None:
    """Remove what a run leaves for the next one in the same program, also if :func:`shutdown` has
    raised.
    """
    if runtime is not None:
        # The next run has another store, perhaps on the same port, and its ranks may have run
        # different numbers of jobs.
        sys.modules["bmt_core.run.rendezvous"]._stores.clear()
        runtime._starts = 0
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    # Groups in reference cycles would keep their sockets open, and other ranks would wait for them.
    gc.collect()


@contextmanager
def _lost_errors() -> Iterator[list[Exception]]:
    """Collect the errors that Python would print and forget, those of ``__del__`` and of callbacks
    of weak references.
    """
    lost: list[Exception] = []

    def keep(unraisable: sys.UnraisableHookArgs) -> None:
        sys.__unraisablehook__(unraisable)
        if isinstance(unraisable.exc_value, Exception):
            lost.append(unraisable.exc_value)

    before, sys.unraisablehook = sys.unraisablehook, keep
    try:
        yield lost
    finally:
        sys.unraisablehook = before


@contextmanager
def _restored() -> Iterator[None]:
    """Restore the settings of the process that a job may change."""
    dtype, threads, directory = torch.get_default_dtype(), torch.get_num_threads(), os.getcwd()
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        # Also a default device that is the CPU would stay as a mode around all later operations.
        torch.set_default_device(None)
        torch.set_num_threads(threads)
        if torch.are_deterministic_algorithms_enabled() != deterministic:
            # Not always: it imports torch's compiler.
            torch.use_deterministic_algorithms(deterministic)
        os.chdir(directory)


def _pickled(outcome: Outcome) -> bytes:
    # Not multiprocessing's pickler, which sends tensors as file descriptors of shared memory.
    try:
        return pickle.dumps(outcome)
    except Exception as error:
        message = f"The value that rank {outcome.rank} returned cannot be pickled: {error}"
        return pickle.dumps(
            Outcome(rank=outcome.rank, error_type="PicklingError", error_message=message)
        )


def _die_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
