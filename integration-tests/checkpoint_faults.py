"""Ranks that are killed while they save, disks that are full or read-only, and files that were
changed: what is left must load.

After every fault the newest checkpoint that was complete loads, to the last bit, or nothing was
changed and the error names the cause on every rank. Ranks are forked from this process, so that a
try takes a moment.

python3 tools/dev.py setup && .venv/bin/python integration-tests/checkpoint_faults.py --kills 300
--mutations 3000
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import itertools
import json
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore

import bmt_core
from bmt_checkpoint import latest, load_checkpoint, save_checkpoint, wait_for_saves
from bmt_core.errors import BmtError, CheckpointError
from bmt_optim import AdamOptimizer, OptimManager
from bmt_testing.pool import serve_store
from bmt_zero import BMTrainModelWrapper

RANKS, PATIENCE = 2, 60.0  # seconds until a rank counts as one that hangs
# Of the run: what a rank may wait for one that was killed while the two of them connect.
TIMEOUT = PATIENCE / 2
# Exit codes of a rank: its work is done; it raised what it should; anything else.
DONE, REFUSED, FAILED = 0, 3, 4


def main() -> int:
    """Try, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kills", type=int, default=300, help="saves during which a rank is killed"
    )
    parser.add_argument("--full", type=int, default=60, help="saves to a disk with too little room")
    parser.add_argument(
        "--mutations", type=int, default=3000, help="changed files that one process loads"
    )
    parser.add_argument(
        "--shared-mutations", type=int, default=200, help="changed files that several ranks load"
    )
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn")
    options = parser.parse_args()
    torch.set_num_threads(1)
    draw = random.Random(options.seed)
    failures = 0
    # What a first call imports, no rank need import again.
    with tempfile.TemporaryDirectory() as folder:
        _save(Path(folder), 1, True)
        assert check_newest(Path(folder), {1}) == (1, None)
    with contextlib.redirect_stdout(io.StringIO()) as quiet:
        for trial, count in (
            (kills, options.kills),
            (full_disks, options.full),
            (read_only_directory, 1),
            (mutations, options.mutations),
            (shared_mutations, options.shared_mutations),
        ):
            start = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                os.chmod(folder, 0o777)
                summary, found = trial(Path(folder), count, draw)
            failures += len(found)
            print(
                f"{summary}, {len(found)} wrong, {time.monotonic() - start:.0f} s",
                *found[:5],
                sep="\n  ",
                file=sys.stderr,
            )
            quiet.truncate(0)
    return 1 if failures else 0


class Model(nn.Module):
    """Parameters of several sizes and dtypes and a buffer, whose values say which step it is."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(64, 32, dtype=dtype) for dtype in (torch.float32, torch.bfloat16) * 3
        )
        self.register_buffer("step", torch.full((3,), step, dtype=torch.int64))
        for p in self.parameters():
            nn.init.constant_(p, step)


def make(step: int) -> tuple[Any, OptimManager]:
    """Return a model and a manager of the values of ``step``."""
    model: Any = Model(step)
    if bmt_core.is_initialized():
        model = BMTrainModelWrapper(model)
    optimizer = AdamOptimizer(model.parameters(), lr=0.0)
    manager = OptimManager(loss_scale=float(step))
    manager.add_optimizer(optimizer)
    for p in model.parameters():
        p.grad = torch.full_like(p, step)
    optimizer.step()
    return model, manager


def content(model: nn.Module, manager: OptimManager) -> dict[str, torch.Tensor]:
    """Return all tensors of a model and its optimizer by name, and the loss scale. In a run of
    one process.
    """
    found = {name: value.clone() for name, value in model.state_dict().items()}
    state = manager.state_dict(gather_opt=True, named_parameters=list(model.named_parameters()))
    for name, values in state["logical"]["parameters"].items():
        found |= {f"{name}/{key}": torch.as_tensor(value).clone() for key, value in values.items()}
    return {**found, "scale": torch.tensor(manager.loss_scale)}


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether the same names stand for the same bits."""
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) for name, value in one.items()
    )


