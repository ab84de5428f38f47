"""Several hosts, which are namespaces of this machine: runs on two and three of them train as plain
torch does and their checkpoints load on one rank, a host that vanishes and a rank that fails are
errors that name them, and nothing of the hosts remains.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import re
import select
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hosts_training import (
    FAILS_IN,
    FAULTS,
    GRIDS,
    LAST_STEP,
    STEPS,
    batch,
    plain_model,
    steps,
    wrapped_model,
)

import bmtrain as bmt
from hosts import Host, HostsError, hosts, why_no_hosts

HERE = Path(__file__).parent
TOOL = HERE.parent / "tools" / "hosts.py"
TRAINING = str(HERE / "hosts_training.py")
DOCUMENTS = HERE.parent / "docs"
ENVIRONMENT = {
    **os.environ,
    # `torchrun` and `python` of the documents are those that run the tests.
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "PYTHONPATH": ":".join(sys.path),
    "PYTHONUNBUFFERED": "1",
}


@pytest.fixture(autouse=True, scope="module")
def _hosts_can_be_made() -> None:
    if (reason := why_no_hosts("1gbit")) is not None:
        pytest.skip(reason)


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOL), *arguments], capture_output=True, text=True, env=ENVIRONMENT
    )


def processes_in(namespaces: set[str]) -> list[str]:
    """Return the processes of this machine whose network is one of ``namespaces``."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str((process / "ns" / "net").readlink()) in namespaces:
                found.append(process.name)
        except OSError:
            pass  # ended meanwhile
    return found


SLOW = pytest.mark.slow(
    "bmt-core", "bmt-watch", "bmt-zero", "bmt-pipeline", "tools/hosts.py", "tools/slow_cable.py"
)
SHOW_NETWORK = "readlink /proc/self/ns/net"


def network_of(host: Host) -> str:
    return subprocess.check_output(host.command(shlex.split(SHOW_NETWORK)), text=True).strip()


def test_every_host_runs_the_command_and_the_first_failure_is_the_status() -> None:
    command = (
        'hostname; echo "$HOST_NUMBER of $HOSTS, $FIRST_HOST"; getent hosts host2 >&2; pwd;'
        " test $HOST_NUMBER = 0 || exit $((HOST_NUMBER + 4))"
    )
    done = run_tool("--hosts", "3", "--rate", "1gbit", "--", "sh", "-c", command)
    assert (done.returncode, done.stderr) == (5, "")
    lines = done.stdout.splitlines()
    for number in range(3):
        name = f"host{number}"
        own = [line.removeprefix(f"{name}: ") for line in lines if line.startswith(f"{name}: ")]
        assert own[:2] == [name, f"{number} of 3, 10.0.0.1"]
        assert own[2].split() == ["10.0.0.3", "host2"]
        assert own[3:] == [os.getcwd()]
    assert len(lines) == 12
    assert run_tool("--", "true").returncode == 0
    assert run_tool("--", "sh", "-c", "kill -KILL $$").returncode == 128 + signal.SIGKILL


def test_what_cannot_be_made_is_said_in_one_line() -> None:
    done = run_tool("--rate", "fast", "--", "true")
    assert done.returncode == 1 and done.stdout == ""
    assert re.fullmatch(r'hosts\.py: `tc .* failed: .*illegal value for "rate".*\n', done.stderr)
    with pytest.raises(HostsError, match="must be 1 to 250, not 0"), hosts(0):
        pass
    done = run_tool("--delay", "3", "--", "true")
    said = "hosts.py: --delay must be a number and its unit us, ms or s, such as 0.2ms, not '3'.\n"
    assert (done.returncode, done.stderr) == (1, said)
    done = run_tool("--loss", "200%", "--", "true")
    said = "hosts.py: --loss must be a percentage, such as 1%, not '200%'.\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_nothing_remains_after_an_error() -> None:
    before = subprocess.check_output(["ip", "-o", "link"])
    with pytest.raises(ZeroDivisionError), hosts(2) as found:
        networks = {network_of(host) for host in found}
        left_over = start(found[0], ["sh", "-c", "echo started; exec sleep 1000"])
        assert line_of(left_over) == "started" and len(networks) == 2 and processes_in(networks)
        raise ZeroDivisionError
    with left_over:  # nsenter, which ends when the program that it has started was killed
        assert left_over.wait() == -signal.SIGKILL
    assert processes_in(networks) == []
    assert subprocess.check_output(["ip", "-o", "link"]) == before


