"""Settings and launch variables: what is wrong is named, with what to do."""

from __future__ import annotations

import pytest

from bmt_core.errors import ConfigError
from bmt_core.settings import Launch, RunSettings, check_rendezvous


def test_no_variables_mean_one_rank() -> None:
    assert Launch.from_env({}) == Launch(rank=0, world_size=1, local_rank=0, local_world_size=1)


def test_local_rank_follows_from_rank_where_it_is_not_given() -> None:
    launch = Launch.from_env({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"})
    assert (launch.local_rank, launch.local_world_size) == (1, 4)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set although the launcher set others"),
        ({"WORLD_SIZE": "2"}, "RANK is not set although"),
        ({"RANK": "two", "WORLD_SIZE": "2"}, "RANK must be an integer, not 'two'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is outside of WORLD_SIZE=2"),
    ],
)
def test_half_set_and_wrong_variables_are_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Launch.from_env(environ)


def test_missing_rendezvous_variables_are_named() -> None:
    with pytest.raises(ConfigError, match="MASTER_ADDR and MASTER_PORT must be set"):
        check_rendezvous({})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp_size": 0}, "tp_size must be at least 1, not 0"),
        ({"pipe_size": -2}, "pipe_size must be at least 1, not -2"),
        ({"zero_level": 4}, r"zero_level must be one of \(0, 1, 2, 3\), not 4"),
        ({"zero_level": True}, "not True"),
        ({"num_micro_batches": 0}, "num_micro_batches must be at least 1"),
        ({"timeout": 0.0}, "timeout must be a positive number of seconds"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunSettings(**settings)  # type: ignore[arg-type]