def check_newest(folder: Path, expected: set[int]) -> tuple[int, str | None]:
    """Load the newest checkpoint; return its step, and a complaint if that is not ``expected`` or
    its values are another's.
    """
    model, manager = make(1)
    try:
        step = load_checkpoint(folder, model, manager)["step"]
    except Exception as error:
        return -1, f"{type(error).__name__}: {error}"
    if step not in expected:
        return step, f"step {step} loads, and not {expected}"
    return step, None if are_equal(
        content(model, manager), content(*make(step))
    ) else f"values of step {step} are others"


# ---- ranks ----

_runs = itertools.count()


@functools.cache
def _store() -> TCPStore:
    return serve_store(timedelta(seconds=PATIENCE))


def fork_ranks(work: Callable[[int], None], folder: Path) -> list[int]:
    """Run ``work(rank)`` as each of several ranks, forked from this process; return their
    process numbers.

    What they raise is left in ``folder``. They find each other by a store that this process serves,
    as a launcher's does. In a file they would meet the limits of :func:`full_disks` too: a group
    that connects writes to it.
    """
    run = {
        "WORLD_SIZE": RANKS,
        "LOCAL_WORLD_SIZE": RANKS,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": _store().port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": next(_runs),
    }
    pids = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            code = FAILED
            try:
                os.environ.update(
                    {
                        name: str(value)
                        for name, value in {**run, "RANK": rank, "LOCAL_RANK": rank}.items()
                    }
                )
                code = _run_rank(work, rank, folder)
            finally:
                os._exit(code)
        pids.append(pid)
    return pids


def _run_rank(work: Callable[[int], None], rank: int, folder: Path) -> int:
    code = DONE
    try:
        bmt_core.init_distributed(device="cpu", timeout=TIMEOUT, gradients="mean")
        work(rank)
    except BmtError as error:
        (folder / f"error-{rank}").write_text(f"{type(error).__name__}: {error}")
        code = REFUSED
    except BaseException:
        (folder / f"error-{rank}").write_text(traceback.format_exc())
        code = FAILED
    bmt_core.shutdown()
    return code


def wait_for(pids: list[int]) -> list[int]:
    """Wait until the processes ended and return their exit codes; minus a signal's number, 9 for
    those that hang too.
    """
    deadline, codes = time.monotonic() + PATIENCE, dict.fromkeys(pids, 0)
    left = set(pids)
    while left:
        for pid in sorted(left):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes[pid] = os.waitstatus_to_exitcode(status)
                left.remove(pid)
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    return [codes[pid] for pid in pids]


def errors_of_ranks(folder: Path) -> list[str]:
    """Return and forget what the ranks raised; an empty text for one that raised nothing."""
    found = []
    for rank in range(RANKS):
        path = folder / f"error-{rank}"
        found.append(path.read_text() if path.exists() else "")
        path.unlink(missing_ok=True)
    return found


# ---- trials: each returns what was done, and what was wrong ----

Outcome = tuple[str, list[str]]


