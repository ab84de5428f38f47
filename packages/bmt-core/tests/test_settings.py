"""Settings: what is wrong is named, with what to do."""

from __future__ import annotations

import math

import pytest

from bmt_core.errors import ConfigError
from bmt_core.settings import RunSettings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": None}, "seed must be a whole number, not None"),
        ({"tp_size": 0}, "tp_size must be at least 1, not 0"),
        ({"tp_size": "2"}, "tp_size must be a whole number, at least 1, not '2'"),
        ({"axis_sizes": [2]}, "axis_sizes must be a dict of sizes by axis"),
        ({"timeout": "9"}, "timeout must be a positive number of seconds, not '9'"),
        ({"pipe_size": -2}, "pipe_size must be at least 1, not -2"),
        ({"zero_level": 4}, r"zero_level must be one of \(0, 1, 2, 3\), not 4"),
        ({"zero_level": True}, "not True"),
        ({"num_micro_batches": 0}, "num_micro_batches must be at least 1"),
        ({"timeout": 0.0}, "timeout must be a positive number of seconds"),
        ({"timeout": math.inf}, "timeout must be a positive number of seconds, not inf"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunSettings(**settings)  # type: ignore[arg-type]
