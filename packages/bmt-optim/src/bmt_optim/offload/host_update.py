"""``HostUpdate``: one step of an owner's parameters on the host, in the worker's thread.

[Note: all or nothing] A shard is copied back to the device when all of its chunks are updated,
never in part. When a step fails in the worker, parameters updated before have new values on the
device; those that failed, and all after them, keep their old values. On the host the shard that
failed may be updated in part, so the optimizer refuses to go on until a state is loaded. The error
is raised by the next call that waits for the update: a gather of the block, a step, a checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from bmt_core.ops import Kernels
from bmt_core.run.runtime import is_initialized, rank
from bmt_core.torch_internals import named_in_trace
from bmt_optim.offload.chunks import KernelCall, Pair
from bmt_optim.offload.copies import Copied, Copies, HostNumber
from bmt_optim.offload.deltas import Deltas, copied_masters
from bmt_optim.offload.gradient_copies import GradientCopy


class HostUpdate:
    """The update of one owner's parameters, and the mark that readers on the device wait for.

    ``settings`` are the options of ``adam_step`` by the id of the ``Update``; ``weights`` are
    copied to the device afterwards.
    """

    def __init__(
        self,
        gradients: list[GradientCopy],
        settings: dict[int, dict[str, Any]],
        weights: list[Pair],
        copies: Copies,
    ) -> None:
        self._gradients = gradients
        self._settings = settings
        self._weights = weights
        self._copies = copies
        # Set when the host is done, also after a failure or a skipped step.
        self.is_over = threading.Event()
        self._error: BaseException | None = None
        self._failed: list[torch.nn.Parameter] = []
        self._returned: Copied | None = None

    def wait(self) -> None:
        """Wait for the host, and make the current stream wait for the copy to the device. Raise the
        host's error, if any.
        """
        self.is_over.wait()
        if self._error is not None:
            where = f" on rank {rank()}" if is_initialized() else ""
            raise RuntimeError(
                f"Stepping {self._describe()} on the host failed{where}: {self._error!r}."
                " Parameters that were stepped before the failure have new values, all others their"
                " old ones; load a checkpoint to go on."
            ) from self._error
        self.wait_despite_error()

    def wait_despite_error(self) -> None:
        """Like :meth:`wait`, but raise nothing."""
        self.is_over.wait()
        if self._returned is not None:
            self._returned.wait()

    def note_loaded(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Note that the states of ``parameters`` were loaded. When all that failed are loaded, the
        error is forgotten.
        """
        self.is_over.wait()
        loaded = set(parameters)
        self._failed = [p for p in self._failed if p not in loaded]
        if not self._failed:
            self._error = None

    def run(self, scale: float | torch.Tensor, kernels: Kernels, deltas: Deltas | None) -> None:
        """Update chunk after chunk as its gradients arrive, then copy the weights to the device.
        Runs in the worker's thread.
        """
        with named_in_trace("host step"):
            for gradient in self._gradients:
                clip = None if gradient.factor is None else gradient.factor.read()
                for chunk, copied in zip(gradient.chunks, gradient.copied, strict=True):
                    copied.synchronize()
                    for call in chunk.calls:
                        settings = {**self._settings[id(call.update)], "scale": scale, "clip": clip}
                        _step(call, settings, kernels, deltas)
        self._returned = self._copies.to_device(self._weights)

    def end(self, error: BaseException | None = None) -> None:
        """Mark the update as over: done, failed with ``error``, or skipped. Waiting threads
        go on.
        """
        self._error = error
        if error is not None:
            self._failed = [p for gradient in self._gradients for p in gradient.chunks.params]
        self._gradients, self._weights = [], []
        self.is_over.set()

    def _describe(self) -> str:
        shapes = ", ".join(str(tuple(p.shape)) for p in self._failed[:3])
        return (
            f"{len(self._failed)} parameters (local shapes"
            f" {shapes}{', ...' if len(self._failed) > 3 else ''})"
        )


def run_all(
    updates: Sequence[HostUpdate],
    skip: HostNumber | None,
    scale: float | HostNumber,
    kernels: Kernels,
    deltas: Deltas | None,
) -> None:
    """Run ``updates`` one after the other, unless ``skip`` is set. Never raises: see
    [Note: all or nothing].
    """
    error: BaseException | None = None
    for update in updates:
        try:
            if error is None and not (skip is not None and bool(skip.read())):
                update.run(
                    scale.read() if isinstance(scale, HostNumber) else scale, kernels, deltas
                )
        except BaseException as failure:
            # Nobody catches errors of a thread: those who wait raise it.
            error = failure
        finally:
            update.end(error)


def _step(
    call: KernelCall, settings: dict[str, Any], kernels: Kernels, deltas: Deltas | None
) -> None:
    before = None if deltas is None else copied_masters(call.params, call.masters)
    kernels.adam_step(
        call.params, call.grads, call.exp_avgs, call.exp_avg_sqs, call.masters, **settings
    )
    if deltas is not None and before is not None:
        deltas.add(before, call.exp_avgs, call.exp_avg_sqs, call.parameters, settings)
