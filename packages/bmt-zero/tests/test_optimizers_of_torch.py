"""Optimizers of torch on parameters of Blocks: built before wrapping, or that pass over empty
parts; what a step may not do.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _foreach_supported_types
from zero_models import Layer

from bmt_core import ConfigError
from bmt_core.run.runtime import current, world_size
from bmt_testing import on_ranks
from bmt_zero import Block, BMTrainModelWrapper, gathered_memory
from cells import cells


def seeded_layer() -> Any:
    torch.manual_seed(0)
    return Layer(6, 9)


def data() -> torch.Tensor:
    return torch.linspace(-1, 1, 12).view(2, 6)


@on_ranks(1)
@cells("level", [0, 1, 3])
def test_an_optimizer_built_before_wrapping_trains_the_shards(level: int) -> None:
    plain, layer = seeded_layer(), seeded_layer()
    optimizers = [torch.optim.Adam(module.parameters(), lr=0.1) for module in (plain, layer)]
    Block(layer, zero_level=level)
    for _ in range(3):
        for module, optimizer in zip((plain, layer), optimizers, strict=True):
            optimizer.zero_grad()
            module(data()).sum().backward()
            optimizer.step()
    torch.testing.assert_close(dict(layer.state_dict()), dict(plain.state_dict()))


@on_ranks(2)
def test_the_level_may_change_between_steps() -> None:
    plain, block = seeded_layer(), Block(seeded_layer(), zero_level=3)
    optimizers = [
        torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in (plain, block)
    ]
    resident = []
    for block._zero_level in (3, 2, 1, 3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        block(data()).sum().backward()
        (2 * plain(data()).sum()).backward()
        for optimizer in optimizers:
            optimizer.step()
        resident.append(gathered_memory.current > 0)
    with pytest.raises(ConfigError, match="zero_level cannot change from 3 to 0"):
        block._zero_level = 0
    torch.testing.assert_close(dict(block.state_dict()), dict(plain.state_dict()))
    assert resident == [False, False, True, False]


@on_ranks(2)
@cells("level", range(4))
def test_stepping_between_forward_and_backward_is_an_error(level: int) -> None:
    block = Block(Layer(6, 9), zero_level=level)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    block(torch.ones(2, 6)).sum().backward()
    loss = block(torch.ones(2, 6)).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="changed between its forward and its backward"):
        loss.backward()


@on_ranks(2)
def test_torch_optimizers_take_their_foreach_path() -> None:
    block = Block(nn.Linear(4, 4))
    parameters = list(block.parameters())
    # What torch asks before it chooses: on a GPU the answer decides between one kernel and one
    # per parameter.
    assert all(type(parameter) in _foreach_supported_types for parameter in parameters)
    called: set[str] = set()

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            called.add(func.__name__)
            return func(*args, **(kwargs or {}))

    block(torch.ones(2, 4)).sum().backward()
    optimizer = torch.optim.SGD(parameters, lr=0.1, foreach=True)
    with Watch():
        optimizer.step()
    assert {name for name in called if name.startswith("_foreach")} == {"_foreach_add_"}


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.used(x)
        return y


@on_ranks(2)
def test_weight_decay_reaches_what_a_called_block_did_not_use_as_the_readme_says() -> None:
    called, not_called = Block(HalfUsed()), Block(HalfUsed())
    before = called.unused.weight.gather().clone()
    optimizer = torch.optim.AdamW(
        [*called.parameters(), *not_called.parameters()], lr=0.1, weight_decay=0.5
    )
    called(torch.ones(3, 6)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(called.unused.weight.gather(), before * (1 - 0.1 * 0.5))
    assert all(parameter.grad is None for parameter in not_called.parameters())


class SkipsEmpty(torch.optim.Optimizer):
    """Passes over empty parameters, as it may."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.numel() and parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.1)


class Loop:
    """What a loop does that has no optimizer of torch, which would tell of its steps."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.parameters:
            if parameter.numel():
                parameter.sub_(parameter.grad, alpha=0.1)


@on_ranks(4, timeout=30)
@cells("level", range(4))
@cells(("kind", "passes"), [(Loop, 3), (SkipsEmpty, 1), (SkipsEmpty, 3)])
def test_ranks_without_elements_agree_about_gathering_again(
    kind: Any, passes: int, level: int
) -> None:
    """In three steps with a pass each, or with the gradients of one pass and outputs read
    after each.
    """
    torch.manual_seed(0)
    plain, layer = nn.Linear(2, 2), nn.Linear(2, 2)
    layer.load_state_dict(plain.state_dict())
    block = Block(layer, zero_level=level)
    optimizers = [kind(module.parameters()) for module in (plain, block)]
    x = torch.ones(1, 2)
    for step in range(3):
        for module, optimizer, parts in zip(
            (plain, block), optimizers, (1, world_size()), strict=True
        ):
            if step < passes:
                optimizer.zero_grad()
                (module(x).square().sum() / parts).backward()
            optimizer.step()
        if passes == 1:
            with torch.no_grad():
                torch.testing.assert_close(block(x), plain(x))
    torch.testing.assert_close(dict(block.state_dict()), dict(plain.state_dict()))


def train_by_lbfgs(
    model: nn.Module, rows: slice, as_keyword: bool, **options: Any
) -> list[torch.Tensor]:
    """Take four steps with ``rows`` of each batch; return the losses and the parameters."""
    optimizer: Any = torch.optim.LBFGS(model.parameters(), max_iter=4, **options)
    losses = []
    for step in range(4):
        batch = torch.arange(48.0, dtype=torch.float64).view(8, 6).mul(1.7 + step // 2).sin()[rows]

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(batch).tanh() - batch.cos()).square().mean()
            loss.backward()
            return loss

        losses.append(optimizer.step(closure=closure) if as_keyword else optimizer.step(closure))
    return [*(loss.detach() for loss in losses), *model.state_dict().values()]


@on_ranks(1, 4, init={"gradients": "mean"})
@cells("as_keyword", [False, True])
@cells("options", [{"tolerance_change": 1e-3}, {"line_search_fn": "strong_wolfe"}])
def test_ranks_with_all_values_step_by_a_closure_as_one_process(
    options: Any, as_keyword: bool
) -> None:
    rank, ranks = current().rank, world_size()
    plain = nn.Sequential(seeded_layer(), seeded_layer()).double()
    expected = train_by_lbfgs(plain, slice(None), as_keyword, **options)
    model = nn.Sequential(*[Block(seeded_layer().double(), zero_level=0) for _ in range(2)])
    rows = slice(8 * rank // ranks, 8 * (rank + 1) // ranks)
    torch.testing.assert_close(train_by_lbfgs(model, rows, as_keyword, **options), expected)


@on_ranks(1, 2, init={"gradients": "mean"})
@cells("level", [1, 3])
def test_a_step_by_a_closure_is_refused_on_parts_with_what_to_do(level: int) -> None:
    model = BMTrainModelWrapper(nn.Sequential(Block(seeded_layer().double(), zero_level=level)))
    if world_size() == 1:
        train_by_lbfgs(model, slice(None), False)
        return
    with pytest.raises(ConfigError, match=r"also needs a closure.*zero_level=0.*AdamW") as caught:
        train_by_lbfgs(model, slice(None), False)
    assert "optim.whole" not in str(caught.value)
