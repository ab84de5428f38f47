"""Adapters that are put into Blocks train, are saved, loaded and averaged like all parameters, also
before the first forward, which they wait for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import bmtrain as bmt
from bmt_testing import on_ranks, run_ranks

SIZE, STEPS = 6, 3


class LowRank(nn.Module):
    """LoRA, as its libraries put it in."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, SIZE, dtype=base.weight.dtype))
        self.b = nn.Parameter(torch.randn(SIZE, 2, dtype=base.weight.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x) + x @ self.a.t() @ self.b.t()
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(SIZE, SIZE)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def adapted(wrap: Callable[[Any], Any], dtype: torch.dtype = torch.float64) -> Any:
    """The frozen model, wrapped, and then with adapters."""
    torch.manual_seed(3)
    model = wrap(Model().to(dtype).requires_grad_(False))
    for layer in model.layers:
        layer[0] = LowRank(layer[0])
    return model


def plain(model: Any) -> Any:
    return model


def trained(model: Any) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def loss_of(model: Any, step: int, ranks: range) -> torch.Tensor:
    """The mean of the losses of ``ranks``."""
    losses = []
    for rank in ranks:
        x = torch.linspace(-1, 1, 2 * SIZE, dtype=torch.float64).view(2, SIZE) * (1 + step + rank)
        dtype = next(iter(model.parameters())).dtype
        losses.append(model(x.to(dtype)).float().square().mean())
    return torch.stack(losses).mean()


def own() -> range:
    return range(bmt.rank(), bmt.rank() + 1)


def everyone() -> range:
    return range(bmt.world_size())


def whole(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def steps(model: Any, manager: Any, first: int, last: int) -> None:
    for step in range(first, last):
        manager.backward(loss_of(model, step, own()))
        manager.step()
        manager.zero_grad()


def managed(optimizer: Any, **options: Any) -> Any:
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer, **options)
    return manager


def expected_of(make: Callable[[Any], Any], last: int = 2 * STEPS) -> dict[str, torch.Tensor]:
    """What plain torch makes of the training, without a break."""
    model = adapted(plain)
    optimizer = make(trained(model))
    for step in range(last):
        optimizer.zero_grad()
        loss_of(model, step, everyone()).backward()
        optimizer.step()
    return whole(model)


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


# Plain torch's, and bmt's if it is another one.
OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    name: (in_torch, in_bmt or in_torch)
    for name, in_torch, in_bmt in (
        ("AdamW", lambda ps: torch.optim.AdamW(ps, lr=0.05), None),
        # Its states are made with it.
        ("Adagrad", lambda ps: torch.optim.Adagrad(ps, lr=0.05), None),
        ("SGD", lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9), None),
        (
            "bmt's AdamW",
            lambda ps: torch.optim.AdamW(ps, lr=0.05),
            lambda ps: bmt.optim.AdamW(ps, lr=0.05, weight_decay=0.01),
        ),
        (
            "bmt's offload",
            lambda ps: torch.optim.AdamW(ps, lr=0.05),
            lambda ps: bmt.optim.AdamOffloadOptimizer(
                ps, lr=0.05, weight_decay=0.01, decoupled_weight_decay=True
            ),
        ),
        # Steps whole tensors, which the manager finds out.
        ("Muon", lambda ps: torch.optim.Muon(ps, lr=0.05), None),
        # Is given groups one by one.
        ("groups", lambda ps: torch.optim.AdamW(ps, lr=0.05), lambda ps: in_groups(ps)),
    )
}


def in_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    made = torch.optim.AdamW(parameters[:1], lr=0.05)
    for parameter in parameters[1:]:
        made.add_param_group({"params": [parameter]})
    return made


@pytest.mark.parametrize(
    ("name", "ranks"), [(name, (2, 4)[i % 3 == 2]) for i, name in enumerate(OPTIMIZERS)]
)
def test_a_training_goes_on_from_its_checkpoint(name: str, ranks: int, tmp_path: Path) -> None:
    run_ranks(trained_and_resumed, ranks, name, tmp_path)


def trained_and_resumed(name: str, tmp_path: Path) -> None:
    in_torch, in_bmt = OPTIMIZERS[name]
    model = adapted(bmt.BMTrainModelWrapper)
    manager = managed(in_bmt(trained(model)))
    steps(model, manager, 0, STEPS)
    bmt.save_checkpoint(tmp_path, model, manager, step=STEPS)
    gathered = manager.state_dict(gather_opt=True, named_parameters=list(model.named_parameters()))
    states = gathered, manager.state_dict()
    saved = whole(model)
    resumed = adapted(bmt.BMTrainModelWrapper)
    found = managed(in_bmt(trained(resumed)))
    bmt.load_checkpoint(tmp_path, resumed, found)
    steps(resumed, found, STEPS, 2 * STEPS)
    expected = expected_of(in_torch)
    # Muon rounds to bfloat16.
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if name == "Muon" else {"rtol": 1e-6, "atol": 1e-8}
    torch.testing.assert_close(whole(resumed), expected, **tolerance)
    for state in states:
        again = adapted(bmt.BMTrainModelWrapper)
        manager = managed(in_bmt(trained(again)))
        manager.load_state_dict(state, named_parameters=list(again.named_parameters()))
        again.load_state_dict(saved)
        steps(again, manager, STEPS, 2 * STEPS)
        close(whole(again), whole(resumed))


