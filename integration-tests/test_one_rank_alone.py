"""What one rank alone does to a model while the others train: an error on every rank, which
names both.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import bmtrain as bmt
from bmt_core.errors import CallError
from bmt_core.run import runtime
from bmt_testing import run_ranks
from bmt_watch import call_watch


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.head(x)
        return result


def train(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


def alone(action: Callable[[nn.Module], object]) -> str:
    """Return what a rank raises when rank 0 does ``action`` where the others train."""
    runtime.init_distributed(device="cpu", timeout=300)
    model = bmt.BMTrainModelWrapper(Model())
    train(model)
    try:
        (action if bmt.rank() == 0 else train)(model)
        bmt.synchronize()
    except CallError as error:
        return str(error)
    finally:
        runtime.shutdown()
    return ""


@contextmanager
def quick_watch() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_watch, "PERIOD", 0.1)
        patch.setattr(call_watch, "LOOK_AFTER", 0.2)
        yield


@quick_watch()
def all_actions(folder: Path) -> dict[str, str]:
    return {
        "save": alone(lambda model: bmt.save(model, str(folder / "model.pt"))),
        "state_dict": alone(lambda model: model.state_dict()),
        "print": alone(lambda model: print(model.head.weight)),  # type: ignore[union-attr]
        "forward": alone(lambda model: (model(torch.ones(2, 4)), train(model))),
    }


def test_save_state_dict_print_and_forward_on_one_rank_name_what_each_rank_does(
    tmp_path: Path,
) -> None:
    for rank, said in enumerate(run_ranks(all_actions, 2, tmp_path, init=None, timeout=300)):
        for text in said.values():
            assert text.startswith(
                ("Ranks have entered different calls: ", "Ranks wait for each other in different ")
            )
            assert "rank 0" in text and "rank 1" in text, (rank, text)
            assert "head.weight" in text or "layers.0.weight" in text, (rank, text)
        assert f"at the end of saving {tmp_path}/model.pt" in said["save"]
        assert "for layers.0.weight of shape (4, 4)" in said["state_dict"]
        assert "for head.weight of shape (3, 4)" in said["print"]


@quick_watch()
def fewer_batches_on_rank_1(level: int, then: Callable[[nn.Module], object] | None) -> str:
    """Return what a rank raises when rank 1 has two batches, and the others have four."""
    runtime.init_distributed(device="cpu", zero_level=level, timeout=300)
    model = bmt.BMTrainModelWrapper(Model())
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        for _ in range(2 if bmt.rank() == 1 else 4):
            manager.zero_grad()
            manager.backward(model(torch.ones(2, 4)).sum())
            manager.step()
        if then is not None:
            then(model)
    except CallError as error:
        assert "GLHF" not in "".join(traceback.format_exception(error))  # gloo's own words
        return str(error)
    finally:
        runtime.shutdown()
    return ""


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        bmt.sum_loss(model(torch.ones(2, 4)).sum())


@pytest.mark.parametrize(("level", "world_size"), [(0, 4), (3, 2)])
def test_a_loop_with_fewer_batches_is_named_with_the_remedy(level: int, world_size: int) -> None:
    said = run_ranks(fewer_batches_on_rank_1, world_size, level, None, init=None, timeout=300)
    assert said.pop(1) == ""
    for text in said:
        assert text.startswith("Rank 1 has ended after 2 steps, and rank ")
        assert "give every rank the same number of them, for example by DistributedSampler" in text


@pytest.mark.parametrize("level", [0, 3])
def test_a_loop_with_fewer_batches_is_among_the_causes_of_other_calls(level: int) -> None:
    """Rank 1 evaluates where the other still trains."""
    for text in run_ranks(fewer_batches_on_rank_1, 2, level, evaluate, init=None, timeout=300):
        assert "different calls: " in text
        assert ", and for a loop that has fewer batches on some ranks." in text
