"""``OnHost``: a number computed on the device that a thread of the host reads later."""

from __future__ import annotations

import torch


class OnHost:
    """A copy on the host of a one-element tensor, as it is at this point of the device's current stream."""

    def __init__(self, number: torch.Tensor) -> None:
        number = number.detach().reshape(()).to(torch.float32)
        self._event: torch.cuda.Event | None = None
        if number.device.type == "cuda":
            self._copy = torch.empty((), dtype=torch.float32, pin_memory=True)
            self._copy.copy_(number, non_blocking=True)
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(number.device))
        else:
            self._copy = number.clone()

    def read(self) -> torch.Tensor:
        """Return the copy, after the device has got that far."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy
