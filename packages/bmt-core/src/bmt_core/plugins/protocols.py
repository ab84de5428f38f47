"""What hooks hand over of modules that lie above the registry, as protocols: nothing here imports those modules."""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch

from bmt_core.comm.protocols import Group
from bmt_core.settings import RunSettings


class Run(Protocol):
    """What a plugin is told of the run: :class:`bmt_core.run.runtime.Runtime`, by its parts that do not change."""

    settings: RunSettings
    device: torch.device
    world: Group

    @property
    def rank(self) -> int:
        """This process among all."""

    @property
    def world_size(self) -> int:
        """Number of processes."""


class FileFormat(Protocol):
    """What the registry asks of a checkpoint format; :class:`bmt_core.checkpoint.CheckpointFormat` is the base of all."""

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
