#!/usr/bin/env python3
"""The checklist of a release: build the files of all packages, and try them as users get them.

``python3 tools/release.py`` leaves wheels and source archives in ``dist/release`` and prints a
table of its steps. The last steps install the wheels into bare virtual environments and work
outside of the tree. Nothing is uploaded. An index does not accept the wheel of bmt-kernels, which
is for this machine's Linux; its source archive is what can be uploaded.
"""

from __future__ import annotations

import argparse
import email
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from email.message import Message
from pathlib import Path

import bump_version
import dev
import isolated

Step = Callable[[], list[str]]
"""Does something and returns what is wrong, a line each."""

NEEDED = ("wheels", "install all", "install torch")
"""Steps without which the steps after them cannot run."""

IMPORT_MODULES = """
import importlib, pkgutil, sys
for name in sys.argv[1:]:
    for module in pkgutil.walk_packages(importlib.import_module(name).__path__, name + "."):
        # __main__ runs a program; a kit needs pytest's options and the package of what it tests.
        if module.name.endswith(".__main__") or ".conformance." in module.name:
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            # An old name of what is in another package now; the message says how to install it.
            if "Install it with: pip" not in str(error):
                raise
"""

BUILD_ARCHIVE = "import sys, {backend} as backend; backend.build_sdist(sys.argv[1])"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checklist and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="let files be uncommitted, fragments be left, and the version be unreleased",
    )
    options = parser.parse_args(arguments)
    dev.setup()
    with tempfile.TemporaryDirectory(prefix="bmt-release-") as scratch:
        release = Release(dev.ROOT, dev.ROOT / "dist" / "release", Path(scratch))
        results = run_steps(release.steps(is_rehearsal=options.rehearse))
    print(f"\n{table(results)}")
    return 0 if all(result == "ok" for _, result, _ in results) else 1


def run_steps(steps: Iterable[tuple[str, Step]]) -> list[tuple[str, str, float]]:
    """Run the steps, print what is wrong, and return name, result and seconds of each."""
    results: list[tuple[str, str, float]] = []
    for name, step in steps:
        if any(needed in NEEDED and result == "FAILED" for needed, result, _ in results):
            results.append((name, "not run", 0.0))
            continue
        print(f"== {name}", flush=True)
        started = time.monotonic()
        problems = step()
        print("".join(f"{problem}\n" for problem in problems), end="", flush=True)
        results.append((name, "FAILED" if problems else "ok", time.monotonic() - started))
    return results


def table(results: Sequence[tuple[str, str, float]]) -> str:
    """Return a line for each step and one for all of them."""
    is_good = all(result == "ok" for _, result, _ in results)
    seconds = sum(spent for _, _, spent in results)
    lines = [*results, ("the release", "ok" if is_good else "FAILED", seconds)]
    return "\n".join(f"{result:<8} {spent:7.1f} s  {name}" for name, result, spent in lines)


