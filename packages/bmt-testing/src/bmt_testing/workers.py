"""``Workers``: the processes that run jobs, each controlled by a :class:`Worker` in the
parent process.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext, SpawnContext

import torch
from torch.distributed import TCPStore

from bmt_testing.job import END, Job, pickled
from bmt_testing.outcome import Outcome
from bmt_testing.rank_process import READY, serve

_START_PATIENCE = 300.0
_EXIT_PATIENCE = 5.0
_END_PATIENCE = 20.0


@dataclass(frozen=True)
class SharedRun:
    """A run that its ``workers`` have kept after a job. ``key`` says which jobs may go on with
    it; ``store`` is that of its rendezvous; it has had ``jobs``.
    """

    key: object
    store: TCPStore
    workers: list[Worker]
    jobs: int

    def is_alive(self) -> bool:
        """Whether all ranks are there."""
        return all(worker.is_usable() for worker in self.workers)


class Workers:
    """The rank processes of a pool, which are kept between runs."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []
        self.shared_run: SharedRun | None = None
        """The run that the last job has left for the next one."""

    def end_shared_run(self) -> None:
        """End the run that the last job has left, on all of its ranks."""
        run, self.shared_run = self.shared_run, None
        if run is not None:
            for worker in run.workers:
                worker.end_run()
            for worker in run.workers:
                worker.wait_for_end_of_run()

    def take(self, count: int) -> list[Worker]:
        """Return ``count`` workers that are alive and idle. Those that are not are replaced. A
        shared run ends before.

        The others keep their rank, because libraries read some environment variables only once in
        a process, such as NCCL ``NCCL_HOSTID``.
        """
        self.end_shared_run()
        new = []
        for rank in range(count):
            old = self._workers[rank : rank + 1]
            if not old or not old[0].is_usable():
                for worker in old:
                    worker.kill()
                new.append(Worker())
                self._workers[rank : rank + 1] = new[-1:]
        # Before a job's time limit begins, because importing torch takes seconds.
        for worker in new:
            worker.wait_until_ready()
        return self._workers[:count]

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.kill()
        self._workers = []


class Worker:
    """A rank's process, seen from the parent, and its current job."""

    def __init__(self) -> None:
        context = _context()
        self.connection, jobs = context.Pipe()
        self._stacks, stacks = context.Pipe(duplex=False)
        self._process = context.Process(target=serve, args=(jobs, stacks), daemon=True)
        self._process.start()
        jobs.close()
        stacks.close()
        self._rank = 0
        self._outcome: Outcome | None = None
        self.is_busy = False

    def wait_until_ready(self) -> None:
        """Return when the new process can take a job."""
        if not self.connection.poll(_START_PATIENCE):
            raise TimeoutError(f"A rank's process did not start within {_START_PATIENCE:g} s.")
        try:
            self.connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            self._process.join(_EXIT_PATIENCE)
            message = (
                f"A rank's process ended with exit code {self._process.exitcode} while starting;"
                " see its output."
            )
            raise RuntimeError(message) from None

    def is_usable(self) -> bool:
        """Whether the process is alive and idle."""
        return not self.is_busy and self._process.is_alive()

    @property
    def outcome(self) -> Outcome:
        """How the last job ended."""
        assert self._outcome is not None
        return self._outcome

    @property
    def has_failed(self) -> bool:
        """Whether the last job is known to have failed."""
        return self._outcome is not None and self._outcome.failed

    @property
    def has_answered(self) -> bool:
        """Whether it is known how the last job ended."""
        return self._outcome is not None

    def start(self, job: Job) -> None:
        """Send ``job`` to the process."""
        self._rank, self._outcome, self.is_busy = job.rank, None, True
        self.send(pickled(job))

    def end_run(self) -> None:
        """End the shared run that the last job has left; :meth:`receive` says when it is over."""
        self.is_busy = True
        self.send(END)

    def wait_for_end_of_run(self) -> None:
        """Return when the run has ended. A rank that cannot end it is killed."""
        while self.is_busy:
            if not self.connection.poll(_END_PATIENCE):
                self.give_up(f"Killed {_END_PATIENCE:g} s after its run was to end.")
                return
            self.receive()

    def send(self, message: bytes) -> None:
        """Send a message to the process."""
        try:
            self.connection.send_bytes(message)
        except BrokenPipeError:
            pass  # the process has died; ``receive`` reports it

    def receive(self) -> None:
        """Process the next message, or the end of the process."""
        try:
            message = self.connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            self._process.join(_EXIT_PATIENCE)
            code = self._process.exitcode
            self._fail(
                "Died", f"The process ended with exit code {code} before the function returned."
            )
            self.is_busy = False
            return
        if message == READY:
            self.is_busy = False
            return
        try:
            outcome: Outcome = pickle.loads(message)
        except Exception as error:
            self._fail(
                "UnpicklingError", f"What rank {self._rank} returned cannot be unpickled: {error}"
            )
            return
        if not self.has_failed:
            self._outcome = outcome

    def give_up(self, why: str) -> None:
        """Kill the process, which did not finish in time, and record the stacks of its threads."""
        stacks = self.kill()
        self._fail("Hung", why, stacks)

    def kill(self) -> str:
        """End the process, if it was not ended before, and return the stacks of its threads."""
        if self.connection.closed:
            return ""
        self._process.terminate()
        self._process.join(_EXIT_PATIENCE)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        stacks = self._read_stacks()
        self.connection.close()
        self._stacks.close()
        return stacks

    def _fail(self, error_type: str, message: str, traceback: str = "") -> None:
        # The first failure counts, and a failure after a returned value (in cleaning up)
        # counts too.
        if not self.has_failed:
            self._outcome = Outcome(
                rank=self._rank, error_type=error_type, error_message=message, traceback=traceback
            )

    def _read_stacks(self) -> str:
        chunks = []
        while chunk := os.read(self._stacks.fileno(), 65536):
            chunks.append(chunk)
        return b"".join(chunks).decode(errors="replace")


@functools.cache
def _context() -> ForkServerContext | SpawnContext:
    """Return the context that starts processes: it forks a server that has imported torch, because
    an import takes seconds.

    If torch is built with CUDA, processes are spawned instead and each imports torch: a process
    that has used a GPU cannot be forked. Forks share one hash seed, so a set has the same order on
    all ranks; ranks that torchrun starts have different orders.
    """
    if torch.version.cuda is not None:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # The first one imports the compiler, which torch would do at the first optimizer.
    context.set_forkserver_preload(["torch.distributed.pipelining", "bmt_testing.rank_process"])
    return context
