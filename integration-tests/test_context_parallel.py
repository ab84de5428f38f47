"""A sequence that is divided over ranks (bmt-cp) trains as in one process of plain torch."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from context_models import KINDS, Model, batch, split_along_tp
from document_code import blocks, code, printed_by, run
from hypothesis import given, settings
from planted_mistakes import replace_on_rank
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

import bmt_cp
import bmtrain as bmt
from bmt_core.comm.torch_backend import SingleGroup
from bmt_core.errors import ConfigError
from bmt_core.run.runtime import current
from bmt_optim import OptimManager
from bmt_pipeline import train_step
from bmt_testing import (
    RankFailure,
    TrainingSettings,
    assert_matches_single,
    on_ranks,
    run_ranks,
    training_settings,
)
from bmt_zero import Block, BMTrainModelWrapper

GRIDS = [
    TrainingSettings(ranks=2, axes={"cp": 2}, gradients="sum", levels=(3,), recompute=(True,)),
    TrainingSettings(ranks=4, axes={"cp": 4}, gradients="sum", levels=(0, 1, 2), max_norm=0.1),
    TrainingSettings(
        ranks=4, axes={"cp": 2}, gradients="sum", levels=(2, 3), optimizer="adam", micro_batches=2,
        recompute=(True, False), keep="attention", reload=True,
    ),
    TrainingSettings(
        ranks=4, axes={"cp": 2}, gradients="sum", levels=(3, 1), shard_size=1, no_sync=True,
        micro_batches=2,
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "kind"),
    # How a sequence is divided concerns each kind; what else a training does, only one.
    [*product(GRIDS[:2], KINDS), (GRIDS[2], "documents"), (GRIDS[3], "odd length")],
    ids=repr,
)
def test_a_training_is_that_of_one_process(settings: TrainingSettings, kind: str) -> None:
    assert_matches_single(partial(Model, kind), partial(batch, kind), settings=settings)


@pytest.mark.parametrize("kind", ["full", "window"])
def test_a_training_with_split_layers_is_that_of_one_process(kind: str) -> None:
    drawn = TrainingSettings(
        ranks=4, axes={"cp": 2, "tp": 2}, gradients="sum", levels=(3, 2), recompute=(True, False)
    )
    assert_matches_single(
        partial(Model, kind), partial(batch, kind), settings=drawn, parallelize=split_along_tp
    )


@pytest.mark.parametrize("kind", ["odd length", "window"])
def test_a_training_with_a_pipeline_is_that_of_one_process(kind: str) -> None:
    settings = TrainingSettings(
        ranks=4, axes={"cp": 2, "pp": 2}, gradients="sum", levels=(3,), recompute=(True,)
    )
    assert_matches_single(
        partial(Model, kind), partial(batch, kind), settings=settings, pipeline="layers"
    )


EXAMPLES = int(os.environ.get("BMT_TEST_CONTEXT_EXAMPLES", "2"))


@pytest.mark.parametrize("kind", KINDS)
@given(drawn=training_settings(axes={"cp": (2, 4)}, ranks=(2, 4)))
@settings(deadline=None, max_examples=EXAMPLES, derandomize=True, database=None)
def test_random_trainings_are_those_of_one_process(kind: str, drawn: TrainingSettings) -> None:
    assert_matches_single(partial(Model, kind), partial(batch, kind), settings=drawn, steps=2)


def count_own_tokens(model: nn.Module) -> nn.Module:
    """Plant: each rank divides by the number of its own tokens."""
    import bmt_optim.token_counts

    return replace_on_rank(bmt_optim.token_counts, "sum_group", lambda: SingleGroup(0), model)


def shift_after_the_cut(model: nn.Module) -> nn.Module:
    """Plant: a rank shifts the labels that it has."""
    split = bmt_cp.split

    def shifted(**given: Any) -> bmt_cp.Part:
        part = split(**given)
        part["shift_labels"] = F.pad(part["labels"][:, 1:], (0, 1), value=bmt_cp.IGNORED)
        return part

    return replace_on_rank(bmt_cp, "split", shifted, model)


def attend_to_old_keys(model: nn.Module) -> nn.Module:
    """Plant: the second layer sees the first one's keys."""
    import bmt_cp.context_attention

    gather, seen = bmt_cp.exchange.gather_tokens, []

    def stale(tensors: Any, group: Any) -> Any:
        seen.append(gather(tensors, group))
        return seen[-2] if len(seen) % 3 == 2 else seen[-1]

    return replace_on_rank(bmt_cp.context_attention, "gather_tokens", stale, model)


