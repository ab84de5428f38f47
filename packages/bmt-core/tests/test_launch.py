"""Launchers: torchrun, Slurm and Open MPI say who a process is and where the others are, or it
is refused.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bmt_core.errors import ConfigError
from bmt_core.launch import Launch, first_host, rendezvous_address, separate_runs, tasks_per_node
from bmt_core.run.rendezvous import rendezvous_store
from bmt_core.run.runtime import _choose_device
from bmt_core.settings import RunSettings
from bmt_testing.programs import end_of, start_program
from bmtrain._program.environment import describe_launcher


def variables(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


# A step of 6 tasks on two hosts, inside of a job of 8.
STEP = variables(
    "SLURM_JOB_ID=4711 SLURM_STEP_ID=2 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=6 "
    "SLURM_STEP_TASKS_PER_NODE=4,2 SLURM_STEP_NODELIST=gpu[07,09] "
    "SLURM_JOB_NODELIST=gpu[05-09] SLURM_PROCID=5 SLURM_LOCALID=1 "
    "SLURM_NODEID=1 ENVIRONMENT=BATCH"
)
MPI = variables(
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 "
    "OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=prterun-host-17@1"
)


def test_no_variables_mean_one_rank() -> None:
    assert Launch.from_env({}) == Launch(
        rank=0, world_size=1, local_rank=0, local_world_size=1, launcher="none"
    )


def test_local_rank_follows_from_rank_where_it_is_not_given() -> None:
    launch = Launch.from_env({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"})
    assert (launch.local_rank, launch.local_world_size) == (1, 4)


def test_task_of_a_slurm_step_knows_its_place() -> None:
    launch = Launch.from_env(STEP)
    assert launch == Launch(
        rank=5, world_size=6, local_rank=1, local_world_size=2, launcher="Slurm"
    )
    first = Launch.from_env(
        {**STEP, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    )
    assert first.local_world_size == 4
    assert rendezvous_address(launch, STEP) == rendezvous_address(first, STEP)


def test_rendezvous_of_a_step_is_its_first_host_and_a_port_of_its_own() -> None:
    launch = Launch.from_env(STEP)
    host, port = rendezvous_address(launch, STEP)
    assert host == "gpu07"
    assert 10_000 <= port < 30_000
    assert rendezvous_address(launch, {**STEP, "SLURM_STEP_ID": "3"})[1] != port
    assert rendezvous_address(launch, {**STEP, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "77"}) == (
        "10.0.0.1",
        77,
    )


def test_one_host_needs_no_name() -> None:
    one = variables("SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_JOB_NODELIST=unknown-to-name-servers")
    assert rendezvous_address(Launch.from_env(one), one)[0] == "127.0.0.1"


def test_process_of_open_mpi_knows_its_place_inside_of_slurm_too() -> None:
    daemon = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}
    launch = Launch.from_env({**MPI, **daemon})
    assert launch == Launch(
        rank=1, world_size=2, local_rank=1, local_world_size=2, launcher="Open MPI"
    )
    assert rendezvous_address(launch, MPI)[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "environ",
    [
        {**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
        {name: value for name, value in MPI.items() if name != "PMIX_NAMESPACE"},
    ],
)
def test_what_open_mpi_does_not_tell_is_asked_for(environ: dict[str, str]) -> None:
    launch = Launch.from_env(environ)
    with pytest.raises(ConfigError, match="mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500"):
        rendezvous_address(launch, environ)
    assert rendezvous_address(launch, {**environ, "MASTER_ADDR": "a", "MASTER_PORT": "1"}) == (
        "a",
        1,
    )


def test_what_torchrun_sets_comes_first() -> None:
    own = variables("RANK=2 WORLD_SIZE=16 LOCAL_RANK=2 LOCAL_WORLD_SIZE=8 TORCHELASTIC_RUN_ID=1")
    launch = Launch.from_env({**STEP, **MPI, **own})
    assert launch == Launch(
        rank=2, world_size=16, local_rank=2, local_world_size=8, launcher="torchrun"
    )


def test_shell_of_an_allocation_is_one_rank() -> None:
    assert Launch.from_env({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}) == Launch()
    interactive = variables("SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_ID=0")
    assert Launch.from_env(interactive).world_size == 1


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set although the launcher set others"),
        ({"WORLD_SIZE": "2"}, "RANK is not set although"),
        ({"RANK": "two", "WORLD_SIZE": "2"}, "RANK must be an integer, not 'two'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is outside of WORLD_SIZE=2"),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "2"}, "SLURM_PROCID=2 is outside of SLURM_NTASKS=2"),
        ({**STEP, "WORLD_SIZE": "8"}, "WORLD_SIZE is 8, and Slurm has started 6 tasks"),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "ENVIRONMENT": "BATCH"},
            "Write srun python train.py in the script",
        ),
        (
            variables("SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_TASKS_PER_NODE=2 SLURM_NODEID=1"),
            "SLURM_NODEID=1",
        ),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "two"},
            "must be like 4",
        ),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not set"),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "4"},
            "has started 4 processes, and each would be a run of its own",
        ),
        # MPICH's mpirun in a Slurm job: Slurm counts the daemons.
        (
            {"PMI_RANK": "3", "PMI_SIZE": "4", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
            "PMI_RANK=3 and PMI_SIZE=4",
        ),
        (
            variables("PMI_RANK=0 PMI_SIZE=4 SLURM_PROCID=0 SLURM_NTASKS=2 ENVIRONMENT=BATCH"),
            "PMI_SIZE=4",
        ),
        ({"PMI_RANK": "1"}, "PMI_RANK=1: an MPI launcher"),
        ({"PMIX_RANK": "0", "PMIX_NAMESPACE": "prte-1"}, "PMIX_RANK=0: PMIx"),
        (
            {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"},
            "MV2_COMM_WORLD_SIZE=2: MVAPICH2",
        ),
        ({"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2"}, "FLUX_JOB_SIZE=2: Flux"),
        ({"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2"}, "JSM_NAMESPACE_SIZE=2: jsrun"),
        ({"SLURM_PROCID": "3"}, "SLURM_NTASKS is not set"),
    ],
)
def test_half_set_and_wrong_variables_are_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Launch.from_env(environ)


@pytest.mark.parametrize("pmi", [{"PMI_RANK": "1", "PMI_SIZE": "2"}, {"PMIX_RANK": "1"}])
def test_srun_with_pmi_is_taken_from_slurm(pmi: dict[str, str]) -> None:
    assert Launch.from_env({**pmi, "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}).launcher == "Slurm"


@pytest.mark.parametrize(
    "environ",
    [
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1"},
        {"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"},  # a batch script of a job without --ntasks
    ],
)
def test_one_process_of_any_launcher_is_one_rank(environ: dict[str, str]) -> None:
    assert Launch.from_env(environ) == Launch()


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT"])
def test_missing_rendezvous_variables_are_named(name: str) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    del environ[name]
    with pytest.raises(ConfigError, match=f"^{name} must be set when WORLD_SIZE is above 1"):
        rendezvous_address(Launch.from_env(environ), environ)


@pytest.mark.parametrize(
    ("port", "message"),
    [
        ("http", "MASTER_PORT must be an integer, not 'http'"),
        ("99999", "MASTER_PORT must be a port, below 65536, not 99999"),
        ("-1", "MASTER_PORT must be a port, below 65536, not -1"),
    ],
)
def test_what_is_no_port_is_named(port: str, message: str) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": port}
    with pytest.raises(ConfigError, match=message):
        rendezvous_address(Launch.from_env(environ), environ)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[003-010]", "n003"),
        ("n[7,9-11]-ib,m1", "n7-ib"),
        ("r[1-2]n[05-06]", "r1n05"),
    ],
)
def test_first_host_of_a_list_is_found(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_tasks_of_nodes_are_counted() -> None:
    assert tasks_per_node("8") == [8]
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]


def test_task_that_sees_one_gpu_of_its_own_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    settings = RunSettings(device="cuda")
    two = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"}
    assert _choose_device(settings, Launch.from_env(two)) == torch.device("cuda", 0)
    with pytest.raises(ConfigError, match="Rank 1 needs CUDA device 1"):
        _choose_device(settings, Launch.from_env({"RANK": "1", "WORLD_SIZE": "2"}))


def test_launcher_is_described() -> None:
    assert describe_launcher(STEP).startswith(
        "Slurm: rank 5 of 6, local rank 1 of 2, rendezvous at gpu07:"
    )
    assert describe_launcher(MPI).startswith(
        "Open MPI: rank 1 of 2, local rank 1 of 2, rendezvous at 127.0.0.1:"
    )
    assert (
        describe_launcher({"RANK": "0", "WORLD_SIZE": "1"})
        == "RANK and WORLD_SIZE: rank 0 of 1, local rank 0 of 1"
    )
    assert describe_launcher({"RANK": "0"}) == "unknown: see the environment below"


PROGRAM = """
import torch
import bmt_core
bmt_core.init_distributed(seed=0, device="cpu", timeout=60)
mean = bmt_core.sum_loss(torch.tensor([float(bmt_core.rank() + 1)]))
print("sum", int(mean * bmt_core.world_size()), flush=True)
bmt_core.shutdown()
"""


def run_as(
    environments: list[dict[str, str]], folder: Path, program: str = PROGRAM
) -> list[tuple[int, str]]:
    """Start a process with each of ``environments``, without any other launcher's variables; return
    status and output, which goes to files in ``folder``.
    """
    of_launchers = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_",
        "MASTER_",
        "GROUP_",
        "TORCHELASTIC_",
        "SLURM_",
        "OMPI_",
        "PMI",
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith(of_launchers)}
    outputs = [folder / f"output {number}" for number in range(len(environments))]
    processes = [
        start_program(program, output, environment={**clean, **each})
        for output, each in zip(outputs, environments, strict=True)
    ]
    return [
        (end_of(process), output.read_text())
        for process, output in zip(processes, outputs, strict=True)
    ]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("launcher", ["Slurm", "Open MPI"])
def test_processes_that_another_launcher_starts_train_together(
    launcher: str, tmp_path: Path
) -> None:
    job = str(os.getpid())
    of_rank = {
        "Slurm": lambda rank: {
            "SLURM_JOB_ID": job,
            "SLURM_STEP_ID": "0",
            "SLURM_NTASKS": "2",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "SLURM_STEP_NODELIST": "node17",
        },
        "Open MPI": lambda rank: {
            **MPI,
            "OMPI_COMM_WORLD_RANK": str(rank),
            "PMIX_NAMESPACE": f"test-{job}",
        },
    }[launcher]
    results = run_as([of_rank(0), of_rank(1)], tmp_path)
    assert [status for status, _ in results] == [0, 0], results
    assert all("sum 3" in output for _, output in results), results
    assert "2 ranks (dp=2)" in results[0][1]


ON_ANOTHER_HOST = """
import os, socket
host = "node" + os.environ["RANK"]
socket.gethostname = lambda: host
resolve = socket.getaddrinfo
def of_hosts(name, *rest, **more):
    if name == "node1":
        raise socket.gaierror("unknown")
    return resolve({"node0": "127.0.1.1"}.get(name, name), *rest, **more)
