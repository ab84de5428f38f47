"""Layers of torchao that compute in float8 on GPUs, in Blocks: as in plain torch with the same
layers, on the same GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from delays import PLACES, delayed
from float8_trainings import check, check_tied, losses_and_gradients, model_of, trained_in_runs
from torch import nn

from bmt_core.run.runtime import rank, world_size
from bmt_testing import run_ranks
from bmt_zero import Block, BMTrainModelWrapper

pytest.importorskip("torchao", reason="float8 layers are torchao's")

ON_GPUS = [pytest.param(size, marks=pytest.mark.gpu(size)) for size in (1, 2)]


@pytest.mark.parametrize("ranks", ON_GPUS)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "gathered"])
def test_on_gpus_float8_layers_train_like_plain_torch(
    ranks: int, recompute: bool, recipe: str
) -> None:
    # Several roundings of bfloat16, of 2**-9 each.
    init = {"device": "cuda"}
    run_ranks(check, ranks, recipe, recompute, False, 0.01, init=init, timeout=120)


@pytest.mark.parametrize("ranks", ON_GPUS)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "gathered"])
def test_on_gpus_float8_layers_with_tied_weights_train_like_plain_torch(
    ranks: int, recipe: str
) -> None:
    run_ranks(check_tied, ranks, recipe, init={"device": "cuda"}, timeout=120)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "gathered"])
def test_on_gpus_a_training_goes_on_as_if_it_had_not_ended(recipe: str, tmp_path: Path) -> None:
    settings = (recipe, torch.bfloat16, "cuda")
    expected, values = trained_in_runs(tmp_path / "whole", [(2, 6)], *settings)
    losses, found = trained_in_runs(tmp_path / "parts", [(2, 2), (2, 4)], *settings)
    assert losses == expected
    torch.testing.assert_close(found, values, rtol=0, atol=0)
    losses, _ = trained_in_runs(tmp_path / "other", [(2, 2), (1, 4)], *settings)
    assert losses[:2] == expected[:2] and losses == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("ranks", ON_GPUS)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "gathered"])
def test_on_gpus_compiled_float8_layers_train_like_plain_torch(
    ranks: int, recompute: bool, recipe: str
) -> None:
    # Compiled in other pieces, a layer rounds elsewhere to bfloat16, and then to float8: gradients
    # were up to 0.09 apart on H200.
    init = {"device": "cuda"}
    run_ranks(check, ranks, recipe, recompute, True, 0.2, init=init, timeout=300)


def losses_of_blocks(recipe: str, watch: Callable[[nn.Module], None] | None) -> list[float]:
    """Train Blocks of levels 3, 1, 2 and 3; return this rank's losses."""
    model = model_of(recipe)
    for level, layer in zip((3, 1, 2, 3), model.layers, strict=True):
        Block(layer, use_checkpoint=level == 2, zero_level=level)
    BMTrainModelWrapper(model)
    if watch is not None:
        watch(model)
    losses = losses_and_gradients(model, [rank()], world_size())["losses"]
    return [float(loss) for loss in losses]


def check_delays() -> None:
    expected = losses_of_blocks("tensorwise", None)
    for where in PLACES:
        with delayed(where) as watch:
            assert losses_of_blocks("gathered", watch) == expected, where


@pytest.mark.gpu(2)
def test_delays_change_nothing_in_gathers_in_float8() -> None:
    """To the bit: a layer that gathers in bfloat16 rounds to the same numbers."""
    run_ranks(check_delays, 2, init={"device": "cuda"}, timeout=240)
