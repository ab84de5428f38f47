"""Programs, scripts, packages and options in the shell lines of documents exist."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from document_code import ROOT, blocks, guides
from torch.distributed.run import get_args_parser

from bmtrain._program import main as bmt

SCRIPT_FOLDERS = ("", "examples/gpt", "examples/hf", "examples/from_bmtrain")
OWN = ("train.py", "script.py")
"""Scripts of the reader, on pages that are not about the examples."""


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield (page, words) of each command, without what stands behind ``#``."""
    for page in guides():
        for block in (*blocks(page, "sh"), *blocks(page, "bash")):
            for line in block.splitlines():
                words = shlex.split(line, comments=True)
                while words:
                    end = next((n for n, word in enumerate(words) if word in ("&&", ";")), None)
                    yield page, words[:end]
                    words = [] if end is None else words[end + 1 :]


@functools.cache
def help_of(script: Path, *commands: str) -> str:
    """Return what ``python script commands --help`` prints."""
    folder = script if script.is_dir() else script.parent
    arguments, path = sys.argv, list(sys.path)
    # Modules beside the script may have the names of others.
    beside = {each.stem for each in folder.iterdir()} - {"__main__"}
    others = {name: sys.modules[name] for name in sys.modules if name.partition(".")[0] in beside}
    for name in others:
        del sys.modules[name]
    sys.argv, sys.path[:0] = [str(script), *commands, "--help"], [str(folder)]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit):
            runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = arguments, path
        for name in [name for name in sys.modules if name.partition(".")[0] in beside]:
            del sys.modules[name]
        sys.modules.update(others)
    return printed.getvalue()


def problem_of_script(page: str, words: list[str]) -> str | None:
    """Say what is wrong with a script and its options."""
    options = options_of(words[1:])
    folders = [Path(page).parent, *map(Path, SCRIPT_FOLDERS)]
    found = [ROOT / folder / words[0] for folder in folders if (ROOT / folder / words[0]).exists()]
    if words[0] in OWN and not (options and found):
        return None
    if not found:
        return f"no script {words[0]}"
    if found[0].name == "sanitize_kernels.py":
        return None if not options else "it takes none"
    if found[0].name in ("bench", "dev.py"):
        printed = help_of(found[0], words[1])
        options = [] if words[1] == "test" else options  # they go to pytest
    else:
        printed = help_of(found[0]) if options else ""
    return missing(options, printed)


def options_of(words: list[str]) -> list[str]:
    """Return the names of the options up to ``--``."""
    own = words[: words.index("--")] if "--" in words else words
    return [word.partition("=")[0] for word in own if word.startswith("--")]


def missing(options: list[str], printed: str) -> str | None:
    known = set(re.findall(r"(?<![\w-])--?[\w-]+", printed))
    unknown = [option for option in options if option not in known]
    return f"no {' '.join(unknown)}" if unknown else None


def problem_of_bmt(words: list[str]) -> str | None:
    names = itertools.takewhile(lambda word: re.fullmatch(r"[a-z][a-z-]*", word), words)
    result = CliRunner().invoke(bmt, [*names, "--help"])
    return missing(options_of(words), result.output) if result.exit_code == 0 else result.output


def problem_of_torchrun(page: str, words: list[str]) -> str | None:
    if "-m" in words and words[words.index("-m") + 1] == "bmtrain":
        return problem_of_bmt(words[words.index("-m") + 2 :])
    start = next(n for n, word in enumerate(words) if not word.startswith("-"))
    known = {text for action in get_args_parser()._actions for text in action.option_strings}
    unknown = [option for option in options_of(words[:start]) if option not in known]
    return f"torchrun has no {unknown}" if unknown else problem_of_script(page, words[start:])


def problem_of_pip(words: list[str]) -> str | None:
    names = {path.name.replace("bmtrain", "bmt-train") for path in ROOT.glob("packages/*")}
    for word in words:
        name = word.partition("[")[0]
        if name.startswith("./") and not (ROOT / name / "pyproject.toml").exists():
            return f"no {name}"
        if name.startswith("bmt") and name not in names:
            return f"no package {name}"
    return None


def problem(page: str, words: list[str]) -> str | None:
    """Say what is wrong with a command; None for those of other programs, too."""
    program, rest = words[0], words[1:]
    if program == "bmt":
        return problem_of_bmt(rest)
    if program == "torchrun":
        return problem_of_torchrun(page, rest)
    if program in ("python", "python3", ".venv/bin/python") and not rest[0].startswith("-"):
        return problem_of_script(page, rest)
    if program == "pip":
        return problem_of_pip(rest[1:])
    return None


def test_what_shell_lines_name_exists() -> None:
    checked = list(commands())
    assert len(checked) > 60
    assert {"bmt", "pip", "python", "python3", "torchrun"} <= {words[0] for _, words in checked}
    found = [(page, shlex.join(words), problem(page, words)) for page, words in checked]
    assert [each for each in found if each[2] is not None] == []


@pytest.mark.parametrize(
    "line",
    [
        "bmt pipeline-plan --no-such-option 1",
        "bmt no-such-command",
        "torchrun --nproc-per-nodes=2 train.py",
        "torchrun --nproc_per_node=2 train.py --no-such-option",
        "python no_such_script.py",
        "python3 tools/dev.py docs --no-such-option",
        "pip install ./packages/bmt-no-such-package",
        "pip install bmt-no-such-package",
    ],
)
def test_a_line_that_names_what_is_not_there_is_found(line: str) -> None:
    assert problem("docs/mixed-precision.md", shlex.split(line)) is not None
