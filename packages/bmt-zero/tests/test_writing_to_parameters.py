"""Values written to sharded parameters: random fills of parts, rules that go by the shape,
gathered copies.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.init import xavier_uniform_  # by name, before a run has started
from zero_models import Root, wrapped_root

from bmt_core import ConfigError
from bmt_core.run.runtime import world_size
from bmt_params import DistributedModule, DistributedParameter
from bmt_testing import on_ranks
from bmt_zero import Block, BMTrainModelWrapper
from cells import cells

needs_numpy = pytest.mark.skipif(find_spec("numpy") is None, reason="numpy is not installed")


def part_of(model: nn.Module, name: str) -> Any:
    """This rank's part of a parameter: outside of Blocks, reading the attribute gathers it."""
    return dict(model.named_parameters())[name]


def loaded(value: Any) -> Any:
    torch.save(value, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=True)


FILLS: list[Callable[[Any], Any]] = [
    nn.init.normal_,
    nn.init.uniform_,
    nn.init.trunc_normal_,
    lambda t: t.data.normal_(0, 0.02),
    lambda t: nn.init.normal_(t.data),
    lambda t: t.bernoulli_(),
    lambda t: t.cauchy_(),
    lambda t: t.exponential_(),
    lambda t: t.geometric_(0.5),
    lambda t: t.log_normal_(),
    lambda t: t.random_(),
]


@on_ranks(1, 2)
@cells("name", ["layers.0.weight", "head.weight"])
def test_random_fills_of_parts_point_to_init_parameters(name: str, world_size: int) -> None:
    part = part_of(wrapped_root(), name)
    for fill in FILLS:
        before = part.detach().clone()
        with torch.no_grad():
            if world_size == 1:
                fill(part)
                continue
            with pytest.raises(ConfigError, match=r"init_parameters\(model\)"):
                fill(part)
        assert torch.equal(part.detach(), before)


@on_ranks(1, 2)
@cells("name", ["layers.0.weight", "head.weight"])
def test_random_numbers_like_a_part_are_refused_outside_of_steps(
    name: str, world_size: int
) -> None:
    part = part_of(wrapped_root(), name)
    for like in (part, part.data):
        for draw in (torch.randn_like, torch.rand_like, lambda p: torch.randint_like(p, 2)):
            with (
                nullcontext()
                if world_size == 1
                else pytest.raises(ConfigError, match=r"same numbers .* whole_parameters\(module\)")
            ):
                assert draw(like).shape == part.shape
            assert draw(part.detach()).shape == part.shape

    class Noisy(torch.optim.SGD):
        def step(self) -> None:  # type: ignore[override]
            self.drawn = torch.randn_like(self.param_groups[0]["params"][0])

    optimizer = Noisy([part], lr=0.1)
    optimizer.step()
    assert optimizer.drawn.shape == part.shape


@needs_numpy
@on_ranks(2)
@cells("name", ["layers.0.weight", "head.weight"])
def test_what_may_be_written_to_parts_and_read_of_them(name: str) -> None:
    part = part_of(wrapped_root(), name)
    nn.init.constant_(part, 2.0)
    part.data.mul_(2)
    assert part.detach().eq(4.0).all()
    # What cannot be known, and the way for parts that each rank draws for itself.
    part.detach().normal_()
    kept = [
        copy.deepcopy(part.data),
        part.data + 0,
        nn.Parameter(part.data).detach(),
        part.data.numpy(),
    ]
    assert all(
        torch.equal(torch.as_tensor(each), part.detach()) for each in [*kept, loaded(part.data)]
    )
    assert type(kept[0]) is type(kept[1]) is torch.Tensor


@on_ranks(2)
def test_replicated_parameters_and_those_on_the_meta_device_are_filled() -> None:
    nn.init.normal_(Block(nn.Linear(3, 3), zero_level=0).weight)
    with torch.device("meta"):
        unfilled = Root()
    BMTrainModelWrapper(
        unfilled, init=lambda module: [p.data.normal_() for p in module.parameters(recurse=False)]
    )


RULES: list[Callable[[Any], Any]] = [
    xavier_uniform_,
    nn.init.xavier_normal_,
    nn.init.kaiming_uniform_,
    nn.init.kaiming_normal_,
    nn.init.orthogonal_,
    nn.init.eye_,
    lambda t: nn.init.sparse_(t, 0.5),
]


@on_ranks(1, 2)
def test_rules_that_go_by_a_parameter_s_shape_point_to_init_parameters(world_size: int) -> None:
    model, whole = wrapped_root(), nn.Linear(3, 3)
    weight, bias = part_of(model, "head.weight"), part_of(model, "head.bias")
    before = weight.detach().clone()
    for rule in RULES:
        with pytest.raises(ConfigError, match=r"init_parameters\(model\)") as caught:
            rule(weight)
        assert "of shape (5, 3)" in str(caught.value)
        if world_size > 1:
            with pytest.raises(ConfigError, match=r"init_parameters\(model\)"):
                rule(weight.data)
        rule(whole.weight)
        # What it says in plain torch, too.
        with pytest.raises(ValueError, match="dimensions") as of_torch:
            rule(bias)
        assert "init_parameters" not in str(of_torch.value)
    assert torch.equal(weight.detach(), before)


