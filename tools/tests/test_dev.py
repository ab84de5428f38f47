"""The developer's program: when it sets up again, and that its failures are failures."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

import dev


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(dev, "ROOT", tmp_path)
    monkeypatch.setattr(dev, "REQUIREMENTS", tmp_path / "requirements-dev.txt")
    for path in (
        "requirements-dev.txt",
        "packages/a/pyproject.toml",
        "integration-tests/plugins/b/pyproject.toml",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
    return tmp_path


def test_environment_is_made_again_when_what_it_is_made_from_changes(tree: Path) -> None:
    fingerprints = {dev.fingerprint()}
    for path in (
        "requirements-dev.txt",
        "packages/a/pyproject.toml",
        "integration-tests/plugins/b/pyproject.toml",
    ):
        (tree / path).write_text(path + "changed")
        fingerprints.add(dev.fingerprint())
    (tree / "packages/c").mkdir()
    (tree / "packages/c/pyproject.toml").write_text("new")
    fingerprints.add(dev.fingerprint())
    assert len(fingerprints) == 5


def test_environment_is_kept_when_only_sources_change(tree: Path) -> None:
    before = dev.fingerprint()
    (tree / "packages/a/module.py").write_text("new")
    assert dev.fingerprint() == before


def test_third_party_packages_are_installed_after_ours(tree: Path) -> None:
    assert [path.name for path in dev.editable_directories()] == ["a", "b"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], {"bmt-zero", "bmt-optim", "bmt-watch"}),
        (["hf"], {"bmt-hf", "bmt-zero", "bmt-optim"}),
        (["bmt-zero", "tp"], {"bmt-zero", "bmt-tp"}),
        (["all"], {"bmt-zero", "bmt-optim", "bmt-tp", "bmt-pipeline", "bmt-kernels"}),
    ],
)
def test_install_names_packages_after_all_that_they_require(
    names: list[str],
    expected: set[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dev, "setup", lambda: pytest.fail("it needs no .venv"))
    assert dev.main(["install", "--dry-run", *names]) == 0
    said, command = capsys.readouterr().out.splitlines()
    assert said.startswith(f"Installing into {sys.prefix}: ")
    found = said.partition(": ")[2].split(", ")
    always = {"bmt-core", "bmt-params", "bmt-watch", "bmt-checkpoint", "bmt-train"}
    assert len(found) == len({*found}) and {*found} >= expected | always
    directories = {dev.name_of(directory): directory for directory in dev.package_directories()}
    paths = [f"./packages/{directories[name].name}" for name in found]
    assert command.split()[-len(paths) - 4 :] == [sys.executable, "-m", "pip", "install", *paths]
    for place, name in enumerate(found):
        needed = dev.own_names(dev.project_of(directories[name])["dependencies"])
        assert {*needed} <= {*found[:place]}


def test_install_runs_pip_and_fails_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], *, cwd: Path) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr("subprocess.run", run)
    assert dev.main(["install"]) == 3
    ((python, *pip, core),) = [command[:5] for command in commands]
    assert [python, *pip, core] == [sys.executable, "-m", "pip", "install", "./packages/bmt-core"]


def test_install_refuses_what_is_no_package_and_an_environment_with_bmtrain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(SystemExit, match=r"no package zeros\. There are: .*bmt-zero"):
        dev.main(["install", "zeros"])
    monkeypatch.setattr(dev, "distribution", lambda name: types.SimpleNamespace(version="1.0.1"))
    with pytest.raises(SystemExit, match=r"BMTrain 1\.0\.1 is installed .* pip uninstall bmtrain"):
        dev.main(["install"])


def test_one_failing_check_fails_the_whole(capsys: pytest.CaptureFixture[str]) -> None:
    good = dev.run_check("good", [sys.executable, "-c", ""])
    bad = dev.run_check("bad", [sys.executable, "-c", "raise SystemExit(3)"])
    assert (good[1], bad[1]) == (0, 3)
    assert dev.report([good]) == 0
    assert dev.report([bad, good]) == 1
    assert "FAILED bad" in capsys.readouterr().out


def test_users_python_paths_do_not_reach_the_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("PIP_USER", "1")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    environment = dev.environment()
    assert not {"PYTHONPATH", "PIP_USER", "PYTHONDONTWRITEBYTECODE"} & environment.keys()
    assert environment["PYTHONNOUSERSITE"] == "1"


def test_wheels_have_the_cuda_module_for_all_architectures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("BMT_CUDA_ARCHITECTURES", "SKBUILD_BUILD_DIR"):  # tools/dev.py test sets both
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("shutil.which", lambda program: None)  # a machine without a GPU
    assert dev.environment()["BMT_CUDA_ARCHITECTURES"] == "90"
    environments: list[dict[str, str]] = []

    def run(
        command: object, *, cwd: object, env: dict[str, str]
    ) -> subprocess.CompletedProcess[bytes]:
        environments.append(env)
        return subprocess.CompletedProcess([], 0)

    monkeypatch.setattr("subprocess.run", run)
    assert dev.build_wheels(tmp_path, []) == 0
    (environment,) = environments
    assert "BMT_CUDA_ARCHITECTURES" not in environment
    assert environment["SKBUILD_BUILD_DIR"] != dev.environment()["SKBUILD_BUILD_DIR"]


def test_options_of_train_and_test_pass_through_and_no_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        dev.main(["lint", "--surprise"])
    assert "unknown options for lint: --surprise" in capsys.readouterr().err


STARTED = """
import sys
import dev
dev.setup = lambda: None
dev.checks = lambda: []
sys.exit(dev.main(["test", "--all", sys.argv[1]]))
"""
HOLDS_FIFO = "import os\nheld = os.open({fifo!r}, os.O_WRONLY)\n"
WAITS_ON_RANKS = """
import os
import threading

from bmt_testing import run_ranks


def wait_for_ever() -> None:
    held = os.open({fifo!r}, os.O_WRONLY)
    os.write(held, b"a rank\\n")
    threading.Event().wait()


def test_that_does_not_end() -> None:
    run_ranks(wait_for_ever, 2, init=None, timeout=600)
"""


@pytest.mark.slow("bmt-testing", "tools/dev.py")
@pytest.mark.ranks(2)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")
def test_sigterm_ends_pytest_and_its_ranks(tmp_path: Path) -> None:
    """pytest, its workers and the ranks hold a FIFO open, which ends when the last has ended."""
    fifo, test = tmp_path / "fifo", tmp_path / "test_waiting.py"
    os.mkfifo(fifo)
    (tmp_path / "conftest.py").write_text(HOLDS_FIFO.format(fifo=str(fifo)))
    test.write_text(WAITS_ON_RANKS.format(fifo=str(fifo)))
    tools = str(Path(dev.__file__).parent)
    process = subprocess.Popen(
        [sys.executable, "-c", STARTED, str(test)],
        env={**os.environ, "PYTHONPATH": tools},
        stdout=subprocess.DEVNULL,
    )
    with fifo.open() as held:
        assert [held.readline() for _ in range(2)] == ["a rank\n"] * 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
        ended, _, _ = select.select([held], [], [], 60)
        assert ended and held.read() == ""
