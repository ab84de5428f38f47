"""Which optimizers may have sharded parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from managed import Unaware

from bmt_core.errors import ConfigError
from bmt_core.params.parameter import DistributedParameter
from bmt_optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager
from bmt_testing import on_ranks


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


ELEMENTWISE: list[Any] = [AdamOptimizer, AdamOffloadOptimizer, torch.optim.AdamW, torch.optim.SGD, Unaware, OwnMuon]
REASONS: dict[Any, str] = {
    torch.optim.Adafactor: "of which each rank has a 1-D slice: it keeps the second moment by rows",
    torch.optim.LBFGS: "",
    AdamW8bit: "in blocks",
    FusedLAMB: "",
    Declared: "bmt_elementwise = False",
    Tuned: "",
}


@on_ranks(1, 2)
def test_optimizers_that_need_whole_parameters_are_refused_for_sharded_ones() -> None:
    p, manager = DistributedParameter(torch.ones(4, 3)), OptimManager()
    for kind, reason in REASONS.items():
        with pytest.raises(ConfigError, match=f"^{kind.__name__} cannot train sharded .*{reason}") as caught:
            manager.add_optimizer(kind([p]))
        assert "bmt_elementwise = True" in str(caught.value) and not manager.optimizers
    for kind in ELEMENTWISE:
        OptimManager().add_optimizer(kind([p]))


def test_any_optimizer_may_have_ordinary_parameters() -> None:
    for kind in [*ELEMENTWISE, *REASONS]:
        OptimManager().add_optimizer(kind([torch.nn.Parameter(torch.ones(4, 3))]))
