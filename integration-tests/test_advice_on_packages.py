"""What errors and warnings say of packages that are not installed."""

from __future__ import annotations

import pickle
import sys

import pytest
import torch

from bmt_core.errors import ConfigError, RemoteError
from bmt_core.packages import PACKAGES
from bmt_core.plugins import Registry
from bmt_core.user_warnings import warn_user
from bmt_params.parameter import DistributedParameter
from bmt_testing import on_ranks


def leave_out(monkeypatch: pytest.MonkeyPatch, *present: str) -> None:
    """Have Python find no package of bmt but ``present``."""
    for name, package in PACKAGES.items():
        if name not in present:
            monkeypatch.setitem(sys.modules, package.module, None)  # type: ignore[arg-type]


@on_ranks(2)
def test_an_error_says_how_to_install_what_it_advises() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        leave_out(monkeypatch, "bmt-core", "bmt-testing")
        p = DistributedParameter(torch.ones(4, 3))
        p.grad = torch.ones_like(p)
        with pytest.raises(ConfigError) as caught:
            torch.nn.utils.clip_grad_norm_([p], 1.0)
        text = str(caught.value)
        for name in ("bmt-optim", "bmt-train"):
            assert text.count(f"{name} is not installed: {PACKAGES[name].install}") == 1
        assert "bmt-zero" not in text and "bmt-checkpoint is" not in text
        of_other_rank = pickle.loads(pickle.dumps(RemoteError(f"Rank 1 has failed: {text}")))
        assert str(of_other_rank).count("bmt-optim is not installed") == 1


def test_a_warning_says_how_to_install_what_it_advises(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out(monkeypatch, "bmt-core", "bmt-zero")
    with pytest.warns(UserWarning, match="bmt-checkpoint is not installed: "):
        warn_user("Wrap it by BMTrainModelWrapper. Call save_checkpoint(directory, model).")
    with pytest.warns(UserWarning, match="BMTrainModelWrapper.$"):
        warn_user("Wrap it by BMTrainModelWrapper.")
    with pytest.warns(UserWarning, match="bmt-train is not installed: .*pip install bmt-train"):
        warn_user("Compare the calls of all ranks: bmt hang calls/")


def test_every_command_of_the_program_is_known() -> None:
    advised = {name for name in PACKAGES["bmt-train"].advised if name.startswith("bmt ")}
    assert advised == {f"bmt {name}" for name in Registry.load().working("command")}
