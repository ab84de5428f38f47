"""Every line of the tree that tells how to install something names packages of ours that exist, or
one of few others.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SUFFIXES = {
    *(".py", ".pyi", ".md", ".toml", ".txt", ".cmake", ".sh"),
    *(".h", ".inl", ".cpp", ".cu", ".cuh", ".c"),
}
NOT_OURS_TO_READ = {"build", "dist", "runs", "__pycache__"}
NO_HINTS = {
    "integration-tests/test_install_hints.py",  # wrong hints, for the tests below
    "integration-tests/test_shell_lines.py",  # wrong lines, likewise
    "tools/offline_node.sh",  # runs pip itself
}
THIRD_PARTY = {
    *("cosmic-ray", "matplotlib", "peft", "tensorboard", "torchao", "transformers", "wandb")
}

PIP_LINE = re.compile(r"\bpip3?(?: +-[\w-]+)* +install\b(.*)")
ARGUMENT = re.compile(r"""\s+(?:\\?["'](?P<quoted>[^"'\\]*)\\?["']|(?P<bare>[^\s"'`,;()#\\]+))""")
WITH_EXTRAS = re.compile(r"(?<![\w./-])(?:bmt-[a-z]+|bmtrain)\[[^\]]*\]")
REQUIREMENT = re.compile(r"(?P<target>[\w./-]+)(?:\[(?P<extras>[\w,-]*)\])?(?:[=<>~!].*)?")


def project_in(directory: Path) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((directory / "pyproject.toml").read_text())["project"]
    return project


OURS = {project["name"]: project for project in map(project_in, (ROOT / "packages").iterdir())}


def text_files() -> Iterator[Path]:
    for directory, below, files in os.walk(ROOT):
        below[:] = [
            name for name in below if not name.startswith(".") and name not in NOT_OURS_TO_READ
        ]
        paths = (Path(directory, name) for name in files)
        yield from (
            path
            for path in paths
            if path.suffix in SUFFIXES and str(path.relative_to(ROOT)) not in NO_HINTS
        )


def hints_in(text: str) -> Iterator[str]:
    """The arguments of every ``pip install``, and every requirement on one of our packages that
    has extras.
    """
    for line in text.splitlines():
        for pip_line in re.split(r"(?=\bpip3?\b)", line):
            if match := PIP_LINE.match(pip_line):
                yield match[1]
        yield from (f' "{requirement}"' for requirement in WITH_EXTRAS.findall(line))


def arguments_of(hint: str) -> list[str]:
    """What stands between ``pip install`` and the end of the hint: a comma, a bracket, a quote that
    closes, a comment.
    """
    arguments, position = [], 0
    while match := ARGUMENT.match(hint, position):
        bare = match["bare"] or ""
        arguments.append(match["quoted"] or (bare if bare == "." else bare.rstrip(".:")))
        position = match.end()
    return arguments


def problems_of(hint: str) -> list[str]:
    """Why pip would not install what is meant."""
    arguments = arguments_of(hint)
    requirements = [argument for argument in arguments if not argument.startswith("-")]
    if not requirements:
        return [f"pip install{hint}: no package is named in this line"]
    problems, from_paths, needed = [], set(), set()
    for requirement in requirements:
        match = REQUIREMENT.fullmatch(requirement)
        if match is None:
            problems.append(
                f"{requirement} is computed, or no requirement: write it out, so that it can"
                " be checked"
            )
            continue
        target, extras = match["target"], set(filter(None, (match["extras"] or "").split(",")))
        if target in THIRD_PARTY or target == ".":  # a package of the reader
            continue
        if "/" in target:
            if not (ROOT / target / "pyproject.toml").is_file():
                problems.append(f"{target} is no package below the root of the tree")
                continue
            project = project_in(ROOT / target)
            from_paths.add(project["name"])
            needed |= siblings_needed(project, extras)
        elif target in OURS:
            project = OURS[target]
        else:
            problems.append(f"{target} is no package of ours")
            continue
        unknown = extras - project.get("optional-dependencies", {}).keys()
        problems += [f"{project['name']} has no extra {extra}" for extra in sorted(unknown)]
    if "--no-deps" not in arguments:
        missing = sorted(needed - from_paths)
        problems += [
            f"{name} is needed, and not among the paths: pip would ask an index for it"
            for name in missing
        ]
    return problems


def siblings_needed(project: dict[str, Any], extras: set[str]) -> set[str]:
    requirements = [*project["dependencies"]]
    for extra in extras:
        requirements += project.get("optional-dependencies", {}).get(extra, [])
    names = {match["target"] for match in map(REQUIREMENT.fullmatch, requirements) if match}
    return names & OURS.keys()


def test_every_install_hint_of_the_tree_works() -> None:
    seen, problems = set(), []
    for path in text_files():
        name = str(path.relative_to(ROOT))
        for hint in hints_in(path.read_text()):
            seen.add(name)
            problems += [f"{name}: {problem}" for problem in problems_of(hint)]
    assert not problems, "\n".join(problems)
    assert seen >= {"docs/install.md", "packages/bmt-core/src/bmt_core/packages.py"}


def test_packages_require_siblings_and_extras_that_exist() -> None:
    for path in [
        *ROOT.glob("packages/*/pyproject.toml"),
        *ROOT.glob("integration-tests/plugins/*/pyproject.toml"),
    ]:
        project = project_in(path.parent)
        for requirements in [
            project["dependencies"],
            *project.get("optional-dependencies", {}).values(),
        ]:
            for requirement in requirements:
                assert (
                    not requirement.startswith("bmt") or problems_of(f' "{requirement}"') == []
                ), path


def test_a_pipeline_is_installed_with_the_package_that_makes_its_blocks() -> None:
    plugins = ROOT.glob("packages/bmt-*/src/*/plugin.py")
    makers = [path.parents[2].name for path in plugins if ".make_block = " in path.read_text()]
    assert makers == ["bmt-zero"]
    assert siblings_needed(OURS["bmt-pipeline"], set()) >= {*makers}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("pip install bmtrain", "bmtrain is no package of ours"),
        ('raise Missing("Type: pip install bmtrain.")', "bmtrain is no package of ours"),
        ('Install it with: pip install "bmtrain[optim]"\'', "bmtrain is no package of ours"),
        ('"pip install \\"bmtrain[optim]\\""', "bmtrain is no package of ours"),
        ("python -m pip --quiet install -U bmtrain==1.0.1", "bmtrain is no package of ours"),
        ("It needs `bmtrain[zero,optim]`.", "bmtrain is no package of ours"),
        (
            "`pip install bmt-core`, then `pip install bmt-expert`",
            "bmt-expert is no package of ours",
        ),
        ('pip install "bmt-train[zero,expert]"', "bmt-train has no extra expert"),
        (
            (
                "pip install ./packages/bmt-core ./packages/bmt-params ./packages/bmt-watch"
                ' ./packages/bmt-checkpoint "./packages/bmtrain[expert]"'
            ),
            "bmt-train has no extra expert",
        ),
        ("pip install ./packages/bmt-train", "./packages/bmt-train is no package below the root"),
        (
            "pip install ./packages/bmt-params ./packages/bmt-tp",
            "bmt-core is needed, and not among the paths",
        ),
        (
            "pip install ./packages/bmt-core ./packages/bmt-params ./packages/bmt-watch"
            ' ./packages/bmt-checkpoint "./packages/bmtrain[zero]"',
            "bmt-zero is needed, and not among the paths",
        ),
        ('f"pip install {package}"', "{package} is computed"),
        ("pip install requests", "requests is no package of ours"),
        ('"Install it with: pip install "', "no package is named"),
    ],
)
def test_wrong_hint_is_found(text: str, problem: str) -> None:
    problems = [problem for hint in hints_in(text) for problem in problems_of(hint)]
    assert problems and all(problem in found for found in problems)
