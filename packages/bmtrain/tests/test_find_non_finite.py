"""``bmt.debug.find_non_finite``: the first value of a step that is not finite is named, on every
rank, and a step in which all are finite stays as it is.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import bmtrain as bmt
from bmt_core import BmtError, rank
from bmt_testing import on_ranks


class Layer(nn.Module):
    """A layer that goes wrong where ``fault`` says, on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.act = nn.Tanh()
        self.fault = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.act(self.up(x))
        if self.fault == "between":
            h = torch.log(h - 5)
        if self.fault == "slope":
            h = h + torch.sqrt(h * 0)
        out: torch.Tensor = x + self.down(h)
        return out


class Model(nn.Module):
    def __init__(self, level: int | None = None, recomputes: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers: list[nn.Module] = [Layer() for _ in range(3)]
        if level is not None:
            layers = [bmt.Block(layer, recomputes, level) for layer in layers]
        self.first, self.layers = nn.Linear(4, 4), nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def batch() -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(1 + rank()))


def what_is_found(model: nn.Module, x: torch.Tensor | None = None) -> str:
    with pytest.raises(BmtError) as raised, bmt.debug.find_non_finite(model):
        model(batch() if x is None else x).backward()
    return str(raised.value)


CASES = [(None, True), (0, False), (2, True), (3, False), (3, True)]


@on_ranks(2)
def test_the_first_value_that_is_not_finite_is_named_on_every_rank() -> None:
    for level, recomputes in CASES:
        model: Any = Model(level, recomputes)
        model = bmt.BMTrainModelWrapper(model) if level is not None else model
        layer, x = model.layers[1], batch()
        assert repr(layer).startswith("Block[Layer]" if level is not None else "Layer")
        if rank() == 1:
            x[2, 3] = float("inf")
        found = what_is_found(model, x)
        line = "In forward, an input of the model (Model) of shape (5, 4) has 1 of 20 elements"
        assert line in found
        assert "(rank 1)." in found and "(rank 0" not in found.splitlines()[1]

        layer.fault = "between" if rank() == 1 else ""
        found = what_is_found(model)
        line = "In forward, an input of layers.1.down (Linear) of shape (5, 6) has 30 of 30"
        assert line in found and "(rank 1)." in found.splitlines()[1]
        # Of all parameters before it, too: their gradients are those of all ranks.
        assert "After backward, the gradient of first.weight" in found

        layer.fault = "slope" if rank() == 1 else ""
        line = what_is_found(model).splitlines()[1]
        assert "In backward, the gradient of the output of layers.1.act (Tanh) of shape" in line
        assert "(5, 6) has 30" in line and "(rank 1)." in line


@on_ranks(2)
def test_parameters_that_were_not_finite_before_are_named() -> None:
    for level, recomputes in ((0, False), (3, True)):
        model = bmt.BMTrainModelWrapper(Model(level, recomputes))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("layers.2.up.weight") and parameter.numel():
                    parameter.view(-1)[-1] = float("nan")
        lines = what_is_found(model).splitlines()
        assert lines[1].startswith("Before the step, layers.2.up.weight is not finite (rank ")


@on_ranks(2)
def test_a_finite_step_is_the_same_and_nothing_is_left() -> None:
    for level, recomputes in CASES:
        torch.manual_seed(0)
        model: Any = Model(level, recomputes)
        model = bmt.BMTrainModelWrapper(model) if level is not None else model
        model(batch()).backward()
        expected = [copy.deepcopy(p.grad) for p in model.parameters()]
        for p in model.parameters():
            p.grad = None
        with bmt.debug.find_non_finite(model):
            model(batch()).backward()
        for p, grad in zip(model.parameters(), expected, strict=True):
            assert torch.equal(p.grad, grad), (level, recomputes)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.layers[1].modules())


@on_ranks(2)
def test_an_error_of_the_program_says_what_was_found_and_no_rank_waits() -> None:
    model = bmt.BMTrainModelWrapper(Model(3))
    model.layers[0].fault = "between"
    with pytest.raises(ValueError, match="of the program") as raised:
        with bmt.debug.find_non_finite(model):
            model(batch())
            if rank() == 1:
                raise ValueError("of the program")
            raise ValueError("of the program, too")
    (note,) = raised.value.__notes__
    assert note.startswith("find_non_finite: on this rank in forward, an input of layers.0.down")


def test_one_process_without_a_run_is_enough() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with torch.no_grad():
        model[0].bias[1] = float("nan")  # type: ignore[index]
    with pytest.raises(BmtError, match=r"Before the step, 0.bias is not finite \(rank 0\)"):
        with bmt.debug.find_non_finite(model):
            model(torch.ones(1, 2))
    with bmt.debug.find_non_finite(nn.Linear(2, 2)) as search:
        assert search is not None


class Masked(nn.Module):
    """Attention with a mask of -inf, which is no fault."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.TransformerEncoderLayer(4, 2, 8, dropout=0), Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(len(x))
        return self.last(self.layer(x.unsqueeze(1), mask)).square().mean()


def test_a_mask_of_attention_is_no_fault_and_hides_none() -> None:
    model = Masked()
    with bmt.debug.find_non_finite(model):
        model(torch.randn(5, 4)).backward()
    model.zero_grad()
    model.last.fault = "between"
    assert "an input of last.down (Linear)" in what_is_found(model, torch.randn(5, 4))
    mask = torch.full((5, 5), torch.nan)
    with pytest.raises(BmtError, match="an input of"), bmt.debug.find_non_finite(model.layer):
        model.layer(torch.randn(5, 1, 4), mask)
