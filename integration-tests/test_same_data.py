"""Ranks along ``tp``, or along an axis of a plugin, that see the same data: mistakes are right, or
errors with a name.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from beside_torch import assert_same_parameters, train_beside_torch, whole
from compile_models import from_new
from same_data_models import FEATURES, PLAN, WORDS, Classic, Model, WithValue, batch, loss_of, plain
from scratch_axes import SLICE, grid_with
from torch import nn

import bmt_core
import bmt_params
from bmt_core.errors import ConfigError
from bmt_core.run.collectives import all_reduce
from bmt_core.run.runtime import current, rank
from bmt_optim import OptimManager
from bmt_params import DistributedModule, Locality, set_locality
from bmt_testing import on_ranks, run_ranks
from bmt_tp import (
    ColumnParallelLinear,
    RowParallelLinear,
    VPEmbedding,
    allow_equal_rows,
    parallel_linear,
    parallelize,
)
from bmt_tp import whole as declared_whole
from bmt_zero import Block, BMTrainModelWrapper
from bmtrain.loss import FusedCrossEntropy
from bmtrain.nn import Linear
from cells import cells, run_cells

TP = {"tp_size": 2}


def said(call: Callable[[], Any]) -> str:
    with pytest.raises((ConfigError, ValueError)) as caught:
        call()
    return str(caught.value)


# ---- plain modules around split ones ----


def made_with_value() -> WithValue:
    model: WithValue = plain(lambda: WithValue(Model()))
    model.model.head.requires_grad_(False)
    return model


def split_with_value() -> WithValue:
    model = made_with_value()
    parallelize(model.model, PLAN)
    return model


def classic() -> Classic:
    """Megatron's form by hand: its plain modules are the embedding, the norm and the head."""
    model: Classic = plain(lambda: Classic(is_parallel=True))
    model.load_state_dict(plain(lambda: Classic(is_parallel=False)).state_dict())
    return model


def along_tp(ranks: int, tp_size: int) -> dict[str, int]:
    return {"tp_size": tp_size}


@pytest.mark.parametrize("tp_size", [2, 4])
@on_ranks(4, init=along_tp)
def test_declared_modules_around_split_ones_train_as_in_plain_torch(tp_size: int) -> None:
    model = split_with_value()
    assert declared_whole(model.value) is model.value
    train_beside_torch(BMTrainModelWrapper(model), made_with_value(), loss_of)
    train_beside_torch(
        BMTrainModelWrapper(declared_whole(classic())),
        plain(lambda: Classic(is_parallel=False)),
        loss_of,
    )


@on_ranks(4, init={"tp_size": 4})
def test_undeclared_modules_that_every_rank_computes_whole_are_refused() -> None:
    by_hand = classic()
    Block(by_hand.head)
    for model, name in ((split_with_value(), "value."), (by_hand, "head.")):
        BMTrainModelWrapper(model)
        text = said(lambda model=model: model(*batch(0)).backward())  # type: ignore[misc]
        start = "All 4 ranks along 'tp' have computed the same gradient of "
        assert text.startswith(start) and name in text and "bmt_tp.whole(module)" in text, text


@on_ranks(2, init=TP)
def test_a_model_that_nobody_split_is_refused_when_it_is_wrapped_or_at_its_first_backward() -> None:
    text = said(lambda: BMTrainModelWrapper(plain(Model)))
    assert text.startswith(
        "The 2 ranks along 'tp' see the same data, and no parameter of Model is split or declared"
    )
    assert text.endswith("model.requires_grad_(False).")
    frozen = BMTrainModelWrapper(plain(Model).requires_grad_(False))
    assert torch.equal(frozen(*batch(0)), plain(Model)(*batch(0)))
    model = plain(Model)
    for layer in model.layers:
        Block(layer)
    assert said(lambda: model(*batch(0)).backward()).startswith(
        "All 2 ranks along 'tp' have computed the same gradient of norm.weight of shape (8,)."
    )


