"""Protocols of classes that hooks pass or return, and that are defined in modules which import this package."""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch

from bmt_core.comm.protocols import Group
from bmt_core.settings import RunSettings


class Run(Protocol):
    """The stable part of :class:`bmt_core.run.runtime.Runtime`, which ``bmt_run_started`` and ``bmt_run_stopping`` get."""

    settings: RunSettings
    device: torch.device
    world: Group

    @property
    def rank(self) -> int:
        """Index of this process."""

    @property
    def world_size(self) -> int:
        """Number of processes."""


class FileFormat(Protocol):
    """The part of :class:`bmt_core.checkpoint.CheckpointFormat` that the registry uses."""

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
