"""A training goes on when the cable between its hosts is cut for a while, and loses packets; if
it ends, the exit status says so.
"""

from __future__ import annotations

import re

import cut_link
import pytest

from hosts import why_no_hosts


@pytest.mark.slow("bmt-core", "bmt-watch", "tools/hosts.py")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("loss", [None, "2%"])
def test_a_training_goes_on_after_its_cable_was_cut(
    loss: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if (reason := why_no_hosts(loss=loss)) is not None:
        pytest.skip(reason)
    options = [] if loss is None else ["--loss", loss]
    assert cut_link.main(["--seconds", "2", "--timeout", "20", *options]) == 0
    shown = capsys.readouterr().out
    found = re.fullmatch(r"cut for 2 s: the slowest step took (\S+) s; step \d+: \S+\n", shown)
    assert found is not None, shown
    assert 1 < float(found[1]) < 20


@pytest.mark.slow("bmt-core", "bmt-watch", "tools/hosts.py")
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--timeout", "-1"], "timeout"),  # before the first step
        (["--timeout", "8", "--seconds", "60"], "Nothing was heard of rank 1 on host1"),
    ],
)
def test_the_status_is_1_if_the_training_ends(
    options: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if (reason := why_no_hosts()) is not None:
        pytest.skip(reason)
    assert cut_link.main(options) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("the training has ended: ") and error in shown