@on_ranks(2, init=TP)
def test_gradients_of_ordinary_parameters_are_not_summed_if_every_rank_has_the_whole() -> None:
    model = plain(Model)
    manager = OptimManager()
    manager.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    manager.backward(model(*batch(0)))
    text = said(manager.step)
    assert "have computed the same gradient of an ordinary parameter of shape (12, 8)" in text


@on_ranks(2, init=TP)
def test_parameters_without_blocks_are_compared_too() -> None:
    linear = Linear(FEATURES, 2)
    bmt_params.init_parameters(linear)
    text = said(lambda: linear(torch.ones(3, FEATURES)).square().sum().backward())
    assert "have computed the same gradient of Linear." in text


@on_ranks(4, init=grid_with(SLICE))
def test_a_plain_model_along_an_axis_of_a_plugin_is_refused_or_declared() -> None:
    text = said(lambda: BMTrainModelWrapper(plain(Model)))
    assert "The 2 ranks along 'slice' see the same data" in text
    assert "set_locality(module, Locality('slice', gradients='whole'))" in text
    model = set_locality(plain(Model), Locality("slice", gradients="whole"))
    train_beside_torch(BMTrainModelWrapper(model), plain(Model), loss_of)


def first_refused_step(is_whole: bool, dtype: torch.dtype, elements: int) -> int:
    """Train a parameter of which each rank computes the whole gradient, or a share that differs at
    step 8 alone.
    """
    parameter = nn.Parameter(torch.ones(elements, dtype=dtype))
    manager = OptimManager()
    manager.add_optimizer(torch.optim.SGD([parameter], lr=0.1))
    for step in range(1, 17):
        manager.zero_grad()
        (parameter.sum() * (1 if is_whole or step != 8 else 1 + rank())).backward()
        try:
            manager.step()
        except ConfigError as error:
            assert "have computed the same gradient" in str(error)
            return step
    return 0


def test_a_number_may_be_the_same_on_all_ranks_now_and_then() -> None:
    dtypes = (torch.bfloat16, torch.half, torch.float32, torch.float64)
    for is_whole, elements, step in ((False, 1, 0), (True, 7, 8), (False, 8, 1)):
        cells = [(is_whole, dtype, elements) for dtype in dtypes]
        for cell, steps in run_cells(first_refused_step, 4 if is_whole else 2, cells, init=TP):
            assert {*steps} == {step}, cell


@on_ranks(2, init=TP)
def test_gradients_of_nothing_but_rounding_are_not_refused() -> None:
    """Train sixty numbers whose gradients are nothing but rounding, from rows of this rank."""
    for dtype in (torch.float32, torch.float64):
        numbers = [nn.Parameter(torch.zeros((), dtype=dtype)) for _ in range(60)]
        manager = OptimManager()
        manager.add_optimizer(torch.optim.SGD(numbers, lr=0.1))
        random = torch.Generator().manual_seed(rank())
        for _ in range(8):
            manager.zero_grad()
            for number in numbers:
                rows, weights = torch.randn(2, 16, 6, generator=random, dtype=dtype)
                (nn.functional.layer_norm(rows + number, (6,)) * weights).sum().backward()
            manager.step()


# ---- declarations that do not hold ----


@on_ranks(2, init=TP)
def test_what_was_declared_whole_and_differs_is_refused() -> None:
    block = Block(declared_whole(plain(lambda: nn.Linear(FEATURES, 2))))
    rows = torch.randn(3, FEATURES, generator=torch.Generator().manual_seed(rank()))
    of_weight = r"of weight of shape \(2, 8\) differs between ranks along 'tp'"
    with pytest.raises(ConfigError, match=f"^The gradient {of_weight}"):
        block(rows).square().sum().backward()
    block = Block(declared_whole(plain(lambda: nn.Linear(FEATURES, 2))))
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(rank())
    with pytest.raises(ConfigError, match=f"^The value {of_weight}"):
        block(torch.ones(3, FEATURES)).sum().backward()


