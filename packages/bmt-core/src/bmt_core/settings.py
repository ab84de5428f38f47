"""The settings of a run (:class:`RunSettings`), and the axes of its grid of ranks
(:class:`MeshAxis`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal, get_args

from bmt_core.errors import ConfigError

if TYPE_CHECKING:
    import torch

DEFAULT_COMM_BACKEND = "torch"
DEFAULT_ZERO_LEVEL = 3
DEFAULT_TIMEOUT = 1800.0
ZERO_LEVELS = (0, 1, 2, 3)
ReduceDtype = Literal["fp32-sum", "param", "fp32"]
DEFAULT_REDUCE_DTYPE: ReduceDtype = "fp32-sum"
GradientsOfRanks = Literal["sum", "mean"]
DEFAULT_GRADIENTS: GradientsOfRanks = "sum"
ShardSize = int | Literal["host"]
OptimizerShards = Literal["all"]


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The arguments of ``init_distributed``, checked.

    Ranks compare their settings, the axes of the grid, ``BMT_KERNELS`` and the version of torch
    before they connect. They must have the same, except for those in :data:`SETTINGS_OF_A_RANK`.
    """

    seed: int = 0
    """Every rank seeds torch, ``random`` and numpy (if it is importable) with it, so that all draw
    the same first values. Dropout inside of bmt's modules draws from a stream of its own on each
    rank that computes other tokens: see :mod:`bmt_params.modules.outermost_call`."""
    pipe_size: int = 1
    pipe_enabled: bool = False
    """Whether ``pipe_size`` was given, even as 1."""
    num_micro_batches: int | None = None
    tp_size: int = 1
    shard_size: ShardSize | None = None
    """Hybrid sharding: over how many of the ranks that see different data parameters, gradients and
    optimizer states are sharded. A number of ranks nearest each other, which must divide the number
    of these ranks, or ``"host"`` for those of one host. The others have the same parts. Gathers
    stay among these ranks; gradients are summed among them, and then over the ranks with the same
    part. By default all of them shard, and nothing is there twice."""
    optimizer_shards: OptimizerShards | None = None
    """``"all"`` shards parameters, ``.grad`` and optimizer states over all ranks that see different
    data nevertheless, but for Blocks of level 0. Blocks then keep another part of their parameters,
    in the parameters' dtype, from which the ranks of ``shard_size`` gather. It is gathered from the
    other ranks after each backward pass and each change of the parameters, which all ranks must
    make. Parameters outside of Blocks are gathered from all ranks. It needs ``shard_size``."""
    sequence_dim: int | None = None
    """The dim of activations between tensor-parallel layers of which each rank along ``tp`` has a
    part: 0 for (sequence / tp, batch, features), 1 for (batch, sequence / tp, features), as
    BMTrain's examples have them. With None it is dim 0; then a model whose activations may be
    either is warned about."""
    axis_sizes: Mapping[str, int] = field(default_factory=dict)
    """The sizes of other axes by name. An axis that no plugin provides is an error."""
    zero_level: int = DEFAULT_ZERO_LEVEL
    comm_backend: str | type[object] = DEFAULT_COMM_BACKEND
    device: str | torch.device | None = None
    timeout: float = DEFAULT_TIMEOUT
    """In seconds."""
    pin_cpu: bool = False
    """Bind the process to its share of the host's cores. Nothing else changes its CPU settings."""
    reduce_dtype: ReduceDtype = DEFAULT_REDUCE_DTYPE
    """The default of Blocks for sums of half-precision gradients. ``"fp32-sum"`` sends half
    precision and sums in float32, ``"param"`` sends and sums half precision, ``"fp32"`` sends and
    sums float32, twice the bytes."""
    prefetch_bytes: int | None = None
    gradients: GradientsOfRanks = DEFAULT_GRADIENTS
    """``.grad`` is either the ``"sum"`` of the gradients of all ranks, or their ``"mean"`` over the
    ranks that see different data, as with torch's DistributedDataParallel. Loops that call
    ``loss.backward()`` and ``optimizer.step()`` themselves need ``"mean"``. An ``OptimManager``
    gives the gradients of the mean loss with both: with ``"sum"`` it divides the loss."""
    check_calls: bool | None = None
    """Whether every collective's number, name and size are compared with the other ranks', so that
    a rank that is alone in a collective, or in another one, is an error on all ranks
    (:class:`CallError`) and does not hang. With None all collectives are compared on the CPU, and
    on GPUs the first 200 of each group (fewer with more than 32 ranks); none if the rendezvous is a
    file, which would grow with every comparison. A rank that waits 30 s for others names them in a
    warning. It is bmt-watch that compares calls; without it none are."""

    def __post_init__(self) -> None:
        if not isinstance(self.axis_sizes, Mapping):
            raise ConfigError(
                "axis_sizes must be a dict of sizes by axis, such as {'ep': 2}, not"
                f" {self.axis_sizes!r}."
            )
        if not hasattr(self.seed, "__index__"):
            raise ConfigError(f"seed must be a whole number, not {self.seed!r}.")
        counts = {"pipe_size": self.pipe_size, "tp_size": self.tp_size}
        counts.update((f"axis_sizes[{name!r}]", size) for name, size in self.axis_sizes.items())
        if self.num_micro_batches is not None:
            counts["num_micro_batches"] = self.num_micro_batches
        if isinstance(self.shard_size, str):
            if self.shard_size != "host":
                raise ConfigError(
                    'shard_size must be a number of ranks or "host" (those of one host), not'
                    f" {self.shard_size!r}."
                )
        elif self.shard_size is not None:
            counts["shard_size"] = self.shard_size
        if self.optimizer_shards not in (None, *get_args(OptimizerShards)):
            raise ConfigError(
                'optimizer_shards must be "all" (all ranks that see different data) or None (those'
                f" of shard_size), not {self.optimizer_shards!r}."
            )
        for name, count in counts.items():
            if isinstance(count, bool) or not isinstance(count, int):
                raise ConfigError(f"{name} must be a whole number, at least 1, not {count!r}.")
            if count < 1:
                raise ConfigError(f"{name} must be at least 1, not {count}.")
        if self.sequence_dim not in (None, 0, 1):
            raise ConfigError(
                "sequence_dim must be 0 (activations are sequence first), 1 (batch first) or None,"
                f" not {self.sequence_dim!r}."
            )
        if not is_timeout(self.timeout):
            raise ConfigError(
                f"timeout must be a positive number of seconds, not {self.timeout!r}."
            )
        check_zero_level(self.zero_level)
        check_reduce_dtype(self.reduce_dtype)
        if self.prefetch_bytes is not None and self.prefetch_bytes < 0:
            raise ConfigError(
                f"prefetch_bytes must be a number of bytes or None, not {self.prefetch_bytes}."
            )
        if self.gradients not in get_args(GradientsOfRanks):
            raise ConfigError(
                f"gradients must be one of {get_args(GradientsOfRanks)}, not {self.gradients!r}."
            )


