"""States that hold one rank's parts, saved by the optimizer itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bmt_core.errors import CheckpointError
from bmt_core.params.parameter import DistributedParameter
from bmt_core.run import runtime
from bmt_optim import AdamOffloadOptimizer, AdamOptimizer


@pytest.mark.parametrize("kind", [AdamOptimizer, AdamOffloadOptimizer, torch.optim.AdamW])
def test_an_optimizers_own_state_of_another_rank_is_refused(
    run_ranks: Any, kind: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    of_rank_0, of_rank_1 = run_ranks(_load_rank_0s_optimizer_state, 2, kind, str(tmp_path / "optimizer.pt"))
    assert of_rank_0 is None
    assert of_rank_1.startswith("The optimizer state is that of rank 0") and "this is rank 1" in of_rank_1


@pytest.mark.parametrize("world_size", [1, 2])
def test_whole_states_of_plain_torch_are_refused_with_the_way_to_load_them(run_ranks: Any, world_size: int) -> None:
    for error in run_ranks(_load_whole_states, world_size):
        assert error.startswith("The optimizer state has exp_avg of shape (4, 3) for a part of shape (")
        assert "docs/training.md" in error and "scatter_state" in error


def _load_whole_states() -> str:
    plain, part = torch.nn.Parameter(torch.ones(4, 3)), DistributedParameter(torch.ones(4, 3))
    state, optimizer = _stepped(torch.optim.AdamW, plain).state_dict(), torch.optim.AdamW([part])
    with pytest.raises(CheckpointError) as caught:
        optimizer.load_state_dict(state)
    assert not optimizer.state
    return str(caught.value)


def _load_rank_0s_optimizer_state(kind: type[torch.optim.Optimizer], path: str) -> str | None:
    optimizer = _stepped(kind, DistributedParameter(torch.ones(4, 3)))
    state = optimizer.state_dict()
    if runtime.rank() == 0:
        torch.save(state, path)
    runtime.synchronize()
    of_rank_0, error = torch.load(path, weights_only=True), None
    moment = optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"].clone()
    try:
        optimizer.load_state_dict(of_rank_0)
    except CheckpointError as refused:
        error = str(refused)
    optimizer.load_state_dict(state)
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], moment)
    torchs = torch.optim.Adam([DistributedParameter(torch.ones(4, 3))])
    torchs.load_state_dict(state)
    assert torch.equal(torchs.state_dict()["state"][0]["exp_avg"], moment)
    optimizer.load_state_dict({key: of_rank_0[key] for key in ("state", "param_groups")})  # of an older version
    whole = _stepped(kind, torch.nn.Parameter(torch.ones(4, 3)))
    assert whole.state_dict().keys() == {"state", "param_groups"}
    return error


def _stepped(kind: Any, p: torch.nn.Parameter) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = kind([p])
    p.grad = torch.full_like(p, runtime.rank() + 1)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("shape", [(3, 4), (1,)])
def test_torchs_state_of_other_shapes_is_refused(run_ranks: Any, shape: tuple[int, ...]) -> None:
    for error in run_ranks(_load_whole_state, 2, shape):
        assert f"has exp_avg of shape {shape} for a part of shape (6,) of a parameter of shape (4, 3)" in error
        assert "bmt.save_checkpoint" in error


def _load_whole_state(shape: tuple[int, ...]) -> str:
    whole = torch.nn.Parameter(torch.ones(shape))
    whole.grad = torch.ones(shape)
    plain = torch.optim.AdamW([whole])
    plain.step()
    optimizer = torch.optim.AdamW([DistributedParameter(torch.ones(4, 3))])
    with pytest.raises(CheckpointError) as caught:
        optimizer.load_state_dict(plain.state_dict())
    assert not optimizer.state
    return str(caught.value)
