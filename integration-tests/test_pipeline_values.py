"""Arguments of layers that are no tensors: plain values reach every stage as they are now, and
other objects are refused.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pipeline_trainings import Bare, outcome
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask

from bmt_core.run.runtime import current, is_initialized
from bmt_pipeline import PipelineModel, PipelineTransformerBlockList, train_step
from bmt_testing import on_ranks
from cells import run_cells

WIDTH, ROWS = 4, 4


class Sign(enum.Enum):
    PLUS = 1
    MINUS = -1


@dataclass
class Options:
    """Plain values and a tensor of the batch."""

    scale: float
    sign: Sign
    dtype: torch.dtype
    names: dict[str, int]
    mask: torch.Tensor


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: torch.Tensor, options: Any) -> torch.Tensor:
        out = self.linear(x) * options.mask.to(options.dtype)
        return x + options.scale * options.sign.value * options.names["two"] * out


class Model(PipelineModel):
    """Gives its layers what it computes from its own state, which changes from step to step."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        layers = [Layer(number) for number in range(8)]
        self.layers: Any = (
            PipelineTransformerBlockList(layers, **options) if is_initialized() else layers
        )
        self.scale, self.sign = 1.0, Sign.PLUS
        self.changes = False

    def before_layers(self, x: torch.Tensor) -> tuple[torch.Tensor, Options]:
        self.scale += self.changes
        return x, Options(self.scale, self.sign, torch.float64, {"two": 2}, (x > 0).int())

    def after_layers(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def drawn(number: int) -> torch.Tensor:
    return torch.randn(
        ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(number)
    )


def mean_square(out: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (out * targets).square().mean()


STATES = [
    (1.0, Sign.PLUS),
    (0.5, Sign.PLUS),
    (0.5, Sign.MINUS),
    (1.0, Sign.PLUS),
    (0.25, Sign.MINUS),
]


def losses(form: str) -> list[float]:
    """The loss of each step, by ``train_step`` or by the list."""
    model = Model(**({"chunks": 2} if form == "interleaved" else {}))
    found = []
    for number, (model.scale, model.sign) in enumerate(STATES):
        x = drawn(number)
        if not is_initialized():
            hidden, options = model.before_layers(x)
            for layer in model.layers:
                hidden = layer(hidden, options)
            found.append(float(mean_square(hidden, x).detach()))
        elif form == "list":
            found.append(float(mean_square(model(x), x).detach()))
        else:
            found.append(float(train_step(model, mean_square, (x, x), form, 2)))
    return found


@pytest.mark.parametrize(
    ("stages", "forms"), [(2, ["1f1b", "interleaved", "list"]), (4, ["zero-bubble"])]
)
def test_plain_values_that_change_from_step_to_step_reach_every_stage(
    stages: int, forms: list[str]
) -> None:
    wanted = losses("plain")
    for form, of_ranks in run_cells(losses, stages, zip(forms), init={"pipe_size": stages}):
        for found in of_ranks:
            assert found == pytest.approx(wanted, rel=1e-6), form


class Passing(Bare):
    """Passes its second input to the layers."""

    def before_layers(self, x: torch.Tensor, other: Any) -> Any:
        return x, other() if callable(other) else other


@on_ranks(2, init={"pipe_size": 2})
def test_objects_and_values_that_differ_are_refused_in_one_line_on_all_ranks() -> None:
    model, passing, x = Model(), Passing([Layer(number) for number in range(4)]), drawn(0)
    flex = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cpu")
    plain = Options(1.0, Sign.PLUS, torch.float64, {"two": 2}, torch.ones(()))
    of_rank = replace(plain, scale=1.0 + current().rank, mask=x)
    space = SimpleNamespace(**vars(plain))

    def step(model: PipelineModel, *inputs: Any) -> torch.Tensor:
        return train_step(model, mean_square, (inputs if inputs[1:] else x, x), "1f1b", 2)

    unknown = "A pipeline cannot know what is in"
    refusals: list[tuple[Callable[[], Any], str]] = [
        (lambda: model.layers(x, space), f"{unknown} arguments.rest[0], a types.SimpleNamespace,"),
        (
            lambda: step(passing, x, lambda: space),
            f"{unknown} output.rest[0], a types.SimpleNamespace,",
        ),
        (
            lambda: step(passing, x, flex),
            f"{unknown} inputs[1], a torch.nn.attention.flex_attention.BlockMask,",
        ),
        (
            lambda: model.layers(x, of_rank),
            "but rank 0 has arguments.rest[0].scale: float 1.0, and rank 1"
            " arguments.rest[0].scale: float 2.0.",
        ),
    ]
    for attempt, message in refusals:
        text = str(outcome(attempt))
        assert text.startswith("ConfigError: ") and message in text, (message, text)
        assert "\n" not in text and len(text) < 400
    model.changes = True
    assert (
        "returned output.rest[0].scale: float 3.0, but output.rest[0].scale: float 2.0 for another"
    ) in str(outcome(lambda: step(model, x)))