# A rank may have another device than the others if it is of the same type, which is compared when
# it is chosen.
SETTINGS_OF_A_RANK = ("device", "timeout", "pin_cpu", "pipe_enabled")
"""The settings that ranks choose for themselves. With any other difference ranks would make other
collectives, or begin with or train another model: they draw the parts of one model from one
``seed``, for example."""


def common_settings(settings: RunSettings) -> dict[str, str]:
    """Return the settings that must be the same on every rank, as texts by name.

    >>> common_settings(RunSettings(tp_size=2))["tp_size"]
    '2'
    """
    values = {each.name: getattr(settings, each.name) for each in fields(settings)}
    values["axis_sizes"] = dict(sorted(settings.axis_sizes.items()))
    if not isinstance(settings.comm_backend, str):
        values["comm_backend"] = getattr(settings.comm_backend, "name", settings.comm_backend)
    return {name: str(value) for name, value in values.items() if name not in SETTINGS_OF_A_RANK}


def is_timeout(timeout: object) -> bool:
    """Whether ``timeout`` is a positive number of seconds, and not infinite."""
    return isinstance(timeout, int | float) and 0 < timeout < math.inf


def check_zero_level(level: int) -> int:
    """Return ``level``, or raise :class:`ConfigError` when it is none of 0, 1, 2, 3.

    >>> check_zero_level(3)
    3
    """
    if isinstance(level, bool) or level not in ZERO_LEVELS:
        raise ConfigError(f"zero_level must be one of {ZERO_LEVELS}, not {level!r}.")
    return level


def check_reduce_dtype(reduce_dtype: ReduceDtype) -> ReduceDtype:
    """Return ``reduce_dtype``, or raise :class:`ConfigError` if it is not a known way to
    sum gradients.

    >>> check_reduce_dtype("fp32-sum")
    'fp32-sum'
    """
    if reduce_dtype not in get_args(ReduceDtype):
        raise ConfigError(
            f"reduce_dtype must be one of {get_args(ReduceDtype)}, not {reduce_dtype!r}."
        )
    return reduce_dtype


@dataclass(frozen=True)
class MeshAxis:
    """An axis that a package adds to the rank grid; axes lie from outermost to innermost
    by ``(order, name)``.

    The built-in axis ``dp`` has order 50 and takes the ranks that the others leave.
    ``shards_data``: whether the ranks along the axis read different batches. This decides the
    divisor that turns summed gradients into those of the mean loss.
    ``splits_sum``: whether their losses and gradients are parts of one sum, because they compute
    other rows or other tokens; by default as ``shards_data``. Such ranks draw different dropout
    masks. Along ``cp`` ranks read one batch, and each computes a part of its tokens; along ``tp``
    they compute the same loss.
    """

    name: str
    size: int
    order: int
    shards_data: bool = True
    splits_sum: bool | None = None

    def __post_init__(self) -> None:
        if self.splits_sum is None:
            object.__setattr__(self, "splits_sum", self.shards_data)
        elif self.shards_data and not self.splits_sum:
            raise ConfigError(
                f"The axis {self.name!r} has shards_data=True and splits_sum=False: the losses of"
                " ranks that read different batches are parts of one sum. Leave splits_sum out, or"
                " give shards_data=False."
            )
        if self.size < 1:
            raise ConfigError(
                f"The axis {self.name!r} must have a size of at least 1, not {self.size}."
            )