def kills(folder: Path, count: int, draw: random.Random) -> Outcome:
    """Kill one rank, or all, at a random moment of a save."""
    runs, wrong, survived, old = folder / "runs", [], 0, 1
    _finish(lambda rank: _save(runs, 1, False), folder)
    seconds = _finish(lambda rank: _save(runs, 2, False), folder)
    old, killed = 2, 0
    for number in range(count):
        new, in_background = old + 1, draw.random() < 0.5
        reader, writer = os.pipe()

        def work(
            rank: int, new: int = new, in_background: bool = in_background, writer: int = writer
        ) -> None:
            model, manager = make(new)
            bmt_core.synchronize()
            os.write(writer, b".")
            save_checkpoint(runs, model, manager, step=new, keep=2, non_blocking=in_background)
            wait_for_saves()

        pids = fork_ranks(work, folder)
        os.close(writer)
        victims = draw.choice([[0], [1], [0, 1]])
        os.read(reader, 1)
        os.close(reader)
        time.sleep(draw.random() * seconds * 1.2)
        for rank in victims:
            os.kill(pids[rank], signal.SIGKILL)
        codes = wait_for(pids)
        errors = errors_of_ranks(folder)
        step, complaint = check_newest(runs, {old, new})
        what = (
            f"try {number}, ranks {victims} killed,"
            f" {'in the background' if in_background else 'waiting'}"
        )
        if complaint:
            wrong.append(f"{what}: {complaint}")
            shutil.rmtree(runs)
            _finish(lambda rank, old=old: _save(runs, old, False), folder)
        for rank in set(range(RANKS)) - set(victims):
            # It may have finished before the other one was killed.
            if codes[rank] not in (DONE, REFUSED) or (codes[rank] == DONE and step != new):
                wrong.append(f"{what}: rank {rank} ended with {codes[rank]}: {errors[rank][-500:]}")
            survived += codes[rank] == DONE
        killed += step == old
        old = max(step, old)
    return f"{count} kills during saves: the old checkpoint was left {killed} times", wrong


def full_disks(folder: Path, count: int, draw: random.Random) -> Outcome:
    """Save where no file can be as long as is needed, which looks to the program as a full
    disk does.
    """
    runs, limits = folder / "runs", [draw.randrange(1, 40_000) for _ in range(count)]
    victims = [draw.choice([(0,), (1,), (0, 1)]) for _ in range(count)]
    backgrounds = [draw.random() < 0.5 for _ in range(count)]

    def work(rank: int) -> None:
        _save(runs, 1, False)
        complaints, refused, old = [], 0, 1
        for number, (limit, chosen, background) in enumerate(
            zip(limits, victims, backgrounds, strict=True)
        ):
            model, manager = make(number + 2)
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            if rank in chosen:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
            message = ""
            try:
                save_checkpoint(
                    runs, model, manager, step=number + 2, keep=1, non_blocking=background
                )
                wait_for_saves()
            except CheckpointError as error:
                message = str(error)
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            bmt_core.synchronize()
            newest = latest(runs)
            if message:
                refused += 1
                if "annot write" not in message or newest is None or newest.name != f"step-{old}":
                    complaints.append(f"limit {limit}: {newest} is left after: {message}")
                if rank == 0 and sorted(path.name for path in runs.glob("[!.]*")) != [
                    "latest",
                    f"step-{old}",
                ]:
                    complaints.append(
                        f"limit {limit} leaves {sorted(path.name for path in runs.glob('[!.]*'))}"
                    )
            else:
                old = number + 2
                if newest is None or newest.name != f"step-{old}":
                    complaints.append(
                        f"limit {limit}: nothing was raised, and {newest} is the newest"
                    )
            bmt_core.synchronize()
        (folder / f"result-{rank}").write_text(json.dumps([complaints, refused, old]))

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    codes = wait_for(fork_ranks(work, folder))
    if codes != [DONE] * RANKS:
        return "full disks", [f"ranks ended with {codes}: {errors_of_ranks(folder)}"]
    results = [json.loads((folder / f"result-{rank}").read_text()) for rank in range(RANKS)]
    wrong = [text for complaints, _, _ in results for text in complaints]
    _, complaint = check_newest(runs, {results[0][2]})
    wrong += [complaint] if complaint else []
    wrong += ["ranks were told different things"] if results[0][1] != results[1][1] else []
    return f"{count} saves with too little room, {results[0][1]} refused", wrong


def read_only_directory(folder: Path, count: int, draw: random.Random) -> Outcome:
    """Save where nothing may be written."""
    runs = folder / "runs"
    _finish(lambda rank: _save(runs, 1, False), folder)
    runs.chmod(0o555)

    def work(rank: int) -> None:
        if os.geteuid() == 0:  # who may write everywhere
            bmt_core.synchronize()
            os.setegid(65534)
            os.seteuid(65534)
        _save(runs, 2, False)

    codes = wait_for(fork_ranks(work, folder))
    errors = errors_of_ranks(folder)
    wrong = [f"ranks ended with {codes}: {errors}"] if codes != [REFUSED] * RANKS else []
    wrong += [f"no cause named: {error}" for error in errors if "annot write" not in error]
    _, complaint = check_newest(runs, {1})
    return "a read-only directory", wrong + ([complaint] if complaint else [])