@SLOW
@pytest.mark.parametrize("delay", [None, "1ms"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_remains_after_a_signal(number: signal.Signals, delay: str | None) -> None:
    if (reason := why_no_hosts(delay=delay)) is not None:
        pytest.skip(reason)
    options = [] if delay is None else ["--delay", delay]
    tool = [sys.executable, str(TOOL), *options, "--", "sh", "-c", f"{SHOW_NETWORK}; sleep 1000"]
    with subprocess.Popen(tool, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        shown = {process.stdout.readline().split()[-1] for _ in range(2)}
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        networks = {str(Path(f"/proc/{child}/ns/net").readlink()) for child in children}
        assert len(networks) == 3 and shown < networks  # and that of the switch
        programs = [Path(f"/proc/{child}/cmdline").read_text() for child in children]
        assert sum("slow_cable.py" in each for each in programs) == (0 if delay is None else 2)
        with ends_of(processes_in(networks)) as wait_for_ends:
            process.send_signal(number)
            assert process.wait() == (-number if number == signal.SIGKILL else 128 + number)
            wait_for_ends()
        assert processes_in(networks) == []


@contextlib.contextmanager
def ends_of(processes: list[str]) -> Iterator[Callable[[], None]]:
    """Give a function that waits until all of ``processes`` have ended."""
    with contextlib.ExitStack() as files:
        ends = []
        for process in processes:
            with contextlib.suppress(ProcessLookupError):  # ended meanwhile
                ends.append(os.pidfd_open(int(process)))
                files.callback(os.close, ends[-1])

        def wait() -> None:
            for end in ends:
                assert select.select([end], [], [], 30)[0] == [end]

        yield wait


SERVE = """
import socket
with socket.create_server(("", 7000)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    with connection:
        while data := connection.recv(1 << 20):
            if data.endswith(b"end"):
                connection.sendall(b"!")
"""
CONNECT = """
import select, socket, time
with socket.create_connection(("host0", 7000)) as connection:
    start = time.monotonic()
    connection.sendall(bytes(4 << 20) + b"end")
    connection.recv(1)
    print(time.monotonic() - start, flush=True)
    shortest = 1e9
    for _ in range(10):
        start = time.monotonic()
        connection.sendall(b"end")
        connection.recv(1)
        shortest = min(shortest, time.monotonic() - start)
    print(shortest, flush=True)
    input()
    connection.sendall(b"end")
    print(bool(select.select([connection], [], [], 0.3)[0]), flush=True)
    input()
    print(connection.recv(1), flush=True)
"""


def start(
    host: Host, argv: list[str], *, errors: int = subprocess.STDOUT, **variables: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        host.command(argv),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env={**ENVIRONMENT, **variables},
    )


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def say(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go on\n")
    process.stdin.flush()


@SLOW
@pytest.mark.parametrize("delay", [None, "20ms"])
def test_a_cable_has_its_rate_and_delay_and_can_be_pulled_out_and_in(delay: str | None) -> None:
    if (reason := why_no_hosts(delay=delay)) is not None:
        pytest.skip(reason)
    with hosts(2, rate="100mbit", delay=delay) as (first, second):
        with start(first, [sys.executable, "-c", SERVE]) as server:
            assert line_of(server) == "listening"
            with start(second, [sys.executable, "-c", CONNECT]) as client:
                # 4 MiB, of which the queues of both ends let pass at most 512 KiB each at once
                assert float(line_of(client)) > 3 * 2**20 * 8 / 100e6
                there_and_back = float(line_of(client))
                assert (there_and_back >= 0.04) == (delay is not None), there_and_back
                second.disconnect()
                say(client)
                assert line_of(client) == "False"
                second.reconnect()
                say(client)
                assert line_of(client) == "b'!'"


RECEIVE = """
import socket
with socket.create_server(("", 7000)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    with connection:
        print(sum(len(data) for data in iter(lambda: connection.recv(1 << 20), b"")), flush=True)
"""
SEND = """
import socket
with socket.create_connection(("host0", 7000)) as connection:
    connection.sendall(bytes(64 << 20))
"""


def packets(pid: int, device: str, direction: str) -> int:
    """Return how many packets the ``device`` in the network of process ``pid`` has sent ("tx") or
    received ("rx").
    """
    enter = ["nsenter", "--target", str(pid), "--net"]
    shown = subprocess.check_output([*enter, "ip", "-json", "-stats", "link", "show", device])
    count: int = json.loads(shown)[0]["stats64"][direction]["packets"]
    return count


@SLOW
def test_a_cable_loses_some_packets_and_a_connection_goes_on() -> None:
    if (reason := why_no_hosts(loss="2%")) is not None:
        pytest.skip(reason)
    with hosts(2, loss="2%") as (first, second):
        with start(first, [sys.executable, "-c", RECEIVE]) as receiver:
            assert line_of(receiver) == "listening"
            with start(second, [sys.executable, "-c", SEND]) as sender:
                assert sender.wait() == 0
            assert line_of(receiver) == str(64 << 20)
        sent = packets(first.switch_pid, "host0", "tx")  # into the cable
        received = packets(first.pid, "eth0", "rx")
        assert sent > 1000 and 3 < sent - received < sent / 10, (sent, received)


def documented_line() -> str:
    """Return how docs/several-hosts.md starts four hosts with torchrun."""
    (line,) = [
        line.partition("#")[0].strip()
        for line in (DOCUMENTS / "several-hosts.md").read_text().splitlines()
        if line.startswith("torchrun --nnodes")
    ]
    return line


def train_on_two_hosts(folder: Path) -> None:
    """Let four ranks on two hosts fill ``folder``, started by the line of the documents."""
    line = documented_line()
    assert "--nnodes=4 --nproc_per_node=8" in line and line.endswith(":29500 train.py")
    line = line.replace("--nnodes=4 --nproc_per_node=8", "--nnodes=2 --nproc_per_node=2")
    line = line.replace("HOST:", "$FIRST_HOST:")
    line = line.replace("train.py", shlex.join([TRAINING, "whole", str(folder), *GRIDS]))
    done = run_tool("--hosts", "2", "--", "sh", "-c", line)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_batch_script_is_one_and_starts_a_rank_per_gpu() -> None:
    page = (DOCUMENTS / "several-hosts.md").read_text()
    (script,) = re.findall(r"^```bash\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    before, _, commands = script.partition("\n\n")
    first, *lines = before.splitlines()
    assert first == "#!/bin/bash" and "#SBATCH" not in commands  # Slurm reads none after a command
    options = dict(line.removeprefix("#SBATCH --").split("=", 1) for line in lines)
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    # A stand-in for srun prints its options and the tasks' command.
    run = 'srun() { echo "$@"; }; source() { :; }\n' + script
    cpus = options["cpus-per-task"]
    variables = {**os.environ, "SLURM_CPUS_PER_TASK": cpus}
    started = subprocess.check_output(["bash", "-eu", "-c", run], text=True, env=variables)
    assert started == f"--cpus-per-task={cpus} --kill-on-bad-exit=1 --label python train.py\n"


def plain_training(end: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    model, losses = plain_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(end):
        loss = model(batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return dict(model.state_dict()), losses


def ranks_as_plain_torch(folder: Path, grid: str, ranks: int) -> list[dict[str, Any]]:
    """Return what ``ranks`` have found, after a comparison with plain torch."""
    expected, losses = plain_training(STEPS)
    found = [torch.load(folder / f"found-{grid}-{rank}.pt") for rank in range(ranks)]
    for each in found:
        torch.testing.assert_close(each["losses"], losses)
        own = {name: expected[name] for name in each["model"]}  # a stage has only its layers
        torch.testing.assert_close(each["model"], own)
    assert {name for each in found for name in each["model"]} == set(expected)
    return found


@SLOW
@pytest.mark.ranks(4)
def test_torchrun_on_two_hosts_trains_as_plain_torch_and_one_process_goes_on(
    tmp_path: Path,
) -> None:
    train_on_two_hosts(tmp_path)
    for grid in GRIDS:
        check_ranks_of_two_hosts(tmp_path, grid)
        check_one_process_goes_on(tmp_path, grid)


def check_ranks_of_two_hosts(folder: Path, grid: str) -> None:
    ranks = ranks_as_plain_torch(folder, grid, 4)
    assert [found["host"] for found in ranks] in (
        ["host0", "host0", "host1", "host1"],  # as they come
        ["host1", "host1", "host0", "host0"],
    )
    for rank, found in enumerate(ranks):
        of_host = (0, 1) if rank < 2 else (2, 3)
        if grid == "stages":  # each host has a layer, which tp splits there
            own = {name for name in found["model"] if name.startswith("layers.")}
            assert {name.split(".")[1] for name in own} == {str(rank // 2)}
            assert found["split_over"] == of_host
        else:  # or parameters are gathered inside of a host
            assert set(found["shared_by"]) == {of_host if grid == "hybrid" else (0, 1, 2, 3)}


@SLOW
@pytest.mark.ranks(3)
def test_three_hosts_train_as_plain_torch_does(tmp_path: Path) -> None:
    with hosts(3) as made:
        for process in start_ranks(made, 1, "whole", str(tmp_path), "all"):
            _, errors = process.communicate()
            assert process.returncode == 0, errors
    ranks = ranks_as_plain_torch(tmp_path, "all", 3)
    assert [found["host"] for found in ranks] == ["host0", "host1", "host2"]


def check_one_process_goes_on(folder: Path, grid: str) -> None:
    expected, losses = plain_training(LAST_STEP)
    model, optimizer, manager = wrapped_model()
    try:
        found = bmt.load_checkpoint(folder / f"checkpoints-{grid}", model, manager)
        assert found["step"] == STEPS
        further = list(steps(model, optimizer, STEPS, LAST_STEP))
        torch.testing.assert_close(further, losses[STEPS:])
        torch.testing.assert_close(dict(model.state_dict()), expected)
    finally:
        bmt.shutdown()


TIMEOUT = 12  # seconds; a silent rank is named some 9 s after a call began that waits for it
# In one line where another rank has failed.
ERROR = r"^(?:\[rank.\]: )?(?:bmt_core\.errors\.\w+|\S+:\d+: \w+Error): "
FAILURES = {
    "raises": "stages",
    "killed": "hybrid",
    "stopped": "all",
    "vanishes": "stages",
    "vanishes, of two ranks": "all",
}
"""The grids of trainings that end by a fault of rank 3, or because a host vanishes."""


def start_ranks(
    made: list[Host], ranks_per_host: int, *arguments: str, job: int = 7
) -> list[subprocess.Popen[str]]:
    """Start the training as Slurm does. Errors have a pipe of their own."""
    variables = {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(len(made) * ranks_per_host),
        "SLURM_STEP_TASKS_PER_NODE": f"{ranks_per_host}(x{len(made)})",
        "SLURM_STEP_NODELIST": f"host[0-{len(made) - 1}]",
    }
    return [
        start(
            host,
            [sys.executable, TRAINING, *arguments],
            errors=subprocess.PIPE,
            **variables,
            SLURM_PROCID=str(number * ranks_per_host + local),
            SLURM_LOCALID=str(local),
            SLURM_NODEID=str(number),
        )
        for number, host in enumerate(made)
        for local in range(ranks_per_host)
    ]


def error_of(ended: Ended) -> str:
    """Return the one error of bmt that a rank has printed, and what follows it."""
    found = list(re.finditer(ERROR, ended.errors, re.MULTILINE))
    assert ended.status == 1 and len(found) == 1, ended.errors
    return ended.errors[found[0].start() :]


def names_call_and_place(error: str, rank: int, *, first: str | None = None) -> bool:
    """Whether an error says for what ``rank`` waits, and where in the model. What lies outside of
    layers is gathered for the whole model, and gradients may be waited for behind all layers. A
    rank gathers its ``first`` layer, if it is given, before it comes there. A call that the cause
    names is not named again.
    """
    if re.search(rf": \w+ .*, (?:for|made in) .* This is rank {rank}\.$", error, re.MULTILINE):
        return True
    call = re.search(
        rf"ank {rank}(?: has waited \d+ s|,) in (.*?)\.(?: It waits for| Nothing was heard|$)",
        error,
        re.MULTILINE,
    )
    if call is None:
        return False
    if re.search(", in the (forward|backward) of |made in the (forward|backward) of ", call[1]):
        return True
    if "layers" in call[1] and "gradients" not in call[1]:
        return first is not None and "all_gather " in call[1] and f"for {first}." in call[1]
    return re.search(", (for|to begin|of micro-batch) ", call[1]) is not None


def begin(trainings: list[list[subprocess.Popen[str]]]) -> None:
    """Let the ranks of one training after another begin, once all have imported torch, and wait:
    the start of a run has the same timeout as its calls. Then let all train on.
    """
    for process in itertools.chain(*trainings):
        assert line_of(process) == "ready"
    for ranks in trainings:
        for process in ranks:
            say(process)
        for process in ranks:
            while not line_of(process).startswith(f"step {FAILS_IN - 1}: "):
                assert process.poll() is None, end_of(process, TIMEOUT).errors
    for process in itertools.chain(*trainings):
        say(process)


class Ended(NamedTuple):
    """How a rank has ended, and what it printed to standard error."""

    status: int
    errors: str


def end_of(process: subprocess.Popen[str], timeout: float) -> Ended:
    try:
        _, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise AssertionError((error.stderr or b"").decode()) from error
    return Ended(process.returncode, errors)


def failed_trainings() -> dict[str, list[Ended]]:
    """How the ranks of all :data:`FAILURES` ended, which waited at the same time."""
    with contextlib.ExitStack() as ends, hosts(2) as made, hosts(2) as cut:
        trainings = {
            name: start_ranks(
                cut if name.startswith("vanishes") else made,
                1 if name.endswith("two ranks") else 2,
                "until-a-call-fails",
                grid,
                str(TIMEOUT),
                *([name] if name in FAULTS else []),
                job=number,
            )
            for number, (name, grid) in enumerate(FAILURES.items())
        }
        # nsenter stops with the process that it has started, and is killed with it at the end.
        for process in itertools.chain(*trainings.values()):
            ends.enter_context(process)
            ends.callback(process.kill)
        begin(list(trainings.values()))
        cut[1].disconnect()
        # Beside the timeout, for which calls that were started before may already have waited: the
        # last periods of the watch, and its patience with the other ranks that should hear it.
        limit = 2 * TIMEOUT + 7
        *_, stopped = trainings["stopped"]
        return {
            name: [end_of(process, limit) for process in ranks if process is not stopped]
            for name, ranks in reversed(trainings.items())
        }


@SLOW
@pytest.mark.ranks(4)
def test_a_rank_that_fails_and_a_host_that_vanishes_are_named_on_both_hosts() -> None:
    failed = failed_trainings()
    for fault in FAULTS:
        check_that_rank_3_is_named(failed[fault], fault)
    for fault in ("vanishes", "vanishes, of two ranks"):
        check_that_the_other_host_is_named(failed[fault])


def check_that_the_other_host_is_named(ranks: list[Ended]) -> None:
    """Each host has vanished from the other one."""
    for rank, ended in enumerate(ranks):
        error = error_of(ended)
        is_on_host0 = rank < len(ranks) // 2
        # Rank 0 serves the store in which ranks read what others do: host0 is where Slurm has it.
        whom = r"rank \d on host1" if is_on_host0 else "rank 0 on host0, or of the launcher there,"
        assert re.search(
            rf"Nothing was heard of {whom} for \d+ s: its process, its host or the network between"
            " has failed",
            error,
        ), error
        # Where the model's call begins, a rank starts to gather its first layer, and is in none.
        # The lines of the program that are printed do not tell.
        first = "layers.0" if is_on_host0 or len(ranks) == 2 else "layers.1"  # of its stage
        assert names_call_and_place(error, rank, first=first), ended.errors


def check_that_rank_3_is_named(ranks: list[Ended], fault: str) -> None:
    cause = {
        "raises": (
            r"Rank 3 on host1 has failed \(Stage 1 of the pipeline \(rank 3\) failed in the"
            r" computation of a step, in the forward of layers\.1: .*Error: planted"
        ),
        # It makes two calls next, one with each of the other ranks that have its layers: the first
        # that began is named.
        "killed": (
            r"The process of rank 3 on host1, whose last call was [^(]* \(ranks 2, 3\): all_gather"
            r".* for layers\.1\..*, before call [^(]* \(ranks [12], 3\): [^:]* for gradients of"
            r" layers\.1\.\S* and 3 others, made in the backward of layers\.1, was killed or has"
            r" crashed"
        ),
        # Of ranks whose connection to one that has given up is lost, some are told so.
        "stopped": r"(?:waits for rank 3 on host1, |rank 3 on host1, .*, or is stopped: )",
    }[fault]
    for rank, ended in enumerate(ranks[:3]):
        error = error_of(ended)
        assert re.search(cause, error, re.DOTALL), error
        # Of what has failed elsewhere a rank prints the first line.
        assert fault == "raises" or names_call_and_place(error, rank), ended.errors
    if fault == "raises":
        own = ranks[3].errors
        assert own.rstrip().endswith("RuntimeError: planted") and "bmt_core.errors" not in own
        assert "KeyError: 'its cause'" in own


@SLOW
@pytest.mark.ranks(2)
def test_a_host_that_comes_back_in_time_trains_on() -> None:
    with hosts(2) as made:
        ranks = start_ranks(made, 1, "until-a-call-fails", "all", str(TIMEOUT))
        begin([ranks])
        lines = queue.Queue[str]()
        reader = threading.Thread(target=read_lines, args=(ranks[0], lines))
        reader.start()
        made[1].disconnect()
        last = f"step {FAILS_IN - 1}: "
        with contextlib.suppress(queue.Empty):
            while True:  # what was on its way
                last = lines.get(timeout=TIMEOUT / 4)
        made[1].reconnect()
        step = int(last.split()[1].rstrip(":"))
        _, losses = plain_training(step + 3)
        for further in range(step + 1, step + 3):
            assert lines.get(timeout=2 * TIMEOUT) == f"step {further}: {losses[further]:.3f}"
    for process in ranks:
        process.wait()
    reader.join()


def read_lines(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    """Put the lines of ``process`` until its end into ``lines``."""
    while line := line_of(process):
        lines.put(line)
