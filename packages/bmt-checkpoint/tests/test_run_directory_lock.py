"""One run at a time saves checkpoints to a directory; the lock of a process that died is free."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch

import bmt_checkpoint
from bmt_checkpoint import run_directory_lock
from bmt_core.errors import CheckpointError
from bmt_testing import run_ranks

SAVE = "bmt_checkpoint.save_checkpoint(sys.argv[1], torch.nn.Linear(3, 2), step=1)"
LOCK = "bmt_checkpoint.lock_checkpoints(sys.argv[1])"


def start(script: str, folder: Path) -> subprocess.Popen[str]:
    """Run ``script`` on ``folder`` in a process that has run it when this returns, and waits for
    its standard input to end.
    """
    lines = textwrap.dedent(script).strip() + "\nprint('done', flush=True)\nsys.stdin.read()\n"
    imports = "import os, sys, time\nimport torch\nimport bmt_checkpoint, bmt_core\n"
    command = [sys.executable, "-c", imports + lines, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while (line := process.stdout.readline()) != "done\n":
        assert line, "the process ended"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def errors_of_a_second_run(folder: str) -> list[str]:
    # As if the other run wrote there now.
    (Path(folder) / "step-9.tmp").mkdir(parents=True, exist_ok=True)
    with pytest.raises(CheckpointError) as caught:
        bmt_checkpoint.save_checkpoint(folder, torch.nn.Linear(3, 2), step=9)
    with pytest.raises(CheckpointError) as caught_earlier:
        bmt_checkpoint.lock_checkpoints(folder)
    bmt_checkpoint.load_checkpoint(folder, torch.nn.Linear(3, 2))  # reading is free
    assert (Path(folder) / "step-9.tmp").is_dir()
    return [str(caught.value), str(caught_earlier.value)]


def save(folder: str, step: int) -> str:
    return bmt_checkpoint.save_checkpoint(folder, torch.nn.Linear(3, 2), step=step).name


def lock_and_save(folder: str, step: int) -> str:
    bmt_checkpoint.lock_checkpoints(folder)
    return save(folder, step)


@pytest.mark.slow("bmt-checkpoint")
@pytest.mark.parametrize(("world_size", "script"), [(2, SAVE), (4, LOCK)])
def test_a_second_run_is_refused_with_process_and_host_of_the_first_until_that_dies(
    world_size: int, script: str, tmp_path: Path
) -> None:
    run_ranks(save, 1, str(tmp_path), 1)
    first = start(script, tmp_path)
    try:
        found = run_ranks(errors_of_a_second_run, world_size, str(tmp_path))
        for message in itertools.chain(*found):
            words = (
                f"to {re.escape(str(tmp_path))}: process {first.pid} on host"
                f" {re.escape(socket.gethostname())} since 20"
            )
            assert re.search(words, message)
            assert "Stop that one, or give this one another directory" in message
    finally:
        end(first)  # SIGKILL
    assert run_ranks(lock_and_save, world_size, str(tmp_path), 9) == ["step-9"] * world_size


def load_and_see_lock(folder: str) -> bool:
    bmt_checkpoint.load_checkpoint(folder, torch.nn.Linear(3, 2))
    return (Path(folder) / run_directory_lock.LOCK_FILE).exists()


def test_a_run_that_only_loads_locks_nothing(tmp_path: Path) -> None:
    run_ranks(save, 1, str(tmp_path), 1)
    assert run_ranks(load_and_see_lock, 2, str(tmp_path)) == [False] * 2


def lock_error(path: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        bmt_checkpoint.lock_checkpoints(path)
    return str(caught.value)


def test_a_directory_that_is_a_file_or_cannot_be_made_is_an_error_on_every_rank(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    for path, message in (("file", "is a file"), ("file/run", "Cannot write")):
        for error in run_ranks(lock_error, 2, str(tmp_path / path)):
            assert message in error


def test_shutdown_gives_the_directory_free_and_leaves_no_file(tmp_path: Path) -> None:
    script = """
    for step in (1, 2):
        bmt_core.init_distributed()
        for _ in range(2):
            bmt_checkpoint.save_checkpoint(sys.argv[1], torch.nn.Linear(3, 2), step=step)
        bmt_core.shutdown()
    """
    first = start(script, tmp_path)
    try:
        assert not (tmp_path / run_directory_lock.LOCK_FILE).exists()
        assert run_ranks(save, 2, str(tmp_path), 3) == ["step-3"] * 2
        assert not (tmp_path / run_directory_lock.LOCK_FILE).exists()
    finally:
        end(first)


@pytest.mark.slow("bmt-checkpoint")
def test_a_worker_that_outlives_its_training_keeps_no_lock(tmp_path: Path) -> None:
    script = f"""
    {SAVE}
    worker = os.fork()
    if worker == 0:
        time.sleep(600)
    with open(sys.argv[1] + "/worker", "w") as file:
        file.write(str(worker))
    """
    training = start(script, tmp_path)
    worker = int((tmp_path / "worker").read_text())
    try:
        training.kill()
        training.wait()
        os.kill(worker, 0)  # raises if the worker has ended
        assert run_ranks(save, 1, str(tmp_path), 2) == ["step-2"]
    finally:
        os.kill(worker, signal.SIGKILL)
        training.communicate()


def delete_and_save(folder: str) -> list[str]:
    names = []
    for step in (1, 2):
        names.append(save(folder, step))
        message = subprocess.run(
            [sys.executable, "-c", f"import sys, torch, bmt_checkpoint\n{SAVE}", folder],
            stderr=subprocess.PIPE,
        )
        assert b"Another run writes its checkpoints" in message.stderr
        shutil.rmtree(folder)
    return names


def test_a_directory_that_was_deleted_meanwhile_is_locked_anew(tmp_path: Path) -> None:
    assert run_ranks(delete_and_save, 1, str(tmp_path / "run")) == [["step-1", "step-2"]]


def test_a_file_system_without_locks_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(
        UserWarning, match="has no locks .No locks available.: if a second run writes"
    ):
        run_directory_lock.lock_run_directory(tmp_path)
    run_directory_lock.lock_run_directory(tmp_path)  # says so once


def test_lock_of_another_host_that_is_free_is_taken_over_with_a_warning(tmp_path: Path) -> None:
    record = tmp_path / run_directory_lock.LOCK_FILE
    record.write_text("process 12 on host elsewhere since 2020-01-01T00:00:00+00:00\n")
    try:
        with pytest.warns(
            UserWarning,
            match=(
                r"was left by process 12 on host elsewhere since 2020.* Make sure that it has ended"
            ),
        ):
            run_directory_lock.lock_run_directory(tmp_path)
        assert f"process {os.getpid()} on host" in record.read_text()
    finally:
        run_directory_lock._unlock_all()
    record.write_text(
        f"process 12 on host {socket.gethostname()} since 2020-01-01T00:00:00+00:00\n"
    )
    with warnings.catch_warnings(action="error"):
        run_directory_lock.lock_run_directory(tmp_path)
    run_directory_lock._unlock_all()


def lock_and_unlock(folder: str, turns: int) -> None:
    """Take and release the lock ``turns`` times; while this process has it, no other one may."""
    path, had = Path(folder), 0
    while had < turns:
        try:
            run_directory_lock.lock_run_directory(path)
        except CheckpointError:
            continue
        had += 1
        (path / "held").mkdir()  # raises if another process has the lock
        (path / "held").rmdir()
        run_directory_lock._unlock_all()


def test_processes_that_take_and_release_a_lock_never_have_it_together(tmp_path: Path) -> None:
    run_ranks(lock_and_unlock, 4, str(tmp_path), 100)
