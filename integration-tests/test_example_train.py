"""The example's ``train.py``, from its options to the last line: grids, resumed runs, mistakes,
what it shows.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from click.testing import CliRunner
from grid_trainings import unequal

import bmtrain as bmt
import curves
import train as example
from bmt_testing import RankFailure, run_ranks
from bmtrain._program import main as bmt_program
from callbacks import CALLBACKS

TRAIN = Path(example.__file__)
TIME_LIMIT = 120.0
LAST_LINE = re.compile(
    r"trained (\d+) steps: held-out loss (\d+\.\d+) -> (\d+\.\d+), checkpoint (\S+)"
)

SMALL = {
    "layers": 2,
    "dim": 32,
    "heads": 2,
    "seq-len": 32,
    "batch-size": 8,
    "eval-windows": 48,
    "sample-bytes": 8,
    "log-every": 1,
}


def small(out: Path, *arguments: object) -> list[str]:
    """The command line of a run that takes a moment."""
    options = {**SMALL, "out": out}
    return [
        *(f"--{name}={value}" for name, value in options.items()),
        *(str(argument) for argument in arguments),
    ]


def main_with_callback(line: list[str]) -> list[dict[str, Any]]:
    """Run ``train.py`` and return what it hands to a callback."""
    seen: list[dict[str, Any]] = []
    example.main(line, callbacks=[lambda step, metrics: seen.append({"step": step, **metrics})])
    return seen


def small_run(out: Path, *arguments: object, ranks: int = 2) -> list[dict[str, Any]]:
    """Run ``train.py`` on the ranks of the pool and return its metrics, which a callback gets on
    rank 0 too.
    """
    line = small(out, "--max-bytes", 400_000, *arguments)
    seen = run_ranks(main_with_callback, ranks, line, init=None, timeout=TIME_LIMIT)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    first, *others = seen
    assert first and first == records[-len(first) :] and not any(others)
    for record in records:
        for name in ("tokens_per_second", "milliseconds_per_step", "peak_memory_bytes"):
            assert record.pop(name, 1) > 0
    return records


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return small_run(tmp_path_factory.mktemp("one"), "--steps", 6, ranks=1)


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        (2, "--zero-level 3 --accumulate 4"),
        (2, "--zero-level 2 --no-checkpoint --overlap-forward --reduce-dtype param"),
        (2, "--pipe 2 --schedule gpipe --zero-level 1 --no-checkpoint"),
        (4, "--pipe 2 --tp 2 --micro-batches 8 --zero-level 2"),
    ],
)
def test_sharding_pipelines_and_accumulation_do_not_change_what_is_trained(
    tmp_path: Path, one_rank: list[dict[str, Any]], ranks: int, arguments: str
) -> None:
    records = small_run(tmp_path, "--steps", 6, *arguments.split(), ranks=ranks)
    assert len(records) == len(one_rank)
    for record, expected in zip(records, one_rank, strict=True):
        assert record == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("options", ["", "--dtype fp16 --accumulate 2 --zero-level 1"])
def test_a_resumed_run_equals_one_that_never_stopped(tmp_path: Path, options: str) -> None:
    line = ["--steps", 20, "--checkpoint-every", 10, "--log-every", 5, *options.split()]
    whole = small_run(tmp_path / "whole", *line)
    resumed = small_run(
        tmp_path / "resumed", *line, "--resume", tmp_path / "whole/checkpoints/step-10"
    )
    assert resumed == [record for record in whole if record["step"] > 10]
    assert_same_checkpoints(
        tmp_path / "whole/checkpoints/step-20", tmp_path / "resumed/checkpoints/step-20"
    )
    assert (tmp_path / "whole/sample.txt").read_text() == (
        tmp_path / "resumed/sample.txt"
    ).read_text()


def assert_same_checkpoints(first: Path, second: Path) -> None:
    for name in ("model", "optimizer"):
        command = ["checkpoint", "diff", str(first / name), str(second / name)]
        assert CliRunner().invoke(bmt_program, command).output == "Equal.\n"
    values = [torch.load(folder / "training.pt", weights_only=True) for folder in (first, second)]
    assert unequal(*values) == []


def test_a_run_that_stopped_goes_on_in_its_directory(tmp_path: Path) -> None:
    line = ["--steps", 6, "--checkpoint-every", 3, "--optimizer", "lion", "--lr", 1e-3]
    whole = small_run(tmp_path, *line)
    # As if it had stopped after step 3, or later.
    (tmp_path / "checkpoints/latest").write_text("step-3\n")
    with (tmp_path / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 7, "lo')  # killed while it wrote
    assert small_run(tmp_path, *line) == whole
    line[1] = 9
    longer = small_run(tmp_path, *line)
    assert longer[: len(whole)] == whole and longer[-1]["step"] == 9
    assert longer[-2]["lr"] == pytest.approx(1e-3 / 30 * 9)  # of the warm-up, which goes on
    with pytest.raises(RankFailure, match="has 9 steps behind it, more than --steps 6"):
        small_run(tmp_path, "--steps", 6, *line[2:])


def test_muon_for_the_layers_beside_adamw_trains_as_on_one_rank_and_goes_on(tmp_path: Path) -> None:
    line = ["--optimizer", "muon", "--steps", 6, "--warmup", 2, "--checkpoint-every", 3]
    one = small_run(tmp_path / "one", *line, ranks=1)
    two = small_run(tmp_path / "two", *line)
    resumed = small_run(
        tmp_path / "tp", *line, "--tp", 2, "--resume", tmp_path / "two/checkpoints/step-3"
    )
    assert one[0]["held_out_loss"] - one[-1]["held_out_loss"] > 0.5
    assert len(one) == len(two) == 8 and len(resumed) == 4
    for records, wanted in ((two, one), (resumed, one[-4:])):
        for record, expected in zip(records, wanted, strict=True):
            assert record == pytest.approx(expected, rel=2e-3)
    curves.main([*map(str, (tmp_path / "one", tmp_path / "two")), f"--out={tmp_path}/both.svg"])
    assert "two, held out" in (tmp_path / "both.svg").read_text()


def test_a_run_goes_on_on_one_rank(tmp_path: Path) -> None:
    line = ["--steps", 8, "--checkpoint-every", 4]
    whole = small_run(tmp_path / "whole", *line, "--tp", 2)
    resumed = small_run(
        tmp_path / "resumed", *line, "--resume", tmp_path / "whole/checkpoints/step-4", ranks=1
    )
    assert len(resumed) == 5
    for record, expected in zip(resumed, whole[-5:], strict=True):
        assert record == pytest.approx(expected, rel=1e-3)


def test_resuming_another_run_is_an_error_on_every_rank(tmp_path: Path) -> None:
    whole = small_run(tmp_path / "run", "--steps", 2)
    arguments = ["--steps", 4, "--lr", 0.1]
    for out, more in (("run", []), ("other", ["--resume", tmp_path / "run/checkpoints"])):
        with pytest.raises(RankFailure) as failure:
            small_run(tmp_path / out, *arguments, *more)
        errors = failure.value.errors
        assert len(errors) == 2
        for error in errors.values():
            assert "run: lr was 0.004 and is 0.1" in str(error)
    assert [
        json.loads(line)["step"]
        for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ] == [record["step"] for record in whole]


def test_a_second_run_in_one_directory_is_an_error_on_every_rank_before_anything_is_trained(
    tmp_path: Path,
) -> None:
    bmt.init_distributed(device="cpu")
    try:
        bmt.lock_checkpoints(tmp_path / "checkpoints")
        with pytest.raises(RankFailure) as failure:
            small_run(tmp_path, "--steps", 2)
    finally:
        bmt.shutdown()
    assert len(failure.value.errors) == 2
    for error in failure.value.errors.values():
        assert f"writes its checkpoints to {tmp_path}/checkpoints: process" in str(error)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
    assert len(small_run(tmp_path, "--steps", 2)) > 0


def test_a_run_of_another_text_is_an_error_that_says_which_options_choose_it(
    tmp_path: Path,
) -> None:
    small_run(tmp_path, "--steps", 2, ranks=1)
    with pytest.raises(
        RankFailure, match=r"it trains on another text .--data and --max-bytes choose it"
    ):
        small_run(tmp_path, "--steps", 4, "--max-bytes", 300_000, ranks=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--batch-size 12 --accumulate 4",
            "--batch-size 12 is not a multiple of 2 ranks x --accumulate 4. Try 8.",
        ),
        (
            "--tp 2 --accumulate 3",
            "--batch-size 8 is not a multiple of 1 groups of --tp 2 ranks x --accumulate 3. Try 6.",
        ),
        (
            "--pipe 2 --micro-batches 3",
            (
                "--batch-size 8 is not a multiple of 1 groups of --pipe 2 ranks x --micro-batches"
                " 3. Try 6."
            ),
        ),
        ("--pipe 2 --layers 1", "1 layers cannot be split into 2 parts."),
        (
            "--tp 2 --dim 33 --heads 3 --seq-len 15",
            "--tp 2 must divide --heads 3 and --seq-len 15.",
        ),
    ],
)
def test_what_cannot_be_divided_is_an_error_on_every_rank(
    tmp_path: Path, arguments: str, message: str
) -> None:
    with pytest.raises(RankFailure) as failure:
        small_run(tmp_path, *arguments.split())
    errors = failure.value.errors
    assert len(errors) == 2
    for error in errors.values():
        assert message in str(error)


def test_weights_of_an_earlier_run_can_be_the_first(tmp_path: Path) -> None:
    before = small_run(tmp_path / "before", "--steps", 3)
    after = small_run(
        tmp_path / "after", "--steps", 3, "--init", tmp_path / "before/model.pt", ranks=1
    )
    assert after[0]["held_out_loss"] == pytest.approx(before[-1]["held_out_loss"], rel=1e-6)


@pytest.mark.parametrize("options", ["--dtype fp16", "--dtype bf16 --tp 2"])
def test_half_precision_learns(
    tmp_path: Path, one_rank: list[dict[str, Any]], options: str
) -> None:
    records = small_run(tmp_path, "--steps", 6, *options.split())
    assert records[-1]["held_out_loss"] == pytest.approx(one_rank[-1]["held_out_loss"], rel=0.02)


@pytest.mark.slow("bmt-zero", "bmt-pipeline", "examples/gpt/")
def test_layers_in_float8_learn_alike_on_any_ranks_and_go_on(
    tmp_path: Path, one_rank: list[dict[str, Any]]
) -> None:
    pytest.importorskip("torchao", reason="--float8 needs it")
    line = ["--steps", 6, "--checkpoint-every", 3, "--float8"]
    # Micro-batches of four sequences everywhere: the scale of a product is that of its rows.
    one = small_run(tmp_path / "one", *line, "--accumulate", 2, ranks=1)
    stages = small_run(tmp_path / "stages", *line, "--pipe", 2, "--micro-batches", 2)
    gathered = small_run(tmp_path / "gathered", *line, "tensorwise_gathered", "--zero-level", 3)
    checkpoint = tmp_path / "stages/checkpoints/step-3"
    resumed = small_run(
        tmp_path / "resumed", *line, "--resume", checkpoint, "--accumulate", 2, ranks=1
    )
    for records in (stages, gathered, resumed):
        assert len(records) == (4 if records is resumed else len(one))
        for record, expected in zip(records, one[-len(records) :], strict=True):
            assert record == pytest.approx(expected, rel=2e-3)
    assert one[-1]["held_out_loss"] == pytest.approx(one_rank[-1]["held_out_loss"], rel=0.02)
    assert one[0]["held_out_loss"] != pytest.approx(one_rank[0]["held_out_loss"], rel=1e-5)
    assert torch.load(tmp_path / "gathered/model.pt", weights_only=True).keys() == GPT_KEYS


def test_float8_of_other_sizes_or_without_its_package_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("options.importlib.util.find_spec", lambda package: None)
    for more, message in (
        ([], "--float8 needs the package torchao, which is not installed: pip install torchao"),
        (["--tp=2"], "--float8 computes whole linear layers, and --tp 2 splits them"),
    ):
        with pytest.raises(SystemExit):
            example.main(small(tmp_path, "--float8", *more))
        assert message in capsys.readouterr().err
    monkeypatch.undo()
    pytest.importorskip("torchao", reason="--float8 needs it")
    for more, message in (
        (["--dim", 24], r"multiples of 16: --dim is 24"),
        (["--seq-len", 2], r"a rank's micro-batch has 4 x --seq-len 2 bytes"),
    ):
        with pytest.raises(RankFailure, match=message):
            small_run(tmp_path, "--float8", "tensorwise", *more)


def test_a_mistake_ends_in_one_line_and_in_a_traceback_only_on_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["train.py", *small(tmp_path), "--device=cpu", "--data", str(tmp_path / "missing")]
    monkeypatch.setattr(sys, "argv", line)
    with pytest.raises(SystemExit) as ended:
        example.run()
    assert (
        ended.value.code
        == f"train.py, rank 0: ValueError: There is no file or directory {tmp_path / 'missing'}."
    )
    monkeypatch.setattr(sys, "argv", [*line, "--traceback"])
    with pytest.raises(ValueError, match="no file or directory"):
        example.run()
    assert not bmt.is_initialized()
    monkeypatch.setattr("options.importlib.util.find_spec", lambda package: None)
    monkeypatch.setattr(sys, "argv", [*line, "--log-to", "wandb"])
    with pytest.raises(SystemExit):
        example.run()
    assert "--log-to wandb needs the package wandb" in capsys.readouterr().err


def test_metrics_go_to_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    CALLBACKS["tensorboard"](tmp_path, 2)(3, {"loss": 1.5, "lr": 0.25})
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [
        (name, event.step, event.value) for name in ("loss", "lr") for event in events.Scalars(name)
    ] == [("loss", 3, 1.5), ("lr", 3, 0.25)]


def test_metrics_go_to_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package, which would start a process of its own, is replaced."""
    run = mock.Mock()
    monkeypatch.setitem(sys.modules, "wandb", mock.Mock(init=run))
    CALLBACKS["wandb"](tmp_path, 2)(3, {"loss": 1.5, "lr": 0.25})
    run.assert_called_once_with(dir=tmp_path)
    run.return_value.log.assert_called_once_with({"loss": 1.5, "lr": 0.25}, step=3)


