"""Layers that a tensor-parallel plan has split, on the stages of a pipeline (pp x tp), against the
plain model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from plan_models import built, inputs
from torch import nn
from tp_models import gradients_of

from bmt_core.comm.objects import all_gather_object
from bmt_core.errors import ConfigError
from bmt_core.run.collectives import all_reduce
from bmt_core.run.runtime import current
from bmt_optim import OptimManager
from bmt_pipeline import PipelineModel, PipelineTransformerBlockList, train_step
from bmt_testing import on_ranks, run_ranks
from bmt_tp import ColumnParallelLinear, parallelize
from bmt_zero import Block, BMTrainModelWrapper
from cells import run_cells


class Llama(PipelineModel):
    """The modules of Hugging Face's Llama, with its layers on stages."""

    def __init__(self, plain: Any, **options: Any) -> None:
        super().__init__()
        self.embed_tokens, self.rotary = plain.model.embed_tokens, plain.model.rotary_emb
        self.layers = PipelineTransformerBlockList(list(plain.model.layers), **options)
        self.norm, self.lm_head = plain.model.norm, plain.lm_head

    def before_layers(self, ids: torch.Tensor) -> tuple[Any, ...]:
        hidden = self.embed_tokens(ids)
        positions = torch.arange(ids.shape[1])[None]
        return hidden, None, positions, None, None, self.rotary(hidden, positions)

    def after_layers(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(self.norm(hidden))
        return logits


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = inputs(0)["input_ids"]
    return ids, ids.roll(1, 1)


def made(blocks: bool = False, **options: Any) -> Any:
    plain: Any = parallelize(built("llama", num_hidden_layers=4))
    if blocks:
        for number, layer in enumerate(plain.model.layers):
            Block(layer, number % 2 == 0, number % 4, mode="PIPE")
    model = BMTrainModelWrapper(Llama(plain, **options))
    # As a program does that goes on to use its name: layers of other stages stay, too.
    model.__dict__["plain"] = plain
    return model


Found = tuple[float, dict[str, torch.Tensor]]


def trained(schedule: str | None, micro_batches: int, options: dict[str, Any]) -> Found:
    """The mean loss and the gradients of all stages, by a schedule, or by the list, whose ranks
    pass parts of the batch.
    """
    model, manager, topology = made(**options), OptimManager(), current().topology
    ids, targets = batch()
    if schedule is None:
        own_ids, own_targets = (
            x.chunk(topology.data_size)[topology.data_rank] for x in (ids, targets)
        )
        loss = loss_of(model(own_ids), own_targets)
        manager.backward(loss)
    else:
        loss = train_step(model, loss_of, (ids, targets), schedule, micro_batches, manager=manager)
    gradients = all_gather_object(gradients_of(model), current().world)
    return float(all_reduce(loss.detach(), "avg")), {
        k: v for of_rank in gradients for k, v in of_rank.items()
    }


FORMS: list[tuple[str | None, int, dict[str, Any]]] = [
    (None, 1, {}),  # as many rows in a micro-batch as a rank has positions
    (None, 4, {"batch_dim": (0, 1)}),
    (None, 2, {"chunks": 2}),
    ("1f1b", 2, {}),
    ("zero-bubble", 4, {"blocks": True}),
]


@pytest.mark.parametrize(("schedule", "micro_batches", "options"), FORMS)
def test_layers_of_a_plan_train_on_stages_as_the_plain_model(
    schedule: str | None, micro_batches: int, options: dict[str, Any]
) -> None:
    plain: Any = built("llama", num_hidden_layers=4)
    ids, targets = batch()
    loss = loss_of(plain(input_ids=ids).logits, targets)
    loss.backward()
    wanted = {name.removeprefix("model."): p.grad for name, p in plain.named_parameters()}
    init = {"pipe_size": 2, "tp_size": 2, "num_micro_batches": micro_batches}
    for value, gradients in run_ranks(
        trained, 4, schedule, micro_batches, options, init=init, timeout=100
    ):
        assert value == pytest.approx(float(loss.detach()), rel=1e-6)
        assert gradients.keys() == wanted.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(
                gradient, wanted[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )


class Turning(nn.Linear):
    """Returns hidden states with batch and sequence exchanged, of which nobody knows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).transpose(0, 1)


@on_ranks(
    4,
    init={"pipe_size": 2, "tp_size": 2, "num_micro_batches": 2, "timeout": 20},
    timeout=100,
)
def test_a_dim_that_contradicts_the_layers_is_refused_on_all_ranks() -> None:
    turning = PipelineTransformerBlockList([nn.Linear(4, 4), Turning(4, 4)])
    right = PipelineTransformerBlockList([nn.Linear(4, 4), Turning(4, 4)], batch_dim=(0, 1))
    hidden = made().layers
    x, wide = torch.ones(2, 3, 4), torch.ones(2, 8, 32, dtype=torch.float64)
    assert right(x).shape == (3, 2, 4)
    remedy = r".*Make it with batch_dim=\(0, 1\)\."
    refusals: list[tuple[Callable[[], Any], str]] = [
        (lambda: made(batch_dim=1)(batch()[0]), r"(?s)takes dims \(1, 1\) of" + remedy),
        (lambda: made(batch_dim=0)(batch()[0]), r"(?s)takes dims \(0, 0\) of" + remedy),
        (
            lambda: turning(x),
            r"hidden states of shapes \[\(3, 2, 4\)\], whose dim 0 should be the 2 rows of a"
            " micro-batch",
        ),
        (
            lambda: hidden(wide, return_hidden_states=True),
            "return_hidden_states stacks the inputs of all layers",
        ),
    ]
    for attempt, message in refusals:
        with pytest.raises(Exception, match=message):
            attempt()


class Half(nn.Module):
    """A split layer on the first stage only, if anywhere."""

    def __init__(self, is_split: bool) -> None:
        super().__init__()
        first = ColumnParallelLinear(4, 4) if is_split else nn.Linear(4, 4)
        self.layers = PipelineTransformerBlockList([first, nn.Linear(4, 4)])


def wrapped(is_split: bool) -> str:
    try:
        return type(BMTrainModelWrapper(Half(is_split))).__name__
    except ConfigError as error:
        return str(error)


def test_a_model_is_wrapped_if_one_stage_has_split_layers_and_refused_if_none_has() -> None:
    init = {"pipe_size": 2, "tp_size": 2}
    refused = "The 2 ranks along 'tp' see the same data, and no parameter of Half is split"
    for (is_split,), found in run_cells(wrapped, 4, [(True,), (False,)], init=init):
        for said in found:
            assert said == "Half" if is_split else said.startswith(refused)
