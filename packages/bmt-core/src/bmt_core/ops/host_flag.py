"""``HostFlag``: a flag computed on the device that the host reads later, without waiting for all of
the device's work.
"""

from __future__ import annotations

import torch


class HostFlag:
    """A host copy of a one-element tensor, made asynchronously on the device's current stream.

    :meth:`read` waits for this copy only, and not for what was launched after it. So a training
    step that reads the flag of the previous step does not make the device wait for the host.
    """

    def __init__(self, flag: torch.Tensor) -> None:
        flag = flag.detach().reshape(())
        self._event: torch.cuda.Event | None = None
        if flag.device.type == "cuda":
            self._host = torch.empty((), dtype=flag.dtype, device="cpu", pin_memory=True)
            self._host.copy_(flag, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(flag.device))
        else:
            self._host = flag.clone()

    def is_known(self) -> bool:
        """Whether :meth:`read` would return at once."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def read(self) -> bool:
        """Wait for the copy, and return whether the flag is set."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return bool(self._host)
