"""Tensor-parallel layers on activations that are batch first, as in BMTrain's example, or
sequence first.
"""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from beside_torch import train_beside_torch
from compile_models import from_new, graphs
from torch import nn
from torch.nn import functional as F

import bmt_core
import bmt_params
from bmt_core.errors import ConfigError
from bmt_core.run.runtime import current
from bmt_params import DistributedModule, DistributedParameter
from bmt_testing import on_ranks, run_ranks
from bmt_tp import (
    ColumnParallelLinear,
    OpParallelLinear,
    ReduceType,
    RowParallelLinear,
    VPEmbedding,
)
from bmt_zero import Block
from bmtrain.loss import FusedCrossEntropy

WORDS, FEATURES, HEADS, SEQUENCE = 12, 8, 4, 8
Record = dict[str, torch.Tensor]


class Attention(nn.Module):
    """Causal attention on (batch, sequence, features), of which BMTrain's layers get (batch,
    sequence / tp, features).
    """

    def __init__(self, is_parallel: bool) -> None:
        super().__init__()
        if is_parallel:
            self.qkv: nn.Module = ColumnParallelLinear(
                FEATURES, 3 * FEATURES, sections=(FEATURES,) * 3
            )
            self.out: nn.Module = RowParallelLinear(FEATURES, FEATURES)
        else:
            self.qkv, self.out = nn.Linear(FEATURES, 3 * FEATURES), nn.Linear(FEATURES, FEATURES)
        self.norm = nn.LayerNorm(FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, FEATURES // HEADS)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        read = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(read.transpose(1, 2).flatten(2))


class FeedForward(DistributedModule):
    """Products by the function that BMTrain's users call, the second of which splits its
    input itself.
    """

    def __init__(self, is_parallel: bool) -> None:
        super().__init__()
        self.is_parallel = is_parallel
        if is_parallel:
            tp = current().topology.axis_size("tp")
            normal = bmt_params.ParameterInitializer(nn.init.normal_)
            sizes = ((4 * FEATURES // tp, FEATURES, 0), (FEATURES, 4 * FEATURES // tp, 1))
            self.up, self.down = (
                DistributedParameter(
                    torch.empty(out, own), init_method=normal, tp_mode=True, tp_split_dim=dim
                )
                for out, own, dim in sizes
            )
            self.last: nn.Module = RowParallelLinear(FEATURES, FEATURES, split_input=True)
        else:
            self.up, self.down = (
                nn.Parameter(torch.empty(4 * FEATURES, FEATURES)),
                nn.Parameter(torch.empty(FEATURES, 4 * FEATURES)),
            )
            self.last = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_parallel:
            return x + self.last(F.gelu(x @ self.up.t()) @ self.down.t())
        inner = F.gelu(OpParallelLinear.apply(x, self.up, None, True))
        added = OpParallelLinear.apply(
            inner, self.down, None, False, False, False, ReduceType.REDUCE_SCATTER
        )
        return x + self.last(added)


class Model(DistributedModule):
    """As BMTrain's GPT: ids (batch, sequence) of which a rank takes its positions, to logits of its
    part of the vocabulary.
    """

    def __init__(self, is_parallel: bool, compiles: bool = False) -> None:
        super().__init__()
        self.is_parallel = is_parallel
        self.table: nn.Module = (
            VPEmbedding(WORDS, FEATURES, dtype=torch.get_default_dtype())
            if is_parallel
            else nn.Embedding(WORDS, FEATURES)
        )
        self.layers = nn.ModuleList(
            [kind(is_parallel) for _ in range(2) for kind in (Attention, FeedForward)]
        )
        if is_parallel:
            for layer in self.layers:
                Block(layer, not compiles, compile=compiles)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.is_parallel:
            topology = current().topology
            ids = ids.chunk(topology.axis_size("tp"), dim=1)[topology.axis_rank("tp")]
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = (
            self.table(x, projection=True) if self.is_parallel else x @ self.table.weight.t()
        )
        return logits


def values() -> Record:
    generator = torch.Generator().manual_seed(1)
    model = Model(is_parallel=False)
    return {
        name: torch.randn(p.shape, generator=generator) * 0.4
        for name, p in model.named_parameters()
    }


def loss_of(batch: int, model: Model, step: int, *_: int) -> torch.Tensor:
    """Each rank along tp sees the same sequences. Sizes change from step to step."""
    shape = (batch + step % 2, SEQUENCE * (1 + step % 2) + 1)
    data = torch.randint(WORDS, shape, generator=torch.Generator().manual_seed(step))
    entropy = FusedCrossEntropy(parallel=True) if model.is_parallel else nn.CrossEntropyLoss()
    loss: torch.Tensor = entropy(model(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten())
    return loss


def train(batch: int, compiles: bool = False, **tolerance: float) -> None:
    expected, model = Model(is_parallel=False), Model(True, compiles)
    for each in (expected, model):
        each.load_state_dict(values())
    train_beside_torch(model, expected, partial(loss_of, batch), max_norm=None, **tolerance)


def train_in_float64(batch: int) -> None:
    """Rounding to float32 in three steps is more than what is compared, on some processors."""
    torch.set_default_dtype(torch.float64)
    try:
        train(batch, rtol=1e-9, atol=1e-10)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("batch", "tp_size"), [(1, 1), (1, 2), (4, 4)])
def test_batch_first_activations_train_as_in_plain_torch(batch: int, tp_size: int) -> None:
    run_ranks(train_in_float64, tp_size, batch, init={"tp_size": tp_size, "sequence_dim": 1})


@pytest.mark.slow("bmt-tp", "bmt-zero")
@on_ranks(2, init={"tp_size": 2, "sequence_dim": 1}, timeout=300)
def test_compiled_layers_train_on_batch_first_activations_as_in_plain_torch() -> None:
    """Layers are traced and differentiated as usual, and run as they are: what torch generates from
    the same operators runs in ``test_tensor_parallel.py``.
    """
    with from_new("aot_eager"):
        train(3, compiles=True, rtol=1e-4, atol=1e-5)
        assert graphs() > 0


@on_ranks(4, init={"tp_size": 4})
def test_one_batch_first_sequence_gives_logits_in_the_order_of_its_positions() -> None:
    """BMTrain's layout at batch 1, undeclared: (1, sequence / tp, features) are rows in order."""
    table = VPEmbedding(WORDS, FEATURES, dtype=torch.float32)
    whole = values()["table.weight"]
    table.load_state_dict({"weight": whole})
    rank = current().topology.axis_rank("tp")
    own = torch.arange(SEQUENCE).unsqueeze(0).chunk(4, dim=1)[rank]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logits = table(table(own), projection=True)
    expected = (whole[:SEQUENCE] @ whole.t()).chunk(4, -1)[rank]
    torch.testing.assert_close(logits.flatten(0, 1), expected)


@on_ranks(2, init=None)
def test_what_may_be_batch_first_or_sequence_first_is_warned_about_unless_declared() -> None:
    for declared in (None, 0, 1):
        bmt_core.init_distributed(device="cpu", tp_size=2, sequence_dim=declared)
        table = VPEmbedding(WORDS, FEATURES, dtype=torch.float32)
        bmt_params.init_parameters(table)
        ids = torch.arange(4).view(2, 2) + current().rank
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            table(table(ids), projection=True)
        texts = [str(warning.message) for warning in caught]
        assert len(texts) == (declared is None and current().rank == 0)
        assert all("VPEmbedding takes (2, 2) for (sequence / tp, batch, ...)" in t for t in texts)
        bmt_core.shutdown()


@on_ranks(2, init={"tp_size": 2, "sequence_dim": 1})
def test_flat_rows_have_no_sequence_dim() -> None:
    layer = ColumnParallelLinear(FEATURES, 4)
    bmt_params.init_parameters(layer)
    expected = (
        r"^With sequence_dim=1 tensor-parallel layers expect \(batch, sequence / tp, \.\.\.\)"
    )
    with pytest.raises(ValueError, match=expected):
        layer(torch.ones(3, FEATURES))


@on_ranks(1, init=None)
def test_a_sequence_dim_is_0_or_1() -> None:
    with pytest.raises(ConfigError) as caught:
        bmt_core.init_distributed(sequence_dim=2)
    assert str(caught.value) == (
        "sequence_dim must be 0 (activations are sequence first), 1 (batch first) or None, not 2."
    )