def mutations(folder: Path, count: int, draw: random.Random) -> Outcome:
    """Change a file of a checkpoint, and load it in this process."""
    runs, other, wrong, refused = folder / "runs", folder / "other", [], 0
    _finish(lambda rank: _save(runs, 2, False), folder)
    _finish(lambda rank: _save(other, 3, False), folder)
    model, manager = make(1)
    before, saved = content(model, manager), content(*make(2))
    for number in range(count):
        with mutated(runs, other, draw) as what:
            try:
                load_checkpoint(runs, model, manager)
            except CheckpointError as error:
                refused += 1
                found = content(model, manager)
                if not are_equal(found, before) or not str(error):
                    wrong.append(f"{number}, {what}: refused, and something changed: {error}")
            except BaseException as error:
                wrong.append(f"{number}, {what}: {type(error).__name__}: {str(error)[:300]}")
            else:  # something that does not matter, such as a blank in the index
                if not are_equal(content(model, manager), saved):
                    wrong.append(f"{number}, {what}: other values were loaded")
                model, manager = make(1)
        if PROOF.exists():
            PROOF.unlink()
            wrong.append(f"{number}, {what}: code in the file was run")
    _, complaint = check_newest(runs, {2})
    wrong += [f"undone: {complaint}"] if complaint else []
    return f"{count} mutations, {refused} refused", wrong


def shared_mutations(folder: Path, count: int, draw: random.Random) -> Outcome:
    """Change a file of a checkpoint, and load it on several ranks."""
    runs, other, seed = folder / "runs", folder / "other", draw.random()
    _finish(lambda rank: _save(runs, 2, False), folder)
    _finish(lambda rank: _save(other, 3, False), folder)

    def work(rank: int) -> None:
        own_draw, complaints, refused = random.Random(seed), [], 0
        model, manager = make(1)
        for number in range(count):
            with (
                mutated(runs, other, own_draw) if rank == 0 else contextlib.nullcontext("") as what
            ):
                bmt_core.synchronize()
                message = ""
                try:
                    load_checkpoint(runs, model, manager)
                except CheckpointError as error:
                    message = str(error)
                values = {
                    float(p.detach().float().sum() / max(1, p.numel()))
                    for p in model.parameters()
                    if p.numel()
                }
                if values != ({1.0} if message else {2.0}):
                    complaints.append(
                        f"{number}, {what}: values {values} after: {message or 'nothing'}"
                    )
                refused += bool(message)
                model, manager = (model, manager) if message else make(1)
                bmt_core.synchronize()
        (folder / f"result-{rank}").write_text(json.dumps([complaints, refused]))

    codes = wait_for(fork_ranks(work, folder))
    if codes != [DONE] * RANKS:
        return "mutations that several ranks load", [
            f"ranks ended with {codes}: {errors_of_ranks(folder)}"
        ]
    results = [json.loads((folder / f"result-{rank}").read_text()) for rank in range(RANKS)]
    wrong = [text for complaints, _ in results for text in complaints]
    wrong += ["ranks were told different things"] if results[0][1] != results[1][1] else []
    return f"{count} mutations that {RANKS} ranks load, {results[0][1]} refused", wrong


def _save(runs: Path, step: int, non_blocking: bool) -> None:
    save_checkpoint(runs, *make(step), step=step, keep=2, non_blocking=non_blocking)


