"""Writing checkpoints: when it fails, when the program dies, in the background, and in formats
of plugins.
"""

from __future__ import annotations

import errno
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import weakref
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import bmt_checkpoint
import bmt_core
import bmtrain
from bmt_checkpoint import CheckpointFormat, TorchFormat, wait_for_saves
from bmt_checkpoint.format_choice import choose_format
from bmt_core.errors import CheckpointError, PluginError
from bmt_core.plugins import Registry
from bmt_core.plugins.hookspecs import hookimpl
from bmt_params.parameter import DistributedParameter
from bmt_params.state.index import Index
from bmt_params.state.state_tensors import TensorPart
from bmt_params.state.whole_state import LocalState, WholeState
from bmt_testing import on_ranks, rank_pool, run_ranks
from bmt_testing.programs import run_program


def net() -> nn.Module:
    model = nn.Module()
    model.register_parameter("weight", DistributedParameter(torch.ones(7, 5)))
    model.register_parameter("bias", DistributedParameter(torch.zeros(3)))
    model.register_parameter("plain", nn.Parameter(torch.full((3,), 2.0)))
    model.register_buffer("steps", torch.tensor([3, 3]))
    return model


# ---- when writing fails, and when the program dies ----


def save_where_nothing_can_be(path: str) -> None:
    bmt_checkpoint.save(net(), path)


def test_when_rank_0_cannot_write_all_ranks_raise(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    outcomes = rank_pool(2).outcomes(
        save_where_nothing_can_be, str(tmp_path / "file" / "model.pt"), timeout=30
    )
    assert [outcome.error_type for outcome in outcomes] == ["CheckpointError", "CheckpointError"]
    assert (
        "Cannot write" in outcomes[0].error_message
        and "Rank 0 failed in saving" in outcomes[1].error_message
    )


def save_on_a_full_disk(path: str) -> str:
    """A limit on the size of files makes the write fail in the middle, as a full disk does."""
    model = nn.Module()
    model.register_parameter("a", DistributedParameter(torch.ones(50_000)))
    model.register_parameter("b", DistributedParameter(torch.ones(50_000)))
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, hard))
    try:
        bmt_checkpoint.save(model, path)
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    return "no error"


def test_a_full_disk_is_an_error_on_every_rank_and_leaves_the_previous_file(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_text("previous")
    for message in run_ranks(save_on_a_full_disk, 2, str(tmp_path / "model.pt"), timeout=30):
        assert "Cannot write" in message
    assert (tmp_path / "model.pt").read_text() == "previous"
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.pt"]


def save_adapters_without_temporary_files(folder: str, failing: int) -> str:
    import peft

    config = peft.LoraConfig(target_modules=["0"], r=2)
    model = peft.get_peft_model(nn.Sequential(nn.Linear(8, 8)), config)
    bmtrain.BMTrainModelWrapper(model)
    broken = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    temporary = mock.Mock(wraps=tempfile)
    if bmt_core.rank() == failing:
        temporary.TemporaryDirectory = broken
    with mock.patch("bmt_checkpoint.adapters.tempfile", temporary), pytest.raises(Exception) as e:
        bmt_checkpoint.save(model, f"{folder}/")
    return f"{type(e.value).__name__}: {e.value}"


@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_without_temporary_files_keeps_no_other_waiting(
    tmp_path: Path, failing: int
) -> None:
    found = run_ranks(save_adapters_without_temporary_files, 2, str(tmp_path), failing, timeout=120)
    assert found[failing] == "OSError: [Errno 28] No space left on device"
    assert f"Rank {failing} failed in saving" in found[1 - failing]


def errors_of_saving(paths: list[str], folder: str) -> list[str]:
    messages = []
    for save in [lambda path=path: bmt_checkpoint.save(net(), path) for path in paths] + [
        lambda: bmt_checkpoint.save_checkpoint(folder, net(), step=2)
    ]:
        with pytest.raises(CheckpointError) as caught:
            save()
        messages.append(str(caught.value))
    return messages


def save_steps(folder: str, step: int) -> int:
    bmt_checkpoint.save_checkpoint(folder, net(), step=step)
    return int(bmt_checkpoint.load_checkpoint(folder, net())["step"])


def test_a_disk_without_space_is_named_in_the_first_line_on_every_rank(tmp_path: Path) -> None:
    """The temporary files are links to /dev/full, on which every write fails as on a full disk."""
    (tmp_path / "model.pt").write_text("previous")
    (tmp_path / ".model.pt.tmp").symlink_to("/dev/full")
    assert run_ranks(save_steps, 2, str(tmp_path / "runs"), 1) == [1, 1]
    (tmp_path / "runs" / ".latest.tmp").symlink_to("/dev/full")
    paths = [str(tmp_path / "model.pt")]
    for messages in run_ranks(errors_of_saving, 2, paths, str(tmp_path / "runs"), timeout=30):
        for message in messages:
            assert "The disk is full: cannot write" in message.splitlines()[0]
    assert (tmp_path / "model.pt").read_text() == "previous"
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_file()] == ["model.pt"]
    assert (tmp_path / "runs" / "latest").read_text() == "step-1\n"
    assert run_ranks(save_steps, 2, str(tmp_path / "runs"), 3) == [3, 3]


