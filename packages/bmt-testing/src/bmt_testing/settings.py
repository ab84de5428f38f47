"""``TrainingSettings``: how a model is trained on several ranks, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from bmt_core.settings import (
    GradientsOfRanks,
    OptimizerShards,
    ReduceDtype,
    check_zero_level,
)

DtypeName = Literal["float64", "float32", "bfloat16", "float16"]
OptimizerName = Literal["sgd", "adam"]
KeepName = Literal["attention", "products"]


@dataclass(frozen=True, kw_only=True, repr=False)
class TrainingSettings:
    """How :func:`assert_matches_single` trains a model on ranks. Defaults are the simplest:
    one rank.

    The settings name no module, so they fit any model: what is given per Block, step or parameter
    is repeated. The ``repr`` shows what is not a default, and is a Python expression.

    >>> TrainingSettings(ranks=2, levels=(0, 3))
    TrainingSettings(ranks=2, levels=(0, 3))
    >>> [TrainingSettings(levels=(0, 3)).level_of(block) for block in range(3)]
    [0, 3, 0]
    """

    ranks: int = 1
    axes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of axes of the grid, such as ``{"tp": 2}``; the other ranks are data parallel."""
    shard_size: int | None = None
    """See ``init_distributed``: over how many of the data-parallel ranks to shard."""
    optimizer_shards: OptimizerShards | None = None
    """See ``init_distributed``: ``"all"`` shards optimizer states over all of these ranks."""
    dtype: DtypeName = "float64"
    """Of parameters, buffers and batches."""
    param_dtype: DtypeName | None = None
    """See ``BMTrainModelWrapper``; None computes in ``dtype``."""
    levels: tuple[int, ...] = (0,)
    """ZeRO levels of the Blocks, one after the other, from the beginning again after the last."""
    recompute: tuple[bool, ...] = (False,)
    """Which Blocks are recomputed in backward, in the same way."""
    keep: KeepName | int | None = None
    """What those that are recomputed keep of their forward: see ``bmt_zero.Block``. Bytes are those
    of each.
    """
    frozen: tuple[tuple[int, ...], ...] = ((),)
    """For each step, in the same way, the numbers of the parameters that are frozen:
    see :meth:`frozen_in`.
    """
    micro_batches: int = 1
    """Batches of a step, whose gradients are added up."""
    no_sync: bool = False
    """Whether all but the last of them run inside ``bmt_zero.no_sync``."""
    gradients: GradientsOfRanks = "mean"
    """``"mean"``: a plain loop with ``loss.backward()``. ``"sum"``: one with
    an ``OptimManager``.
    """
    max_norm: float | None = None
    """To which gradients are clipped; only an ``OptimManager`` does."""
    optimizer: OptimizerName = "sgd"
    """Torch's SGD with momentum, or Adam."""
    prefetch_bytes: int | None = None
    """See ``init_distributed``."""
    reduce_dtype: ReduceDtype = "fp32-sum"
    """See ``init_distributed``; it matters to half types."""
    reload: bool = False
    """Whether model and optimizer are saved after the first step and loaded into new ones,
    by bmt-checkpoint.
    """
    seed: int = 0
    """Seed of the model's values; batches of other seeds are others."""

    def __post_init__(self) -> None:
        for name in ("ranks", "micro_batches"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a number, at least 1, not {value!r}.")
        for name in ("levels", "recompute", "frozen"):
            value = getattr(self, name)
            if not isinstance(value, tuple) or not value:
                raise ValueError(f"{name} must be a tuple with at least one entry, not {value!r}.")
        for level in self.levels:
            check_zero_level(level)
        for name, known in (
            ("dtype", get_args(DtypeName)),
            ("gradients", get_args(GradientsOfRanks)),
            ("optimizer", get_args(OptimizerName)),
            ("reduce_dtype", get_args(ReduceDtype)),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {known}, not {getattr(self, name)!r}.")
        if self.param_dtype not in (None, *get_args(DtypeName)):
            raise ValueError(
                f"param_dtype must be None or one of {get_args(DtypeName)}, not"
                f" {self.param_dtype!r}."
            )
        if self.max_norm is not None and self.gradients != "sum":
            raise ValueError(
                f"max_norm={self.max_norm} needs gradients='sum': an OptimManager clips, and with"
                " gradients='mean' the loop has none."
            )

    def __repr__(self) -> str:
        default = _defaults()
        shown = ((each.name, getattr(self, each.name)) for each in fields(self))
        chosen = (f"{name}={value!r}" for name, value in shown if value != default[name])
        return f"{type(self).__name__}({', '.join(chosen)})"

    @property
    def computed_dtype(self) -> DtypeName:
        """The dtype in which forward and backward compute."""
        return self.param_dtype or self.dtype

    def level_of(self, block: int) -> int:
        """Return the ZeRO level of Block number ``block``."""
        return self.levels[block % len(self.levels)]

    def is_recomputed(self, block: int) -> bool:
        """Whether Block number ``block`` is recomputed in backward."""
        return self.recompute[block % len(self.recompute)]

    def frozen_in(self, step: int, count: int) -> set[int]:
        """Return which of ``count`` parameters are frozen in ``step``.

        Numbers from ``count`` on begin with 0 again. Parameter 0 is never frozen, so that there is
        always one to train.
        """
        return {number % count for number in self.frozen[step % len(self.frozen)]} - {0}

    def batch_seed(self, step: int, micro_batch: int) -> int:
        """Return the seed of a batch."""
        return 1000 * self.seed + step * self.micro_batches + micro_batch


def arguments_of_axes(sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return the arguments of ``init_distributed`` for axes of these sizes.

    >>> arguments_of_axes({"tp": 2, "ep": 4})
    {'axis_sizes': {'ep': 4}, 'tp_size': 2}
    """
    names = {"tp": "tp_size", "pp": "pipe_size"}
    own = {names[name]: size for name, size in sizes.items() if name in names}
    others = {name: size for name, size in sizes.items() if name not in names}
    return {**({"axis_sizes": others} if others else {}), **own}


def _defaults() -> dict[str, Any]:
    # Not a TrainingSettings(): its __repr__ asks here.
    return {
        each.name: {} if each.name == "axes" else each.default for each in fields(TrainingSettings)
    }
