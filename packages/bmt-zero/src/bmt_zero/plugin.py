"""The hooks that this package implements."""

from __future__ import annotations

from bmt_core.plugins.hookspecs import hookimpl
from bmt_core.plugins.protocols import Run
from bmt_zero.block import Block


@hookimpl
def bmt_run_started(runtime: Run) -> None:
    """Let other packages make Blocks: see :func:`bmt_params.modules.block_use.make_block`."""
    runtime.make_block = Block
