"""Run functions on several ranks from a test: each on its own process, with the errors of all ranks
in one message.

    from bmt_testing import on_ranks, run_ranks

    def doubled_rank() -> int:  # at the top level of the test module: every rank imports it
        return 2 * bmt_core.rank()

    def test_rank_is_doubled() -> None:
        assert run_ranks(doubled_rank, 4) == [0, 2, 4, 6]

    @on_ranks(1, 2, 4)  # or the test itself runs on every rank
    def test_every_rank_knows_their_number(world_size: int) -> None:
        assert bmt_core.world_size() == world_size

The function runs between ``init_distributed()`` and ``shutdown()``. The processes are started once
and reused.

:func:`assert_matches_single` compares a training on ranks with one process of plain torch, and
:func:`training_settings` draws the ways to train.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bmt_testing.decorator import on_ranks
    from bmt_testing.gpus import gpu_ranks
    from bmt_testing.matches_single import assert_matches_single
    from bmt_testing.outcome import Outcome, RankError, RankFailure
    from bmt_testing.pool import RankPool, rank_pool, run_ranks
    from bmt_testing.settings import TrainingSettings
    from bmt_testing.strategies import property_settings, training_settings

__all__ = [
    "Outcome",
    "RankError",
    "RankFailure",
    "RankPool",
    "TrainingSettings",
    "assert_matches_single",
    "gpu_ranks",
    "on_ranks",
    "property_settings",
    "rank_pool",
    "run_ranks",
    "training_settings",
]

_FILES = {
    "Outcome": "outcome",
    "RankError": "outcome",
    "RankFailure": "outcome",
    "RankPool": "pool",
    "TrainingSettings": "settings",
    "assert_matches_single": "matches_single",
    "gpu_ranks": "gpus",
    "on_ranks": "decorator",
    "property_settings": "strategies",
    "rank_pool": "pool",
    "run_ranks": "pool",
    "training_settings": "strategies",
}


def __getattr__(name: str) -> Any:
    # Imported at first use: every pytest where this package is installed imports its plugin, and
    # need not import torch, which takes seconds.
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_FILES[name]}"), name)
