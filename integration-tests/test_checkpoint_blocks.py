"""Checkpoints of sharded blocks of every level, and of whole training runs with the
optimizer manager.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bmt_checkpoint
import bmt_core
import bmt_params
from bmt_core.errors import CheckpointError
from bmt_optim import AdamOptimizer, OptimManager
from bmt_optim.lr_scheduler import Cosine
from bmt_testing import run_ranks
from bmt_zero import Block, BMTrainModelWrapper, TransformerBlockList

VOCABULARY, WIDTH = 11, 5


class Layer(nn.Module):
    """Sizes that no number of ranks divides, a parameter smaller than most worlds, a buffer, a
    low dtype.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.up = nn.Linear(WIDTH, 7, dtype=dtype)
        self.down = nn.Linear(7, WIDTH, bias=False, dtype=dtype)
        self.gain = nn.Parameter(torch.ones(1, dtype=dtype))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.gain * self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self, layers: int = 4, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, dtype=dtype)
        self.layers = nn.ModuleList(Layer(dtype) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def plain_model(seed: int, **options: Any) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Model(**options)


def sharded_model(seed: int, **options: Any) -> Model:
    """Blocks of all levels side by side; the rest sharded alone."""
    model = plain_model(seed, **options)
    for level, layer in enumerate(model.layers):
        Block(layer, zero_level=level % 4, use_checkpoint=level % 2 == 0)
    return BMTrainModelWrapper(model)


TOKENS = torch.arange(12).view(3, 4) % VOCABULARY


def logits_of(model: Model) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS)  # type: ignore[no-any-return]


def loss_of(model: Model) -> torch.Tensor:
    return nn.functional.cross_entropy(
        model(TOKENS[:, :-1]).float().flatten(0, 1), TOKENS[:, 1:].flatten()
    )


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


