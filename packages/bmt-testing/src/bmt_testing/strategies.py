"""``training_settings``: a strategy of hypothesis that draws :class:`TrainingSettings`;
``property_settings``: how hypothesis tries them.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from bmt_core.plugins import Registry
from bmt_core.settings import RunSettings
from bmt_testing.settings import DtypeName, TrainingSettings

if TYPE_CHECKING:
    import hypothesis
    from hypothesis.strategies import DrawFn, SearchStrategy

_MANY_BYTES = 10**9  # all Blocks of a test's model are gathered ahead


def training_settings(
    *,
    ranks: Sequence[int] = (1, 2, 4),
    axes: Mapping[str, Sequence[int]] | None = None,
    dtypes: Sequence[DtypeName] = ("float64", "float32", "bfloat16"),
    param_dtypes: Sequence[DtypeName | None] = (None,),
    levels: Sequence[int] = (0, 1, 2, 3),
    max_micro_batches: int = 3,
) -> SearchStrategy[TrainingSettings]:
    """Return a strategy that draws settings of a training, for ``hypothesis.given``.

    The simplest, to which hypothesis shrinks a failure, are the first of ``ranks``, ``dtypes`` and
    ``levels``, no recomputation, nothing frozen, one micro-batch. ``axes`` has sizes of the axes of
    the grid that the model can be split along, such as ``{"tp": (1, 2), "pp": (1, 2)}``: see
    :func:`assert_matches_single`. Axes of other plugins whose ranks see different data need nothing
    from the model, and are drawn wherever a plugin offers them in every run. Clipping and summed
    gradients are drawn where bmt-optim is installed, checkpoints where bmt-checkpoint is.
    ``param_dtypes`` are for models whose code takes arguments and buffers of another dtype than
    that of its parameters.
    """
    given = {"ranks": ranks, "dtypes": dtypes, "param_dtypes": param_dtypes, "levels": levels}
    for name, values in given.items():
        if not values:
            raise ValueError(
                f"training_settings({name}=...) needs at least one, such as {name}=(1,)."
            )
    from hypothesis import strategies as st  # the ranks do without

    drawn_axes = dict.fromkeys(_offered_axes(), ranks) | dict(axes or {})
    has_manager = importlib.util.find_spec("bmt_optim") is not None
    has_checkpoints = importlib.util.find_spec("bmt_checkpoint") is not None

    @st.composite
    def draw_settings(draw: DrawFn) -> TrainingSettings:
        number = draw(st.sampled_from(ranks))
        micro_batches = draw(st.integers(1, max_micro_batches))
        dtype = draw(st.sampled_from(dtypes))
        is_half = dtype in ("bfloat16", "float16")
        numbers = st.lists(st.integers(1, 15), max_size=3, unique=True).map(sorted).map(tuple)
        sizes = _draw_axes(draw, drawn_axes, number)
        kinds = ("sum",) if "cp" in sizes else ("mean", "sum") if has_manager else ("mean",)
        gradients = draw(st.sampled_from(kinds))
        data_size = number // math.prod(sizes.values())
        shard_size = draw(st.sampled_from((None, *_divisors_below(data_size))))
        return TrainingSettings(
            ranks=number,
            axes=sizes,
            shard_size=shard_size,
            optimizer_shards=None if shard_size is None else draw(st.sampled_from((None, "all"))),
            dtype=dtype,
            param_dtype=draw(st.sampled_from(param_dtypes)),
            levels=tuple(draw(st.lists(st.sampled_from(levels), min_size=1, max_size=3))),
            recompute=tuple(draw(st.lists(st.booleans(), min_size=1, max_size=2))),
            keep=cast(
                "Any", draw(st.sampled_from((None, "attention", "products", 1_000, 100_000)))
            ),
            frozen=cast("Any", tuple)(draw(st.lists(numbers, min_size=1, max_size=3))),
            micro_batches=micro_batches,
            no_sync=micro_batches > 1 and draw(st.booleans()),
            gradients=cast("Any", gradients),
            max_norm=draw(st.sampled_from((None, 0.01, 0.1))) if gradients == "sum" else None,
            optimizer=cast("Any", draw(st.sampled_from(("sgd", "adam")))),
            prefetch_bytes=draw(st.sampled_from((None, 0, _MANY_BYTES))),
            reduce_dtype=cast(
                "Any", draw(st.sampled_from(_REDUCE_DTYPES if is_half else ("fp32-sum",)))
            ),
            reload=draw(st.booleans()) if has_checkpoints else False,
            seed=draw(st.integers(0, 3)),
        )

    return draw_settings()


def property_settings(max_examples: int = 20) -> hypothesis.settings:
    """Return settings of hypothesis for tests that train: ``max_examples`` trainings without
    deadline. Of a failure the simplest is looked for and shown, and no others: hypothesis by
    default goes on to look for other errors, and to vary the simplest example to explain it, which
    takes longer than all the rest.

    >>> property_settings(50).max_examples
    50
    """
    import hypothesis

    return hypothesis.settings(
        max_examples=max_examples,
        deadline=None,
        report_multiple_bugs=False,
        phases=set(hypothesis.Phase) - {hypothesis.Phase.explain},
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )


def _divisors_below(number: int) -> list[int]:
    return [size for size in range(1, number) if number % size == 0]


_REDUCE_DTYPES = ("fp32-sum", "param", "fp32")


def _draw_axes(draw: DrawFn, axes: Mapping[str, Sequence[int]], ranks: int) -> dict[str, int]:
    """Draw sizes of ``axes`` whose product divides ``ranks``; without those of size 1."""
    from hypothesis import strategies as st

    sizes = {}
    for name, allowed in axes.items():
        size = draw(
            st.sampled_from([1, *sorted({one for one in allowed if one > 1 and ranks % one == 0})])
        )
        ranks //= size
        if size > 1:
            sizes[name] = size
    return sizes


def _offered_axes() -> list[str]:
    """Return the axes that installed plugins offer in every run and whose ranks see
    different data.
    """
    return [axis.name for axis in Registry.load().mesh_axes(RunSettings()) if axis.shards_data]
