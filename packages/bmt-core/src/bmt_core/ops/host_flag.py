"""``HostFlag``: a flag computed on the device that the host reads later, without draining the device's queue."""

from __future__ import annotations

import torch


class HostFlag:
    """A copy on the host of a one-element tensor, as it is at this point of the device's current stream.

    The copy is asynchronous, and :meth:`read` waits for the device to pass this point only, not for what was launched since. A
    training step that asks for the flag one step later therefore never idles the device.
    """

    def __init__(self, flag: torch.Tensor) -> None:
        flag = flag.detach().reshape(())
        self._event: torch.cuda.Event | None = None
        if flag.device.type == "cuda":
            self._host = torch.empty((), dtype=flag.dtype, pin_memory=True)
            self._host.copy_(flag, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(flag.device))
        else:
            self._host = flag.clone()

    def is_known(self) -> bool:
        """Whether :meth:`read` would return at once."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def read(self) -> bool:
        """Return whether the flag is set, after the device has got that far."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return bool(self._host)
