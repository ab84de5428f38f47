from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points, version
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner, Result

from bmt_core.cli.output import make_console
from bmt_core.packages import PACKAGES, Package
from bmt_core.plugins import Registry
from bmt_testing import run_ranks
from bmtrain._plugin import bmt_cli_commands
from bmtrain._program import main
from bmtrain._program.byte_sizes import parse_bytes
from bmtrain._program.commands import COMMANDS, WITHOUT_COMMANDS
from bmtrain._program.doctor import Report, _report_defaults
from bmtrain._program.environment import Finding, Machine, examine_environment

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
Bmt = Callable[..., Result]
Install = Callable[..., None]

COMMAND = """
import click
from bmt_core.plugins.hookspecs import hookimpl
from bmt_core.errors import ConfigError
@click.command()
def greet():
    click.echo("hello from a plugin")
@click.command()
def fail():
    raise ConfigError("it cannot work")
@click.command()
def doctor():
    click.echo("impostor")
@click.group()
def papers():
    pass
@papers.command()
def inspect():
    pass
@hookimpl
def bmt_cli_commands():
    return [greet, fail, doctor, papers]
"""

AXES = """
from bmt_core.plugins.hookspecs import hookimpl
from bmt_core.settings import MeshAxis
@hookimpl
def bmt_mesh_axes(config):
    own = [MeshAxis("expert", 2, 60), MeshAxis("sp", config.axis_sizes.get("sp", 1), 70)]
    return own + ([MeshAxis("tp", config.tp_size, 100)] if config.tp_size > 1 else [])
"""


