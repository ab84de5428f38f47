"""The core's own plugin, registered like those of third parties.

The functions import what they need, because the registry is loaded before these modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bmt_core.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from bmt_core.comm.protocols import CommBackend


@hookimpl
def bmt_comm_backends() -> list[type[CommBackend]]:
    """Announce the process groups of ``torch.distributed``."""
    from bmt_core.comm.torch_backend import TorchBackend

    return [TorchBackend]