KILLED = f"""
# train.py, whose rank 1 dies right after the first checkpoint, once.
import os, runpy, signal, sys
import bmtrain as bmt

save_checkpoint = bmt.save_checkpoint

def save_and_die(*arguments, **options):
    path = save_checkpoint(*arguments, **options)
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return path

bmt.save_checkpoint = save_and_die
sys.path.insert(0, os.path.dirname({str(TRAIN)!r}))
runpy.run_path({str(TRAIN)!r}, run_name="__main__")
"""


@pytest.mark.ranks(2)
@pytest.mark.slow("bmt-core", "bmt-checkpoint", "bmt-watch", "examples/gpt/")
def test_train_py_under_torchrun_goes_on_after_a_rank_was_killed_and_ends_with_the_last_line(
    tmp_path: Path,
) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc_per_node=2", "--max-restarts=1"]
    (tmp_path / "killed.py").write_text(KILLED)
    line = small(tmp_path, "--steps", 12, "--warmup", 2, "--checkpoint-every", 5)
    command = [*launch, str(tmp_path / "killed.py"), *line]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT)
    assert result.returncode == 0, result.stderr
    *_, last = result.stdout.splitlines()
    found = LAST_LINE.fullmatch(last)
    assert found is not None, last
    steps, first_loss, last_loss, checkpoint = found.groups()
    assert steps == "12"
    assert float(first_loss) == pytest.approx(5.5, abs=0.2)
    assert float(last_loss) < float(first_loss) - 0.5
    assert (Path(checkpoint) / "model" / "model.safetensors.index.json").is_file()
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "sample.txt").read_text().startswith("def ")
    assert torch.load(tmp_path / "model.pt", weights_only=True).keys() == GPT_KEYS
    assert "going on after step 5, from" in result.stdout
    files = f"metrics in {tmp_path / 'metrics.jsonl'}, loss curve in {tmp_path / 'loss.png'}"
    assert f"while it trains: {files}" in result.stdout and f"written: {files}" in result.stdout
    assert re.search(r"^step 12/12 .* ms/step  \d\.\d\d GiB$", result.stdout, re.MULTILINE)
    steps = [line.split()[1] for line in result.stdout.splitlines() if line.startswith("step ")]
    done = [step for step in steps if "/" in step]
    assert done[:5] == [f"{step}/12" for step in range(1, 6)]
    assert done[-7:] == [f"{step}/12" for step in range(6, 13)]


