"""Optimizers over whole tensors train models in Blocks, over stages and with split layers as they
train plain ones.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from whole_trainings import (
    KINDS,
    assert_alike,
    by_manager,
    expected,
    expected_in_plain_loop,
    in_plain_loop,
)

from bmt_core.errors import ConfigError
from bmt_core.plugins.hookspecs import hookimpl
from bmt_core.run.runtime import current
from bmt_optim import create
from bmt_testing import on_ranks, run_ranks
from bmt_zero import Block

MIXED = (0, 1, 2, 3)
IN_FLOAT32 = 2e-6
"""The tolerance of a training that is clipped by a norm, which is formed in float32."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("ranks", "levels"), [(1, MIXED), (2, MIXED), (4, MIXED), (4, (3, 3, 3, 3))]
)
def test_a_manager_trains_as_plain_torch(kind: str, ranks: int, levels: tuple[int, ...]) -> None:
    wanted = expected(kind)
    for found in run_ranks(by_manager, ranks, kind, levels)[:1]:
        assert_alike(found, wanted, IN_FLOAT32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_plain_loop_with_mean_gradients_trains_as_plain_torch(kind: str, ranks: int) -> None:
    wanted = expected_in_plain_loop(kind)
    for found in run_ranks(in_plain_loop, ranks, kind, MIXED, init={"gradients": "mean"})[:1]:
        assert_alike(found, wanted, 1e-10)


class NamedMuon(torch.optim.Muon):
    """Goes by shapes, where torch's goes by ``ndim``, which is right for parts."""

    name = "muon"

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        if any(len(p.shape) != 2 for group in self.param_groups for p in group["params"]):
            raise ValueError("NamedMuon takes 2D tensors.")


class Plugin:
    @hookimpl
    def bmt_optimizers(self) -> list[Any]:
        return [NamedMuon]


@on_ranks(1, 2, own_run=True)  # to which it adds a plugin
def test_a_class_of_matrices_by_name_is_refused_at_every_level_with_what_to_do() -> None:
    current().registry.register(Plugin(), "muon")
    for level in range(4):
        block = Block(nn.Linear(4, 3, bias=False), zero_level=level)
        with pytest.raises(ConfigError, match=r"takes whole ones: bmt\.optim\.whole\(NamedMuon"):
            create("muon", block.parameters())