@on_ranks(2)
@pytest.mark.parametrize("level", range(4))
def test_a_state_of_the_optimizer_alone_is_that_of_parts_at_every_level(level: int) -> None:
    def wrap(model: Any) -> Any:
        for layer in model.layers:
            bmt.Block(layer, zero_level=level)
        return bmt.BMTrainModelWrapper(model)

    def make(parameters: Any) -> Any:
        return torch.optim.AdamW(parameters, lr=0.05)

    def train(model: Any, optimizer: Any, first: int) -> None:
        for step in range(first, first + STEPS):
            optimizer.zero_grad()
            (loss_of(model, step, own()) / bmt.world_size()).backward()
            optimizer.step()

    model, resumed = adapted(wrap), adapted(wrap)
    optimizer, other = make(trained(model)), make(trained(resumed))
    train(model, optimizer, 0)
    resumed.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    train(resumed, other, STEPS)
    close(whole(resumed), expected_of(make))


@on_ranks(2)
@pytest.mark.parametrize("when", ["before the optimizer", "after the optimizer"])
def test_an_average_made_before_the_first_forward_is_that_of_plain_torch(when: str) -> None:
    def averaged(model: Any, ranks: range, factor: float) -> dict[str, torch.Tensor]:
        first, second = (
            (lambda: torch.optim.SGD(trained(model), lr=0.05), lambda: AveragedModel(model))
            if when == "after the optimizer"
            else (lambda: AveragedModel(model), lambda: torch.optim.SGD(trained(model), lr=0.05))
        )
        made = first(), second()
        optimizer, average = made if when == "after the optimizer" else reversed(made)
        for step in range(STEPS):
            average.update_parameters(model)
            optimizer.zero_grad()
            (factor * loss_of(model, step, ranks)).backward()
            optimizer.step()
        return whole(average.module)

    found = averaged(adapted(bmt.BMTrainModelWrapper), own(), 1 / bmt.world_size())
    close(found, averaged(adapted(plain), everyone(), 1.0))


@on_ranks(2)
def test_a_copy_that_gets_adapters_before_its_first_call_goes_on(tmp_path: Path) -> None:
    def copied() -> Any:
        torch.manual_seed(3)
        base = bmt.BMTrainModelWrapper(Model().double().requires_grad_(False))
        model: Any = copy.deepcopy(base)
        for layer in model.layers:
            layer[0] = LowRank(layer[0])
        return model

    def make(model: Any) -> Any:
        return managed(torch.optim.AdamW(trained(model), lr=0.05))

    model, resumed = copied(), copied()
    manager, found = make(model), make(resumed)
    steps(model, manager, 0, STEPS)
    bmt.save_checkpoint(tmp_path, model, manager)
    bmt.load_checkpoint(tmp_path, resumed, found)
    steps(resumed, found, STEPS, 2 * STEPS)
    close(whole(resumed), expected_of(lambda ps: torch.optim.AdamW(ps, lr=0.05)))


@on_ranks(2)
def test_float32_masters_are_those_of_parts(tmp_path: Path) -> None:
    def make(model: Any) -> Any:
        return managed(torch.optim.AdamW(trained(model), lr=0.05), masters=True)

    models = [adapted(bmt.BMTrainModelWrapper, torch.bfloat16) for _ in range(2)]
    managers = [make(model) for model in models]
    steps(models[0], managers[0], 0, STEPS)
    bmt.save_checkpoint(tmp_path, models[0], managers[0])
    bmt.load_checkpoint(tmp_path, models[1], managers[1])
    for model, manager in zip(models, managers, strict=True):
        steps(model, manager, STEPS, 2 * STEPS)
    assert all(torch.equal(a, b) for a, b in zip(*map(trained, models), strict=True))


@on_ranks(2)
def test_what_waits_for_a_forward_is_saved_whole(tmp_path: Path) -> None:
    model = adapted(bmt.BMTrainModelWrapper)
    bmt.save(model, str(tmp_path / "model.pt"))
    bmt.save(model, str(tmp_path / "parts.safetensors"), non_blocking=True)
    bmt.wait_for_saves()
    bmt.synchronize()
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    close(dict(saved), whole(adapted(plain)))
    assert "layers.0.0.a" in saved
