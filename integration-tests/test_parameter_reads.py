"""What a program reads and writes between ``step()`` and the next forward pass: the lists of what
waits for an update beside it (``overlap_forward``), and of what does not, are true.
"""

from __future__ import annotations

from typing import Any

import pytest
from parameter_reads import WAYS, LateHost, expected, outcomes

from bmt_testing import run_ranks


@pytest.fixture(scope="module", params=[1, 2])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The outcomes of each rank."""
    folder = str(tmp_path_factory.mktemp("reads"))
    return run_ranks(outcomes, request.param, LateHost, folder, init={"gradients": "mean"})


@pytest.mark.parametrize("name", WAYS)
def test_what_waits_and_what_does_not_is_as_the_lists_say(name: str, found: list[Any]) -> None:
    for of_rank in found:
        assert of_rank[name] == expected(name)
