"""Plans: which modules and parameters they name, what they refuse, and a model of plain torch
modules cut by one.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from tp_models import drawn, on_tp_ranks, own_rows

from bmt_core.errors import ConfigError
from bmt_core.run.collectives import all_reduce
from bmt_params import DistributedParameter
from bmt_testing import on_ranks
from bmt_tp import Column, Head, PerPosition, Plan, Row, VocabularyEmbedding, Whole, parallelize
from bmt_tp.plans.matching import match
from bmt_tp.plans.styles import OWN_ROWS
from bmt_tp.row_exchange import gather_input_rows
from bmt_tp.tensor_group import tensor_group

BATCH, SEQUENCE, WORDS, FEATURES = 2, 8, 12, 8


class Layer(nn.Module):
    """A feed-forward layer of two products of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.up = nn.Linear(FEATURES, 4 * FEATURES)
        self.down = nn.Linear(2 * FEATURES, FEATURES)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        out: torch.Tensor = x + self.dropout(self.down(gate.sigmoid() * up))
        return out


class Model(nn.Module):
    """An embedding with a padding token, positions, two layers, a head with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, FEATURES, padding_idx=7)
        self.positions = nn.Embedding(SEQUENCE, FEATURES)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm = nn.LayerNorm(FEATURES)
        self.head = nn.Linear(FEATURES, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


PLAN = Plan(
    parameters={
        "embed": VocabularyEmbedding(),
        "positions": Whole(),
        "layers.*.up": Column(sections=(1, 1), gather="sequence_first"),
        "layers.*.down": Row(input="sequence_first"),
        "head": Head(),
    },
    layers="layers.*",
    last="norm",
)


def made() -> Model:
    torch.manual_seed(0)
    return Model().double()


def loss_of(model: nn.Module) -> torch.Tensor:
    ids = torch.arange(BATCH * SEQUENCE).view(BATCH, SEQUENCE) % WORDS
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


@on_tp_ranks(2)
def test_a_plan_cuts_a_model_of_plain_torch() -> None:
    plain, model = made(), made()
    with pytest.raises(ConfigError, match="names several modules as the last one"):
        parallelize(model, replace(PLAN, last="layers.*"))
    assert [type(module) for module in model.modules()] == [
        type(module) for module in plain.modules()
    ]
    assert parallelize(model, PLAN) is model
    expected, loss = loss_of(plain), loss_of(model)
    torch.testing.assert_close(loss, expected)
    expected.backward()
    loss.backward()
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(parameter, DistributedParameter)
        assert parameter.grad is not None and other.grad is not None
        grad = parameter.gather_all_like(parameter.grad)
        torch.testing.assert_close(grad, other.grad, msg=lambda text, n=name: f"{n}: {text}")
    twin = copy.deepcopy(model)
    assert (
        torch.equal(loss_of(twin), loss)
        and twin.embed._parameters["weight"] is not model.embed._parameters["weight"]
    )
    with pytest.raises(
        ValueError, match=r"that tp_size=2 divides, not of shape \(2, 7, 8\). Pad the sequences"
    ):
        model(torch.zeros(2, 7, dtype=torch.int64))
    with pytest.raises(
        ConfigError, match=r"embed\.weight is distributed already\. Call parallelize"
    ):
        parallelize(model, PLAN)


@on_tp_ranks(2)
def test_the_gradients_of_gathered_rows_are_summed() -> None:
    x = drawn(4, 3, 2).requires_grad_()
    own = own_rows(x.detach()).requires_grad_()
    factors = drawn(4, 3, 2, seed=1), drawn(4, 3, 2, seed=2)
    (x * sum(factors)).sum().backward()
    (gather_input_rows(own) * factors[tensor_group().rank]).sum().backward()
    assert x.grad is not None and own.grad is not None
    torch.testing.assert_close(own.grad, own_rows(x.grad))


@on_tp_ranks(2)
def test_dropout_differs_between_ranks_and_they_draw_alike_afterwards() -> None:
    # Positions hold the same vectors, so that their dropout shows in the logits.
    model = parallelize(made(), PLAN)
    with torch.no_grad():
        model.positions._parameters["weight"].zero_()  # type: ignore[union-attr]
    for layer in model.layers:
        layer.dropout.p = 0.5  # type: ignore[union-attr, assignment]
    torch.manual_seed(1)
    logits = model(torch.zeros(1, SEQUENCE, dtype=torch.int64))[0].detach()
    following = torch.rand(1)
    assert not torch.equal(*logits.chunk(2))
    # Afterwards the ranks draw alike again.
    assert torch.equal(all_reduce(following, "max"), following)
    logits = model.eval()(torch.zeros(1, SEQUENCE, dtype=torch.int64))[0].detach()
    torch.testing.assert_close(*logits.chunk(2))


@on_ranks(1)
def test_with_one_rank_nothing_changes() -> None:
    model = made()
    before = [type(module) for module in model.modules()]
    parallelize(model)  # and asks for no plan
    assert [type(module) for module in model.modules()] == before
    assert not any(isinstance(parameter, DistributedParameter) for parameter in model.parameters())


def having(plan: Plan = PLAN, without: str = "", **more: object) -> Plan:
    kept = {name: style for name, style in plan.parameters.items() if name != without}
    return replace(plan, parameters={**kept, **more})  # type: ignore[arg-type]


REFUSED = {
    "a name that nothing has": (
        having(**{"layers.*.upp": Column()}),
        (
            r"Pattern 'layers.\*.upp' of the plan matches no module of Model. Modules with similar"
            r" names: layers.\d.up"
        ),
    ),
    "two entries": (
        having(**{"layers.1.up": Column()}),
        (
            r"layers.1.up.weight is claimed by two entries of the plan, 'layers.\*.up'"
            r" and 'layers.1.up'"
        ),
    ),
    "no entry": (
        having(without="positions"),
        (
            r"No entry of the plan names positions.weight of shape \(8, 8\), outside of the layers"
            r" .* such as Whole\(\)"
        ),
    ),
    "no entry inside of the layers": (
        having(without="layers.*.down"),
        (
            r"No entry of the plan names layers.0.down.weight of shape \(8, 16\), inside of the"
            r" layers .* such as PerPosition\(\)"
        ),
    ),
    "a style of modules inside of the layers": (
        having(without="positions", positions=PerPosition()),
        (
            r"positions.weight is outside of the layers \('layers.\*', 'norm'\), where every rank"
            r" computes all positions, .* would be 2 times too large\. Choose Whole\(\)"
        ),
    ),
    "a module of another class": (
        having(**{"layers.*.norm": Column()}),
        (
            r"layers.0.norm, a LayerNorm with weight of shape \(8,\), bias of shape \(8,\): Column"
            r" is a style of nn.Linear"
        ),
    ),
    "an embedding for a linear layer": (
        having(without="head", head=VocabularyEmbedding()),
        (
            r"head, a Linear with weight of shape \(12, 8\), .*: VocabularyEmbedding is a style"
            r" of nn.Embedding"
        ),
    ),
    "sections": (
        having(**{"layers.*.up": Column(sections=(3, 2))}),
        (
            r"layers.0.up, a Linear .*: 32 output features cannot be cut in the ratio of sections"
            r" \(3, 2\)"
        ),
    ),
    "a number of heads": (
        having(**{"layers.*.up": Column(heads=3)}),
        "tp_size=2 does not divide the number of heads, 3. Choose another tp_size",
    ),
    "a name of a number that the config lacks": (
        having(**{"layers.*.up": Column(heads="heads")}),
        "the plan says heads='heads', but the model's config has no such number",
    ),
    "an attribute that is no number": (
        replace(PLAN, divided={"layers.*": ("heads",)}),
        "layers.0, a Layer with no parameters: it has no number 'heads', which the plan divides",
    ),
    "several last modules": (
        replace(PLAN, last="layers.*"),
        "names several modules as the last one: layers.0, layers.1",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_plan_that_does_not_fit_is_refused(what: str) -> None:
    plan, text = REFUSED[what]
    with pytest.raises(ConfigError, match=text):
        match(made(), plan, 2)


def test_a_vocabulary_that_tp_does_not_divide_is_refused_with_the_ways_out() -> None:
    with pytest.raises(
        ConfigError,
        match=r"tp_size=5 does not divide the size of the vocabulary, 12\. Pad the vocabulary",
    ):
        match(made(), PLAN, 5)


def test_tied_parameters_are_cut_alike() -> None:
    model = made()
    model.head.weight = model.embed.weight
    assert (
        match(model, PLAN, 2).claims["head.weight"].locality
        == match(model, PLAN, 2).claims["embed.weight"].locality
    )
    with pytest.raises(ConfigError, match=r"embed\.weight and head\.weight are one tied parameter"):
        match(model, having(without="head", head=Whole()), 2)


def test_what_computes_each_position_by_itself_has_gradients_of_its_positions() -> None:
    per_position = {"layers.*.up": PerPosition(), "layers.*.down": PerPosition()}
    claims = match(made(), replace(PLAN, parameters={**PLAN.parameters, **per_position}), 2).claims
    assert (
        claims["layers.1.up.weight"].locality == claims["layers.1.down.bias"].locality == OWN_ROWS
    )
    assert claims["layers.1.norm.weight"].locality == OWN_ROWS  # without an entry


def test_a_parameter_of_the_layers_may_have_a_second_name_outside() -> None:
    model = made()
    model.kept = nn.Linear(8, 16)
    model.kept.weight, model.kept.bias = model.layers[0].up.weight, model.layers[0].up.bias
    found = match(model, having(**{"layers.*.up": PerPosition(), "kept": PerPosition()}), 2)
    assert found.claims["kept.weight"].locality == OWN_ROWS


def test_the_last_layer_may_be_the_last_module() -> None:
    model = made()
    found = match(model, replace(having(norm=Whole()), last="layers.1"), 2).changes
    assert found["layers.0"].input == "own_rows" and not found["layers.0"].output_is_whole
    assert (
        found["layers.1"].input is None
        and found["layers.1"].output_is_whole
        and found["layers.1"].own_random_numbers
    )
