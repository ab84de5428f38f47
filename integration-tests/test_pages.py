"""The code of the guides runs as it stands there, and prints what stands below it."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import os
import pkgutil
import re
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from document_code import ROOT, blocks, code, printed_by, run
from torch.nn.parallel import DistributedDataParallel

import bmtrain as bmt
from bmt_testing import on_ranks, run_ranks

NUMBER = r"\d+\.\d+"


def own_lines(printed: str) -> str:
    """Return ``printed`` without the lines in which bmt describes the run."""
    return re.sub(r"^bmt: .*\n", "", printed, flags=re.MULTILINE)


def assert_prints(printed: str, expected: str) -> None:
    """Compare two texts, numbers with a point to within two units of their last digit: processors
    round differently.
    """
    printed = own_lines(printed)
    assert re.sub(NUMBER, "#", printed) == re.sub(NUMBER, "#", expected)
    for found, wanted in zip(
        re.findall(NUMBER, printed), re.findall(NUMBER, expected), strict=True
    ):
        unit = 10.0 ** -len(wanted.partition(".")[2])
        assert float(found) == pytest.approx(float(wanted), abs=2 * unit)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_training_trains_on_any_number_of_ranks(ranks: int, tmp_path: Path) -> None:
    losses, sequence = blocks("docs/first-training.md", "text")
    script = code("docs/first-training.md", 0, 1, 2, 3)
    first, *others = run_ranks(printed_by, ranks, script, str(tmp_path), init=None)
    assert_prints(first, losses + sequence)
    assert others == [sequence] * (ranks - 1)


def test_the_first_fine_tuning_prints_what_stands_below_it(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    script = code("examples/hf/README.md", 0)
    first, second = run_ranks(printed_by, 2, script, str(tmp_path), init=None)
    assert_prints(first, blocks("examples/hf/README.md", "text")[0])
    assert second == ""
    transformers = pytest.importorskip("transformers")
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert exported.config.vocab_size == 64


@on_ranks(1, 2)
def test_a_rank_holds_the_bytes_per_parameter_that_the_page_says(world_size: int) -> None:
    """Weights, gradients and states in half precision."""
    row = "| bfloat16, with `bmt-kernels` | 2 | 2 | 4 + 4 moments, 2 for the master | 14 |"
    assert row in (ROOT / "docs" / "memory.md").read_text()
    layers = torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False) for _ in range(4))
    model = torch.nn.Sequential(*map(bmt.Block, layers.bfloat16()))
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), compact_master=True)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    rows = torch.ones(8, 64, dtype=torch.bfloat16, device=bmt.current().device)
    manager.backward(model(rows).sum())
    manager.step()
    parameters = list(model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    kinds = (parameters, [parameter.grad for parameter in parameters], states)
    whole = sum(parameter.whole_shape.numel() for parameter in parameters)
    tensors = [[each for each in kind if isinstance(each, torch.Tensor)] for kind in kinds]
    bytes = [sum(each.numel() * each.element_size() for each in kind) for kind in tensors]
    expected = [each / world_size for each in (2, 2, 4 + 4 + 2)]
    assert [round(each / whole, 1) for each in bytes] == expected


def test_ranks_have_the_parts_that_the_page_shows(tmp_path: Path) -> None:
    _, second = run_ranks(printed_by, 2, code("docs/concepts.md"), str(tmp_path), init=None)
    assert second == blocks("docs/concepts.md", "text")[0]


def rows_of_the_data_page(script: str) -> tuple[list[list[int]], list[float], str]:
    """Return the rows of the first block by epoch, the numbers that are drawn, and what the last
    block prints.
    """
    seen: list[list[int]] = []
    script = script.replace(
        "    for (rows,) in loader:", "    seen.append([])\n    for (rows,) in loader:"
    )
    script = script.replace(
        "        rows = rows.to(", "        seen[-1] += rows.tolist()\n        rows = rows.to("
    )
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        names = run(script, seen=seen)
    bmt.shutdown()
    return seen, names["noise"].tolist(), own_lines(printed.getvalue())


def test_ranks_with_different_data_have_each_row_once(tmp_path: Path) -> None:
    script = code("docs/data.md")
    (one,) = run_ranks(rows_of_the_data_page, 1, script, init=None)
    first, second = run_ranks(rows_of_the_data_page, 2, script, init=None)
    for epoch in range(2):
        assert sorted(first[0][epoch] + second[0][epoch]) == list(range(32))
        assert sorted(one[0][epoch]) == list(range(32)) and one[0][0] != one[0][1]
    assert first[1] == one[1] != second[1]
    assert first[2] + second[2] == blocks("docs/data.md", "text")[0]
    last = [
        list(map(int, re.findall(r"\d+", text.partition("last are")[2])))
        for text in (first[2], second[2], one[2])
    ]
    assert last[0] + last[1] == last[2]


def test_ranks_along_tp_have_the_same_rows() -> None:
    script = code("docs/data.md").replace("init_distributed(seed=0)", "init_distributed(tp_size=2)")
    first, second = run_ranks(rows_of_the_data_page, 2, script, init=None)
    assert first[:2] == second[:2]
    assert sorted(first[0][0]) == list(range(32))


def sides_of_the_diff(page: str) -> tuple[str, str]:
    """Return the script before and after the diff in ``page``."""
    (diff,) = blocks(page, "diff")
    return tuple(  # type: ignore[return-value]
        "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] != left_out)
        for left_out in "+-"
    )


_KEPT: list[DistributedDataParallel] = []
"""Torch hangs if a process group is freed, with the lock of the interpreter held, while a thread of
gloo waits for that lock to release a tensor. So the groups of torch's own models stay.
"""


def losses_of(script: str, directory: str) -> list[float]:
    """Run a script of the diff on the CPU, in ``directory``; return its losses."""
    os.chdir(directory)
    script = script.replace(
        'torch.device("cuda", rank % torch.cuda.device_count())', 'torch.device("cpu")'
    ).replace("torch.cuda.set_device(device)\n", "")
    script = script.replace("init_distributed(", "init_distributed(device='cpu', ")
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(script, "script", "exec"), names)
    if isinstance(names["model"], DistributedDataParallel):
        _KEPT.append(names["model"])
    return names["losses"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("page", ["docs/coming-from-ddp.md", "docs/coming-from-fsdp2.md"])
def test_both_scripts_of_the_diff_train_alike(page: str, tmp_path: Path) -> None:
    losses, files = [], []
    for script in sides_of_the_diff(page):
        losses += [run_ranks(losses_of, 2, script, str(tmp_path), init=None)]
        files += [dict(torch.load(tmp_path / "model.pt"))]
        (tmp_path / "model.pt").unlink()
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(files[0], files[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_script_of_a_deepspeed_configuration_trains(ranks: int, tmp_path: Path) -> None:
    script = code("docs/coming-from-deepspeed.md")
    printed, *_ = run_ranks(printed_by, ranks, script, str(tmp_path), init=None)
    (expected,) = blocks("docs/coming-from-deepspeed.md", "text")
    if ranks == 1:
        assert_prints(printed, expected)
    first, last = map(float, re.findall(r"loss (\S+)", printed))
    assert last < first / 2


def texts_of_sources() -> Iterator[str]:
    """Yield the texts in bmt's sources; a NUL stands for what is inserted when they are printed."""
    for source in ROOT.glob("packages/*/src/**/*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    str(part.value) if isinstance(part, ast.Constant) else "\0"
                    for part in node.values
                ]
                yield "".join(parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield re.sub(r"%\.?\d*[a-z]", "\0", node.value)


def test_every_message_of_troubleshooting_is_in_the_sources() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    messages = re.findall(r"^\| `(.*?)` \|", page, re.MULTILINE)
    assert len(messages) > 30
    texts = list(texts_of_sources())
    absent = []
    for message in messages:
        parts = [re.escape(part) for part in message.split("...")]
        assert max(map(len, parts)) > 8, message
        pattern = re.compile("^" + ".*".join(parts), re.DOTALL)
        if not any(pattern.search(text) for text in texts):
            absent.append(message)
    assert absent == []


# --- hooks.md ---


def named_on(page: str) -> dict[str, Any]:
    """Return what ``page`` imports from bmt, and all parts of paths that begin with bmt, by the
    last name.
    """
    imports = re.findall(r"^from (bmt_(?!lion)[\w.]+) import (.*)$", page, re.MULTILINE)
    paths = [f"{module}.{name}" for module, names in imports for name in names.split(", ")]
    for span in re.findall(r"`([^`\n]+)`", page):
        paths += re.findall(r"(?<![\w./])bmt(?:_\w+)?(?:\.[A-Za-z]\w*)+", span)
    paths = [re.sub(r"^bmt\.", "bmtrain.", path) for path in paths]
    parts = {part for path in paths for part in accumulate(path.split("."), "{}.{}".format)}
    return {part.rpartition(".")[2]: pkgutil.resolve_name(part) for part in parts}


def test_the_page_of_hooks_names_classes_as_they_are_in_the_sources() -> None:
    page = (ROOT / "docs/hooks.md").read_text()
    known = named_on(page)
    prose = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    spans = re.findall(r"`([^`\n]+)`", prose)
    words = {word for span in spans for word in re.findall(r"(?<![\w.\"])[A-Z][a-z]\w+", span)}
    own = {"Sequence", "None", "True", "False", *re.findall(r"^class (\w+)", page, re.MULTILINE)}
    assert words - known.keys() - own == set(), "say of which module"
    members = [vars(kind) for kind in known.values() if isinstance(kind, type)]
    for span in spans:
        if attribute := re.fullmatch(r"([a-z]\w+) = (?:True|False)", span):
            assert any(attribute[1] in of_class for of_class in members), span
        if call := re.fullmatch(r"(?:bmt[\w.]*\.)?(\w+)(\(\w.*\))", span):
            found = [known.get(call[1], getattr(bmt, call[1], None))]
            found += [of_class[call[1]] for of_class in members if call[1] in of_class]
            assert any(takes(each, call[2]) for each in found), span


def takes(function: Any, arguments: str) -> bool:
    """Whether ``function`` has parameters for the ``arguments`` of a call, as text: those that are
    words by the same names.
    """
    if not callable(function):
        return False
    call = ast.parse(f"f{arguments}", mode="eval").body
    assert isinstance(call, ast.Call)
    parameters = inspect.signature(function).parameters
    names = [name.id for name in call.args if isinstance(name, ast.Name)]
    return {*names, *(str(keyword.arg) for keyword in call.keywords)} <= parameters.keys()
