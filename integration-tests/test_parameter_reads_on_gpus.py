"""On GPUs, the lists of what waits for an update beside the next forward pass, and of what does
not, are true: see ``test_parameter_reads.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
from parameter_reads import WAYS, LateHost, LateStream, expected, outcomes

from bmt_testing import run_ranks

pytestmark = pytest.mark.gpu
KINDS = [
    pytest.param((kind, size), marks=pytest.mark.gpu(size), id=f"{kind.__name__}-{size}")
    for kind in (LateStream, LateHost)
    for size in (1, 2)
]


@pytest.fixture(scope="module", params=KINDS)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The outcomes of each rank."""
    kind, size = request.param
    folder = str(tmp_path_factory.mktemp("reads"))
    init = {"device": "cuda", "gradients": "mean"}
    return run_ranks(outcomes, size, kind, folder, init=init, timeout=240)


@pytest.mark.parametrize("name", WAYS)
def test_on_gpus_what_waits_and_what_does_not_is_as_the_lists_say(
    name: str, found: list[Any]
) -> None:
    for of_rank in found:
        assert of_rank[name] == expected(name)
