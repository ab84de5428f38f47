"""A training that one grid of ranks has saved goes on on another one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from grid_trainings import Grid, differences, load_on, save_on

SLOW = pytest.mark.slow(
    *("bmt-checkpoint", "bmt-optim", "bmt-params", "bmt-pipeline", "bmt-tp", "bmt-zero")
)


@pytest.mark.parametrize(
    ("dtype", "saving", "loading"),
    [
        pytest.param(
            torch.float32,
            Grid((2, 1, 1, 2), (3, 2, 1), False),
            Grid((1, 1, 2, 1), (0, 3, 2), True),
            marks=SLOW,
        ),
        (torch.float32, Grid((1, 2, 2, 1), (3, 2, 1), True), Grid((1, 3, 1, 1), (2, 3, 3), False)),
        pytest.param(
            torch.bfloat16,
            Grid((1, 1, 3, 1), (1, 3, 0), True),
            Grid((2, 2, 1, 1), (2, 3, 3), False),
            marks=SLOW,
        ),
        (
            torch.float32,
            Grid((1, 2, 2, 1), (3, 2, 1), True, states_over_all=True),
            Grid((1, 2, 1, 1), (2, 3, 1), False, states_over_all=True),
        ),
    ],
)
def test_what_one_grid_saved_another_loads_and_goes_on(
    dtype: torch.dtype, saving: Grid, loading: Grid, tmp_path: Path
) -> None:
    folders = {grid: tmp_path / str(grid.ranks) for grid in (saving, loading)}
    saved = {grid: save_on(grid, folder, dtype) for grid, folder in folders.items()}
    found = load_on(loading, [folders[saving], folders[loading]], dtype)
    assert differences(found[0], saved[saving], saved[loading], dtype) == []
    assert differences(found[1], saved[loading], saved[loading], dtype) == []


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    ("saving", "loading"),
    [
        (Grid((1, 1, 2, 1), (3, 2, 1), False), Grid((1, 1, 1, 2), (0, 3, 2), True)),
        (Grid((2, 1, 1, 1), (2, 3, 0), True), Grid((1, 1, 2, 1), (3, 0, 1), False)),
    ],
)
def test_what_gpus_save_beside_their_training_other_grids_load(
    saving: Grid, loading: Grid, tmp_path: Path
) -> None:
    """On a GPU, sums of gradients depend on the order of its threads, so steps that follow are
    equal to rounding only.
    """
    dtype = torch.float32
    saved = save_on(saving, tmp_path / "saved", dtype, "cuda", non_blocking=True)
    on_host = Grid((1, 1, 1, 1), saving.levels, False)
    for grid, device in ((saving, "cuda"), (loading, "cuda"), (on_host, "cpu")):
        (loaded,) = load_on(grid, [tmp_path / "saved"], dtype, device)
        assert differences(loaded, saved, dataclasses.replace(saved), dtype) == []