@on_ranks(1, 2, init=lambda ranks: {"tp_size": ranks})
def test_declarations_that_come_too_late_or_cut_are_refused(world_size: int) -> None:
    if world_size == 1:  # nothing to declare
        assert type(declared_whole(nn.Linear(2, 2))) is nn.Linear
        return
    whole_along_tp = Locality("tp", gradients="whole")
    column = ColumnParallelLinear(FEATURES, 4)
    before = [p.locality for p in column.parameters()]  # type: ignore[attr-defined]
    assert [p.locality for p in set_locality(column, whole_along_tp).parameters()] == before  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"^weight is sharded already, and cannot be declared as"):
        set_locality(Block(nn.Linear(2, 2)), whole_along_tp)
    with pytest.raises(ConfigError, match="modules that every rank along 'tp' holds whole, and"):
        set_locality(nn.Linear(2, 2), Locality("tp", split_dim=0))


# ---- rows and targets ----


@on_ranks(2, init=TP)
def test_layers_that_gather_rows_refuse_the_same_rows_from_every_rank() -> None:
    model: Classic = plain(lambda: Classic(is_parallel=True, gathers=True))
    bmt_params.init_parameters(model)
    BMTrainModelWrapper(declared_whole(model))
    embedding = VPEmbedding(12, FEATURES, dtype=torch.float32)
    bmt_params.init_parameters(embedding)
    assert (
        "All 2 ranks along 'tp' passed the same rows (32, 8) to a column-parallel layer,"
        " which gathers"
    ) in said(lambda: model(*batch(0)).backward())
    assert "passed the same rows (4, 8) to VPEmbedding" in said(lambda: embedding(batch(0)[0]))


def see_a_sequence_twice(is_declared: bool) -> None:
    """Embed and multiply a sequence, of which each rank along ``tp`` has one half, and both are
    the same.
    """
    model = nn.Sequential(
        VPEmbedding(12, FEATURES, dtype=torch.float32),
        ColumnParallelLinear(FEATURES, 4, bias=False),
    )
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) / 50)
    half = torch.arange(6).view(3, 2)
    if not is_declared:
        rows = torch.randn(3, FEATURES)
        for call in (lambda: model[0](half), lambda: model[1](rows).sum().backward()):
            text = said(call)
            assert "passed the same rows" in text and "bmt_tp.allow_equal_rows()" in text
        return
    allow_equal_rows()
    table, weight = (whole(p, p.detach()).requires_grad_() for p in model.parameters())
    model(half).square().sum().backward()
    (table[torch.cat([half, half])] @ weight.t()).square().sum().backward()
    for parameter, expected in zip(model.parameters(), (table, weight), strict=True):
        torch.testing.assert_close(whole(parameter, parameter.grad), expected.grad)


def test_a_sequence_that_repeats_itself_trains_after_a_declaration_in_this_run() -> None:
    for is_declared in (False, True, False):
        run_ranks(see_a_sequence_twice, 2, is_declared, init=TP)


@on_ranks(2, init=TP)
@cells("wrong, as_functions", itertools.product(range(6), (False, True)))
def test_one_layer_of_many_that_gathers_the_same_rows_is_found_in_the_first_step(
    wrong: int, as_functions: bool
) -> None:
    rows = torch.randn(3, FEATURES, generator=torch.Generator().manual_seed(3))
    calls: list[Callable[[], torch.Tensor]] = []
    for number in range(6):
        gathers = number == wrong
        if as_functions:
            weight = torch.ones(4, FEATURES, requires_grad=True)
            calls.append(partial(parallel_linear, rows, weight, gather_input=gathers))
        else:
            layer = ColumnParallelLinear(FEATURES, 4, gather_input=gathers)
            bmt_params.init_parameters(layer)
            calls.append(partial(layer, rows))
    text = said(lambda: torch.stack([call().square().mean() for call in calls]).sum().backward())
    assert "passed the same rows (3, 8) to a column-parallel layer, which gathers" in text


@on_ranks(2, init=TP)
def test_layers_and_losses_that_expect_the_same_rows_refuse_others() -> None:
    layer = ColumnParallelLinear(FEATURES, 4, gather_input=False)
    bmt_params.init_parameters(layer)
    rows = torch.randn(3, FEATURES, generator=torch.Generator().manual_seed(rank()))
    assert said(lambda: layer(rows).sum().backward()).startswith(
        "The ranks along 'tp' passed different rows (3, 8) to a column-parallel layer"
    )
    logits, targets = torch.zeros(4, 6), torch.arange(4) + rank()
    assert (
        "Ranks 0, 1 must have the same targets of FusedCrossEntropy, and the values of"
        " targets differ"
    ) in said(lambda: FusedCrossEntropy(parallel=True)(logits, targets))