socket.getaddrinfo = of_hosts
"""


@pytest.mark.slow("bmt-core")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("has_interface", [False, True])
def test_hosts_whose_names_lead_to_themselves_alone_are_named_on_every_rank(
    has_interface: bool, tmp_path: Path
) -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
    environ = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environ |= {"GLOO_SOCKET_IFNAME": "lo"} if has_interface else {}
    results = run_as(
        [{**environ, "RANK": str(rank)} for rank in range(2)], tmp_path, ON_ANOTHER_HOST + PROGRAM
    )
    if has_interface:
        assert all(status == 0 and "sum 3" in output for status, output in results), results
        return
    for status, output in results:
        assert (
            status == 1
            and "ConfigError: The names of these hosts lead to themselves alone" in output
        )
        assert "node0 (127.0.1.1), node1 (no address: torch takes 127.0.0.1)" in output
        assert "Set GLOO_SOCKET_IFNAME there to the network interface" in output


# Rank 0's first program ends when rank 1's second one has met its server.
PROGRAM_OF_A_SCRIPT = f"""
import os, time
from pathlib import Path
import torch.distributed as dist
place, met = os.environ["PLACE"], Path(os.environ["MET"])
connect = dist.TCPStore
def connect_and_note(*args, **options):
    store = connect(*args, **options)
    if place == "second program of rank 1":
        met.touch()
    return store