def variables(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


@pytest.fixture
def bmt(monkeypatch: pytest.MonkeyPatch) -> Bmt:
    """Run the program in this process, with the plugins of core and facade, and with
    ``plugins``.
    """
    for name in (*LAUNCHER, "BMT_COMM_BACKEND", "BMT_KERNELS"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str, plugins: tuple[str, ...] = ()) -> Result:
        own = {"bmt-core", "bmt-train", "bmt-watch"}
        others = {entry.name for entry in entry_points(group="bmt")} - {*own, *plugins}
        monkeypatch.setenv("BMT_DISABLE_PLUGINS", ",".join(others))
        return CliRunner().invoke(main, arguments)

    return run


# --- the program ---


def test_commands_are_those_that_packages_announce() -> None:
    registry = Registry.load_what_works()
    own = [name for name, owner in registry.owners("command").items() if owner in PACKAGES]
    assert sorted(own) == sorted(COMMANDS)
    for name, command in COMMANDS.items():
        assert command.load(name) is registry.find("command", name)
        assert registry.owners("command")[name] == command.package
    assert {*WITHOUT_COMMANDS, *registry.owners("command").values()} >= PACKAGES.keys()
    assert [command.name for command in bmt_cli_commands()] == [
        "bench",
        "doctor",
        "memory",
        "plugins",
    ]


def test_help_lists_commands_and_names_plugins_of_others(bmt: Bmt, install: Install) -> None:
    install("greeter", COMMAND)
    result = bmt("--help", plugins=("greeter",))
    assert result.exit_code == 0
    listed, others = result.output.split("Commands:\n")[1].split("\n\n")
    assert [line.split()[0] for line in listed.splitlines()] == [
        "bench",
        "doctor",
        "hang",
        "memory",
        "plugins",
    ]
    assert others.split()[-1] == "greeter"


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_import_neither_torch_nor_plugins(argument: str, install: Install) -> None:
    install("greeter", "raise SystemExit('imported')")
    program = """
import sys
from bmtrain._program import main
try:
    main([sys.argv[1]])
finally:
    loaded = {"torch", "bmt_core", "rich"} & sys.modules.keys()
    print("loaded:", sorted(loaded))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", program, argument], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("loaded: []\n")
    assert ("Plugins of other packages" in result.stdout) == (argument == "--help")


def groups() -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = [()]
    for name, command in COMMANDS.items():
        if isinstance(loaded := command.load(name), click.Group):
            found.append((name,))
            assert loaded.commands
    return found


@pytest.mark.parametrize("names", groups(), ids=" ".join)
def test_short_helps_are_not_cut(names: tuple[str, ...]) -> None:
    output = CliRunner().invoke(main, [*names, "--help"]).output
    listed = output.split("Commands:\n")[1].split("\n\n")[0].splitlines()
    assert listed and all(line.endswith((".", "?")) for line in listed)
    assert not any(line.endswith("...") for line in listed)


def test_each_call_of_the_program_reads_which_plugins_are_turned_on(
    bmt: Bmt, install: Install
) -> None:
    install("greeter", COMMAND)
    assert "greet" not in bmt("--help").output
    assert bmt("greet", plugins=("greeter",)).output == "hello from a plugin\n"
    assert "No command is named 'greet'" in bmt("greet").output


def test_errors_of_bmt_are_messages_with_status_2(bmt: Bmt, install: Install) -> None:
    install("greeter", COMMAND)
    result = bmt("fail", plugins=("greeter",))
    assert (result.exit_code, result.output) == (2, "Error: it cannot work\n")


@pytest.mark.parametrize(
    ("name", "owner"),
    [("doctor", "bmt-train"), ("hang", "bmt-watch"), ("checkpoint", "bmt-checkpoint")],
)
def test_plugin_cannot_replace_a_command_of_bmt_and_is_named(
    name: str, owner: str, bmt: Bmt, install: Install
) -> None:
    pytest.importorskip(owner.replace("-", "_"))
    install("a-greeter", COMMAND.replace("doctor", name))
    result = bmt(name, "--help", plugins=("a-greeter", owner))
    assert f"Usage: bmt {name}" in result.stdout and "impostor" not in result.stdout
    assert len(result.stdout.splitlines()) > 5
    result = bmt("plugins", plugins=("a-greeter", owner))
    assert result.exit_code == 1
    assert re.search(
        rf"The command '{name}' is offered twice: by the plugin '{owner}' .* and by the plugin"
        r" 'a-greeter' .*\. Rename that of 'a-greeter', or turn it off:"
        r" BMT_DISABLE_PLUGINS=a-greeter$",
        " ".join(result.output.split()),
    )


def test_unknown_command_gets_the_nearest(bmt: Bmt) -> None:
    result = bmt("docter")
    assert result.exit_code == 2
    assert (
        "No command is named 'docter'. Did you mean 'doctor'? Known: bench, doctor, hang, memory,"
        " plugins." in result.output
    )


def test_a_command_of_a_group_that_is_called_without_the_group_is_named(
    bmt: Bmt, install: Install
) -> None:
    install("greeter", COMMAND)
    assert "No command is named 'inspect'" in (
        output := bmt("inspect", "me", plugins=("greeter",)).output
    )
    assert "Did you mean 'bmt papers inspect'?" in output


def test_command_of_a_missing_package_is_answered_with_how_to_install_it(
    bmt: Bmt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bmt_core.packages.importlib.util.find_spec", lambda name: None)
    result = bmt("checkpoint", "inspect", "model.pt")
    assert result.exit_code == 2
    assert (
        "'checkpoint' is provided by bmt-checkpoint, which is not installed. Install it with: pip"
        in result.output
    )


def test_broken_plugin_is_hinted_at_where_its_command_is_missed(bmt: Bmt, install: Install) -> None:
    install("broken", "1 / 0")
    assert "Some plugins do not work: see bmt doctor." in bmt("greet", plugins=("broken",)).output
    assert "Some plugins" not in bmt("greet").output


STATUSES = {
    "doctor": 0,
    "plugins": 0,
    "pipeline-plan --stages 2 --micro-batches 4": 0,
    "memory --model llama3-8b --gpus 8 --seq 4096 --gpu-memory 80GB": 0,
    "memory --model llama2-70b --gpus 8 --seq 4096 --gpu-memory 80GB": 1,
    "checkpoint verify damaged.pt": 1,
    "bench": 2,
    "checkpoint inspect damaged.pt": 2,
    "checkpoint verify nothing.pt": 2,
    "doctor --fast": 2,
    "hang .": 2,
    "hang nowhere": 2,
    "memory --model nothing --gpus 8 --seq 4096": 2,
    "pipeline-plan --stages 2 --micro-batches 4 --schedule nothing": 2,
    "verify no_such_module_of_bmt:make": 2,
}


@pytest.mark.parametrize("line", STATUSES)
def test_exit_status_is_1_for_what_was_found_and_2_for_what_could_not_be_done(
    line: str, bmt: Bmt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    Path("damaged.pt").write_bytes(b"no checkpoint")
    others = ("bmt-checkpoint", "bmt-params", "bmt-pipeline", "bmt-testing")
    result = bmt(*line.split(), plugins=others)
    assert result.exit_code == STATUSES[line], result.output
    assert "Traceback" not in result.output


def test_version_is_that_of_the_distribution(bmt: Bmt) -> None:
    assert bmt("--version").output.startswith("bmt, version ")


# --- bmt plugins ---


def test_plugins_lists_version_hooks_and_names(bmt: Bmt) -> None:
    result = bmt("plugins")
    assert result.exit_code == 0
    for text in (
        "bmt-core",
        "bmt-train",
        "bmt_comm_backends",
        "comm backend: torch",
        "command: hang",
        "command: bench, doctor, memory, plugins",
    ):
        assert text in result.output


# --- bmt doctor ---


def test_doctor_finds_nothing_wrong_here(bmt: Bmt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    result = bmt("doctor", "--all")
    assert result.exit_code == 0, result.output
    for text in ("torch", "chosen for a run", "plain torch", "bmt-core"):
        assert text in result.output


def test_doctor_prints_problems_and_a_summary_only(
    bmt: Bmt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    first, second = bmt("doctor").output.splitlines()
    assert first.startswith(
        f"No problem found. bmt {version('bmt-core')}; torch {torch.__version__}"
    )
    assert "; kernels " in first and second.startswith("bmt doctor --all shows everything")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setattr("bmt_core.cli.output._WIDTH_WITHOUT_TERMINAL", 400)
    result = bmt("doctor")
    assert result.exit_code == 0 and "1 warning. bmt" in result.output
    assert [row[:2] for row in rows_of(result.output)] == [["CUDA_LAUNCH_BLOCKING", "warning"]]


def test_doctor_prints_json(bmt: Bmt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RANK", "3")
    result = bmt("doctor", "--json")
    assert result.exit_code == 1
    found = json.loads(result.output)
    assert (found["errors"], found["warnings"]) == (1, 0)
    assert found["summary"].startswith("1 error. bmt")
    tables = {table["title"]: table["rows"] for table in found["tables"]}
    assert ["torch", torch.__version__] in tables["Software and device"]
    assert tables["Environment"][0][:2] == ["RANK", "error"]


def test_doctor_survives_a_broken_plugin_and_fails(bmt: Bmt, install: Install) -> None:
    install("broken", "import no_such_module_of_bmt")
    result = bmt("doctor", "--all", plugins=("broken",))
    assert result.exit_code == 1
    assert "No module named 'no_such_module_of_bmt'" in result.output
    assert "what to do" in result.output, "the rest of the report must be there"


UNMET = {
    "bmt-core>=99": f"needs bmt-core>=99, and bmt-core {version('bmt-core')} is installed",
    "no-such-package-of-bmt": "needs no-such-package-of-bmt, which is not installed",
    "bmt-core==": "its requirement 'bmt-core==' cannot be checked",
}
MET = [
    "bmt-core>=0.0.1",
    "torch",
    'no-such-package-of-bmt; extra == "more"',
    "no-such-package-of-bmt; python_version < '3'",
]


def test_doctor_compares_what_plugins_require_with_what_is_installed(
    bmt: Bmt, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bmt_core.cli.output._WIDTH_WITHOUT_TERMINAL", 1000)
    install("content", COMMAND.replace("doctor", "other"), requires=MET)
    assert bmt("doctor", plugins=("content",)).exit_code == 0
    install("unhappy", AXES, requires=[*MET, *UNMET])
    result = bmt("doctor", plugins=("content", "unhappy"))
    assert result.exit_code == 1
    (row,) = [row for row in rows_of(result.output) if row[0] == "unhappy"]
    assert row[1] == "error" and "Install what it needs, or another version of it." in row[2]
    assert all(text in row[2] for text in UNMET.values())


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("BMT_COMM_BACKEND", "torhc", "Did you mean 'torch'?"),
        ("BMT_KERNELS", "fast", "No kernel provider is named 'fast'"),
        ("BMT_KERNELS", "reference", "as BMT_KERNELS asks"),
        ("RANK", "3", "WORLD_SIZE is not set"),
        ("PMI_SIZE", "3", "an MPI launcher has started 3 processes"),
        ("SLURM_NTASKS", "2", "Slurm: rank 0 of 2, local rank 0 of 2, rendezvous at 127.0.0.1:"),
        ("CUDA_LAUNCH_BLOCKING", "1", "waits for every kernel"),
    ],
)
def test_doctor_judges_the_environment(
    bmt: Bmt, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, text: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("bmt_core.cli.output._WIDTH_WITHOUT_TERMINAL", 400)
    bmt("--help")
    monkeypatch.setenv(variable, value)
    monkeypatch.setenv("PMI_RANK" if variable == "PMI_SIZE" else "SLURM_PROCID", "0")
    result = bmt("doctor", "--all")
    assert text in result.output
    is_broken = variable not in ("CUDA_LAUNCH_BLOCKING", "SLURM_NTASKS") and value != "reference"
    assert result.exit_code == int(is_broken)


KERNELS = """
from bmt_core.ops import KernelProvider, reference
from bmt_core.plugins.hookspecs import hookimpl
class Wide(KernelProvider):
    name = "wide"
    device_type = "{here}"
    priority = -100
    adam_step = staticmethod(reference.adam_step)
    scale_ = staticmethod(reference.scale_)
    def available(self):
        return None
class Broken(Wide):
    name = "broken"
    def available(self):
        return "this device has no AVX-1024"
class Elsewhere(Wide):
    name = "elsewhere"
    device_type = "{elsewhere}"
@hookimpl
def bmt_kernel_providers():
    return [Wide, Broken, Elsewhere]
"""
SCALE = """
from bmt_core.ops import KernelProvider, reference
from bmt_core.plugins.hookspecs import hookimpl
class Mine(KernelProvider):
    name = "mine"
    device_type = "{here}"
    scale_ = staticmethod(reference.scale_)
    def available(self):
        return None
@hookimpl
def bmt_kernel_providers():
    return [Mine]
"""


def rows_of(output: str) -> list[list[str]]:
    """The cells of all tables."""
    lines = [line.strip("│ ") for line in output.splitlines() if "│" in line]
    return [[cell.strip() for cell in line.split("│")] for line in lines]


def test_doctor_and_plugins_show_which_kernels_come_from_whom(
    bmt: Bmt, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bmt_core.cli.output._WIDTH_WITHOUT_TERMINAL", 400)
    here, elsewhere = ("cuda", "cpu") if torch.cuda.is_available() else ("cpu", "cuda")
    install("wide-kernels", KERNELS.format(here=here, elsewhere=elsewhere))
    install("my-scale", SCALE.format(here=here))
    both = ("wide-kernels", "my-scale")
    rows = rows_of(bmt("doctor", "--all", plugins=both).output)
    left = "cross_entropy_backward, cross_entropy_forward, has_non_finite, powers_sum, zero_if_"
    expected = [
        ["mine", "my-scale", "ok", f"active on {here} for scale_"],
        ["broken", "wide-kernels", "warning", "cannot be used: this device has no AVX-1024"],
        ["elsewhere", "wide-kernels", "", f"is for {elsewhere}, and runs here use {here}"],
        ["wide", "wide-kernels", "ok", f"active on {here} for adam_step"],
        [
            "reference",
            "bmt-core",
            "ok",
            f"active on {here}: plain torch, for what no provider has: {left}",
        ],
    ]
    assert [row for row in rows if row in expected] == expected
    rows = rows_of(bmt("plugins", plugins=both).output)
    expected = [
        ["mine", "my-scale", here, "0", "scale_"],
        ["broken", "wide-kernels", here, "-100", "adam_step, scale_"],
        ["elsewhere", "wide-kernels", elsewhere, "-100", "adam_step, scale_"],
        ["wide", "wide-kernels", here, "-100", "adam_step, scale_"],
    ]
    assert [row for row in rows if row in expected] == expected


@pytest.mark.parametrize(("device", "is_shown"), [("cuda", True), ("cpu", False)])
def test_doctor_says_on_a_gpu_what_makes_steps_faster_if_it_is_asked_for(
    device: str, is_shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    _report_defaults(report := Report(), torch.device(device))
    report.print(make_console(), shows_all=True)
    shown = " ".join(capsys.readouterr().out.split())
    assert ("overlap_forward" in shown and "optimizer.wait()" in shown) == is_shown


def test_doctor_names_packages_that_are_missing_or_do_not_fit(
    bmt: Bmt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bmt_core.cli.output._WIDTH_WITHOUT_TERMINAL", 400)
    versions = {"bmt-core": "1.0", "bmt-fits": "1.0", "bmt-old": "0.9", "bmtrain": "1.0.1"}
    monkeypatch.setattr("bmtrain._program.doctor._version_of", versions.get)
    packages = {
        "bmt-fits": Package("json", "", ""),
        "bmt-none": Package("bmt_none", "nothing", "type this"),
        "bmt-old": Package("json", "", ""),
        "bmt-path": Package("json", "", ""),
        "bmt-train": Package("json", "", "type that"),
    }
    monkeypatch.setattr("bmtrain._program.doctor.PACKAGES", packages)
    result = bmt("doctor", "--all")
    assert result.exit_code == 1 and "; without bmt-none; " in result.output
    found: dict[str, tuple[str, str]] = {}
    for name, state, text in (row for row in rows_of(result.output) if len(row) == 3):
        if name in packages:
            found.setdefault(name, (state, text))  # the table of plugins comes later
    assert found["bmt-fits"] == ("ok", "1.0")
    assert found["bmt-none"] == ("", "not installed: nothing. Install it with: type this")
    assert found["bmt-old"] == (
        "error",
        "version 0.9, beside bmt-core 1.0. Install one version of all packages.",
    )
    assert (
        found["bmt-path"][0] == "warning"
        and "json can be imported but bmt-path is not installed" in found["bmt-path"][1]
    )
    assert found["bmt-train"][0] == "error" and found["bmt-train"][1].startswith("BMTrain 1.0.1")


def test_doctor_shows_the_axes_of_the_grid_and_who_asks_for_them(
    bmt: Bmt, install: Install
) -> None:
    assert "asked for by" not in bmt("doctor", "--all").output
    install("experts", AXES)
    output = bmt("doctor", "--all", plugins=("experts",)).output
    lines = [line.strip("│ ").split("│") for line in output.splitlines() if "│" in line]
    found = {line[0].strip(): line[-1].strip() for line in lines}
    assert found["dp"] == "the ranks that the other axes leave"
    assert found["expert"] == "in every run"
    assert found["tp"] == "asked for by tp_size"
    assert found["sp"] == "asked for by axis_sizes"
    install("more-experts", AXES)
    result = bmt("doctor", plugins=("experts", "more-experts"))
    assert result.exit_code == 1
    assert "'expert' is offered twice" in result.output


# --- the rules of the environment ---

CPU = Machine(cores=8, device_type="cpu")
CUDA = Machine(cores=8, device_type="cuda")
QUIET = {"OMP_NUM_THREADS": "8"}


@pytest.mark.parametrize(
    ("variable", "bad", "good"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", "0"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", "0"),
        ("NCCL_BLOCKING_WAIT", "1", "0"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "OFF"),
        ("NCCL_DEBUG", "INFO", "WARN"),
        ("NCCL_NVLS_ENABLE", "0", "2"),
        ("NCCL_P2P_DISABLE", "1", "0"),
        ("NCCL_SHM_DISABLE", "1", "0"),
        ("NCCL_IB_DISABLE", "1", "0"),
        ("NCCL_ALGO", "Ring", ""),
        ("NCCL_PROTO", "LL", ""),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "8"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", ""),
        ("CUDA_VISIBLE_DEVICES", "", "0,1"),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128", "expandable_segments:True"),
        ("OMP_NUM_THREADS", "9", "8"),
    ],
)
def test_value_that_hurts_is_found_and_others_are_not(variable: str, bad: str, good: str) -> None:
    findings = examine_environment({**QUIET, variable: bad}, CPU)
    assert [(finding.variable, finding.severity) for finding in findings] == [(variable, "warning")]
    assert findings[0].effect and findings[0].remedy
    assert examine_environment({**QUIET, variable: good}, CPU) == []


def severities(environ: dict[str, str], machine: Machine = CPU) -> dict[str, str]:
    return {finding.variable: finding.severity for finding in examine_environment(environ, machine)}


def test_threads_are_judged_by_the_ranks_of_the_host() -> None:
    two_ranks = variables("RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1")
    assert severities({**two_ranks, "OMP_NUM_THREADS": "4"}) == {}
    assert severities({**two_ranks, "OMP_NUM_THREADS": "5"}) == {"OMP_NUM_THREADS": "warning"}
    assert severities(two_ranks) == {"OMP_NUM_THREADS (unset)": "warning"}
    assert severities({}) == {"OMP_NUM_THREADS (unset)": "advice"}
    assert severities({"OMP_NUM_THREADS": "many"}) == {"OMP_NUM_THREADS": "error"}
    (finding,) = examine_environment({**two_ranks, "OMP_NUM_THREADS": "5"}, CPU)
    assert finding == Finding(
        "warning",
        "OMP_NUM_THREADS",
        "2 ranks x 5 threads compete for 8 cores.",
        "Set OMP_NUM_THREADS=4",
    )


@pytest.mark.parametrize("half_set", [{"RANK": "0"}, {"RANK": "0", "WORLD_SIZE": "2"}])
def test_half_set_rendezvous_is_an_error(half_set: dict[str, str]) -> None:
    assert list(severities({**QUIET, **half_set}).values()) == ["error"]


def test_launcher_variables_that_nobody_reads_are_a_warning() -> None:
    assert severities({**QUIET, "LOCAL_RANK": "1"}) == {"LOCAL_RANK": "warning"}


def test_whole_rendezvous_and_none_are_fine() -> None:
    whole = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
    assert severities({**QUIET, **whole}) == {}
    assert severities({**QUIET, "RANK": "0", "WORLD_SIZE": "1"}) == {}
    assert severities(QUIET) == {}


def test_loopback_between_hosts_is_an_error() -> None:
    hosts = variables("RANK=0 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1")
    environ = {**hosts, "OMP_NUM_THREADS": "1", "NCCL_SOCKET_IFNAME": "lo"}
    assert severities(environ) == {"NCCL_SOCKET_IFNAME": "error"}
    assert severities({**environ, "LOCAL_WORLD_SIZE": "4"}) == {}


def test_allocator_is_judged_on_gpus() -> None:
    assert severities(QUIET, CUDA) == {"PYTORCH_ALLOC_CONF (unset)": "advice"}
    assert severities({**QUIET, "PYTORCH_ALLOC_CONF": "expandable_segments:True"}, CUDA) == {}
    both = variables(
        "PYTORCH_ALLOC_CONF=expandable_segments:True "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
    )
    assert severities({**QUIET, **both}, CUDA) == {
        "PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF": "warning"
    }


def test_errors_come_first() -> None:
    found = [
        finding.severity
        for finding in examine_environment({"RANK": "0", "NCCL_DEBUG": "INFO"}, CUDA)
    ]
    assert found == ["error", "warning", "advice", "advice"]


# --- bmt bench ---


def test_bench_refuses_one_rank_and_says_how_to_start_more(bmt: Bmt) -> None:
    result = bmt("bench", "--max-bytes", "8K", "--device", "cpu")
    assert result.exit_code == 2
    assert result.output.startswith("Error: bmt bench measures what ranks exchange")
    assert "torchrun --nproc_per_node=2 -m bmtrain bench" in result.output


def run_under_torchrun(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        "--rdzv-backend=c10d",
    ]
    command = [*launcher, "--rdzv-endpoint=localhost:0", "-m", "bmtrain", *arguments]
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**clean, **environment}
    )


def printed_by_bench() -> str:
    result = CliRunner().invoke(
        main, ["bench", "--max-bytes=8K", "--device=cpu"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def test_bench_measures_on_all_ranks_and_rank_0_prints() -> None:
    printed, nothing = run_ranks(printed_by_bench, 2, init=None)
    for operation in ("all_gather", "reduce_scatter", "send_recv"):
        assert printed.count(f"{operation} on 2 ranks") == 1
    assert nothing == ""


@pytest.mark.slow("bmtrain", "bmt-core")
@pytest.mark.ranks(2)
def test_run_that_cannot_start_ends_torchrun_with_a_message_and_a_status() -> None:
    result = run_under_torchrun("bench", "--device=cpu", BMT_COMM_BACKEND="torhc")
    assert result.returncode != 0
    assert "No comm backend is named 'torhc'. Did you mean 'torch'?" in result.stderr


@pytest.mark.parametrize("text", ["", "64X", "0", "-1", "1.5M"])
def test_bytes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="not a number of bytes"):
        parse_bytes(text)
