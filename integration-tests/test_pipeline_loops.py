"""Loops over a pipelined list and calls of its layers, of which a stage has only some, and losses
that layers compute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipeline_trainings import outcome
from torch import nn
from zero_models import full_gradient

from bmt_core.run.runtime import current, is_initialized
from bmt_optim import OptimManager
from bmt_params import DistributedModule
from bmt_pipeline import PipelineModel, PipelineTransformerBlockList, train_step
from bmt_testing import on_ranks
from cells import run_cells

WIDTH, ROWS = 4, 4


class Layer(nn.Module):
    """Keeps a loss in an attribute, and adds it up in a hidden state, too, if there are two
    of them.
    """

    aux: torch.Tensor | None = None

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: torch.Tensor, losses: torch.Tensor | None = None) -> Any:
        y = self.linear(x)
        self.aux = y.square().mean(-1)
        return x + torch.tanh(y) if losses is None else (x + torch.tanh(y), losses + self.aux)


class Looping(nn.Module):
    """Plain torch around the list, which it loops over, as GPT-2 of Hugging Face does."""

    def __init__(self, use: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers = PipelineTransformerBlockList([Layer(number) for number in range(4)])
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self.layers, x)


class Sharded(DistributedModule, Looping):
    """The same as a module of bmt."""


class Scheduled(PipelineModel):
    """A model for a schedule; ``after`` gets the list, too."""

    def __init__(
        self, after: Callable[[Any, torch.Tensor], torch.Tensor], num_hidden: int = 1
    ) -> None:
        super().__init__()
        layers = [Layer(number) for number in range(4)]
        self.layers: Any = (
            PipelineTransformerBlockList(layers, num_hidden)
            if is_initialized()
            else nn.ModuleList(layers)
        )
        self.num_hidden, self.after = num_hidden, after

    def before_layers(self, x: torch.Tensor) -> Any:
        return (x, torch.zeros_like(x[:, 0])) if self.num_hidden == 2 else x

    def after_layers(self, *hidden: torch.Tensor) -> Any:
        return hidden if self.num_hidden == 2 else self.after(self.layers, hidden[0])


def looped(layers: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def indexed(layers: Any, x: torch.Tensor) -> torch.Tensor:
    for number in range(len(layers)):
        x = layers[number](x)
    return x


def called_alone(layers: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in layers.layers():
        x = layer(x)
    return x


def with_losses(layers: Any, x: torch.Tensor) -> torch.Tensor:
    return layers(x) + sum(layer.aux.mean() for layer in layers)


def with_losses_after(layers: Any, x: torch.Tensor) -> torch.Tensor:
    return x + sum(layer.aux.mean() for layer in layers)


def drawn(number: int = 0) -> torch.Tensor:
    return torch.randn(
        ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(number)
    )


def mean_square(out: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (out * targets).square().mean()


def stepped(model: Any, loss: Any = mean_square) -> torch.Tensor:
    return train_step(model, loss, (drawn(), drawn()), "1f1b", 2)


def loss_with_losses(model: Any) -> torch.Tensor:
    return stepped(
        model, lambda out, x: mean_square(out, x) + sum(layer.aux.mean() for layer in model.layers)
    )


def with_found_losses(find: Callable[[Any], Any]) -> torch.Tensor:
    """Add what ``find`` finds in the model inside of the loss."""
    model = Scheduled(lambda layers, x: x)
    return stepped(
        model, lambda out, x: mean_square(out, x) + sum(one.sum() for one in find(model))
    )


@on_ranks(2, init={"pipe_size": 2})
def test_what_would_leave_out_other_stages_is_refused_on_all_ranks() -> None:
    tries: dict[str, Callable[[], Any]] = {
        "loop in plain torch": lambda: Looping(looped)(drawn()),
        "loop": lambda: Sharded(looped)(drawn()),
        "numbers": lambda: Sharded(indexed)(drawn()),
        "layers alone": lambda: Looping(called_alone)(drawn()),
        "layers alone in a module of bmt": lambda: Sharded(called_alone)(drawn()),
        "losses in forward": lambda: Sharded(with_losses)(drawn()),
        "losses in after_layers": lambda: stepped(Scheduled(with_losses_after)),
        "losses in loss_fn": lambda: loss_with_losses(Scheduled(lambda layers, x: x)),
        "modules": lambda: with_found_losses(
            lambda m: [x.aux for x in m.modules() if isinstance(x, Layer)]
        ),
        "children": lambda: with_found_losses(
            lambda m: [layer.aux for _, layer in m.layers.named_children()]
        ),
        "layers": lambda: with_found_losses(lambda m: [layer.aux for layer in m.layers.layers()]),
        "penalty": lambda: with_found_losses(lambda m: [p.square() for p in m.parameters()]),
    }
    for name, attempt in tries.items():
        text = str(outcome(attempt))
        refusal = "Call the list instead of looping over"
        assert text.startswith("ConfigError: ") and refusal in text, (name, text)


@on_ranks(2, init={"pipe_size": 2})
def test_a_stage_lists_its_own_layers_outside_of_a_step() -> None:
    model, scheduled = Looping(lambda layers, x: layers(x)), Scheduled(lambda layers, x: x)
    assert len(list(model.layers)) == 2
    model(drawn()).sum().backward()
    assert len(list(model.layers)) == 2
    with torch.no_grad():
        model(drawn())
    stepped(scheduled)
    assert len(list(model.layers)) == len(list(scheduled.layers)) == 2 and len(model.layers) == 4
    own = model.layers.layer_ids[0]
    assert model.layers[own] is model.layers.layers()[0]
    assert len(scheduled.layers[own : own + 1]) == 1
    with pytest.raises(IndexError, match="Index only these"):
        model.layers[(own + 2) % 4]


def loss_of_both(out: Any, targets: torch.Tensor) -> torch.Tensor:
    return mean_square(out[0], targets) + out[1].mean()


def with_returned_losses(form: str) -> tuple[float, dict[str, torch.Tensor | None]]:
    model = Scheduled(lambda layers, x: x, num_hidden=2)
    if not is_initialized():
        hidden = model.before_layers(drawn())
        for layer in model.layers:
            hidden = layer(*hidden)
        loss = loss_of_both(hidden, drawn())
        loss.backward()
        return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}
    manager = OptimManager()
    if form == "list":  # half of the rows on each of the two ranks
        own = drawn().chunk(2)[current().rank]
        loss = loss_of_both(model(own), own)
        manager.backward(loss)
        loss = sum_of_ranks(loss.detach()) / 2
    else:
        loss = train_step(model, loss_of_both, (drawn(), drawn()), form, 2, manager=manager)
    return float(loss), {name: full_gradient(p) for name, p in model.named_parameters()}


def sum_of_ranks(loss: torch.Tensor) -> torch.Tensor:
    current().world.all_reduce(loss).wait()
    return loss


def test_losses_that_layers_return_are_trained_as_in_plain_torch() -> None:
    loss, gradients = with_returned_losses("plain")
    cells = [("list",), ("1f1b",)]
    for form, found in run_cells(with_returned_losses, 2, cells, init={"pipe_size": 2}):
        assert {name for _, of_rank in found for name in of_rank} == gradients.keys(), form
        for of_rank, grads in found:
            assert of_rank == pytest.approx(loss, rel=1e-6), form
            torch.testing.assert_close(grads, {name: gradients[name] for name in grads})