class Release:
    """A release of the tree ``root``: its files come into ``files``, and ``scratch`` is where they
    are tried.
    """

    def __init__(self, root: Path, files: Path, scratch: Path) -> None:
        self._root = root
        self._files = files
        self._scratch = scratch
        self._packages = sorted(path.parent for path in root.glob("packages/*/pyproject.toml"))

    def steps(self, *, is_rehearsal: bool = False) -> Iterator[tuple[str, Step]]:
        """Yield name and function of each step, in order."""
        if not is_rehearsal:
            yield "everything is committed", lambda: uncommitted(self._root)
        yield "one version, exact pins", self.version_problems
        yield "the changelog", lambda: self.changelog_problems(may_be_unreleased=is_rehearsal)
        yield "wheels", self.build_wheels
        yield "source archives", self.build_archives
        yield "names, versions, licences", self.metadata_problems
        yield "twine check", self.twine_problems
        yield "install all", self.install_all
        yield "import all modules", lambda: self.import_problems("all", self._packages)
        yield "bmt plugins", lambda: self.program_problems("plugins")
        yield "bmt doctor", lambda: self.program_problems("doctor")
        yield "the first training on 2 ranks", self.loop_problems
        yield "install torch", self.install_torch
        for package in self._packages:
            yield f"{package.name} alone", self._alone(package)

    def version_problems(self) -> list[str]:
        """Return the packages with another version, or with a loose pin of a sibling."""
        files = [package / "pyproject.toml" for package in self._packages]
        return bump_version.find_problems(
            {str(path.relative_to(self._root)): path.read_text() for path in files}
        )

    def changelog_problems(self, *, may_be_unreleased: bool) -> list[str]:
        """Say if the page of changes does not have the version that is released, or if fragments
        are not in it yet.
        """
        version = dev.project_of(self._packages[0])["version"]
        page = (self._root / "docs" / "changes.md").read_text()
        headings = re.findall(r"^## (.*)$", page, re.MULTILINE)
        named = [heading for heading in headings if version in re.split(r"[\s()]+", heading)]
        if not named:
            return [f"docs/changes.md has no heading of level 2 with {version}."]
        if may_be_unreleased:
            return []
        problems = []
        if "(not released)" in named[0]:
            problems += [f"docs/changes.md calls {version} not released: write the date."]
        fragments = sorted(path.name for path in self._root.glob("changes/*.*.md"))
        if fragments:
            problems += [f"changes/ has fragments that are in no release: {', '.join(fragments)}"]
        return problems

    def build_wheels(self) -> list[str]:
        """Build a wheel of each package, as ``dev.py wheels`` does."""
        shutil.rmtree(self._files, ignore_errors=True)
        status = dev.build_wheels(self._files, self._packages)
        return [f"pip exited with status {status}."] if status else []

    def build_archives(self) -> list[str]:
        """Build a source archive of each package, with the build backend that it declares."""
        problems = []
        for package in self._packages:
            settings = tomllib.loads((package / "pyproject.toml").read_text())["build-system"]
            code = BUILD_ARCHIVE.format(backend=settings["build-backend"])
            command = [str(dev.PYTHON), "-c", code, str(self._files)]
            problems += failure_of(command, package, dev.environment(is_for_others=True))
        return problems

    def metadata_problems(self) -> list[str]:
        """Compare the metadata of each wheel and each archive with the tree."""
        problems = []
        for package in self._packages:
            found = list(self._files.glob(f"{file_stem(package)}-*"))
            if sorted(path.suffix for path in found) != [".gz", ".whl"]:
                problems.append(f"{package.name}: not one wheel and one archive, but {found}")
            for path in found:
                problems += [f"{path.name}: {text}" for text in file_problems(path, package)]
        return problems

    def twine_problems(self) -> list[str]:
        """Let twine look at all files; it also renders the READMEs as the index does."""
        files = sorted(str(path) for path in self._files.iterdir())
        command = [str(dev.PYTHON), "-m", "twine", "check", "--strict", *files]
        return failure_of(command, self._scratch, dev.environment())

    def install_all(self) -> list[str]:
        """Install all wheels and what they require, in the versions that are pinned."""
        wheels = [str(self._wheel(package)) for package in self._packages]
        return self._install("all", wheels)

    def import_problems(self, name: str, packages: Iterable[Path]) -> list[str]:
        """Import every module of ``packages`` in the environment ``name``."""
        modules = [next(package.glob("src/*/__init__.py")).parent.name for package in packages]
        return self._ran([str(self._bin(name) / "python"), "-c", IMPORT_MODULES, *modules])

    def program_problems(self, subcommand: str) -> list[str]:
        """Run a subcommand of the program ``bmt``."""
        return self._ran([str(self._bin("all") / "bmt"), subcommand])

    def loop_problems(self) -> list[str]:
        """Train with the script of the first training, under torchrun on two processes."""
        directory = self._scratch / "loop"
        directory.mkdir()
        page = (self._root / "docs" / "first-training.md").read_text()
        blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
        (directory / "train.py").write_text("\n".join(blocks[:3]))
        torchrun = str(self._bin("all") / "torchrun")
        problems = self._ran([torchrun, "--standalone", "--nproc_per_node=2", "train.py"], "loop")
        if not problems and not (directory / "model.pt").exists():
            problems.append("The loop wrote no model.pt.")
        return problems

    def install_torch(self) -> list[str]:
        """Install torch alone, which every package requires, once for the steps after this one."""
        return self._install("torch", ["torch"])

    def _alone(self, package: Path) -> Step:
        def step() -> list[str]:
            """Install the package and what it requires, and nothing else, and import it."""
            siblings = isolated.siblings_of(package)
            wheels = [str(isolated.wheel_of(name, self._files)) for name in siblings]
            problems = self._install(package.name, wheels, beside="torch")
            problems = problems or self.import_problems(package.name, [package])
            shutil.rmtree(self._scratch / package.name)
            return problems

        return step

    def _install(self, name: str, requirements: Sequence[str], beside: str = "") -> list[str]:
        """Make the environment ``name`` with ``requirements`` and what they require; it also sees
        the packages of the environment ``beside``.
        """
        python = isolated.new_environment(self._scratch / name)
        if beside:
            (self._site_packages(name) / "beside.pth").write_text(str(self._site_packages(beside)))
        command = [python, "-m", "pip", "install", "--quiet", *requirements]
        return self._ran([*command, "--constraint", str(dev.REQUIREMENTS)])

    def _site_packages(self, name: str) -> Path:
        base = str(self._scratch / name)
        return Path(sysconfig.get_path("purelib", "venv", {"base": base, "platbase": base}))

    def _bin(self, name: str) -> Path:
        return self._scratch / name / "bin"

    def _wheel(self, package: Path) -> Path:
        return isolated.wheel_of(dev.project_of(package)["name"], self._files)

    def _ran(self, command: Sequence[str], directory: str = ".") -> list[str]:
        """Run ``command`` as a user does who has no tree, no ``.venv`` and no GPU."""
        env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **isolated.environment()}
        return failure_of(command, self._scratch / directory, env)


