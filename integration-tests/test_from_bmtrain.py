"""The scripts of ``examples/from_bmtrain``, from the first line to the last, on two ranks."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import gathered_state
import inspect_values
import optim_manager
import pipeline
import sharded_module
import tensor_parallel
import train_gpt
import zero_levels
from bmt_core import ConfigError
from bmt_testing import run_ranks
from small_model import run


def run_all() -> dict[str, Any]:
    scripts = (
        gathered_state,
        inspect_values,
        optim_manager,
        pipeline,
        sharded_module,
        tensor_parallel,
        train_gpt,
        zero_levels,
    )
    return {script.__name__.rpartition(".")[2]: script.main("cpu") for script in scripts}


@pytest.mark.slow("examples/from_bmtrain/", "bmtrain")
def test_every_script_does_what_it_shows() -> None:
    first, second = run_ranks(run_all, 2, init=None)
    tables = [found.pop("inspect_values") for found in (first, second)]
    assert tables[0] == tables[1]
    rows = [line.split()[0] for line in tables[0].splitlines()]
    assert (
        rows[:4] == ["name", "layers.0.hidden", "layers.1.hidden", "embedding.weight"]
        and len(rows) == 8
    )
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    looped, listed = first["zero_levels"]
    torch.testing.assert_close(looped, listed)
    for name in ("optim_manager", "pipeline", "tensor_parallel", "train_gpt"):
        assert first[name][0] > 3 and first[name][-1] < 0.1, (name, first[name])
    assert looped[0] > 3 and looped[-1] < 0.1
    original, sharded, in_a_list = first["sharded_module"]
    torch.testing.assert_close(sharded, original)
    torch.testing.assert_close(in_a_list, original)
    unbroken, of_manager, of_optimizer = first["gathered_state"]
    assert unbroken == of_manager == of_optimizer


def test_a_mistake_in_a_script_ends_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def mistaken() -> None:
        raise ConfigError("tp_size=3 does not divide 32.")

    monkeypatch.setattr(sys, "argv", ["examples/tensor_parallel.py"])
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(SystemExit) as ended:
        run(mistaken)
    assert (
        ended.value.code == "tensor_parallel.py, rank 2: ConfigError: tp_size=3 does not divide 32."
    )
    monkeypatch.setattr(sys, "argv", ["tensor_parallel.py", "--traceback"])
    with pytest.raises(ConfigError):
        run(mistaken)
