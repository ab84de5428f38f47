"""Attention over the ranks along ``cp`` is that of one process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from attention_cases import Case, differences

from bmt_core.comm.protocols import Group
from bmt_cp import attention, context_attention, exchange, rows
from bmt_testing import on_ranks

DOCUMENTS = (5, 20, 1, 22)
KINDS = [
    Case(),
    Case(causal=False),
    Case(window=7),
    Case(causal=False, window=7),
    Case(documents=DOCUMENTS),
    Case(causal=False, documents=DOCUMENTS),
    Case(window=9, documents=DOCUMENTS),
]
HEADS = [(4, 4, None), (4, 4, "all_gather"), (4, 1, None), (8, 4, None), (6, 3, None)]


def check_all_cases() -> None:
    for kind, (heads, key_heads, transport) in itertools.product(KINDS, HEADS):
        case = kind._replace(heads=heads, key_heads=key_heads, transport=transport)
        assert max(differences(case)) < 1e-13, case


@on_ranks(1, 4, init=lambda ranks: {"cp_size": ranks})
def test_every_kind_of_attention_is_that_of_its_definition() -> None:
    check_all_cases()


@on_ranks(2, init={"cp_size": 2})
def test_keys_are_gathered_some_heads_at_a_time() -> None:
    gathered = []

    def gather(tensors: Sequence[torch.Tensor], group: Group) -> tuple[torch.Tensor, ...]:
        gathered.append(tensors[0].shape[1])
        return exchange.gather_tokens(tensors, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_attention, "_GATHERED_BYTES", 1)
        patch.setattr(context_attention, "gather_tokens", gather)
        for kind in KINDS:
            assert max(differences(kind._replace(key_heads=2, transport="all_gather"))) < 1e-13
    assert gathered == [1, 1] * len(KINDS)


@on_ranks(2, init={"cp_size": 2})
def test_rows_with_a_window_or_documents_are_computed_some_at_a_time() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "ROWS", 5)
        check_all_cases()


@on_ranks(2, init={"cp_size": 2})
def test_under_autocast_queries_and_values_may_differ_in_dtype() -> None:
    for key_heads in (4, 2, 1):
        query, key = torch.ones(1, 4, 8, 8), torch.ones(1, key_heads, 8, 8)
        with torch.autocast("cpu", torch.bfloat16):
            assert attention(query, key, key.bfloat16()).dtype == torch.bfloat16


@on_ranks(4, init={"cp_size": 2})
def test_ranks_along_other_axes_have_sequences_of_their_own() -> None:
    check_all_cases()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 0.5, "window": 3}, "dropout=0.5 of attention weights"),
        ({"dropout": 0.5, "document_ids": torch.zeros(1, 8)}, "dropout=0.5 of attention weights"),
        ({"window": 0}, "window must be at least 1 token, or None, not 0"),
    ],
)
def test_attention_that_is_not_computed_is_refused(options: dict[str, Any], message: str) -> None:
    x = torch.ones(1, 2, 8, 4)
    with pytest.raises(ValueError, match=message):
        attention(x, x, x, **options)
    with pytest.raises(ValueError, match=r"query must be .* They are \(2, 8, 4\), \(2, 8, 4\)"):
        attention(x[0], x[0], x[0])