def lose_a_head(model: nn.Module) -> nn.Module:
    """Plant: the result of one head does not come back."""
    import bmt_cp.context_attention

    back = bmt_cp.exchange.heads_to_tokens

    def losing(tensors: list[torch.Tensor], ranks: int) -> list[torch.Tensor]:
        (found,) = back(tensors, ranks)
        return [torch.cat([found[:, :-1], torch.zeros_like(found[:, -1:])], 1)]

    return replace_on_rank(bmt_cp.context_attention, "heads_to_tokens", losing, model)


def order_by_rank(model: nn.Module) -> nn.Module:
    """Plant: chunks from the tail are taken for those that follow chunks from the head."""
    import bmt_cp.exchange

    def by_rank(parts: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(parts.unbind(0), dim)

    def chunks_by_rank(by_token: torch.Tensor, ranks: int) -> Any:
        chunks = by_token.chunk(2 * ranks)
        return chunks[::2], chunks[1::2]

    replace_on_rank(bmt_cp.exchange, "_chunks", chunks_by_rank, model)
    return replace_on_rank(bmt_cp.exchange, "in_order", by_rank, model)


@pytest.mark.parametrize(
    ("plant", "kind"),
    [
        (count_own_tokens, "causal"),
        (shift_after_the_cut, "causal"),
        (attend_to_old_keys, "odd length"),
        (lose_a_head, "causal"),
        (order_by_rank, "causal"),
        (order_by_rank, "odd length"),
    ],
)
def test_a_planted_mistake_is_found(plant: Callable[..., nn.Module], kind: str) -> None:
    drawn = TrainingSettings(ranks=2, axes={"cp": 2}, gradients="sum")
    with pytest.raises(AssertionError, match="differs from one process of plain torch"):
        assert_matches_single(
            partial(Model, kind), partial(batch, kind), settings=drawn, parallelize=plant
        )


class Own(nn.Module):
    """A layer that computes something of its tokens, in a model."""

    def __init__(self, layer: nn.Module, *arguments: Any, **named: Any) -> None:
        super().__init__()
        self.layer, self.arguments, self.named = layer, arguments, named

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x, *self.arguments, **self.named)


class Product(nn.Module):
    """Calls torch's attention."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x)


class ByHand(nn.Module):
    """Computes attention by products."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x.mT, -1) @ x


