"""Which optimizers may have sharded parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from managed import Unaware

from bmt_core.errors import ConfigError
from bmt_core.params.parameter import DistributedParameter
from bmt_optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager


class AdamW8bit(torch.optim.AdamW):
    """Stands for those of other packages, which are known by such names."""


class FusedLAMB(Unaware):
    """As apex calls it."""


class Declared(Unaware):
    bmt_elementwise = False


class Tuned(torch.optim.Adafactor):
    """A name that does not tell: what it inherits from does."""


class OwnMuon(torch.optim.LBFGS):
    """Gathers whole parameters, and says so."""

    bmt_elementwise = True


def _added(is_sharded: bool) -> dict[str, str]:
    whole = torch.ones(4, 3)
    messages = {}
    kinds: list[Any] = [
        *(AdamOptimizer, AdamOffloadOptimizer, torch.optim.AdamW, torch.optim.SGD, Unaware, OwnMuon),
        *(torch.optim.Adafactor, torch.optim.LBFGS, AdamW8bit, FusedLAMB, Declared, Tuned),
    ]
    for kind in kinds:
        p = DistributedParameter(whole) if is_sharded else torch.nn.Parameter(whole)
        manager = OptimManager()
        try:
            manager.add_optimizer(kind([p]))
        except ConfigError as error:
            messages[kind.__name__] = str(error)
            assert not manager.optimizers
    return messages


@pytest.mark.parametrize("world_size", [1, 2])
def test_optimizers_that_need_whole_parameters_are_refused_for_sharded_ones(run_ranks: Any, world_size: int) -> None:
    for messages in run_ranks(_added, world_size, True):
        assert messages.keys() == {"Adafactor", "LBFGS", "AdamW8bit", "FusedLAMB", "Declared", "Tuned"}
        assert messages["Adafactor"].startswith(
            "Adafactor cannot train sharded parameters, of which each rank has a 1-D slice: it keeps the second moment by rows"
        )
        assert "in blocks" in messages["AdamW8bit"] and "bmt_elementwise = False" in messages["Declared"]
        assert all("bmt_elementwise = True" in message for message in messages.values())


def test_any_optimizer_may_have_ordinary_parameters() -> None:
    assert _added(False) == {}