@pytest.mark.parametrize(("saving", "loading"), [(1, 4), (2, 1), (4, 2)])
def test_blocks_of_every_level_load_at_any_world_size(
    saving: int, loading: int, tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"
    expected = run_ranks(train_and_save, saving, str(path))[0]
    plain = plain_model(seed=2)
    state = torch.load(path, weights_only=True)
    assert list(state) == list(plain.state_dict())
    assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
    plain.load_state_dict(state)
    assert torch.equal(logits_of(plain), expected)
    for loaded in run_ranks(load_and_run, loading, str(path)):
        assert torch.equal(loaded, expected)


def test_checkpoint_of_the_plain_model_loads_into_blocks(tmp_path: Path) -> None:
    plain = plain_model(seed=3)
    torch.save(plain.state_dict(), tmp_path / "model.pt")
    for loaded in run_ranks(load_and_run, 4, str(tmp_path / "model.pt")):
        assert torch.equal(loaded, logits_of(plain))


def save_between_backward_and_step(path: str) -> None:
    model, undisturbed = sharded_model(seed=1), sharded_model(seed=1)
    for saved in (model, undisturbed):
        for _ in range(2):  # accumulated
            loss_of(saved).backward()
            if saved is model:
                bmt_checkpoint.save(saved, path)
    for one, other in zip(model.parameters(), undisturbed.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_saving_leaves_gradients_alone(tmp_path: Path) -> None:
    run_ranks(save_between_backward_and_step, 2, str(tmp_path / "model.pt"))


def load_what_does_not_fit(path: str) -> tuple[str, bool]:
    model = sharded_model(seed=1)
    before = logits_of(model)
    with pytest.raises(CheckpointError) as caught:
        bmt_checkpoint.load(model, path)
    return str(caught.value), torch.equal(logits_of(model), before)


def test_block_that_does_not_fit_is_an_error_on_every_rank_and_changes_nothing(
    tmp_path: Path,
) -> None:
    state = plain_model(seed=2).state_dict()
    state["layers.2.up.weight"] = torch.zeros(WIDTH, 7)
    del state["layers.3.gain"]
    torch.save(state, tmp_path / "model.pt")
    for message, is_unchanged in run_ranks(
        load_what_does_not_fit, 2, str(tmp_path / "model.pt"), timeout=30
    ):
        assert "layers.2.up.weight: the file has shape (5, 7), the model (7, 5)" in message
        assert "only the model has: layers.3.gain" in message
        assert is_unchanged


class ListModel(bmt_params.DistributedModule):
    """As scripts for BMTrain write it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = bmt_params.DistributedParameter(torch.randn(VOCABULARY, WIDTH))
        self.layers = TransformerBlockList([Layer() for _ in range(2)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weight = self.embedding
        return self.layers(nn.functional.embedding(tokens, weight)) @ weight.t()  # type: ignore[no-any-return]


def save_list(path: str) -> list[str]:
    model = ListModel()
    bmt_checkpoint.save(model, path)
    other = ListModel()
    assert not torch.equal(logits_of(other), logits_of(model))  # type: ignore[arg-type]
    bmt_checkpoint.load(other, path)
    assert torch.equal(logits_of(other), logits_of(model))  # type: ignore[arg-type]
    return list(torch.load(path, weights_only=True))


def test_block_lists_keep_the_names_of_the_plain_model(tmp_path: Path) -> None:
    names = [
        "embedding",
        *(f"layers.{i}.{name}" for i in range(2) for name in Layer().state_dict()),
    ]
    assert run_ranks(save_list, 2, str(tmp_path / "model.pt")) == [names] * 2


# ---- whole training runs ----


def make_run(dtype: torch.dtype) -> tuple[Model, OptimManager]:
    model = sharded_model(seed=1, dtype=dtype)
    optimizer = AdamOptimizer(model.parameters(), lr=0.05, weight_decay=0.1)
    manager = OptimManager(loss_scale=256, loss_scale_steps=3)
    manager.add_optimizer(optimizer, Cosine(optimizer, 0.05, warmup_iter=2, end_iter=10))
    return model, manager


def train(model: Model, manager: OptimManager, steps: int, noise: float) -> list[float]:
    losses = []
    for _ in range(steps):
        manager.zero_grad()
        loss = loss_of(model) + noise * torch.rand(())
        manager.backward(loss)
        manager.clip_grad_norm(manager.optimizers[0].param_groups, 1.0)
        manager.step()
        losses.append(loss.item())
    return losses


def everything(model: Model, manager: OptimManager) -> Any:
    """All numbers of a run; those of the optimizer whole, by name."""
    manager.read_outcome()
    parameters = {name: value.float().tolist() for name, value in model.state_dict().items()}
    state = manager.state_dict(gather_opt=True, named_parameters=list(model.named_parameters()))
    numbers = {**state, "logical": _listed(state["logical"])}
    return parameters, numbers


def _listed(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _listed(part) for key, part in value.items()}
    return [_listed(part) for part in value] if isinstance(value, (list, tuple)) else value


def uninterrupted(folder: str, dtype: torch.dtype, noise: float = 0.01) -> Any:
    model, manager = make_run(dtype)
    train(model, manager, 4, noise)
    bmt_checkpoint.save_checkpoint(folder, model, manager, step=4)
    saved = everything(model, manager)
    return saved, train(model, manager, 4, noise), everything(model, manager)


def resumed(folder: str, dtype: torch.dtype, noise: float = 0.01) -> Any:
    torch.rand(bmt_core.rank() + 1)
    model, manager = make_run(dtype)
    assert bmt_checkpoint.load_checkpoint(folder, model, manager)["step"] == 4
    loaded = everything(model, manager)
    return loaded, train(model, manager, 4, noise), everything(model, manager)


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [(2, torch.bfloat16), (4, torch.float32)],
)
def test_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    world_size: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    expected = run_ranks(uninterrupted, world_size, str(tmp_path), dtype)
    assert run_ranks(resumed, world_size, str(tmp_path), dtype) == expected


@pytest.mark.parametrize(
    ("saving", "loading", "dtype"),
    [
        (2, 4, torch.bfloat16),
        (4, 1, torch.float32),
    ],
)
def test_run_resumes_at_another_world_size(
    saving: int, loading: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    (saved, losses, _), *_ = run_ranks(uninterrupted, saving, str(tmp_path), dtype, noise=0)
    (loaded, resumed_losses, _), *_ = run_ranks(resumed, loading, str(tmp_path), dtype, noise=0)
    assert loaded == saved  # every parameter, moment, master, scale and schedule, bit for bit
    # What follows differs by the order in which gradients are summed.
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert resumed_losses == pytest.approx(losses, rel=tolerance)


# ---- states that do not fit ----


def spoiled_states(state: dict[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """What -> (what the error must say, the state of a manager with that fault)."""
    logical = state["logical"]
    first, *rest = logical["parameters"]
    values = logical["parameters"][first]

    def with_logical(**changes: Any) -> dict[str, Any]:
        return {**state, "logical": {**logical, **changes}}

    def with_first(**changes: Any) -> dict[str, Any]:
        return with_logical(parameters={**logical["parameters"], first: {**values, **changes}})

    damaged, key = (
        "The optimizer state is damaged",
        next(k for k, v in values.items() if isinstance(v, dict)),
    )  # names a tensor
    return {
        "no state": (damaged, {"steps": 3}),
        "parameters text": (damaged, with_logical(parameters="all")),
        "parameter text": (
            damaged,
            with_logical(parameters={**logical["parameters"], first: "text"}),
        ),
        "groups text": (damaged, with_logical(groups=["lr 0.1"])),
        "more groups": (
            "parameter groups",
            with_logical(groups=[[*logical["groups"][0], {"lr": 1.0}]]),
        ),
        "schedulers": ("with a scheduler", {**state, "lr_schedulers": []}),
        "names": (
            "nothing about 1 of",
            with_logical(parameters={name: logical["parameters"][name] for name in rest}),
        ),
        "tensor text": (f"{key} of {first!r} is the text", with_first(**{key: "text"})),
        "shape": ("of shape (2, 2)", with_first(**{key: torch.zeros(2, 2)})),
    }


def load_spoiled(folder: str, count: int) -> list[tuple[str, bool]]:
    model, manager = make_run(torch.bfloat16)
    train(model, manager, 1, 0)
    results = []
    for i in range(count):
        before = everything(model, manager)
        with pytest.raises(CheckpointError) as caught:
            bmt_checkpoint.load_checkpoint(f"{folder}/{i}/step-4", model, manager)
        results.append((str(caught.value), everything(model, manager) == before))
    return results


def test_an_optimizer_state_that_does_not_fit_is_an_error_on_every_rank_and_changes_nothing(
    tmp_path: Path,
) -> None:
    run_ranks(uninterrupted, 2, str(tmp_path), torch.bfloat16)
    whole = torch.load(tmp_path / "step-4" / "training.pt", weights_only=True)
    spoiled = spoiled_states(whole["optimizer_state"])
    for i, (_, state) in enumerate(spoiled.values()):
        shutil.copytree(tmp_path / "step-4", tmp_path / str(i) / "step-4")
        torch.save(
            {**whole, "optimizer_state": state}, tmp_path / str(i) / "step-4" / "training.pt"
        )
    for results in run_ranks(load_spoiled, 2, str(tmp_path), len(spoiled), timeout=60):
        for (what, (part, _)), (message, unchanged) in zip(spoiled.items(), results, strict=True):
            assert part in message and unchanged, (what, message, unchanged)
