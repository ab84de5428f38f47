"""The settings of a run (:class:`RunSettings`) and this process's place in it (:class:`Launch`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from bmt_core.errors import ConfigError

if TYPE_CHECKING:
    import torch

DEFAULT_COMM_BACKEND = "torch"
DEFAULT_ZERO_LEVEL = 3
ZERO_LEVELS = (0, 1, 2, 3)
ReduceDtype = Literal["fp32-sum", "param", "fp32"]
DEFAULT_REDUCE_DTYPE: ReduceDtype = "fp32-sum"
GradientsOfRanks = Literal["sum", "mean"]
DEFAULT_GRADIENTS: GradientsOfRanks = "sum"


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The arguments of ``init_distributed``, checked.

    ``pipe_size`` and ``tp_size`` are 1 by default; ``axis_sizes`` has the sizes of other axes, by name, for the plugins that
    provide them; ``timeout`` is in seconds. Ranks compare their settings at start, and must
    have the same, except those in :data:`SETTINGS_OF_A_RANK`.
    """

    seed: int = 0
    pipe_size: int = 1
    num_micro_batches: int | None = None
    tp_size: int = 1
    sequence_dim: int | None = None
    axis_sizes: Mapping[str, int] = field(default_factory=dict)
    zero_level: int = DEFAULT_ZERO_LEVEL
    comm_backend: str | type[object] = DEFAULT_COMM_BACKEND
    device: str | torch.device | None = None
    timeout: float = 1800.0
    pin_cpu: bool = False
    reduce_dtype: ReduceDtype = DEFAULT_REDUCE_DTYPE
    prefetch_bytes: int | None = None
    gradients: GradientsOfRanks = DEFAULT_GRADIENTS
    check_calls: bool | None = None

    def __post_init__(self) -> None:
        for name in ("pipe_size", "tp_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}.")
        for name, size in self.axis_sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"axis_sizes[{name!r}] must be a whole number, at least 1, not {size!r}.")
        if self.num_micro_batches is not None and self.num_micro_batches < 1:
            raise ConfigError(f"num_micro_batches must be at least 1, not {self.num_micro_batches}.")
        if self.sequence_dim not in (None, 0, 1):
            raise ConfigError(
                f"sequence_dim must be 0 (activations are sequence first), 1 (batch first) or None, not {self.sequence_dim!r}."
            )
        check_timeout(self.timeout)
        check_zero_level(self.zero_level)
        check_reduce_dtype(self.reduce_dtype)
        if self.prefetch_bytes is not None and self.prefetch_bytes < 0:
            raise ConfigError(f"prefetch_bytes must be a number of bytes or None, not {self.prefetch_bytes}.")
        if self.gradients not in get_args(GradientsOfRanks):
            raise ConfigError(f"gradients must be one of {get_args(GradientsOfRanks)}, not {self.gradients!r}.")


# A rank may have another device than the others if it is of the same type, which is compared when it is chosen.
SETTINGS_OF_A_RANK = ("device", "timeout", "pin_cpu")
"""The settings that ranks choose for themselves. With any other difference ranks would make other collectives, or begin with or
train another model: they draw the parts of one model from one ``seed``, for example."""


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


def check_timeout(timeout: float) -> None:
    """Raise :class:`ConfigError` unless ``timeout`` is a positive number of seconds."""
    if timeout <= 0:
        raise ConfigError(f"timeout must be a positive number of seconds, not {timeout}.")


def check_zero_level(level: int) -> int:
    """Return ``level``, or raise :class:`ConfigError` when it is none of 0, 1, 2, 3.

    >>> check_zero_level(3)
    3
    """
    if isinstance(level, bool) or level not in ZERO_LEVELS:
        raise ConfigError(f"zero_level must be one of {ZERO_LEVELS}, not {level!r}.")
    return level


def check_reduce_dtype(reduce_dtype: ReduceDtype) -> ReduceDtype:
    """Return ``reduce_dtype``, or raise :class:`ConfigError` if it is not a known way to sum gradients.

    >>> check_reduce_dtype("fp32-sum")
    'fp32-sum'
    """
    if reduce_dtype not in get_args(ReduceDtype):
        raise ConfigError(f"reduce_dtype must be one of {get_args(ReduceDtype)}, not {reduce_dtype!r}.")
    return reduce_dtype


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The ranks and sizes that the launcher (``torchrun``, for example) gave this process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Launch:
        """Read ``RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE``; without the first two it is a run of one rank.

        Raises :class:`ConfigError` if only one of these two is set, for values that are not numbers, and for a rank outside the
        world.

        >>> Launch.from_env({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"})
        Launch(rank=1, world_size=4, local_rank=1, local_world_size=4)
        """
        environ = os.environ if environ is None else environ
        if "RANK" not in environ and "WORLD_SIZE" not in environ:
            return cls()
        rank = _integer(environ, "RANK")
        world_size = _integer(environ, "WORLD_SIZE")
        if not 0 <= rank < world_size:
            raise ConfigError(f"RANK={rank} is outside of WORLD_SIZE={world_size}. Check the launcher.")
        local_world_size = _integer(environ, "LOCAL_WORLD_SIZE", default=world_size)
        local_rank = _integer(environ, "LOCAL_RANK", default=rank % max(local_world_size, 1))
        return cls(rank=rank, world_size=world_size, local_rank=local_rank, local_world_size=local_world_size)


def check_rendezvous(environ: Mapping[str, str] | None = None) -> None:
    """Raise :class:`ConfigError` unless the variables are set by which the ``env://`` rendezvous finds the other ranks."""
    environ = os.environ if environ is None else environ
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} must be set when WORLD_SIZE is above 1. Start with torchrun, which sets them, or set them."
        )


@dataclass(frozen=True)
class MeshAxis:
    """An axis that a package adds to the rank grid; axes lie from outermost to innermost by ``(order, name)``.

    The built-in axis ``dp`` has order 50 and takes the ranks that the others leave. ``shards_data``: whether the ranks along
    the axis see different data. This decides which ranks draw the same dropout masks, and the divisor that turns summed gradients
    into those of the mean loss.
    """

    name: str
    size: int
    order: int
    shards_data: bool = True

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"The axis {self.name!r} must have a size of at least 1, not {self.size}.")


def _integer(environ: Mapping[str, Any], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None:
        if default is not None:
            return default
        raise ConfigError(
            f"{name} is not set although the launcher set others. Start with torchrun, or unset RANK and WORLD_SIZE."
        )
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} must be an integer, not {text!r}.") from None