class LosesDocuments(nn.Module):
    """Divides packed documents, and attends to all of the sequence."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        part = bmt_cp.split(x=x, document_ids=ids)["x"][:, None]
        return bmt_cp.attention(part, part, part)


@on_ranks(2, init={"cp_size": 2})
def test_dropout_differs_along_cp_and_not_the_numbers_of_the_program() -> None:
    model = BMTrainModelWrapper(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    mask = model(torch.ones(8, 64, 4)) == 0
    ones = torch.ones(2, 2, 16, 4)
    weights = bmt_cp.attention(ones, ones, ones, dropout=0.5)
    group = current().topology.group(("cp",))
    from bmt_core.comm.autograd import gather_stacked

    first, second = gather_stacked(mask.float(), group)
    assert 0.4 < float((first != second).float().mean()) < 0.6
    assert float(weights.mean()) == pytest.approx(1, abs=0.3)
    drawn = gather_stacked(torch.rand(4), group)
    assert torch.equal(drawn[0], drawn[1])


@on_ranks(2, init={"cp_size": 2})
@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Product(), "The model calls torch's scaled_dot_product_attention"),
        (ByHand(), "The model calls torch's softmax"),
        (nn.Conv1d(8, 8, 3), r"layer \(Conv1d\) mixes the tokens"),
        (nn.Sequential(nn.GRU(8, 8)), r"layer\.0 \(GRU\) mixes the tokens"),
    ],
)
def test_a_layer_that_mixes_this_ranks_tokens_is_named(layer: nn.Module, message: str) -> None:
    bmt_cp.split(x=torch.ones(2, 16, 8))
    model = BMTrainModelWrapper(nn.ModuleDict({"out": nn.Linear(8, 8)}))
    model["layer"] = layer
    model.forward = lambda x: layer(x)
    with pytest.raises((TypeError, ConfigError)):
        model()
    for _ in range(2):  # a call that has failed was not the first one
        with pytest.raises(ConfigError, match=message):
            model(torch.ones(2, 8, 8))


@on_ranks(2, init={"cp_size": 2})
def test_a_module_may_say_that_it_computes_each_token_by_itself() -> None:
    layer = nn.Conv1d(8, 8, 3, padding=1)
    layer.token_wise = True  # type: ignore[assignment]
    BMTrainModelWrapper(Own(layer))(torch.ones(2, 8, 8))


@on_ranks(2, init={"cp_size": 2})
def test_wrong_batches_are_errors() -> None:
    ids = torch.arange(8).expand(2, 8)
    rank = current().topology.axis_rank("cp")
    with pytest.raises(ValueError, match=r"must have the same batch for bmt\.cp\.split"):
        bmt_cp.split(input_ids=ids + rank)
    current()._states.clear()  # the next comparison is the first again
    with pytest.raises(ValueError, match="the values of x differ"):
        bmt_cp.split(x=torch.ones(2, 8, 4) + 1e-3 * rank)
    for wrong, message in (
        ({"position_ids": ids % 5}, r"position_ids\[0, 5\] is 0 after 4"),
        ({"labels": ids[:, :4]}, "of the same tokens"),
    ):
        current()._states.clear()
        with pytest.raises(ValueError, match=message):
            bmt_cp.split(input_ids=ids, **wrong)


@on_ranks(1, 2, init=lambda ranks: {"cp_size": ranks})
def test_positions_are_looked_at_in_every_step() -> None:
    ids = torch.arange(8).expand(2, 8)
    for _ in range(6):
        bmt_cp.split(input_ids=ids, position_ids=ids)
    with pytest.raises(ValueError, match=r"position_ids\[0, 5\] is 0 after 4"):
        bmt_cp.split(input_ids=ids, position_ids=ids % 5)


@on_ranks(2, init={"cp_size": 2})
def test_tokens_that_are_not_two_chunks_are_errors() -> None:
    for tokens, key_heads in ((1, 2), (5, 2), (5, 1)):
        query, key = torch.ones(1, 2, tokens, 4), torch.ones(1, key_heads, tokens, 4)
        with pytest.raises(ValueError, match=f"have {tokens} tokens, and each rank"):
            bmt_cp.attention(query, key, key)
    with pytest.raises(ValueError, match="Dim 1 of x has 5 tokens"):
        bmt_cp.gather(torch.ones(2, 5))


@on_ranks(2, init={"cp_size": 2})
def test_documents_that_do_not_reach_attention_are_an_error() -> None:
    model = BMTrainModelWrapper(LosesDocuments())
    with pytest.raises(ConfigError, match="document_ids, which no attention of the model gets"):
        model(torch.ones(1, 8, 4), torch.arange(8)[None] // 3)


@on_ranks(2, init={"cp_size": 2})
def test_a_step_of_a_pipeline_without_counts_is_an_error() -> None:
    inputs: Any = nn.Linear(4, 4), F.mse_loss, (torch.ones(2, 4), torch.ones(2, 4)), "1f1b"
    with pytest.raises(ValueError, match="are parts of one sum"):
        train_step(*inputs)


@on_ranks(2, init={"cp_size": 2})
def test_a_loop_without_a_manager_is_warned_of() -> None:
    rank = current().topology.axis_rank("cp")
    block = Block(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    block(torch.randn(2, 4) + rank).mean().backward()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        optimizer.step()
    assert any("has computed a part" in str(each.message) for each in found) == (rank == 0)


@on_ranks(2, init={"cp_size": 2})
def test_a_loss_without_a_count_is_an_error() -> None:
    block = Block(nn.Linear(4, 4))
    manager = OptimManager()
    manager.add_optimizer(torch.optim.SGD(block.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="are parts of one sum"):
        manager.backward(block(torch.ones(2, 4)).sum())
    manager.scale_loss(block(torch.ones(2, 4)).sum(), count=2)  # the error has noted no loss


@on_ranks(2, init={"cp_size": 2})
def test_a_batch_that_was_not_divided_is_an_error() -> None:
    block = Block(nn.Linear(4, 4))
    manager = OptimManager()
    manager.add_optimizer(torch.optim.SGD(block.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="Divide the batch before the model is called"):
        manager.backward(block(torch.ones(2, 4)).sum(), count=2)
        manager.step()


@on_ranks(2, init={"cp_size": 2})
def test_parts_are_put_together_in_order() -> None:
    x = torch.arange(2 * 11 * 3).view(2, 11, 3)
    part = bmt_cp.split(x=x)["x"]
    assert part.shape == (2, 6, 3)
    assert torch.equal(bmt_cp.gather(part)[:, :11], x)


def test_means_of_gradients_are_refused_where_sequences_are_divided() -> None:
    with pytest.raises(RankFailure, match='cp_size=2 and gradients="mean"'):
        run_ranks(int, 2, init={"cp_size": 2, "gradients": "mean"})


def losses_of(kind: str, compiled: bool) -> tuple[list[float], bool]:
    """The losses of three steps, with Blocks that are compiled or not, and whether each was
    compiled as one graph.
    """
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = Model(kind)
    for layer in model.layers:
        Block(layer, compile=compiled)
    wrapped = BMTrainModelWrapper(model)
    manager = OptimManager()
    manager.add_optimizer(torch.optim.SGD(wrapped.parameters(), lr=0.1))
    found = []
    for step in range(3):
        torch.manual_seed(step)
        loss, count = wrapped(*batch(kind, 0))
        manager.backward(loss, count=count)
        manager.step()
        manager.zero_grad()
        found.append(loss.item())
    return found, counters["frames"]["ok"] > 0 and not counters["graph_break"]


@pytest.mark.slow("bmt-cp", "bmt-zero")
@pytest.mark.parametrize(("kind", "is_one_graph"), [("causal", True), ("odd length", False)])
def test_compiled_layers_train_the_same(kind: str, is_one_graph: bool) -> None:
    options: Any = {"init": {"cp_size": 2}, "timeout": 300}
    for (plain, _), (compiled, one_graph) in zip(
        run_ranks(losses_of, 2, kind, False, **options),
        run_ranks(losses_of, 2, kind, True, **options),
        strict=True,
    ):
        assert compiled == pytest.approx(plain, rel=1e-5)
        assert one_graph == is_one_graph


@on_ranks(2, init=None)
def test_compiled_attention_after_a_run_is_that_of_one_process() -> None:
    bmt.init_distributed(cp_size=2)
    bmt.shutdown()
    query = torch.randn(1, 2, 6, 4)
    compiled = torch.compile(bmt_cp.attention, backend="eager", fullgraph=True)
    torch.testing.assert_close(
        compiled(query, query, query),
        F.scaled_dot_product_attention(query, query, query, is_causal=True),
    )


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_script_of_the_page_prints_what_it_shows(ranks: int, tmp_path: Path) -> None:
    printed, *_ = run_ranks(
        printed_by, ranks, code("docs/long-sequences.md", 0), str(tmp_path), init=None
    )
    steps = [line for line in printed.splitlines() if line.startswith("step")]
    assert steps == blocks("docs/long-sequences.md", "text")[0].splitlines()


def test_the_attention_of_the_page_is_causal() -> None:
    made = run(code("docs/long-sequences.md", 1), torch=torch, bmt=bmt)["Attention"](8, 2)
    x = torch.randn(2, 6, 8)
    first = made(x)[:, :3]
    x[:, 3:] += 1
    torch.testing.assert_close(made(x)[:, :3], first)
