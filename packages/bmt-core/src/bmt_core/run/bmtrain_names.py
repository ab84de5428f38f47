"""The arguments of ``init_distributed`` for axes: BMTrain's for tensor parallelism, which is the
axis ``tp`` here, and for pipelines, the axis ``pp``; and ``cp_size`` for the axis ``cp``.

Nothing else in core, params, zero and optim knows these axes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from bmt_core.errors import ConfigError
from bmt_core.packages import PACKAGES
from bmt_core.settings import MeshAxis, RunSettings

TENSOR_AXIS = "tp"
PIPELINE_AXIS = "pp"
CONTEXT_AXIS = "cp"
BlockMode = Literal["BLOCK", "PIPE"]

# Axis -> the argument of init_distributed() that asks for it, and the package that provides it.
_ARGUMENTS = {
    TENSOR_AXIS: ("tp_size", "bmt-tp"),
    PIPELINE_AXIS: ("pipe_size", "bmt-pipeline"),
    CONTEXT_AXIS: ("cp_size", "bmt-cp"),
}

ARGUMENTS_OF_OTHERS = {
    "backend": "comm_backend",
    "context_parallel_size": "cp_size",
    "pipeline_parallel_size": "pipe_size",
    "pp_size": "pipe_size",
    "stage": "zero_level",
    "tensor_parallel_size": "tp_size",
    "world_size": "The launcher says how many ranks there are: torchrun --nproc-per-node=N.",
    "zero_stage": "zero_level",
}
"""What other libraries call arguments of ``init_distributed()``: for :func:`explain_keywords`."""


def argument_for(axis: str) -> str:
    """Return the setting that changes the size of ``axis``, as error messages name it.

    >>> argument_for("tp"), argument_for("expert")
    ('tp_size', "the size of 'expert'")
    """
    return _ARGUMENTS[axis][0] if axis in _ARGUMENTS else f"the size of {axis!r}"


def how_to_declare_whole(axis: str) -> str:
    """Return the call, for errors, that declares that each rank along ``axis`` computes a
    module whole.

    >>> how_to_declare_whole("tp"), how_to_declare_whole("expert")
    ('bmt_tp.whole(module)', "set_locality(module, Locality('expert', gradients='whole'))")
    """
    if axis == TENSOR_AXIS:
        return "bmt_tp.whole(module)"
    return f"set_locality(module, Locality({axis!r}, gradients='whole'))"


def how_to_split(axis: str) -> str:
    """Return the call, for errors, that splits a model over the ranks along ``axis``.

    >>> how_to_split("tp"), how_to_split("expert")
    ('bmt_tp.parallelize(model)', "parameters with Locality('expert', split_dim=...)")
    """
    return (
        "bmt_tp.parallelize(model)"
        if axis == TENSOR_AXIS
        else f"parameters with Locality({axis!r}, split_dim=...)"
    )


def settings_of_all_axes() -> RunSettings:
    """Return settings that ask for every axis with an argument, to find out which of these axes
    plugins provide.
    """
    return RunSettings(tp_size=2, pipe_size=2, axis_sizes={CONTEXT_AXIS: 2})


def with_context_axis(axis_sizes: Mapping[str, int] | None, cp_size: int) -> Mapping[str, int]:
    """Return ``axis_sizes`` with the size of ``cp``, if ``cp_size`` asks for it.

    >>> with_context_axis({"ep": 2}, 4), with_context_axis(None, 1)
    ({'ep': 2, 'cp': 4}, {})
    """
    if not isinstance(axis_sizes or {}, Mapping):
        return axis_sizes  # RunSettings refuses it
    given = dict(axis_sizes or {})
    if cp_size != 1 and given.get(CONTEXT_AXIS, cp_size) != cp_size:
        raise ConfigError(
            f"cp_size={cp_size} and axis_sizes={given} ask for two sizes of the axis"
            f" {CONTEXT_AXIS!r}. Give cp_size alone."
        )
    return given if cp_size == 1 else {**given, CONTEXT_AXIS: cp_size}


def check_axes_are_provided(settings: RunSettings, axes: Iterable[MeshAxis]) -> None:
    """Raise :class:`ConfigError` if ``tp_size``, ``pipe_size`` or ``cp_size`` asks for an axis that
    is not among ``axes``.

    The sizes of the first two have no other argument.
    """
    provided = {axis.name for axis in axes}
    for name, (argument, package) in _ARGUMENTS.items():
        if name != CONTEXT_AXIS and name in settings.axis_sizes:
            raise ConfigError(
                f"The size of the axis {name!r} is the argument {argument}: pass it there, not"
                " in axis_sizes."
            )
        size = getattr(settings, argument, settings.axis_sizes.get(name, 1))
        if size > 1 and name not in provided:
            raise ConfigError(
                f"{argument}={size} needs the axis {name!r}, which no active plugin provides. "
                f"Install {package}: {PACKAGES[package].install}; or leave {argument} at its"
                " default, or add a plugin whose hook bmt_mesh_axes provides the axis."
            )


def axes_of_mode(mode: BlockMode) -> tuple[str, ...]:
    """Return the axes along which a Block of ``mode`` is local: a ``"PIPE"`` block lives in one
    stage of a pipeline.

    >>> axes_of_mode("PIPE"), axes_of_mode("BLOCK")
    (('pp',), ())
    """
    if mode not in ("BLOCK", "PIPE"):
        raise ConfigError(f"mode must be 'BLOCK' or 'PIPE', not {mode!r}.")
    return (PIPELINE_AXIS,) if mode == "PIPE" else ()


def mode_of_axes(local_axes: Collection[str]) -> BlockMode:
    """Return BMTrain's mode of a Block that is local along ``local_axes``."""
    return "PIPE" if PIPELINE_AXIS in local_axes else "BLOCK"
