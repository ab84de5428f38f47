"""What a start costs the rendezvous store grows with the number of ranks, not with its square; a
rank that cannot start is named on all of them.
"""

from __future__ import annotations

import pytest
from many_ranks import cost_of_start


@pytest.mark.parametrize("ranks", [2, 16, 64])
def test_a_start_takes_so_many_requests_of_each_rank_and_reads_so_many_keys(ranks: int) -> None:
    cost = cost_of_start(ranks, latency=0.0)
    assert not cost.texts
    # Three sections, of five requests at most; plugins and settings; two questions about hosts.
    assert cost.requests <= 25 * ranks
    assert cost.keys <= 25 * ranks


@pytest.mark.parametrize("fails", [0, 11, 15])
def test_a_rank_that_cannot_start_is_named_on_all(fails: int) -> None:
    texts = cost_of_start(16, latency=0.0, fails=fails).texts
    assert texts.pop(fails) == "cannot start"
    assert set(texts.values()) == {f"Rank {fails} failed to start: ValueError: cannot start"}
    assert len(texts) == 15
