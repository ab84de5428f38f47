"""The hooks of bmt. A plugin package implements some of them in one module and names that module in
its entry points::

    [project.entry-points.bmt]
    my-package = "my_package.plugin"

All hooks but the last three are called once, at the start, and return classes or objects with a
unique ``name``. No hook is called inside a training step. ``docs/hooks.md`` has a section for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from collections.abc import Sequence

    import click
    import torch

    from bmt_core.comm.observer import ObserverContext, RunObserver
    from bmt_core.comm.protocols import CommBackend
    from bmt_core.ops.provider import KernelProvider
    from bmt_core.plugins.protocols import FileFormat, Run
    from bmt_core.settings import MeshAxis, RunSettings

PROJECT = "bmt"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def bmt_mesh_axes(config: RunSettings) -> Sequence[MeshAxis]:
    """Return the axes that this plugin adds to the grid of ranks in a run with these settings.

    The grid sorts all axes by (order, name), the lowest order outermost. An axis of size 1 may be
    left out. Tested by ``--bmt-axis`` of ``bmt_testing.conformance``.
    """
    raise NotImplementedError


@hookspec
def bmt_comm_backends() -> Sequence[type[CommBackend]]:
    """Return communication backends, chosen by ``init_distributed(comm_backend="name")`` or
    ``BMT_COMM_BACKEND``, tested by ``--bmt-comm-backend`` of ``bmt_testing.conformance``.
    """
    raise NotImplementedError


@hookspec
def bmt_kernel_providers() -> Sequence[type[KernelProvider]]:
    """Return kernel providers. Each operation comes from the first provider of the device that has
    it, else from plain torch. Tested by ``--bmt-kernels`` of ``bmt_testing.conformance``.
    """
    raise NotImplementedError


@hookspec
def bmt_optimizers() -> Sequence[type[torch.optim.Optimizer]]:
    """Return optimizers, chosen by ``bmt.optim.create("name", params)``, tested by
    ``--bmt-optimizer`` of ``bmt_testing.conformance``.
    """
    raise NotImplementedError


@hookspec
def bmt_checkpoint_formats() -> Sequence[type[FileFormat]]:
    """Return subclasses of ``bmt_checkpoint.CheckpointFormat``, chosen by name or by the suffix of
    a file, tested by ``--bmt-checkpoint-format`` of ``bmt_testing.conformance``.
    """
    raise NotImplementedError


@hookspec
def bmt_cli_commands() -> Sequence[click.Command]:
    """Return commands (objects, not classes) of the program ``bmt``."""
    raise NotImplementedError


@hookspec
def bmt_run_observer(context: ObserverContext) -> RunObserver | None:
    """Return what watches the calls of a run of several ranks, or None. Only one plugin may
    return one.
    """
    raise NotImplementedError


@hookspec
def bmt_run_started(runtime: Run) -> None:
    """Called at the end of ``init_distributed()``. ``runtime`` is what
    ``bmt_core.current()`` returns.
    """
    raise NotImplementedError


@hookspec
def bmt_run_stopping(runtime: Run) -> None:
    """Called at the beginning of ``shutdown()``, when communication still works."""
    raise NotImplementedError
