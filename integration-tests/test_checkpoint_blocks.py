"""Checkpoints of sharded blocks of every level, and states of a manager that do not fit it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bmt_checkpoint
from bmt_core.errors import CheckpointError
from bmt_core.run.runtime import rank
from bmt_optim import AdamOptimizer, OptimManager
from bmt_testing import on_ranks, run_ranks
from bmt_zero import Block, BMTrainModelWrapper

VOCABULARY, WIDTH = 11, 5


class Layer(nn.Module):
    """Sizes that no number of ranks divides, a parameter smaller than most worlds, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.gain * self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def plain_model(seed: int) -> Model:
    torch.manual_seed(seed)
    return Model()


def sharded_model(seed: int) -> Model:
    """Blocks of all levels side by side; the rest sharded alone."""
    model = plain_model(seed)
    for level, layer in enumerate(model.layers):
        Block(layer, zero_level=level % 4, use_checkpoint=level % 2 == 0)
    return BMTrainModelWrapper(model)


TOKENS = torch.arange(12).view(3, 4) % VOCABULARY


def logits_of(model: Model) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS)  # type: ignore[no-any-return]


def loss_of(model: Model) -> torch.Tensor:
    return nn.functional.cross_entropy(model(TOKENS[:, :-1]).flatten(0, 1), TOKENS[:, 1:].flatten())


def train_and_save(path: str) -> torch.Tensor:
    model = sharded_model(seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    bmt_checkpoint.save(model, path)
    return logits_of(model)


def load_and_run(path: str) -> torch.Tensor:
    model = sharded_model(seed=2)
    logits_of(model)  # level 1 has its old parameters in memory now
    bmt_checkpoint.load(model, path)
    assert model.head._parameters["weight"] is model.embedding._parameters["weight"]
    return logits_of(model)


def test_blocks_of_every_level_load_at_another_world_size(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    expected = run_ranks(train_and_save, 4, str(path))[0]
    plain = plain_model(seed=2)
    state = torch.load(path, weights_only=True)
    assert list(state) == list(plain.state_dict())
    assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
    plain.load_state_dict(state)
    assert torch.equal(logits_of(plain), expected)
    for loaded in run_ranks(load_and_run, 2, str(path)):
        assert torch.equal(loaded, expected)


@on_ranks(2)
def test_saving_leaves_gradients_alone(tmp_path: Path) -> None:
    model, undisturbed = sharded_model(seed=1), sharded_model(seed=1)
    for saved in (model, undisturbed):
        for _ in range(2):  # accumulated
            loss_of(saved).backward()
            if saved is model:
                bmt_checkpoint.save(saved, str(tmp_path / "model.pt"))
    for one, other in zip(model.parameters(), undisturbed.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad)


@on_ranks(2)
def test_a_state_with_a_text_or_one_more_group_is_refused_and_changes_nothing() -> None:
    model, manager = sharded_model(seed=1), OptimManager()
    optimizer = AdamOptimizer(model.parameters(), lr=0.05)
    manager.add_optimizer(optimizer)
    manager.backward(loss_of(model))
    manager.step()
    names = list(model.named_parameters())
    before = manager.state_dict(gather_opt=True, named_parameters=names)
    logical = before["logical"]
    parameters = dict(logical["parameters"])
    if rank() == 0:  # which has the parameters
        parameters[names[0][0]] = {**parameters[names[0][0]], "exp_avg": "text"}
    for spoiled, said in (
        ({"parameters": parameters}, "state of '.*' has exp_avg no tensor"),
        ({"groups": [[*logical["groups"][0], {"lr": 1.0, "params": []}]]}, "one more group"),
    ):
        with pytest.raises(CheckpointError, match=said):
            state: dict[str, Any] = {**before, "logical": {**logical, **spoiled}}
            manager.load_state_dict(state, named_parameters=names)
    after = manager.state_dict(gather_opt=True, named_parameters=names)["logical"]["parameters"]
    torch.testing.assert_close(after, logical["parameters"], rtol=0, atol=0)