GPT_KEYS = {
    *(f"{part}.weight" for part in ("input_embedding", "position_embedding", "layernorm")),
    "layernorm.bias",
    *(
        f"transformers.{layer}.{part}.{kind}"
        for layer in range(2)
        for part in (
            *("ln_attn", "attn.project_qkv", "attn.project_out", "ln_ff", "ff.w_in", "ff.w_out"),
        )
        for kind in ("weight", "bias")
    ),
}


@pytest.mark.slow("bmt-core", "examples/gpt/")
def test_train_py_alone_shows_a_progress_bar_on_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(TRAIN.read_bytes() * 3)
    command = [
        sys.executable,
        str(TRAIN),
        *small(tmp_path, "--steps", 3, "--data", tmp_path / "text.txt"),
    ]
    terminal, its_end = pty.openpty()
    try:
        process = subprocess.Popen(
            command, stdout=its_end, stderr=its_end, env={**os.environ, "TERM": "xterm"}
        )
        os.close(its_end)
        shown = b""
        # Reading a terminal whose other end was closed fails with EIO.
        with contextlib.suppress(OSError):
            while part := os.read(terminal, 4096):
                shown += part
        assert process.wait(TIME_LIMIT) == 0, shown.decode()
    finally:
        os.close(terminal)
    assert re.search(rb"3/3.*loss .* tokens/s .* ms/step .* GiB", shown), shown
    *_, last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode()).strip().splitlines()
    assert LAST_LINE.fullmatch(last), last