def uncommitted(root: Path) -> list[str]:
    """Return the files of the git tree ``root`` that are changed or not known to git."""
    command = ["git", "status", "--porcelain"]
    status = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return status.stdout.splitlines()


def failure_of(command: Sequence[str], directory: Path, env: dict[str, str]) -> list[str]:
    """Run ``command`` and return nothing if it succeeds, else what it printed."""
    result = subprocess.run(
        command, cwd=directory, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if result.returncode == 0:
        return []
    return [*result.stdout.splitlines(), f"Exit status {result.returncode}: {shlex.join(command)}"]


def file_stem(package: Path) -> str:
    """Return what the names of the files of ``package`` begin with."""
    name: str = dev.project_of(package)["name"]
    return name.replace("-", "_")


def file_problems(path: Path, package: Path) -> list[str]:
    """Compare the metadata and the contents of a wheel or a source archive with ``package``."""
    project = dev.project_of(package)
    metadata, names = contents(path)
    problems = [
        f"{field} is {metadata[field]!r}, not {wanted!r}"
        for field, wanted in {
            "Name": project["name"],
            "Version": project["version"],
            "License-Expression": project["license"],
            "Requires-Python": project["requires-python"],
            "Summary": project["description"],
            "Description-Content-Type": "text/markdown",
        }.items()
        if metadata[field] != wanted
    ]
    readme = (package / project["readme"]).read_text()
    if metadata.get_payload().strip() != readme.strip():  # type: ignore[union-attr]
        problems.append("its description is not the README")
    if not any(name.endswith("LICENSE") for name in names):
        problems.append("it has no LICENSE")
    if path.suffix == ".whl" and not any(name.endswith("py.typed") for name in names):
        problems.append("it has no py.typed")
    if path.suffix == ".whl" and any("/tests/" in name for name in names):
        problems.append("it has tests")
    return problems


def contents(path: Path) -> tuple[Message, list[str]]:
    """Return the metadata of a wheel or a source archive and the names of its files."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            names = wheel.namelist()
            (name,) = [each for each in names if each.endswith(".dist-info/METADATA")]
            return email.message_from_string(wheel.read(name).decode()), names
    with tarfile.open(path) as archive:
        names = archive.getnames()
        (name,) = [each for each in names if each.count("/") == 1 and each.endswith("/PKG-INFO")]
        file = archive.extractfile(name)
        assert file is not None
        return email.message_from_string(file.read().decode()), names


if __name__ == "__main__":
    sys.exit(main())
