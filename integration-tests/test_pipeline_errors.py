"""What a pipeline refuses, on all ranks and at once, and that it works afterwards; and what it lets
go of.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipeline_calls import LENGTH, WIDTH, Mlp, drawn
from pipeline_trainings import Bare, Piped, loss_of, outcome, text
from torch import nn

from bmt_core.run.runtime import current
from bmt_pipeline import PipelineTransformerBlockList, make_schedule, train_step
from bmt_pipeline.pipelined_call import PipelinedCall
from bmt_testing import on_ranks
from bmt_zero import Block


class Headed(Piped):
    """With a Block after the layers."""

    def __init__(self) -> None:
        super().__init__(4, 3, True)
        self.head = Block(nn.Linear(8, 8).double())


class TakesAFunction(nn.Linear):
    """A layer that is called with a function, which cannot be pickled."""

    def forward(
        self, x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        return function(super().forward(x))


class PassesAFunction(Bare):
    """Passes a function from layer to layer."""

    def before_layers(self, ids: torch.Tensor) -> tuple[Any, ...]:
        return ids[..., None].float().repeat(1, 1, WIDTH), lambda x: x + 1


def layers(count: int = 4) -> list[Mlp]:
    return [Mlp(number) for number in range(count)]


def tied(first: int, second: int) -> list[Mlp]:
    made = layers()
    made[first].up.weight = made[second].up.weight
    return made


def x(rows: int = 6) -> torch.Tensor:
    return drawn(0, 0, rows, LENGTH, WIDTH, grad=True)


def twice(made: nn.Module) -> None:
    loss = made(x()).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def asked(made: nn.Module, leaf: torch.Tensor) -> Any:
    return torch.autograd.grad(made(leaf).sum(), [leaf])


def step(
    model: Any, *args: Any, loss: Any = loss_of, rows: int = 12, **options: Any
) -> torch.Tensor:
    ids, targets = (part[0][:rows] for part in text())
    return train_step(model, loss, (ids, targets), *args, **options)


@on_ranks(2, init={"pipe_size": 2, "num_micro_batches": 3, "timeout": 20})
def test_what_cannot_be_done_is_refused_on_all_ranks_at_once() -> None:
    make: Any = PipelineTransformerBlockList
    rank, made, model, two = current().rank, make(layers()), Piped(4, 3, True), make(layers(), 2)
    functions = PassesAFunction([TakesAFunction(WIDTH, WIDTH) for _ in range(4)])
    block = Block(Mlp(0), mode="PIPE")
    config = "ConfigError"
    refusals: list[tuple[Callable[[], Any], str, str]] = [
        (lambda: make(layers(1)), config, "1 layers cannot be split into 2 parts"),
        (lambda: make([Block(one) for one in layers()]), "AssertionError", 'mode="PIPE"'),
        (lambda: make([lambda: Block(Mlp(0))] * 4), "AssertionError", 'mode="PIPE"'),
        (lambda: make([block] * 2), "AssertionError", "twice"),
        (lambda: make([Mlp(0)] * 3), config, "Layers 0 and 2 of the list, of Mlp, share"),
        (lambda: make(tied(0, 3)), config, "Layers 0 and 3 of the list, of Mlp, share parameters"),
        (lambda: make(layers(), costs=[1, 2]), config, "Give one cost per layer"),
        (lambda: made(x(4)), config, "cannot be divided into num_micro_batches=3 equal parts"),
        (lambda: made(None), config, "not NoneType"),
        (lambda: two(x()), "TypeError", "passes 2 hidden state"),
        (lambda: two(x(), torch.zeros(())), config, "shapes are [(6, 3, 6), ()]"),
        (lambda: made(x(6 * (1 + rank))), config, "arguments of the same shapes"),
        (
            lambda: made(x(), torch.full((1, LENGTH, WIDTH), float(rank))),
            config,
            "multiple of pipe_size=2",
        ),
        (
            lambda: made(x(), torch.zeros(5), batch_related=[0]),
            config,
            "its dim 0 must be the batch",
        ),
        (lambda: made(x(), mask=x(), batch_related="mask"), config, "[] for none, not 'mask'"),
        (lambda: make(layers(), batch_related=0), config, "[] for none, not 0"),
        (lambda: step(model, batch_related=0), config, "[] for none, not 0"),
        (lambda: make(layers(), batch_dim=[0, 1]), config, "what comes out, not [0, 1]"),
        (lambda: step(model, batch_dim=-1), config, "what comes out, not -1"),
        (lambda: step(model, batch_dim=(0,)), config, "what comes out, not (0,)"),
        (lambda: twice(made), "RuntimeError", "a second time through one call"),
        (lambda: asked(made, x()), "RuntimeError", "cannot go through a pipelined list"),
        (lambda: step(model, "2f2b"), config, "2f2b"),
        (
            lambda: step(model, make_schedule("1f1b", 2, 4), 8),
            config,
            "Make the schedule for these sizes",
        ),
        (lambda: step(model, "interleaved"), config, "chunks"),
        (
            lambda: step(model, rows=16),
            config,
            "16 rows, which cannot be divided into num_micro_batches=3",
        ),
        (lambda: step(model, num_micro_batches=0), config, "at least 1, not 0"),
        (lambda: step(model, num_micro_batches=3.0), config, "at least 1, not 3.0"),
        (lambda: step(made), "TypeError", "train_step runs a PipelineModel"),
        (lambda: step(model, num_micro_batches=2 * (1 + rank)), config, "num_micro_batches=4"),
        (
            lambda: step(model, loss=lambda logits, targets: logits),
            ("RemoteError", "ValueError")[rank],
            "(4, 3, 11) float64",
        ),
        (lambda: step(Headed()), config, "head is a Block"),
        (
            lambda: step(functions),
            ("TypeError", "RemoteError")[rank],
            "that another stage computes on must be picklable",
        ),
    ]
    for attempt, kind, message in refusals:
        text = str(outcome(attempt))
        assert text.startswith(f"{kind}: ") and message in text, (message, text)
    assert made(x()).isfinite().all() and step(model).isfinite()


@on_ranks(4, init={"pipe_size": 4})
def test_stages_that_have_none_of_the_shared_layers_raise_too() -> None:
    with pytest.raises(Exception, match="share parameters"):
        PipelineTransformerBlockList(tied(0, 1))


@on_ranks(2, init={"pipe_size": 2})
def test_a_call_ends_without_a_garbage_collection() -> None:
    """A call is gone when its outputs are: after backward, without gradients, and without
    backward.
    """
    calls = []
    make = PipelinedCall.__init__

    def noted(self: PipelinedCall, *args: Any) -> None:
        make(self, *args)
        calls.append(weakref.ref(self))

    PipelinedCall.__init__ = noted  # type: ignore[method-assign]
    made = PipelineTransformerBlockList(layers())
    gc.disable()
    try:
        made(x()).sum().backward()
        made(x())
        with torch.no_grad():
            made(x())
        assert [call() for call in calls] == [None] * 3
    finally:
        gc.enable()
        PipelinedCall.__init__ = make  # type: ignore[method-assign]
