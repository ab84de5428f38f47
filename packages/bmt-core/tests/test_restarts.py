"""The ranks of an attempt of torchrun meet in a store that has what earlier attempts left."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch.distributed as dist

from bmt_core import RemoteError
from bmt_core.run.restarts import meet_in_attempt


class Attempts:
    """A store that a launcher serves, and attempts to meet in it, each rank in a thread."""

    def __init__(self) -> None:
        self._server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def start(
        self, world_size: int, ranks: Sequence[int], timeout: float = 60.0
    ) -> dict[int, Future[str]]:
        """Let ``ranks`` of ``world_size`` begin in this order."""
        pool = ThreadPoolExecutor(len(ranks))
        stores = {rank: dist.TCPStore("localhost", self._server.port) for rank in ranks}
        return {
            rank: pool.submit(meet_in_attempt, stores[rank], rank, world_size, timeout)
            for rank in ranks
        }

    def names(self, world_size: int, ranks: Sequence[int]) -> set[str]:
        return {found.result() for found in self.start(world_size, ranks).values()}


def test_ranks_meet_in_an_attempt_that_no_other_has() -> None:
    attempts = Attempts()
    found = [
        attempts.names(4, [0, 1, 2, 3]),
        attempts.names(4, [3, 2, 1, 0]),
        attempts.names(2, [1, 0]),
        attempts.names(4, [2, 3, 0, 1]),
        attempts.names(1, [0]),
    ]
    assert [len(names) for names in found] == [1] * 5
    assert len(set.union(*found)) == 5


def test_ranks_that_are_missing_are_named_and_a_later_attempt_meets() -> None:
    attempts = Attempts()
    attempts.names(3, [0, 1, 2])
    for ranks, missing in (([1, 2], "0"), ([0, 2], "1")):
        for found in attempts.start(3, ranks, timeout=1.0).values():
            with pytest.raises(RemoteError, match=re.escape(f"have not started: {missing}.")):
                found.result()
    assert len(attempts.names(3, [2, 1, 0])) == 1
