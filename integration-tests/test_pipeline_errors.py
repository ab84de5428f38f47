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
from pipeline_trainings import Piped, loss_of, text
from torch import nn

from bmt_core.run.runtime import current
from bmt_pipeline import PipelineModel, PipelineTransformerBlockList, make_schedule, train_step
from bmt_pipeline.pipelined_call import PipelinedCall
from bmt_testing import run_ranks
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


class PassesAFunction(PipelineModel):
    """Passes a function from layer to layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = PipelineTransformerBlockList([TakesAFunction(WIDTH, WIDTH) for _ in range(4)])

    def before_layers(self, ids: torch.Tensor) -> tuple[Any, ...]:
        return ids[..., None].float().repeat(1, 1, WIDTH), lambda x: x + 1

    def after_layers(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


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


def refusals() -> dict[str, tuple[str, str]]:
    """The errors of this rank, by what was tried."""
    rank, made, model = current().rank, PipelineTransformerBlockList(layers()), Piped(4, 3, True)
    two = PipelineTransformerBlockList(layers(), num_hidden=2)
    tries: dict[str, Callable[[], Any]] = {
        "more stages than layers": lambda: PipelineTransformerBlockList(layers(1)),
        "a Block of all stages": lambda: PipelineTransformerBlockList(
            [Block(one) for one in layers()]
        ),
        "a made Block of all stages": lambda: PipelineTransformerBlockList(
            [lambda: Block(Mlp(0))] * 4
        ),
        "a Block twice": lambda: PipelineTransformerBlockList([Block(Mlp(0), mode="PIPE")] * 2),
        "a layer on two stages": lambda: PipelineTransformerBlockList([Mlp(0)] * 3),
        "tied over stages": lambda: PipelineTransformerBlockList(tied(0, 3)),
        "costs": lambda: PipelineTransformerBlockList(layers(), costs=[1, 2]),
        "rows": lambda: made(x(4)),
        "no tensor": lambda: made(None),
        "hidden states": lambda: two(x()),
        "shapes of ranks": lambda: made(x(6 * (1 + rank))),
        "extras of ranks": lambda: made(x(), torch.full((1, LENGTH, WIDTH), float(rank))),
        "batch_related": lambda: made(x(), torch.zeros(5), batch_related=[0]),
        "batch_related that is no list": lambda: made(x(), mask=x(), batch_related="mask"),
        "batch_related of the list": lambda: PipelineTransformerBlockList(
            layers(), batch_related=0
        ),  # type: ignore[arg-type]
        "batch_related of a step": lambda: step(model, batch_related=0),
        "a list of dims": lambda: PipelineTransformerBlockList(layers(), batch_dim=[0, 1]),  # type: ignore[arg-type]
        "a dim from the end": lambda: step(model, batch_dim=-1),
        "one dim of two": lambda: step(model, batch_dim=(0,)),
        "second backward": lambda: twice(made),
        "autograd.grad": lambda: asked(made, x()),
        "unknown schedule": lambda: step(model, "2f2b"),
        "schedule for others": lambda: step(model, make_schedule("1f1b", 2, 4), 8),
        "interleaved, one chunk": lambda: step(model, "interleaved"),
        "rows of a step": lambda: step(model, rows=16),
        "no model": lambda: step(made),
        "micro-batches of ranks": lambda: step(model, num_micro_batches=2 * (1 + rank)),
        "loss with dims": lambda: step(model, loss=lambda logits, targets: logits),
        "block after the layers": lambda: step(Headed()),
        "a function between stages": lambda: step(PassesAFunction()),
    }
    found = {}
    for name, attempt in tries.items():
        try:
            found[name] = ("nothing", str(attempt()))
        except Exception as error:
            found[name] = (type(error).__name__, str(error))
    found["afterwards"] = ("", str(made(x()).isfinite().all() and step(model).isfinite()))
    return found


REFUSALS = {
    "more stages than layers": ("ConfigError", "1 layers cannot be split into 2 parts"),
    "a Block of all stages": ("AssertionError", 'mode="PIPE"'),
    "a made Block of all stages": ("AssertionError", 'mode="PIPE"'),
    "a Block twice": ("AssertionError", "twice"),
    "a layer on two stages": (
        "ConfigError",
        "Layers 0 and 2 of the list, of Mlp, share parameters",
    ),
    "tied over stages": ("ConfigError", "Layers 0 and 3 of the list, of Mlp, share parameters"),
    "costs": ("ConfigError", "Give one cost per layer"),
    "rows": ("ConfigError", "cannot be divided into num_micro_batches=3 equal parts"),
    "no tensor": ("ConfigError", "not NoneType"),
    "hidden states": ("TypeError", "passes 2 hidden state"),
    "shapes of ranks": ("ConfigError", "arguments of the same shapes"),
    "extras of ranks": ("ConfigError", "multiple of pipe_size=2"),
    "batch_related": ("ConfigError", "its dim 0 must be the batch"),
    "batch_related that is no list": ("ConfigError", "[] for none, not 'mask'"),
    "batch_related of the list": ("ConfigError", "[] for none, not 0"),
    "batch_related of a step": ("ConfigError", "[] for none, not 0"),
    "a list of dims": ("ConfigError", "what comes out, not [0, 1]"),
    "a dim from the end": ("ConfigError", "what comes out, not -1"),
    "one dim of two": ("ConfigError", "what comes out, not (0,)"),
    "second backward": ("RuntimeError", "a second time through one call"),
    "autograd.grad": ("RuntimeError", "cannot go through a pipelined list"),
    "unknown schedule": ("ConfigError", "2f2b"),
    "schedule for others": ("ConfigError", "Make the schedule for these sizes"),
    "interleaved, one chunk": ("ConfigError", "chunks"),
    "rows of a step": ("ConfigError", "16 rows, which cannot be divided into num_micro_batches=3"),
    "no model": ("TypeError", "train_step runs a PipelineModel"),
    "micro-batches of ranks": ("ConfigError", "num_micro_batches=4"),
    "block after the layers": ("ConfigError", "head is a Block"),
    "afterwards": ("", "True"),
}


def test_what_cannot_be_done_is_refused_on_all_ranks_at_once() -> None:
    init = {"pipe_size": 2, "num_micro_batches": 3, "timeout": 20}
    results = run_ranks(refusals, 2, init=init)
    for rank, found in enumerate(results):
        of_loss = found.pop("loss with dims")
        assert (
            of_loss[0] == ("RemoteError", "ValueError")[rank] and "(4, 3, 11) float64" in of_loss[1]
        )
        kind, message = found.pop("a function between stages")
        assert (
            kind == ("TypeError", "RemoteError")[rank]
            and "that another stage computes on must be picklable" in message
        )
        assert found.keys() == REFUSALS.keys()
        for name, (kind, message) in found.items():
            assert kind == REFUSALS[name][0] and REFUSALS[name][1] in message, (name, kind, message)


def refused_on_four() -> None:
    PipelineTransformerBlockList(tied(0, 1))


@pytest.mark.parametrize("stages", [4])
def test_stages_that_have_none_of_the_shared_layers_raise_too(stages: int) -> None:
    with pytest.raises(Exception, match="failed on 4 of 4 ranks"):
        run_ranks(refused_on_four, 4, init={"pipe_size": stages})


def left_of_calls() -> list[bool]:
    """Whether a call is gone when its outputs are: after backward, without gradients, and
    without backward.
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
        return [call() is None for call in calls]
    finally:
        gc.enable()
        PipelinedCall.__init__ = make  # type: ignore[method-assign]


def test_a_call_ends_without_a_garbage_collection() -> None:
    assert run_ranks(left_of_calls, 2, init={"pipe_size": 2}) == [[True, True, True]] * 2
