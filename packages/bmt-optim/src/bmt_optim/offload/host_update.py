"""``HostUpdate``: one step of some parameters on the host, in the worker's thread.

[Note: all or nothing] A shard goes back to the device when all of its chunks are stepped, never in part. When a step fails in the
worker, what has gone back is new and the rest is old, on the device; the parameters that failed, and all after them, keep their
old values there. On the host the shard that failed may be torn, so the optimizer refuses to go on until a state is loaded. Whoever
waits for an update gets the error: the next gather of the block, the next step, a checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from bmt_core.ops import Kernels
from bmt_core.run.runtime import is_initialized, rank
from bmt_optim.offload.chunks import HostSchedule, Pair, Rows
from bmt_optim.offload.copies import Copies, Done
from bmt_optim.offload.deltas import Deltas
from bmt_optim.offload.host_number import OnHost


@dataclass
class Arrival:
    """A schedule, when the gradients of each of its chunks are on the host, and what they are still to be multiplied by."""

    schedule: HostSchedule
    chunks: list[Done]
    clip: OnHost | None = None


class HostUpdate:
    """The update of what one owner keeps. It is also the mark for those who read the parameters on the device."""

    def __init__(self, arrivals: Sequence[Arrival], settings: dict[int, dict[str, Any]], way_back: list[Pair]) -> None:
        self._arrivals = list(arrivals)
        self._settings = settings
        self._way_back = way_back
        self._is_over = threading.Event()
        self._error: BaseException | None = None
        self._failed: list[torch.nn.Parameter] = []
        self._returned: Done | None = None

    def wait(self) -> None:
        """Wait for the host to be done, and let the current stream wait for the copy back. Raises what went wrong there."""
        self._is_over.wait()
        if self._error is not None:
            place = f" on rank {rank()}" if is_initialized() else ""
            raise RuntimeError(
                f"Stepping {self._describe()} on the host failed{place}: {self._error!r}. The parameters keep the values from"
                " before, or if they were stepped before the failure the new ones; load a checkpoint to go on."
            ) from self._error
        self.let_finish()

    def let_finish(self) -> None:
        """:meth:`wait`, whatever came of it."""
        self._is_over.wait()
        if self._returned is not None:
            self._returned.wait()

    def wait_on_host(self) -> None:
        """Wait for the host to be done, whatever came of it."""
        self._is_over.wait()

    def forgive(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Forget what an error left behind of ``parameters``, which was replaced; with the last one, the error is forgotten."""
        self._is_over.wait()
        replaced = set(parameters)
        self._failed = [p for p in self._failed if p not in replaced]
        if not self._failed:
            self._error = None

    def run(self, scale: float | torch.Tensor, kernels: Kernels, copies: Copies, deltas: Deltas | None) -> None:
        """Step chunk after chunk as they arrive, and send the weights back. In the worker's thread."""
        with _named("host step"):
            self._step_all(scale, kernels, deltas)
        self._returned = copies.back(self._way_back)

    def end(self, error: BaseException | None = None) -> None:
        """Say that this is over, with or without ``error``."""
        self._error = error
        if error is not None:
            self._failed = [p for arrival in self._arrivals for p in arrival.schedule.params]
        self._arrivals, self._way_back = [], []
        self._is_over.set()

    def _step_all(self, scale: float | torch.Tensor, kernels: Kernels, deltas: Deltas | None) -> None:
        for arrival in self._arrivals:
            clip = None if arrival.clip is None else arrival.clip.read()
            for chunk, arrived in zip(arrival.schedule.chunks, arrival.chunks, strict=True):
                arrived.synchronize()
                for rows in chunk.rows.values():
                    self._step(rows, scale, clip, kernels, deltas)

    def _step(
        self,
        rows: Rows,
        scale: float | torch.Tensor,
        clip: torch.Tensor | None,
        kernels: Kernels,
        deltas: Deltas | None,
    ) -> None:
        settings = self._settings[id(rows.update)]
        before = None if deltas is None else deltas.before(rows.params, rows.masters)
        kernels.adam_step(
            rows.params,
            rows.grads,
            rows.exp_avgs,
            rows.exp_avg_sqs,
            rows.masters,
            **settings,
            scale=scale,
            clip=clip,
        )
        if deltas is not None and before is not None:
            deltas.after(before, rows.exp_avgs, rows.exp_avg_sqs, rows.owners, settings)

    def _describe(self) -> str:
        shapes = ", ".join(str(tuple(p.shape)) for p in self._failed[:3])
        return f"{len(self._failed)} parameters (local shapes {shapes}{', ...' if len(self._failed) > 3 else ''})"


def _named(text: str) -> AbstractContextManager[object]:
    """Show ``text`` in a trace of torch's profiler as the name of what happens inside."""
    return torch.profiler.record_function(text) if torch.autograd.profiler._is_profiler_enabled else nullcontext()


def run_all(
    updates: Sequence[HostUpdate],
    skip: OnHost | None,
    scale: float | OnHost,
    kernels: Kernels,
    copies: Sequence[Copies],
    deltas: Deltas | None,
) -> None:
    """Run ``updates`` one after the other, unless ``skip`` is set. Never raises: see [Note: all or nothing]."""
    error: BaseException | None = None
    is_skipped, divisor = False, 1.0 if isinstance(scale, OnHost) else scale
    for update, way in zip(updates, copies, strict=True):
        try:
            if error is None:
                is_skipped = skip is not None and bool(skip.read())
                factor = scale.read() if isinstance(scale, OnHost) else divisor
                if not is_skipped:
                    update.run(factor, kernels, way, deltas)
        except BaseException as failure:  # a thread has nobody to raise to: the error goes to those who wait
            error = failure
        finally:
            update.end(error)
