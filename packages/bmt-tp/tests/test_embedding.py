"""``VPEmbedding`` compared with the whole table."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from tp_models import drawn, gradients_of, on_tp_ranks, own_columns, own_rows, tp

from bmt_tp import VPEmbedding

VOCABULARY, FEATURES, LENGTH, BATCH = 12, 5, 8, 3


@on_tp_ranks(1, 4)
def test_lookup_and_projection_equal_those_of_the_whole_table() -> None:
    weight = drawn(VOCABULARY, FEATURES, seed=1)
    ids = torch.randint(VOCABULARY, (LENGTH, BATCH), generator=torch.Generator().manual_seed(2))
    vectors, grad = drawn(LENGTH, BATCH, FEATURES, seed=3), drawn(LENGTH, BATCH, FEATURES, seed=4)
    of_logits = drawn(LENGTH, BATCH, VOCABULARY, seed=5)
    dense = nn.Embedding(VOCABULARY, FEATURES, dtype=torch.float64)
    dense.load_state_dict({"weight": weight})
    input = vectors.clone().requires_grad_()
    expected = dense(ids)
    logits = input @ dense.weight.t()
    torch.autograd.backward([expected, logits], [grad, of_logits])
    assert dense.weight.grad is not None and input.grad is not None

    table = VPEmbedding(VOCABULARY, FEATURES, dtype=torch.float64)
    table.load_state_dict({"weight": weight})
    own = own_rows(vectors).requires_grad_()
    found, found_logits = table(own_rows(ids)), table(own, projection=True)
    torch.autograd.backward([found, found_logits], [own_rows(grad), own_columns(of_logits)])
    assert own.grad is not None
    torch.testing.assert_close(found, own_rows(expected))
    torch.testing.assert_close(found_logits, own_columns(logits))
    torch.testing.assert_close(own.grad, own_rows(input.grad))
    torch.testing.assert_close(gradients_of(table)["weight"], dense.weight.grad)
    torch.testing.assert_close(
        table(own_rows(vectors[:, 0]), projection=True), own_columns(vectors[:, 0] @ weight.t())
    )


@on_tp_ranks(2)
def test_an_id_out_of_range_on_one_rank_is_one_error_on_all() -> None:
    table = VPEmbedding(VOCABULARY, FEATURES, dtype=torch.float32)
    table.load_state_dict({"weight": torch.ones(VOCABULARY, FEATURES)})
    wrong = VOCABULARY if tp()[0] == 1 else 0
    with pytest.raises(
        IndexError, match=r"^Id 12 is out of range: the vocabulary has 12 entries, 0 to 11\.$"
    ):
        table(torch.tensor([0, wrong]))
