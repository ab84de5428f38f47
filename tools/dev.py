#!/usr/bin/env python3
"""Everything that is run in a clone, with nothing installed but Python: ``install``, ``train``,
``test``, ``lint``, ``docs``, ``wheels``, ``setup``.

``install`` installs bmt for the Python that runs it. Each other subcommand first makes ``.venv``
and fills it, once, and again when what it is made from has changed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
REQUIREMENTS = ROOT / "requirements-dev.txt"
STAMP = VENV / "made-from.sha256"
# What docs/first-training.md needs.
FIRST_PACKAGES = ("zero", "optim")
FACADE_STUB = ROOT / "packages" / "bmtrain" / "src" / "bmtrain" / "__init__.pyi"

Command = list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    install = commands.add_parser(
        "install", help="install bmt from this clone, with the pip of the Python that runs this"
    )
    install.add_argument(
        "packages",
        nargs="*",
        metavar="PACKAGE",
        help="such as zero, optim, hf, or bmt-zero; all: every one that bmt-train[all] has"
        f" (default: {' '.join(FIRST_PACKAGES)})",
    )
    install.add_argument(
        "--dry-run", action="store_true", help="print what would be installed, and how"
    )
    commands.add_parser("setup", help="make .venv, or bring it up to date")
    train = commands.add_parser(
        "train", help="train the example GPT; further options go to examples/gpt/train.py"
    )
    train.add_argument("--ranks", type=int, default=2, help="number of processes (default: 2)")
    test = commands.add_parser("test", help="all checks and tests; further options go to pytest")
    test.add_argument(
        "--all",
        action="store_true",
        help="also the slow tests of packages that are as on origin's main branch",
    )
    commands.add_parser("lint", help="the checks without the tests")
    docs = commands.add_parser("docs", help="build the site of docs/ into build/site")
    docs.add_argument(
        "--serve", action="store_true", help="serve it, and build it again when a file changes"
    )
    commands.add_parser(
        "wheels", help="build the wheels of all packages into dist/, for GPUs of all generations"
    )
    if sys.version_info < (3, 11):
        parser.error(f"bmt needs Python 3.11 or later, and this is {sys.version.split()[0]}.")
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command not in ("train", "test"):
        parser.error(f"unknown options for {options.command}: {' '.join(rest)}")

    signal.signal(signal.SIGTERM, end_with_descendants)
    if options.command == "install":
        return install_packages(options.packages, is_dry_run=options.dry_run)
    setup()
    if options.command == "train":
        return run_example(options.ranks, rest)
    if options.command == "test":
        return run_checks_and_tests([*([] if options.all else ["--slow", "changed"]), *rest])
    if options.command == "lint":
        return report(run_checks())
    if options.command == "docs":
        return build_site(is_served=options.serve)
    if options.command == "wheels":
        return build_wheels(ROOT / "dist", package_directories())
    return 0


def end_with_descendants(signum: int, frame: object) -> NoReturn:
    """End this program and all that it has started: whoever sends SIGTERM sends it to this process
    alone, and pytest and its ranks would run on.
    """
    for process in descendants(os.getpid()):  # those that start others first
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)
    os._exit(128 + signum)


def descendants(process: int) -> list[int]:
    """Return the processes that ``process`` has started, and those that they have, parents first;
    none where there is no /proc.
    """
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parent = path.read_text().rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(path.parent.name))
    found = list(children.get(process, ()))
    for each in found:  # which grows
        found += children.get(each, ())
    return found


def install_packages(names: Sequence[str], *, is_dry_run: bool = False) -> int:
    """Install packages of this clone with the pip of the Python that runs this program, and return
    its exit status.
    """
    directories = required_directories(names or FIRST_PACKAGES)
    with suppress(PackageNotFoundError):
        version = distribution("bmtrain").version
        raise SystemExit(
            f"BMTrain {version} is installed in {sys.prefix}, and is imported as bmtrain too."
            f" Uninstall it first: {sys.executable} -m pip uninstall bmtrain"
        )
    paths = [f"./{directory.relative_to(ROOT).as_posix()}" for directory in directories]
    command = [sys.executable, "-m", "pip", "install", *paths]
    print(f"Installing into {sys.prefix}: {', '.join(map(name_of, directories))}")
    print(f"in {ROOT}: {' '.join(command)}", flush=True)
    return 0 if is_dry_run else subprocess.run(command, cwd=ROOT).returncode


def required_directories(names: Sequence[str]) -> list[Path]:
    """Return the directories of the packages ``names``, of bmt-train, and of all of ours that they
    require, what is required first. Exits if there is no such package.
    """
    known = {name_of(directory): directory for directory in package_directories()}
    # "zero" is short for "bmt-zero", and a directory may have another name than its package.
    aliases = {name.removeprefix("bmt-"): name for name in known}
    aliases |= {directory.name: name for name, directory in known.items()}
    found: list[Path] = []

    def add(name: str) -> None:
        name = aliases.get(name, name)
        if name not in known:
            raise SystemExit(f"bmt has no package {name}. There are: {', '.join(known)}, and all.")
        if known[name] not in found:
            project = project_of(known[name])
            for required in own_names(project.get("dependencies", [])):
                add(required)
            found.append(known[name])

    for name in names:
        extras = project_of(known["bmt-train"])["optional-dependencies"]
        for each in own_names(extras["all"]) if name == "all" else [name]:
            add(each)
    add("bmt-train")
    return found


def own_names(requirements: Sequence[str]) -> list[str]:
    """Return the names of our packages among ``requirements``.

    >>> own_names(["torch>=2.11", "bmt-core==0.1.0"])
    ['bmt-core']
    """
    return [text.partition("==")[0] for text in requirements if text.startswith("bmt-")]


def name_of(directory: Path) -> str:
    """Return the name of the package in ``directory``."""
    return str(project_of(directory)["name"])


def project_of(directory: Path) -> dict[str, Any]:
    """Return the table ``project`` of the package in ``directory``."""
    import tomllib  # an older Python has come as far as the error that says so

    project: dict[str, Any] = tomllib.loads((directory / "pyproject.toml").read_text())["project"]
    return project


def setup() -> None:
    """Make ``.venv`` with what ``requirements-dev.txt`` pins and with all packages as editable
    installs, if need be.
    """
    wanted = fingerprint()
    if PYTHON.exists() and STAMP.exists() and STAMP.read_text() == wanted:
        return
    print(f"Setting up {VENV.relative_to(ROOT)} ...", file=sys.stderr, flush=True)
    if not PYTHON.exists():
        venv.create(VENV, with_pip=True)
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    editable = [
        argument for directory in editable_directories() for argument in ("-e", str(directory))
    ]
    for command in (
        [*pip, "-r", str(REQUIREMENTS)],
        [*pip, "--no-build-isolation", "--no-deps", *editable],
    ):
        # Output to stderr: what a subcommand prints on stdout is its own.
        status = subprocess.run(command, cwd=ROOT, env=environment(), stdout=sys.stderr).returncode
        if status != 0:
            raise SystemExit(
                f"Setting up .venv failed: `{' '.join(command)}` exited with status {status}."
            )
    STAMP.write_text(wanted)


def fingerprint() -> str:
    """Return a hash of all that ``.venv`` is made from: not the Python sources, which are installed
    as editable, but C++.
    """
    digest = hashlib.sha256(f"{sys.version_info[:2]} {VENV}".encode())
    for path in [
        REQUIREMENTS,
        *(directory / "pyproject.toml" for directory in editable_directories()),
        *cpp_files(),
    ]:
        digest.update(f"\n{path.relative_to(ROOT)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def package_directories() -> list[Path]:
    """Return the directories of our packages, in order of name."""
    return sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))


def editable_directories() -> list[Path]:
    """Return our packages and the third-party ones of the integration tests."""
    return package_directories() + sorted(
        path.parent for path in ROOT.glob("integration-tests/plugins/*/pyproject.toml")
    )


def cpp_files() -> list[Path]:
    """Return what compiled modules are built from."""
    return sorted(
        [
            *ROOT.glob("packages/*/CMakeLists.txt"),
            *ROOT.glob("packages/*/cmake/*.cmake"),
            *cpp_sources(),
        ]
    )


def cpp_sources() -> list[Path]:
    """Return the sources in C++ and CUDA."""
    return sorted(ROOT.glob("packages/*/csrc/**/*.*"))


def environment(*, is_for_others: bool = False) -> dict[str, str]:
    """Return the environment for the tools: theirs is ``.venv``, whatever the user's shell has
    set up.

    ``is_for_others``: what is built will run on other machines too, so the CUDA module is compiled
    for all architectures.
    """
    outside = {
        "PYTHONPATH",
        "PYTHONHOME",
        "PIP_USER",
        "PIP_TARGET",
        "PIP_PREFIX",
        "__PYVENV_LAUNCHER__",
    }
    # Each of the tests' many processes would compile what it imports.
    outside.add("PYTHONDONTWRITEBYTECODE")
    inherited = {name: value for name, value in os.environ.items() if name not in outside}
    path = f"{VENV / 'bin'}{os.pathsep}{inherited.get('PATH', os.defpath)}"
    # Kept between builds, which then compile what has changed; safe because all of them use the
    # same CMake and ninja.
    building = {
        "SKBUILD_BUILD_DIR": "build/wheels/{wheel_tag}" if is_for_others else "build/{wheel_tag}"
    }
    if shutil.which("nvidia-smi") is None and not is_for_others:
        # No GPU to run the CUDA module on: that it compiles is shown by one architecture.
        building["BMT_CUDA_ARCHITECTURES"] = "90"
    return {
        **building,
        **inherited,
        "PATH": path,
        "PYTHONNOUSERSITE": "1",
        "VIRTUAL_ENV": str(VENV),
    }


def run_example(ranks: int, options: Sequence[str]) -> int:
    """Train the example on ``ranks`` processes."""
    # One thread each, unless the user says otherwise: two processes with all cores' threads get in
    # each other's way.
    env = {"OMP_NUM_THREADS": "1", **environment()}
    launch = [
        str(PYTHON),
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={ranks}",
    ]
    return subprocess.run(
        [*launch, str(ROOT / "examples" / "gpt" / "train.py"), *options], env=env
    ).returncode


def checks() -> list[tuple[str, Command]]:
    """Return name and command of each check that needs no test to run, the longest first."""
    python = str(PYTHON)
    return [
        ("mypy --strict", [python, "-m", "mypy"]),
        (
            "facade stub",
            [
                python,
                "-m",
                "mypy.stubtest",
                "bmtrain",
                "--mypy-config-file",
                "pyproject.toml",
                "--concise",
            ],
        ),
        ("ruff check", [python, "-m", "ruff", "check", "--output-format", "concise", "."]),
        ("ruff format", [python, "-m", "ruff", "format", "--check", "--quiet", "."]),
        (
            "clang-format",
            [str(VENV / "bin" / "clang-format"), "--dry-run", "--Werror", *map(str, cpp_sources())],
        ),
        ("layers", [str(VENV / "bin" / "lint-imports"), "--no-cache"]),
        ("versions", [python, "tools/bump_version.py", "--check"]),
    ]


def run_checks_and_tests(options: Sequence[str]) -> int:
    """Run every check and then the tests; print what came of each, and last the line that pytest
    closes with.
    """
    results = run_checks()
    print("\n== pytest", flush=True)
    started = time.monotonic()
    color = ["--color=yes"] if sys.stdout.isatty() else []
    command = [str(PYTHON), "-m", "pytest", "-n", "2", "-q", *color, *options]
    closing, note = "", ""
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True
    ) as tests:
        assert tests.stdout is not None
        for line in tests.stdout:
            print(line, end="", flush=True)
            closing = line.strip() or closing
            note = line if "ran on several ranks" in line else note
    results.append(("pytest", tests.returncode, time.monotonic() - started))
    status = report(results)
    print(f"\n{note}{closing}")
    return status


def run_checks() -> list[tuple[str, int, float]]:
    """Run every check, two at a time: two of them take half a minute, each on one core."""
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda check: run_check(*check), checks()))


def run_check(name: str, command: Command) -> tuple[str, int, float]:
    """Run one check, print what it says when it has ended, and return its name, exit status and
    seconds.
    """
    started = time.monotonic()
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    print(f"\n== {name}\n{ended.stdout}", end="", flush=True)
    return name, ended.returncode, time.monotonic() - started


def report(results: Sequence[tuple[str, int, float]]) -> int:
    """Print one line per result and return 0 if all are good, else 1."""
    print()
    for name, status, seconds in results:
        print(f"{'ok    ' if status == 0 else 'FAILED'} {name:<14} {seconds:6.1f} s")
    return 0 if all(status == 0 for _, status, _ in results) else 1


def build_site(*, is_served: bool = False) -> int:
    """Build the site, where any warning is an error, or serve it; return mkdocs's exit status."""
    command = ["serve"] if is_served else ["build", "--strict", "--quiet"]
    # The theme announces its successor at every start.
    env = {"NO_MKDOCS_2_WARNING": "1", **environment()}
    return subprocess.run([str(PYTHON), "-m", "mkdocs", *command], cwd=ROOT, env=env).returncode


def build_wheels(into: Path, directories: Sequence[Path]) -> int:
    """Build the wheels of the packages in ``directories``, for any machine of this platform, and
    return pip's exit status.
    """
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    command = [
        *pip,
        "--no-build-isolation",
        "--no-deps",
        "--wheel-dir",
        str(into),
        *map(str, directories),
    ]
    status = subprocess.run(command, cwd=ROOT, env=environment(is_for_others=True)).returncode
    for wheel in sorted(into.glob("*.whl")):
        print(wheel.relative_to(ROOT) if wheel.is_relative_to(ROOT) else wheel)
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
