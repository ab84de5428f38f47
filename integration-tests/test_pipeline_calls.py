"""``PipelineTransformerBlockList`` called in all forms, against the plain layers in one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from pipeline_calls import CASES, all_found, expected

from bmt_testing import run_ranks

# By number of ranks, all of one pipeline: the numbers of micro-batches, and the cases.
RUNS: dict[tuple[int, int], list[str]] = {
    (1, 2): ["extras", "hidden states"],
    (2, 4): list(CASES),
    (2, 1): ["hidden states", "sequence first", "counters"],
    (4, 8): ["hidden states", "extras", "frozen", "constants"],
}


@functools.cache
def results(ranks: int, micro_batches: int) -> list[dict[str, Any]]:
    """What the ranks find, in one run for all cases."""
    init = {"pipe_size": ranks, "num_micro_batches": micro_batches}
    return run_ranks(all_found, ranks, RUNS[ranks, micro_batches], init=init)


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "name"),
    [(*sizes, name) for sizes, names in RUNS.items() for name in names],
)
def test_a_call_gives_what_the_plain_layers_give(ranks: int, micro_batches: int, name: str) -> None:
    wanted = expected(name, ranks)
    for rank, of_rank in enumerate(results(ranks, micro_batches)):
        found = of_rank[name]
        assert not isinstance(found, str), found
        of_plain = dict(wanted[rank])
        for what, value in found:
            other = of_plain[what]
            if other is None and value is not None:  # a layer that took part without effect: zero
                other = torch.zeros_like(value)
            torch.testing.assert_close(
                value, other, msg=lambda text, w=what, r=rank: f"{w} on rank {r}: {text}"
            )
