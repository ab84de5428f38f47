"""The code of the how-to pages that follow a first training runs as it stands there, and trains as
one process of plain torch does.

The pages use ``Model``, ``model``, ``device`` and ``loss_of`` of the first training.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from document_code import blocks, code, run
from test_guides import tiny_llama
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import bmtrain as bmt
from bmt_testing import run_ranks

BEGINNING = code("docs/first-training.md", 0)
COUNTING = code("docs/first-training.md", 4)
TRAIN_WITH_LOSS = """
model = bmt.BMTrainModelWrapper(ModelWithLoss().double())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
manager = bmt.optim.OptimManager()
manager.add_optimizer(optimizer)
for step in range(3):
    batch = torch.randint(64, (9, 8), generator=torch.Generator().manual_seed(step)).to(device)
    own = batch.chunk(bmt.world_size(), dim=1)[bmt.rank()]
    manager.backward(model(own[:-1], own[1:]))
    manager.step()
    manager.zero_grad()
"""
SCHEDULERS = code("docs/optimizers.md", 1)
AVERAGING = code("docs/optimizers.md", 2)
WHOLE = code("docs/optimizers.md", 3)
WITHOUT_LOGITS = code("docs/large-models.md", 1)
WEIGHTS = code("docs/checkpoints.md", 0)
SAVING = code("docs/checkpoints.md", 1)
MOVING = code("docs/checkpoints.md", 2)
BFLOAT16 = code("docs/mixed-precision.md", 0)
FLOAT16 = code("docs/mixed-precision.md", 1)
PARAM_DTYPE = code("docs/mixed-precision.md", 2)
AUTOCAST = code("docs/mixed-precision.md", 3)
MASTERS = code("docs/mixed-precision.md", 4)
LOGGING = code("docs/inspect.md", 0)
MEMORY = code("docs/inspect.md", 1)
PROFILING = code("docs/inspect.md", 2)


def results_of(
    example: str, directory: str, wanted: tuple[str, ...], dtype: str = "double"
) -> dict[str, Any]:
    """Run ``BEGINNING`` and ``example`` on the CPU, with parameters of ``dtype``;
    return what is ``wanted``.
    """
    names = run(BEGINNING.replace("(Model())", f"(Model().{dtype}())") + example, directory)
    found = {name: names[name] for name in wanted if name not in ("model", "ema")}
    found |= {name: dict(names[name].state_dict()) for name in wanted if name in ("model", "ema")}
    found["lr"] = names["optimizer"].param_groups[0]["lr"]
    bmt.shutdown()
    return found


def plain_names(more: str = "") -> dict[str, Any]:
    """``BEGINNING``, and ``more``, without bmt: one process with the whole batch."""
    script = re.sub(
        r"^(import bmtrain.*|bmt\.init_distributed.*)$", "", BEGINNING + more, flags=re.MULTILINE
    )
    script = script.replace("bmt.BMTrainModelWrapper(Model())", "Model().double()")
    script = re.sub(r"\.chunk\(bmt\.world_size\(\), dim=1\)\[bmt\.rank\(\)\]", "", script)
    torch.manual_seed(0)
    return run(script)


def steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[nn.Module, int], torch.Tensor],
    number: int,
) -> Iterator[torch.Tensor]:
    for step in range(number):
        loss = loss_of(model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach()


def check_model(example: str, folder: Path, model: nn.Module, lr: float = 1e-2) -> None:
    """Run ``example`` on two ranks, and compare the model and the last learning rate."""
    for found in run_ranks(results_of, 2, example, str(folder), ("model",), init=None):
        torch.testing.assert_close(found["model"], dict(model.state_dict()))
        assert found["lr"] == lr


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def test_rows_of_unequal_lengths_train_as_in_plain_torch(tmp_path: Path) -> None:
    plain = plain_names(COUNTING.partition("\noptimizer = ")[0])
    model, sums_of = plain["model"], plain["sums_of"]
    optimizer = adamw(model.parameters())
    for step in range(5):
        sums, counts = zip(*[sums_of(model, 2 * step + micro) for micro in range(2)], strict=True)
        optimizer.zero_grad()
        (sum(sums) / sum(counts)).backward()
        optimizer.step()
    with torch.no_grad():
        sums, counts = zip(*[sums_of(model, step) for step in range(10, 13)], strict=True)
    expected = sum(sums) / sum(counts)
    for found in run_ranks(results_of, 2, COUNTING, str(tmp_path), ("model", "loss"), init=None):
        torch.testing.assert_close(found["model"], dict(model.state_dict()))
        torch.testing.assert_close(found["loss"], expected)


def test_averaged_weights_are_those_of_plain_torch(tmp_path: Path) -> None:
    plain = plain_names()
    model = plain["model"]
    optimizer = adamw(model.parameters())
    ema, first = (
        AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
        copy.deepcopy(model.state_dict()),
    )
    for _ in steps(model, optimizer, plain["loss_of"], 5):
        ema.update_parameters(model)
    for found in run_ranks(results_of, 2, AVERAGING, str(tmp_path), ("model", "ema"), init=None):
        torch.testing.assert_close(found["model"], dict(model.state_dict()))
        torch.testing.assert_close(found["ema"], dict(ema.state_dict()))
    saved = torch.load(tmp_path / "ema.pt", weights_only=True)
    torch.testing.assert_close(dict(saved), dict(ema.module.state_dict()))
    assert any(not torch.equal(saved[name], first[name]) for name in saved)


def test_param_dtype_trains_as_plain_torch_that_casts_parameters(tmp_path: Path) -> None:
    plain = plain_names()
    model: nn.Module = plain["Model"]().float()
    first = nn.utils.parameters_to_vector(model.parameters()).detach().clone()

    def cast(*arguments: Any) -> Any:
        read = {name: p.to(torch.bfloat16) for name, p in model.named_parameters()}
        return torch.func.functional_call(model, read, arguments)

    optimizer = adamw(model.parameters())
    for step in range(5):
        loss = plain["loss_of"](cast, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found, *_ = run_ranks(results_of, 2, PARAM_DTYPE, str(tmp_path), ("model",), "float", init=None)
    values = [found["model"][name] for name, _ in model.named_parameters()]
    assert {value.dtype for value in values} == {torch.float32}
    way = torch.cat([value.flatten() for value in values]) - first
    expected = nn.utils.parameters_to_vector(model.parameters()).detach() - first
    # Elements whose gradients are rounding alone move by the sign of it.
    assert (way - expected).norm() < 0.1 * expected.norm()


def test_autocast_trains_as_in_plain_torch(tmp_path: Path) -> None:
    plain = plain_names()
    model = plain["model"].float()
    optimizer = adamw(model.parameters())

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss: torch.Tensor = plain["loss_of"](model, step)
        return loss

    without = [loss.item() for loss in steps(copy.deepcopy(model), optimizer, plain["loss_of"], 1)]
    losses = [loss.item() for loss in steps(model, optimizer, loss_of, 5)]
    for found in run_ranks(results_of, 2, AUTOCAST, str(tmp_path), ("losses",), "float", init=None):
        # Gradients have 8 bits, and those of ranks are rounded one by one: the way that the loss
        # has gone may be off by half of the last bit.
        off = 2**-9 * (losses[0] - losses[-1])
        assert found["losses"] == pytest.approx(losses, abs=off)
        assert found["losses"][0] == pytest.approx(losses[0], rel=1e-6)
        assert found["losses"][0] != pytest.approx(without[0], rel=1e-6)


def test_schedulers_of_torch_train_as_in_plain_torch(tmp_path: Path) -> None:
    plain = plain_names()
    model = plain["model"]
    optimizer = adamw(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=10)
    for _ in steps(model, optimizer, plain["loss_of"], 5):
        scheduler.step()
    check_model(SCHEDULERS, tmp_path, model, optimizer.param_groups[0]["lr"])


def test_muon_trains_as_in_plain_torch(tmp_path: Path) -> None:
    plain = plain_names()
    model = plain["model"]
    matrices = [p for p in model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    muon, optimizer = torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(muon, 2, gamma=0.5)
    for _ in steps(model, optimizer, plain["loss_of"], 5):
        muon.step()
        muon.zero_grad()
        scheduler.step()
    check_model(WHOLE, tmp_path, model)


def test_a_loss_without_logits_trains_as_in_plain_torch(tmp_path: Path) -> None:
    plain = plain_names(WITHOUT_LOGITS)
    torch.manual_seed(0)
    plain["Model"]()
    model = plain["ModelWithLoss"]().double()
    optimizer = adamw(model.parameters())

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        batch = torch.randint(64, (9, 8), generator=torch.Generator().manual_seed(step))
        logits = plain["Model"].forward(model, batch[:-1]).flatten(0, 1)
        squares = logits.logsumexp(1).square().mean()
        targets = batch[1:].flatten()
        loss = nn.functional.cross_entropy(logits, targets, label_smoothing=0.1)
        return loss + 1e-4 * squares

    list(steps(model, optimizer, loss_of, 3))
    check_model(WITHOUT_LOGITS + TRAIN_WITH_LOSS, tmp_path, model)


def test_a_run_that_ended_goes_on_where_it_was(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    expected = run_ranks(
        results_of, 2, SAVING, str(whole), ("model", "first_step", "seen"), init=None
    )
    until_6 = SAVING.replace("range(first_step, 12)", "range(first_step, 6)")
    assert until_6 != SAVING
    run_ranks(results_of, 2, until_6, str(parts), ("model",), init=None)
    found = run_ranks(results_of, 2, SAVING, str(parts), ("model", "first_step", "seen"), init=None)
    assert {each["seen"] for each in (*expected, *found)} == {12 * 8}
    assert [each["first_step"] for each in (*expected, *found)] == [0] * 2 + [4] * 2
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one["model"], other["model"], rtol=0, atol=0)
    assert sorted(path.name for path in (parts / "checkpoints").glob("step-*")) == [
        "step-12",
        "step-8",
    ]


def test_the_training_that_is_saved_is_that_of_plain_torch(tmp_path: Path) -> None:
    plain = plain_names()
    model = plain["model"]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    for step, _ in enumerate(steps(model, optimizer, plain["loss_of"], 12), 1):
        # Of the next step: the warm-up takes two, from 0, and a cosine the others.
        cosine = 0.5 * (1 + math.cos((step - 2) / 10 * math.pi))
        optimizer.param_groups[0]["lr"] = 1e-2 * (step / 2 if step < 2 else cosine)
    for found in run_ranks(results_of, 2, SAVING, str(tmp_path), ("model",), init=None):
        torch.testing.assert_close(found["model"], dict(model.state_dict()))


def test_another_number_of_ranks_goes_on_where_a_run_ended(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    (expected,) = run_ranks(results_of, 1, SAVING, str(whole), ("model",), init=None)
    until_6 = SAVING.replace("range(first_step, 12)", "range(first_step, 6)")
    run_ranks(results_of, 2, until_6, str(parts), ("model",), init=None)
    found = run_ranks(results_of, 1, SAVING, str(parts), ("model", "first_step"), init=None)
    assert found[0]["first_step"] == 4
    torch.testing.assert_close(found[0]["model"], expected["model"])


def test_saved_weights_are_those_of_the_plain_model(tmp_path: Path) -> None:
    expected = dict(plain_names()["model"].state_dict())
    for found in run_ranks(
        results_of, 2, WEIGHTS + WITHOUT_STEPS, str(tmp_path), ("model",), init=None
    ):
        torch.testing.assert_close(found["model"], expected)
    torch.testing.assert_close(dict(torch.load(tmp_path / "model.pt")), expected)
    safetensors = pytest.importorskip("safetensors.torch", reason="a format that it reads")
    files: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "model").glob("*.safetensors"):
        files |= safetensors.load_file(path)
    torch.testing.assert_close(files, expected)
    torch.testing.assert_close(safetensors.load_file(tmp_path / "model.safetensors"), expected)


WITHOUT_STEPS = "optimizer = torch.optim.SGD(model.parameters(), lr=0.0)\n"


def test_a_file_of_plain_torch_goes_on_as_in_plain_torch(tmp_path: Path) -> None:
    plain = plain_names()
    model, loss_of = plain["model"], plain["loss_of"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in steps(model, optimizer, loss_of, 5):
        pass
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "plain.pt"
    )
    for _ in steps(model, optimizer, lambda model, step: loss_of(model, 5 + step), 3):
        pass
    check_model(MOVING, tmp_path, model, 3e-3)


def trained_in_half(
    plain: dict[str, Any], dtype: torch.dtype, optimizer: Any, *, masters: bool = True
) -> torch.Tensor:
    """Train the next model in plain torch as the examples do; return how all parameters moved."""
    model = plain["Model"]().to(dtype)
    first = torch.cat([p.detach().float().flatten() for p in model.parameters()])
    stepped = [p.detach().float() if masters else p for p in model.parameters()]
    made = optimizer(stepped)
    for step in range(5):
        model.zero_grad()
        plain["loss_of"](model, step).backward()
        for master, p in zip(stepped, model.parameters(), strict=True):
            master.grad = p.grad.to(master.dtype)
        nn.utils.clip_grad_norm_(stepped, 1.0 if optimizer is adamw else torch.inf)
        made.step()
        with torch.no_grad():
            for master, p in zip(stepped, model.parameters(), strict=True):
                p.copy_(master)
    return torch.cat([p.detach().float().flatten() for p in model.parameters()]) - first


def rmsprop(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=1e-3)


@pytest.mark.parametrize(
    ("example", "dtype", "optimizer"),
    [
        (BFLOAT16, torch.bfloat16, adamw),
        (FLOAT16, torch.float16, adamw),
        (MASTERS, torch.bfloat16, rmsprop),
    ],
    ids=["bfloat16", "float16", "masters"],
)
def test_half_types_train_as_in_plain_torch_with_float32_masters(
    example: str, dtype: torch.dtype, optimizer: Any, tmp_path: Path
) -> None:
    ways = []
    for masters in (True, False):
        plain = plain_names()
        ways.append(trained_in_half(plain, dtype, optimizer, masters=masters))
    plain = plain_names()
    first = torch.cat([p.detach().flatten() for p in plain["Model"]().to(dtype).parameters()])
    found, *_ = run_ranks(results_of, 2, example, str(tmp_path), ("model",), "float", init=None)
    assert {p.dtype for p in found["model"].values()} == {dtype}
    way = torch.cat([p.flatten().float() for p in found["model"].values()]) - first.float()
    # Elements whose gradients are rounding alone move by the sign of it.
    off, without = ((way - each).norm() / ways[0].norm() for each in ways)
    assert off < 0.1
    assert without.isnan() or off < 0.8 * without  # NaN: AdamW's eps is 0 in float16


def test_logged_numbers_are_those_of_plain_torch(tmp_path: Path) -> None:
    plain = plain_names()
    model = plain["model"].float()
    optimizer = adamw(model.parameters())
    expected = []
    for step in range(5):
        loss = plain["loss_of"](model, step)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        expected += [(step, loss.item(), norm.item())] if step % 2 == 0 else []
    script = LOGGING + MEMORY + PROFILING
    run_ranks(results_of, 2, script, str(tmp_path), (), "float", init=None)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for record, (step, loss, norm) in zip(records, expected, strict=True):
        assert (record["step"], record["scale"], record["lr"]) == (step, 1, 1e-2)
        assert record["loss"] == pytest.approx(loss, rel=1e-4)
        assert record["norm"] == pytest.approx(norm, rel=1e-3)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"aten::addmm", "aten::cross_entropy_loss"} <= names


# --- choosing.md ---


def chosen_for_two_hosts(directory: str, ids: torch.Tensor) -> Any:
    names = run(code("docs/choosing.md", 0), directory=directory)
    names["manager"].backward(names["model"](input_ids=ids, labels=ids).loss)
    names["manager"].step()
    with torch.no_grad():
        logits = names["model"](input_ids=ids).logits
    bmt.shutdown()
    return logits


def test_the_settings_for_two_hosts_load_a_model_and_train(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the models are transformers'")
    plain = tiny_llama(transformers).bfloat16()
    plain.save_pretrained(tmp_path)
    ids = torch.arange(16).view(2, 8) % 40
    with torch.no_grad():
        before = plain(input_ids=ids).logits
    first, second = run_ranks(chosen_for_two_hosts, 2, str(tmp_path), ids, init=None)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, before, rtol=0, atol=0.05)
    assert not torch.equal(first, before)


# --- verify.md ---

GPT = """
import torch
from torch import nn


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        self.head = nn.Linear(6, 11)

    def forward(self, tokens):
        logits = self.head(self.layers(self.embedding(tokens)))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def tokens(seed):
    return torch.randint(11, (8, 5), generator=torch.Generator().manual_seed(seed))


