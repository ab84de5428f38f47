"""Protocols of classes that hooks pass or return. The classes themselves are in modules that import
this package.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Protocol

import torch
from torch import nn

from bmt_core.comm.protocols import Group
from bmt_core.settings import RunSettings


class MakeBlock(Protocol):
    """Makes a Block of a module, in place, as ``bmt_zero.Block`` does. Collective where a parameter
    was sharded before.
    """

    def __call__(self, module: nn.Module, /, *, local_axes: Iterable[str]) -> nn.Module:
        """Return ``module`` as a Block that each rank along ``local_axes`` has for itself."""


class Run(Protocol):
    """The stable part of :class:`bmt_core.run.runtime.Runtime`, which ``bmt_run_started`` and
    ``bmt_run_stopping`` get.
    """

    settings: RunSettings
    device: torch.device
    world: Group
    make_block: MakeBlock | None
    """Set in ``bmt_run_started`` by the package that makes Blocks, for packages that do not
    import it.
    """

    @property
    def rank(self) -> int:
        """Index of this process."""

    @property
    def world_size(self) -> int:
        """Number of processes."""


class FileFormat(Protocol):
    """The part of :class:`bmt_checkpoint.CheckpointFormat` that the registry uses."""

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