class FailingFormat(TorchFormat):
    """Asks for one tensor, then fails: the other gathers must still happen on all ranks."""

    def write(self, path: Path, index: Index, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        next(iter(tensors))
        raise CheckpointError("the format gave up")


@on_ranks(2, timeout=30)
def test_a_format_that_fails_halfway_leaves_the_ranks_in_step(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the format gave up"):
        bmt_checkpoint.save(net(), tmp_path / "model.pt", format=FailingFormat())
    bmt_checkpoint.save(net(), tmp_path / "model.pt")  # and the ranks are still in step


CRASH = textwrap.dedent(
    """
    import os, sys
    from pathlib import Path
    import torch
    import bmt_checkpoint
    from bmt_checkpoint import TorchFormat

    class CrashInTheMiddle(TorchFormat):
        def write(self, path, index, tensors):
            super().write(path, index, tensors)
            os.truncate(path, path.stat().st_size // 2)
            os._exit(9)

    class CrashAtTheEnd(TorchFormat):
        def write(self, path, index, tensors):
            super().write(path, index, tensors)
            os._exit(9)

    model = torch.nn.Linear(100, 100)
    torch.nn.init.ones_(model.weight)
    format = CrashInTheMiddle() if sys.argv[2] == "middle" else CrashAtTheEnd()
    bmt_checkpoint.save(model, sys.argv[1], format=format)
    """
)


@pytest.mark.parametrize("where", ["middle", "end"])
def test_a_crash_while_writing_leaves_the_previous_file_whole(
    where: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("output")
    path = tmp_path / "model.pt"
    previous = nn.Linear(100, 100)
    bmt_checkpoint.save(previous, path)
    status, printed = run_program(CRASH, folder / "output", arguments=[str(path), where])
    assert status == 9, printed
    model = nn.Linear(100, 100)
    bmt_checkpoint.load(model, path)
    assert torch.equal(model.weight, previous.weight)
    # What the crash left is overwritten by the next save, and does not pile up.
    bmt_checkpoint.save(previous, path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.pt"]


# ---- in the background ----


def save_in_background(path: str) -> None:
    model = net()
    bmt_checkpoint.save(model, path, non_blocking=True)
    with torch.no_grad():
        model.weight.zero_()
        model.plain.zero_()
        model.steps.zero_()
    wait_for_saves()


def test_non_blocking_saves_what_the_model_was_at_the_call(tmp_path: Path) -> None:
    run_ranks(save_in_background, 4, str(tmp_path / "model.pt"))
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    assert saved["weight"].tolist() == [[1.0] * 5] * 7
    assert saved["plain"].tolist() == [2.0] * 3
    assert saved["steps"].tolist() == [3, 3]


def save_in_background_and_fail(good: str, bad: str) -> list[str]:
    model = net()
    bmt_checkpoint.save(model, good)
    messages = []
    calls = (
        lambda: bmt_checkpoint.save(model, good),
        lambda: bmt_checkpoint.load(model, good),
        wait_for_saves,
    )
    for call in calls:
        bmt_checkpoint.save(model, bad, non_blocking=True)
        with pytest.raises(CheckpointError) as caught:
            call()
        messages.append(str(caught.value))
        call()  # told once
    return messages


def test_error_in_the_background_comes_out_of_the_next_call_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    good, bad = str(tmp_path / "good.pt"), str(tmp_path / "file" / "bad.pt")
    for messages in run_ranks(save_in_background_and_fail, 2, good, bad, timeout=60):
        assert len(messages) == 3
        for message in messages:
            assert (
                "In the background, saving " in message
                and "Cannot write" in message
                and "bad.pt" in message
            )


def test_a_program_that_ends_finishes_its_last_save(tmp_path: Path) -> None:
    program = (
        "import sys, torch, bmt_checkpoint; bmt_checkpoint.save(torch.nn.Linear(500, 500),"
        " sys.argv[1], non_blocking=True)"
    )
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "model.pt")], check=True, timeout=60
    )
    bmt_checkpoint.load(nn.Linear(500, 500), tmp_path / "model.pt")


# ---- formats ----


class Shouting(TorchFormat):
    name = "shouting"
    suffixes = (".PT",)


class Claiming(TorchFormat):
    name = "claiming"
    suffixes = (".pt",)


class Formats:
    def __init__(self, *formats: type) -> None:
        self.formats = formats

    @hookimpl
    def bmt_checkpoint_formats(self) -> list[type]:
        return list(self.formats)


def choose_among(path: Path, *formats: type, monkeypatch: pytest.MonkeyPatch) -> CheckpointFormat:
    registry = Registry.load()
    registry.register(Formats(*formats), "test-formats")
    monkeypatch.setattr(Registry, "load", lambda: registry)
    return choose_format(path)


def test_format_of_a_plugin_is_chosen_by_suffix(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_among(Path("model.PT"), Shouting, monkeypatch=monkeypatch).name == "shouting"
    assert choose_format(Path("model.pt")).name == "torch"
    assert choose_format(Path("any name")).name == "torch"
    assert choose_format(Path("model.pt"), "shouting").name == "shouting"
    assert choose_format(Path("model.pt"), Shouting).name == "shouting"


def test_a_misspelt_suffix_is_refused_with_the_right_one(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"\.safetensor files, .* Did you mean \.safetensors\?"
    ):
        bmt_checkpoint.save(nn.Linear(1, 1), tmp_path / "model.safetensor")
    assert list(tmp_path.iterdir()) == []


def test_suffix_claimed_twice_is_an_error_that_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PluginError, match=r"\.pt are claimed by .*torch.*claiming"):
        choose_among(Path("model.pt"), Claiming, monkeypatch=monkeypatch)


def test_what_is_no_format_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoFormat:
        name = "none"

    with pytest.raises(PluginError, match="NoFormat is announced as a checkpoint format"):
        choose_among(Path("model.pt"), NoFormat, monkeypatch=monkeypatch)


def test_unknown_format_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(PluginError, match="Did you mean 'torch'"):
        bmt_checkpoint.save(nn.Linear(1, 1), "model.pt", format="torhc")


class BusyOwner:
    """Of a parameter that an optimizer updates beside the program."""

    def __init__(self) -> None:
        self.is_updating = True

    def wait_for_updates(self, *, despite_errors: bool = False) -> None:
        self.is_updating = False


@on_ranks(1)
def test_what_a_rank_writes_is_read_after_updates_that_overlap_the_program() -> None:
    """``DistributedParameter.wait_for_updates``, for parameters and for the state of
    their optimizer.
    """
    for of_state in (False, True):
        owner, parameter = BusyOwner(), DistributedParameter(torch.ones(4))
        parameter.owner_reference = weakref.ref(owner)  # type: ignore[arg-type]

        def moment(owner: BusyOwner = owner) -> torch.Tensor:
            assert not owner.is_updating, "read too early"
            return torch.zeros(4)

        part = TensorPart(
            name="moment",
            shape=torch.Size([4]),
            dtype=torch.float32,
            parameter=parameter,
            value=moment,
        )
        model = torch.nn.Module()
        model.weight = parameter
        local = LocalState.of_parts([part]) if of_state else LocalState.of_model(model)
        (own,) = WholeState(local, "saving", [local.layout.summary]).own_parts()
        assert own.on_host().tolist() == [float(not of_state)] * 4
        assert not owner.is_updating
