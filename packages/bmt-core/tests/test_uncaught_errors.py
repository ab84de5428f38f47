"""What a rank prints of the error that ends it: the hook, called as Python calls it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from bmt_core.errors import CallError, CheckpointError, RemoteError
from bmt_core.run import runtime
from bmt_testing import run_ranks


def caught(function: Any, *arguments: object) -> BaseException:
    try:
        function(*arguments)
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def printed(error: BaseException) -> str:
    """What Python's interpreter prints when ``error`` ends the program."""
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        sys.excepthook(type(error), error, error.__traceback__)
    return text.getvalue()


def multiply() -> None:
    torch.nn.Linear(4, 4)(torch.ones(2, 3))  # the two lines of the program


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    # A start that has failed before leaves its hook, to print its error.
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    runtime.init_distributed(device="cpu")
    yield
    runtime.shutdown()
    assert sys.excepthook is sys.__excepthook__


@pytest.mark.usefixtures("one_rank")
def test_calls_inside_of_torch_are_left_out_and_counted() -> None:
    error = caught(multiply)
    text = printed(error)
    assert [Path(file).name for file in files_in(text)] == [Path(__file__).name] * 2
    assert text.startswith("Traceback (most recent call last):\n")
    assert "  (3 calls of bmt and torch are left out, modules/linear.py:" in text
    assert text.endswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 4x4)\n")
    # What an except statement sees is whole.
    assert "linear.py" in "".join(traceback.format_exception(error))


def files_in(text: str) -> list[str]:
    return [line.split('"')[1] for line in text.splitlines() if line.startswith('  File "')]


@pytest.mark.usefixtures("one_rank")
def test_all_calls_are_there_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BMT_TRACEBACK", "full")
    error = caught(multiply)
    assert printed(error) == "".join(traceback.format_exception(error))


@pytest.mark.usefixtures("one_rank")
def test_an_error_of_torch_alone_is_printed_whole() -> None:
    error = RuntimeError("of a thread of torch")
    assert printed(error) == "RuntimeError: of a thread of torch\n"


def fail_after_errors() -> None:
    try:
        try:
            multiply()
        except RuntimeError as error:
            raise KeyError("of the program") from error
    except KeyError as error:
        raise ValueError("the last") from error


@pytest.mark.usefixtures("one_rank")
def test_errors_of_the_program_that_an_error_follows_stay_and_those_of_libraries_do_not() -> None:
    text = printed(caught(fail_after_errors))
    assert [
        line for line in text.splitlines() if not line.startswith(" ") and "Error: " in line
    ] == [
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 4x4)",
        "KeyError: 'of the program'",
        "ValueError: the last",
    ]
    assert {Path(file).name for file in files_in(text)} == {Path(__file__).name}
    of_library = caught(json.loads, "{")
    of_library.__traceback__ = None  # as if no line of the program had led to it
    error = caught(fail_because_of, of_library)
    assert "JSONDecodeError" not in printed(error) and error.__cause__ is of_library
    assert "KeyError: 'never raised'" in printed(caught(fail_by_key))


def fail_by_key() -> None:
    raise ValueError("ours") from KeyError("never raised")


def fail_because_of(cause: BaseException) -> None:
    raise CheckpointError("ours") from cause


def test_a_hook_of_the_program_prints_in_place_of_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: seen.append(error))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    own = sys.excepthook
    runtime.init_distributed(device="cpu")
    error = caught(multiply)
    assert printed(error) == "" and seen == [error]
    runtime.shutdown()
    assert sys.excepthook is own
    content = json.loads((tmp_path / "error.json").read_text())["message"]
    assert content["message"].startswith("RuntimeError: mat1 and mat2")
    assert "test_uncaught_errors.py" in content["extraInfo"]["py_callstack"]


def test_a_hook_that_the_program_sets_in_the_run_stays_and_ours_is_silent_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    runtime.init_distributed(device="cpu")
    ours = sys.excepthook
    sys.excepthook = theirs = lambda *error: ours(*error)
    runtime.shutdown()
    assert sys.excepthook is theirs
    assert "linear.py" in printed(caught(multiply))


def test_a_start_that_fails_is_printed_without_its_calls_and_the_next_one_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # An earlier start that failed has left its own.
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    error = caught(lambda: runtime.init_distributed(device="cpu", tp_size=3))
    assert {Path(file).name for file in files_in(printed(error))} == {Path(__file__).name}
    runtime.init_distributed(device="cpu")
    runtime.shutdown()
    assert sys.excepthook is sys.__excepthook__


@pytest.mark.usefixtures("one_rank")
def test_a_forked_child_is_not_the_rank() -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, printed(caught(multiply)).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as output:
        assert "linear.py" in output.read()


def fail_with_call(text: str) -> None:
    raise CallError(text)


def fail_with_remote(text: str) -> None:
    raise RemoteError(text)


def on_four_ranks() -> dict[str, str]:
    """What each rank prints of several errors, each in a run of its own."""
    said = {}
    for name, (failing, consequence) in {
        "same": (-1, multiply),
        "other": (2, multiply),
        "consequence": (1, lambda: fail_with_call("Rank 1 has failed (ValueError: planted).")),
        "joint": (-1, lambda: fail_with_call("Ranks wait for each other.")),
        "remote": (3, lambda: fail_with_remote("Rank 3 failed\nlong.")),
        "nobody": (-1, lambda: fail_with_remote("These ranks have not started: 7.")),
    }.items():
        runtime.init_distributed(device="cpu")
        if runtime.rank() == failing:
            said[name] = printed(caught(lambda: int("x")))
        else:
            said[name] = printed(caught(consequence))
        runtime.synchronize()
        runtime.shutdown()
    return said


def test_one_rank_prints_the_calls_and_the_others_one_line() -> None:
    said = run_ranks(on_four_ranks, 4, init=None)

    def whole(name: str) -> list[int]:
        return [rank for rank, texts in enumerate(said) if "Traceback (" in texts[name]]

    for rank, texts in enumerate(said):
        for name, text in texts.items():
            assert all(line.startswith(f"[rank{rank}]: ") for line in text.splitlines())
            assert rank in whole(name) or text.count("\n") == 1, text
    assert len(whole("same")) == len(whole("joint")) == len(whole("nobody")) == 1
    assert 2 in whole("other") and len(whole("other")) == 2
    assert whole("consequence") == [1] and whole("remote") == [3]
    assert "test_uncaught_errors.py:" in said[0]["remote"]
    assert said[0]["remote"].endswith(": RemoteError: Rank 3 failed\n")
    assert said[0]["consequence"].endswith(
        ": CallError: Rank 1 has failed (ValueError: planted).\n"
    )


PROMPT = """
import sys
from bmt_core.run import runtime
runtime.init_distributed(device="cpu")
import torch
torch.nn.Linear(4, 4)(torch.ones(2, 3))
"""


@pytest.mark.slow("bmt-core")
def test_at_a_prompt_errors_are_those_of_python() -> None:
    ended = subprocess.run(
        [sys.executable, "-i", "-c", PROMPT], input="", capture_output=True, text=True, timeout=120
    )
    assert "linear.py" in ended.stderr