def _finish(work: Callable[[int], None], folder: Path) -> float:
    """Run ``work`` on ranks, which must end well; return the seconds that it took."""

    def timed(rank: int) -> None:
        bmt_core.synchronize()
        start = time.monotonic()
        work(rank)
        (folder / f"seconds-{rank}").write_text(str(time.monotonic() - start))

    codes = wait_for(fork_ranks(timed, folder))
    assert codes == [DONE] * RANKS, errors_of_ranks(folder)
    return float((folder / "seconds-0").read_text())


# ---- changed files ----

PROOF = Path(tempfile.gettempdir()) / f"code-was-run-{os.getpid()}"


class _Attack:
    def __reduce__(self) -> Any:
        return os.mkdir, (str(PROOF),)


@contextlib.contextmanager
def mutated(runs: Path, other: Path, draw: random.Random) -> Iterator[str]:
    """Change a file of the newest checkpoint in ``runs``; ``other`` has one of the same files.
    Undone at the end.
    """
    files = sorted(path for path in runs.rglob("*") if path.is_file())
    path = draw.choice(files)
    whole = path.read_bytes()
    kind = draw.choice(
        [
            "bits",
            "bits",
            "bits",
            "cut",
            "longer",
            "exchanged",
            "other",
            "missing",
            "pickle",
            "header",
        ]
    )
    twin = path
    try:
        if kind == "other":  # of another checkpoint, or its neighbour in this one
            twin = draw.choice(
                [
                    q
                    for q in sorted(other.rglob("*")) + files
                    if q.suffix == path.suffix and q.is_file()
                ]
            )
            path.write_bytes(twin.read_bytes())
        elif kind == "missing":
            path.unlink()
        elif kind == "pickle":
            if draw.random() < 0.5:
                torch.save({"step": _Attack()}, path)
            else:
                path.write_bytes(pickle.dumps(_Attack()))
        else:
            path.write_bytes(_changed(whole, kind, draw))
        yield f"{path.relative_to(runs)} {kind}"
    finally:
        path.write_bytes(whole)


def _changed(whole: bytes, kind: str, draw: random.Random) -> bytes:
    data = bytearray(whole)
    if kind == "bits":
        for _ in range(draw.choice((1, 1, 2, 8))):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del data[draw.randrange(len(data)) :]
    elif kind == "longer":
        data += draw.randbytes(draw.randrange(1, 9))
    elif kind == "exchanged":
        size = draw.randrange(1, min(64, len(data)))
        one, two = (draw.randrange(len(data) - size + 1) for _ in range(2))
        data[one : one + size], data[two : two + size] = (
            data[two : two + size],
            data[one : one + size],
        )
    else:
        data[:8] = struct.pack("<Q", draw.choice([0, 1, 2**63, 2**64 - 1, len(data), 100_000_001]))
        if draw.random() < 0.7 and len(whole) > 8:
            data[:] = _hostile_header(whole, draw)
    return bytes(data)


def _hostile_header(whole: bytes, draw: random.Random) -> bytes:
    length = int.from_bytes(whole[:8], "little")
    try:
        header = json.loads(whole[8 : 8 + length])
        names = [name for name in header if name != "__metadata__"]
    except ValueError:
        return b"[" * draw.randrange(1, 100_000)  # of a file of another kind
    name = draw.choice(names)
    change = draw.choice(["dtype", "shape", "offsets", "overlap", "nested", "name"])
    if change == "dtype":
        header[name]["dtype"] = draw.choice(["F64", "I8", "NONE", None, 3])
    elif change == "shape":
        header[name]["shape"] = draw.choice([[2**62, 2**62], [-1], [0], [], [10**9], "32"])
    elif change == "offsets":
        header[name]["data_offsets"] = draw.choice([[0, 2**63], [5, 1], [-4, 4], [], [0]])
    elif change == "overlap":
        header[name]["data_offsets"] = header[draw.choice(names)]["data_offsets"]
    elif change == "nested":
        header["__metadata__"]["bmt_state"] = "A" * draw.randrange(1, 2000)
    else:
        header[draw.choice(["", "../x", "a" * 10_000])] = header.pop(name)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + whole[8 + length :]


if __name__ == "__main__":
    sys.exit(main())