batch = tokens
"""


def pytest_of(folder: Path, *options: str, **more: str) -> str:
    """Run pytest in ``folder``, with ``more`` in the environment; return what it prints."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **more},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.stdout + done.stderr


MISTAKE = "return (1 / bmt_core.world_size() if bmt_core.is_initialized() else 1) * nn."


@pytest.mark.slow("bmt-testing", "docs/")
def test_the_tests_of_the_page_pass_and_a_mistake_prints_what_it_shows(tmp_path: Path) -> None:
    (tmp_path / "gpt.py").write_text(GPT)
    wrong = GPT.replace("return nn.", MISTAKE).replace("import torch\n", "import bmt_core, torch\n")
    (tmp_path / "wrong.py").write_text(wrong)
    ten_lines = code("docs/verify.md", 0)
    (tmp_path / "test_right.py").write_text(ten_lines.replace("=20", "=3"))
    (tmp_path / "test_wrong.py").write_text(ten_lines.replace("from gpt", "from wrong"))
    (tmp_path / "test_ranks.py").write_text(code("docs/verify.md", 2))
    printed = pytest_of(tmp_path)
    assert "1 failed, 4 passed" in printed, printed
    without_numbers = [re.sub(r"\d+(\.\d+)?", "#", line) for line in printed.splitlines()]
    (shown,) = blocks("docs/verify.md", "text")
    for line in shown.splitlines():
        wanted = "".join(re.sub(r"\d+(\.\d+)?", "#", line).split())
        assert any("".join(found.split()).startswith(wanted) for found in without_numbers), line