def trained() -> tuple[Any, torch.Tensor]:
    """A model after a forward and a backward, and the whole value of its head's weight."""
    model = wrapped_root()
    with torch.no_grad():
        model.head.weight[1] = 2.0  # takes effect before the first forward
    model(torch.ones(2, 3)).sum().backward()
    return model, part_of(model, "head.weight").gather().detach().clone()


WRITES: list[Callable[[Any, torch.Tensor], Any]] = [
    lambda head, value: nn.init.zeros_(head.weight),
    lambda head, value: nn.init.xavier_uniform_(head.weight),
    lambda head, value: head.weight.data.normal_(),
    lambda head, value: head.weight.data[0].zero_(),
    lambda head, value: head.weight.detach().mul_(2),
    lambda head, value: torch.add(value, value, out=head.weight.data),
    lambda head, value: nn.functional.relu(head.weight.data, inplace=True),
    lambda head, value: torch._foreach_zero_([head.weight.data]),
    lambda head, value: head.weight.data.__setitem__(0, 1.0),
    lambda head, value: setattr(head.weight, "data", value),
    lambda head, value: head.weight.requires_grad_(False),
    lambda head, value: setattr(head.weight, "requires_grad", False),
    lambda head, value: [part.zero_() for part in head.weight.data.split(2)],
]


@on_ranks(1, 2)
def test_a_write_to_a_gathered_copy_of_a_trained_model_raises() -> None:
    model, value = trained()
    for write in WRITES:
        with pytest.raises(ConfigError, match="gathered copy"):
            write(model.head, value)
    assert torch.equal(model.head.weight, value) and value[1].eq(2.0).all()


@needs_numpy
@on_ranks(2)
def test_a_gathered_copy_is_read_as_any_tensor() -> None:
    model, value = trained()
    read = model.head.weight
    (grad,) = torch.autograd.grad((read.t().sum(0) * 2).sum(), [read])
    assert (
        grad.eq(2).all()
        and type(read + 1) is type(read.sum()) is torch.Tensor
        and read.shape == (5, 3)
    )
    mine = torch.zeros(5, 3).copy_(read.detach())
    assert torch.equal(
        copy.deepcopy(mine.add_(read.detach())), 2 * value
    ) and read.detach().numpy().shape == (5, 3)
    assert torch.equal(loaded(read), value)
    with torch.inference_mode():
        assert torch.equal(model.head.weight, value)


class Writes(nn.Module):
    """Its forward writes to its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(max=0.5)
        return x * self.weight


class OwnWrites(DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = DistributedParameter(torch.ones(3))

    forward = Writes.forward


@on_ranks(1, 2)
def test_writes_in_forward_raise_where_the_rank_keeps_something_else() -> None:
    makes: list[Callable[[], Any]] = [
        OwnWrites,
        lambda: Block(Writes(), True, 3),
        lambda: Block(Writes(), False, 1),
    ]
    said = []
    for make in makes:
        module = make()
        try:
            # torch refuses to read a Block's weight after the write.
            with torch.set_grad_enabled(make is OwnWrites):
                module(torch.ones(2, 3))
        except ConfigError as error:
            said.append(str(error))
    # The buffer of a group of one rank is what the rank keeps, and the write takes effect.
    assert len(said) == (1 if world_size() == 1 else 3) and all(
        "wrote to" in text for text in said
    ), said


class WritesWithGradients(nn.Module):
    """Its forward writes to a weight of a layer of it, by ``write``."""

    def __init__(self, write: Callable[[nn.Parameter], object]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self.second.weight)
        return self.second(self.first(x))


IN_PLACE: dict[Callable[[nn.Parameter], object], str] = {
    lambda weight: weight.mul_(0.5): r"wrote to '0\.second\.weight' in place",
    lambda weight: weight.copy_(torch.zeros(3, 3)): r"wrote to '0\.second\.weight' in place",
    nn.init.zeros_: r"wrote to a parameter, at the latest before it read '0\.first\.weight'",
}


@on_ranks(2)
@cells("level", [0, 1, 3])
@cells("use_checkpoint", [False, True])
def test_a_write_that_autograd_would_record_is_refused_with_the_name_of_the_parameter(
    level: int, use_checkpoint: bool
) -> None:
    for write, message in IN_PLACE.items():
        module = nn.Sequential(WritesWithGradients(write))
        with pytest.raises(ConfigError, match=f"forward of Sequential {message}.* new tensor"):
            Block(module, use_checkpoint=use_checkpoint, zero_level=level)(torch.ones(2, 3))


@on_ranks(2)
def test_a_write_to_a_view_of_a_parameter_has_a_note() -> None:
    block = Block(WritesWithGradients(lambda weight: weight[0].zero_()), use_checkpoint=False)
    with pytest.raises(RuntimeError, match="is a view") as caught:
        block(torch.ones(2, 3))
    (note,) = caught.value.__notes__
    assert "view of a parameter of WritesWithGradients" in note and "new tensor" in note


@on_ranks(1, 2)
@cells("level", range(4))
def test_calls_without_gradients_see_what_was_written_between_them(level: int) -> None:
    x, blocks = torch.ones(2, 4), [Block(nn.Linear(4, 4), zero_level=level) for _ in range(2)]
    with torch.no_grad():
        before = [block(x) for block in blocks]
        for block in blocks:
            for part in block.parameters():
                part.mul_(2)
        assert [block(x).tolist() for block in blocks] == [(2 * each).tolist() for each in before]
