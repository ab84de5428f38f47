"""``StatePlacement``: which parameters keep their states on the device (``device_memory``).

Parameters come in the order of the forward pass. Those of one owner, such as a Block, stay
together, and as many of the first as fit into the budget keep their states on the device. So the
next forward pass waits for no host at first, and the host steps the later blocks meanwhile.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Literal

import torch

from bmt_core.comm.objects import all_gather_object
from bmt_core.errors import ConfigError
from bmt_core.run.runtime import Runtime
from bmt_optim.current_run import world

DeviceMemory = int | Literal["auto"]


def checked_budget(value: object) -> DeviceMemory:
    """Return ``value`` if it is a possible ``device_memory``; raise ``ValueError`` otherwise."""
    if value == "auto":
        return "auto"
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise ValueError(
        f"device_memory must be a number of bytes, 0 or more, or 'auto'; it is {value!r}."
    )


class DeviceRoom:
    """The memory of each device that states may take: what has been free all the time until the
    first optimizer asks, at its first step. All optimizers of a run share it.
    """

    def __init__(self, runtime: Runtime | None = None) -> None:
        self._free: dict[torch.device, int] = {}
        self._placements: weakref.WeakSet[StatePlacement] = weakref.WeakSet()

    def left_for(self, placement: StatePlacement, device: torch.device) -> int:
        """Return how many bytes ``placement`` may take: those that no other one has taken."""
        if device not in self._free:
            self._free[device] = self._measured(device)
        self._placements.add(placement)
        others = [other for other in self._placements if other is not placement]
        return self._free[device] - sum(other.taken.get(device, 0) for other in others)

    def _measured(self, device: torch.device) -> int:
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
        return free + cached


class StatePlacement:
    """Decides for each parameter once whether its state is on the device.

    ``budget`` is in bytes of each device. ``"auto"`` is what is free there, but for
    :attr:`AUTO_SPARES` of it.
    """

    AUTO_SPARES = 0.1

    def __init__(self, budget: DeviceMemory) -> None:
        self.taken: dict[torch.device, int] = {}
        """Bytes of the states on each device."""
        self.is_agreed = budget == 0
        """Whether all ranks know that the budget fits."""
        self._budget = budget
        self._limits: dict[torch.device, int] = {}
        self._on_device: dict[torch.nn.Parameter, bool] = {}

    def has(self, p: torch.nn.Parameter) -> bool:
        """Whether it was decided where the state of ``p`` is."""
        return p in self._on_device

    def is_on_device(self, p: torch.nn.Parameter) -> bool:
        """Whether the state of ``p`` is on the device; False until that is decided."""
        return self._on_device.get(p, False)

    def agree(self, room: DeviceRoom, sizes: Iterable[tuple[torch.device, int]]) -> None:
        """Raise :class:`ConfigError` on every rank if the budget does not fit into ``room`` on one
        of them. Collective.

        ``sizes`` are devices and the bytes that states would take there without a limit.
        """
        needed: dict[torch.device, int] = {}
        for device, size in sizes:
            needed[device] = needed.get(device, 0) + size
        complaint = ""
        for device, size in needed.items():
            free = max(0, room.left_for(self, device))
            if self._budget == "auto":
                self._limits[device] = int(free * (1 - self.AUTO_SPARES))
                continue
            self._limits[device] = self._budget
            if min(self._budget, size) > free:
                complaint = (
                    f"device_memory={self._budget:,} bytes, of which Adam's states need"
                    f" {min(self._budget, size):,}, do not fit on {device} of rank {world().rank}:"
                    f" the training has left {free:,} bytes free so far. Give at most that, or"
                    " 'auto'."
                )
        found = [text for text in all_gather_object(complaint, world()) if text]
        if found:
            raise ConfigError(found[0])
        self.is_agreed = True

    def decide(self, params: Sequence[torch.nn.Parameter], size: int) -> None:
        """Decide where the states of ``params`` are, which are on one device and stay together;
        their states take ``size`` bytes.
        """
        device = params[0].device
        fits = 0 < size <= self._limits.get(device, 0) - self.taken.get(device, 0)
        if fits:
            self.taken[device] = self.taken.get(device, 0) + size
        self._on_device.update(dict.fromkeys(params, fits))