# --- plugins.md ---


@pytest.fixture
def plugin_folder(tmp_path: Path) -> Path:
    """A folder that has the package of the page, installed."""
    package = tmp_path / "bmt_signum"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "signum.py").write_text(code("docs/plugins.md", 0))
    (package / "plugin.py").write_text(code("docs/plugins.md", 1))
    (text,) = blocks("docs/plugins.md", "toml")
    project = tomllib.loads(text)["project"]
    installed = tmp_path / "bmt_signum-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    ((name, module),) = project["entry-points"]["bmt"].items()
    (installed / "entry_points.txt").write_text(f"[bmt]\n{name} = {module}\n")
    return tmp_path


@pytest.mark.slow("bmt-testing", "docs/")
def test_the_optimizer_of_the_page_passes_its_kit(plugin_folder: Path) -> None:
    kit = ("--pyargs", "bmt_testing.conformance", "--bmt-optimizer", "signum")
    # Starting other numbers of ranks would take most of the time.
    printed = pytest_of(plugin_folder, *kit, "-k", "not another_number")
    assert "Optimizer 'signum' of the plugin 'bmt-signum'" in printed, printed
    assert " failed" not in printed and " passed" in printed, printed


CHOOSE = """
import torch
import bmtrain as bmt

bmt.init_distributed(seed=0)
model = bmt.BMTrainModelWrapper(torch.nn.Sequential(torch.nn.Linear(4, 3)))
{block}
first = model.state_dict()["0.weight"].clone()
manager.backward(model(torch.ones(2, 4)).sum())
manager.step()
moved = (model.state_dict()["0.weight"] - first).abs()
bmt.print_rank(type(optimizer).__name__, round(moved.max().item(), 6))
"""


def test_the_optimizer_of_the_page_is_chosen_by_name(plugin_folder: Path) -> None:
    script = CHOOSE.format(block=code("docs/plugins.md", 2)).replace("seed=0", "device='cpu'")
    environment = {**os.environ, "PYTHONPATH": str(plugin_folder)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120
    )
    assert "Signum 0.001" in done.stdout, done.stdout + done.stderr


def test_hooks_of_a_run_are_called_as_the_page_shows() -> None:
    script = code("docs/plugins.md", 3)
    command = [sys.executable, "-c", script.replace("plugins=", "device='cpu', plugins=")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert re.search(r"^1 ranks ran for \d+ s$", done.stdout, re.MULTILINE), done.stderr
