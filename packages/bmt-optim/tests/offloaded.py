"""An optimizer that offloads from the CPU to the CPU: all that a GPU has, but that copies are done
at once.
"""

from __future__ import annotations

import torch

from bmt_optim import AdamOffloadOptimizer
from bmt_optim.offload.placement import DeviceRoom


class Room(DeviceRoom):
    """A device with ``size`` bytes free."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def _measured(self, device: torch.device) -> int:
        return self.size


class Offload(AdamOffloadOptimizer):
    """In chunks so small that every parameter is cut."""

    chunk = 5
    room = Room(1 << 30)

    def _offloads(self, device: torch.device) -> bool:
        return True

    def _device_room(self) -> DeviceRoom:
        return self.room