dist.TCPStore = connect_and_note
{PROGRAM}
while place == "first program of rank 0" and not met.exists():
    time.sleep(0.05)
"""
SCRIPT = """
import os
for number in ("first", "second"):
    process = os.fork()
    if process == 0:
        os.environ["PLACE"] = f"{number} program of rank {os.environ['SLURM_PROCID']}"
        exec(os.environ["PROGRAM"], {})
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0
"""


@pytest.mark.slow("bmt-core")
@pytest.mark.ranks(2)
def test_programs_of_one_step_follow_each_other(tmp_path: Path) -> None:
    step = {
        "SLURM_JOB_ID": f"{os.getpid()}",
        "SLURM_STEP_ID": "1",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NODELIST": "node17",
    }
    program = {"PROGRAM": PROGRAM_OF_A_SCRIPT, "MET": str(tmp_path / "met")}
    results = run_as(
        [{**step, **program, "SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in "01"],
        tmp_path,
        SCRIPT,
    )
    assert [status for status, _ in results] == [0, 0], results
    assert all(output.count("sum 3") == 2 for _, output in results), results


def test_second_process_of_a_rank_is_named() -> None:
    server = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    dist.PrefixStore("attempt/0", server).set("process/1/0", "Process 7 of host a")
    launch = Launch(rank=1, world_size=2)
    with pytest.raises(
        ConfigError,
        match=r"Process 7 of host a has joined the rendezvous at 127.0.0.1:\d+ as rank 1 already",
    ):
        rendezvous_store(f"tcp://127.0.0.1:{server.port}", launch, 0, timeout=1)


def test_torchruns_of_which_srun_starts_several_are_warned_about(tmp_path: Path) -> None:
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}
    assert "torchrun has joined 1 of them" in separate_runs({**step, "GROUP_WORLD_SIZE": "1"})
    assert separate_runs({**step, "GROUP_WORLD_SIZE": "2"}) == ""
    assert separate_runs(step) == ""
    assert (
        separate_runs({"SLURM_NTASKS": "8", "ENVIRONMENT": "BATCH", "GROUP_WORLD_SIZE": "1"}) == ""
    )
    alone = {"RANK": "0", "WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1"}
    ((status, output),) = run_as(
        [{**step, **alone}], tmp_path, "import bmt_core; bmt_core.init_distributed(device='cpu')"
    )
    assert status == 0
    assert "UserWarning: Slurm has started 2 tasks, and torchrun has joined 1 of them" in output


@pytest.mark.ranks(2)
def test_port_that_another_run_serves_is_named(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        environ = {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        ((status, output),) = run_as([environ], tmp_path)
    assert status == 1
    assert (
        f"ConfigError: Rank 0 cannot serve the rendezvous at port {port} of this host, which"
        " another run may use"
    ) in output
