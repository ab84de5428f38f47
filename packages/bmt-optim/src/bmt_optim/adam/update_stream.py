"""``UpdateStream``: updates on a stream of their own, while the next forward pass begins
(``overlap_forward``).

The gather of a Block waits for the update of that Block alone, so later Blocks are updated while
the first ones compute. Updates read memory that the computation allocated (gradients, flags): the
Block keeps it alive until its next gather has arrived, which is after its update.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

PRIORITY = -1
"""Higher than the computation's, which would otherwise delay an update so much that the gather
after it is late.
"""


class UpdateStream:
    """The streams of one optimizer's updates, one on each CUDA device; on the CPU, updates run in
    the caller.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def exists_on(self, device: torch.device) -> bool:
        """Whether updates on ``device`` have a stream of their own."""
        return device.type == "cuda"

    def begin(self, device: torch.device) -> None:
        """Make the following updates wait for the computation so far."""
        if not self.exists_on(device):
            return
        if device not in self._streams:
            # torch does not annotate it.
            self._streams[device] = torch.cuda.Stream(device, PRIORITY)  # type: ignore[no-untyped-call]
        self._streams[device].wait_stream(torch.cuda.current_stream(device))

    def launch_on(self, device: torch.device) -> AbstractContextManager[object]:
        """Return a context in which kernels are launched on the stream. Call
        :meth:`begin` before.
        """
        return torch.cuda.stream(self._streams[device]) if self.exists_on(device) else nullcontext()

    def wait(self) -> None:
        """Make the computation wait for all updates."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