# ---- inputs, first values and losses of models that are split by a plan ----


@on_ranks(2, init=TP)
@cells("which, name", [("ids", "ids"), ("one id", "ids"), ("labels", "labels"), ("later", "ids")])
def test_ranks_along_tp_that_get_other_inputs_are_told_which(which: str, name: str) -> None:
    model = BMTrainModelWrapper(parallelize(plain(Model), PLAN))
    ids, labels = batch(0)
    for _ in range(3 if which == "later" else 0):
        model(ids, labels)
    other_ids, other_labels = batch(rank())
    one_other = ids.clone()
    one_other[0, 0] += rank()
    given = {
        "ids": (other_ids, labels),
        "one id": (one_other, labels),
        "labels": (ids, other_labels),
        "later": (other_ids, labels),
    }[which]
    text = said(lambda: model(*given))
    assert (
        f"Ranks 0, 1 must have the same inputs of Model, and the values of {name} differ on rank 1"
    ) in text
    assert "topology.data_rank" in text


class Words(DistributedModule):
    """A model that returns the logits of all words, on every rank along ``tp``; its head may be
    split by a sum.
    """

    def __init__(self, form: str) -> None:
        super().__init__()
        self.table = VPEmbedding(WORDS, FEATURES, dtype=torch.float32)
        self.up, self.down = (
            ColumnParallelLinear(FEATURES, 4 * FEATURES),
            RowParallelLinear(4 * FEATURES, FEATURES),
        )
        if form == "all-reduced":
            self.head: nn.Module = RowParallelLinear(
                FEATURES, WORDS, split_input=True, all_reduce_output=True
            )
        else:
            self.head = ColumnParallelLinear(FEATURES, WORDS, gather_output=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        own = ids.chunk(current().topology.axis_size("tp"))[current().topology.axis_rank("tp")]
        x = self.table(own)
        logits: torch.Tensor = self.head(x + self.down(torch.relu(self.up(x))))
        return logits


class Logits(Model):
    """Takes no labels."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        logits: torch.Tensor = self.head(self.hidden(ids))
        return logits


def backward_outside(form: str, are_same: bool, compiles: bool) -> str:
    """Backward in plain torch, of a loss that is computed outside of the model."""
    if form == "plan":
        model: Any = parallelize(plain(Logits), PLAN)
        blocks = [*model.layers, model.head]
    else:
        bmt_params.init_parameters(model := Words(form))
        blocks = [*model.children()]
    for block in blocks:
        Block(block, compile=compiles and block is model.head)  # whose output is looked at
    ids, labels = (x.t() if form != "plan" else x for x in batch(0))
    labels = labels if are_same else labels.roll(rank(), 0)
    for step in range(3):
        # Other labels are found in the first step, and if they come later, in a later one.
        try:
            nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten()).backward()
        except ConfigError as error:
            assert step == 0
            return str(error)
    return ""


@on_ranks(2, 4, init=lambda ranks: {"tp_size": ranks}, timeout=120)
@cells("form, are_same", itertools.product(("plan", "gathered", "all-reduced"), (False, True)))
def test_other_labels_outside_of_a_model_are_refused_without_a_manager(
    form: str, are_same: bool
) -> None:
    compiles = bmt_core.world_size() == 2
    with from_new("aot_eager") if compiles else nullcontext():
        text = backward_outside(form, are_same, compiles)
    if are_same:
        assert text == ""
    else:
        assert "have computed different gradients of the output" in text
        assert "topology.data_rank" in text


class WithAux(Model):
    """Adds losses that its layers form from a rank's rows to its loss, and returns them, too."""

    adds = True

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
        loss = super().forward(ids, labels)
        aux: Any = sum(layer.aux for layer in self.layers)
        return {"loss": loss + aux if self.adds else loss, "of this rank": aux.detach()}


@on_ranks(2, init=TP)
def test_a_loss_of_a_ranks_own_rows_that_the_model_returns_is_refused_without_a_manager() -> None:
    model: Any = BMTrainModelWrapper(parallelize(plain(WithAux), PLAN))
    model.adds = False
    model(*batch(0))["loss"].backward()
    model.adds = True
    text = said(lambda: model(*batch(0)))
    assert "must have the same losses that WithAux returns" in text
    assert "all_reduce(term, 'avg'" in text


@on_ranks(2, init=TP)
def test_a_planned_model_trains_on_a_sequence_that_repeats_itself() -> None:
    ids = batch(0)[0].chunk(2, dim=1)[0].repeat(1, 2)
    model, expected = BMTrainModelWrapper(parallelize(plain(Model), PLAN)), plain(Model)
    model(ids, ids).backward()
    expected(ids, ids).backward()
    assert_same_parameters(model, expected)


@on_ranks(2, init=TP)
def test_first_values_that_differ_along_tp_are_refused() -> None:
    model = plain(Model)
    torch.manual_seed(rank())
    model.head.reset_parameters()
    BMTrainModelWrapper(parallelize(model, PLAN))
    with pytest.raises(ConfigError, match=r"^head\.weight has other values on rank 1 than on rank"):
        model(*batch(0))


def averaged(loss: torch.Tensor) -> torch.Tensor:
    return all_reduce(loss, "avg", comm=current().topology.group(("tp",)))


def aux_of(model: Any) -> torch.Tensor:
    return torch.stack([layer.aux for layer in model.layers]).sum()


@on_ranks(4, init=TP)
def test_a_loss_of_a_ranks_own_rows_is_refused_unless_it_is_averaged() -> None:
    model = BMTrainModelWrapper(parallelize(plain(Model), PLAN))
    text = said(lambda: OptimManager().backward(model(*batch(0)) + aux_of(model)))
    assert "must have the same loss" in text and "all_reduce(term, 'avg'" in text
    train_beside_torch(
        BMTrainModelWrapper(parallelize(plain(Model), PLAN)),
        plain(Model),
        lambda model, *data: loss_of(model, *data) + averaged(aux_of(model)),
        lambda model, *data: loss_of(model, *data) + aux_of(model),
    )


@on_ranks(2, init=TP)
def test_the_loss_of_another_model_on_a_ranks_own_data_is_averaged() -> None:
    """A plain model on data of each rank's own, beside a model that is split over these ranks."""
    parallelize(plain(Model), PLAN)
    model, expected = (plain(lambda: nn.Linear(FEATURES, 2)) for _ in range(2))
    rows = torch.randn(2, 3, FEATURES, generator=torch.Generator().manual_seed(0))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, expected)]
    manager = OptimManager()
    manager.add_optimizer(optimizers[0])
    text = said(lambda: manager.backward(model(rows[rank()]).square().mean()))
    assert (
        "the loss of another model on data of a rank's own, must be averaged over these ranks first"
    ) in text
    for _ in range(3):
        manager.zero_grad()
        optimizers[1].zero_grad()
        manager.backward(averaged(model(rows[rank()]).square().mean()))
        expected(rows).square().mean().backward()
        norm = manager.clip_grad_norm(model.parameters(), 0.1)
        expected_norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
        torch.testing.assert_close(norm, expected_norm, rtol=1e-4, atol=1e-6)
        manager.step()
        optimizers[1].step()
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tp_size", [2, 4])
@on_ranks(4, init=lambda ranks, tp_size: {"tp_size": tp_size, "gradients": "mean"})
def test_blocks_of_a_split_model_train_without_a_wrapper(tp_size: int) -> None:
    model: Any = parallelize(plain(Model), PLAN)
    expected = plain(Model)
    for layer in model.layers:
        Block(layer)
    topology = current().topology
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, expected)]
    for step in range(3):
        loss_of(model, step, topology.data_rank, topology.data_size).backward()
        loss_of(expected, step, 0, 1).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, expected)
