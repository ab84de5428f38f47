"""The blocks of the guides run as they stand there: what a test prepares around a block, a reader
has.
"""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from beside_torch import whole
from document_code import blocks, code, printed_by, run
from test_pages import assert_prints
from torch import nn
from torch.optim.swa_utils import AveragedModel

import bmtrain as bmt
import cells
from bmt_testing import on_ranks, run_ranks

# --- inspect.md ---


def test_statistics_are_those_that_the_page_shows(tmp_path: Path) -> None:
    parameters, activations, error = blocks("docs/inspect.md", "text")
    script = code("docs/inspect.md", 3, 4, 5)
    printed, *_ = run_ranks(printed_by, 2, script, str(tmp_path), init=None)
    assert_prints(re.sub(" +$", "", printed, flags=re.MULTILINE), parameters + activations + error)


# --- optimizers.md ---


INPUTS = torch.arange(10 * 4 * 4.0).view(10, 4, 4).sin()


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    own: torch.Tensor = INPUTS[step].chunk(bmt.world_size())[bmt.rank()]
    loss: torch.Tensor = model(own).square().mean()
    return loss


def normed_step(self: torch.optim.Optimizer, closure: None = None) -> None:
    """Step by the gradient's direction, which parts of a tensor do not have."""
    with torch.no_grad():
        for p in self.param_groups[0]["params"]:
            if p.grad is not None and p.grad.norm() > 0:
                p.sub_(0.1 * p.grad / p.grad.norm())


class Normed(torch.optim.Optimizer):
    """Steps by the gradient's direction."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    step = normed_step


@on_ranks(2)
def test_an_optimizer_of_ones_own_trains_as_in_plain_torch() -> None:
    plain = nn.Sequential(nn.Linear(4, 4))
    model = bmt.BMTrainModelWrapper(copy.deepcopy(plain))
    optimizer = Normed(plain.parameters(), lr=0.01)
    for batch in INPUTS:
        plain(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    names = {"bmt": bmt, "model": model, "loss_of": loss_of, "MyOptimizer": Normed}
    run(code("docs/optimizers.md", 0), **names)
    found = [whole(p, p.detach()) for p in model.parameters()]
    torch.testing.assert_close(found, [p.detach() for p in plain.parameters()])


@on_ranks(2)
def test_an_optimizer_that_says_it_is_elementwise_is_not_tried() -> None:
    says = run(code("docs/optimizers.md", 4), torch=torch)["MyOptimizer"]
    model = bmt.BMTrainModelWrapper(nn.Sequential(nn.Linear(4, 4)))
    for base, is_taken_as_it_is in ((says, True), (torch.optim.Optimizer, False)):
        kind = type("Normed", (base,), {"step": normed_step})
        optimizer = kind(model.parameters(), {"lr": 0.1})
        manager = bmt.optim.OptimManager()
        manager.add_optimizer(optimizer)
        assert (manager.optimizers[0] is optimizer) == is_taken_as_it_is


@on_ranks(1, 2)
def test_gradients_without_the_scale_are_those_of_plain_torch() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    batch = torch.arange(16.0).view(4, 4).sin()
    plain(batch).square().mean().backward()
    expected = [p.grad.square() * 0.01 for p in plain.parameters() if p.grad is not None]
    plain.zero_grad()

    model = bmt.BMTrainModelWrapper(plain)
    manager = bmt.optim.OptimManager(loss_scale=2**10)
    manager.add_optimizer(bmt.optim.AdamW(model.parameters()))
    hessian = {p: torch.zeros_like(p) for p in model.parameters()}
    own = batch.chunk(bmt.world_size())[bmt.rank()]
    run(
        code("docs/optimizers.md", 5),
        manager=manager,
        model=model,
        hessian=hessian,
        sampled_loss=model(own).square().mean(),
    )
    found = [whole(p, hessian[p]) for p in model.parameters()]
    torch.testing.assert_close(found, expected)
    assert all(p.grad is None for p in model.parameters())


@on_ranks(2)
def test_an_average_of_updates_beside_the_forward_pass_is_that_of_plain_torch() -> None:
    plain = nn.Sequential(nn.Linear(4, 4))
    model = bmt.BMTrainModelWrapper(copy.deepcopy(plain))
    average = AveragedModel(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for step, batch in enumerate(INPUTS):
        plain(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4:
            average.update_parameters(plain)

    names = run(code("docs/faster.md", 0), bmt=bmt, model=model, loss_of=loss_of)
    found = [whole(p, p.detach()) for p in names["average"].module.parameters()]
    torch.testing.assert_close(found, [p.detach() for p in average.module.parameters()])


# --- pipelines.md ---


class Plain(nn.Module):
    """The models of the page in one process of plain torch."""

    def __init__(self, layer: type[nn.Module], head: nn.Module | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(layer() for _ in range(24))
        self.head = head

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return hidden @ self.embedding.weight.t() if self.head is None else self.head(hidden)


@on_ranks(2, init=None)
def test_both_pipelines_of_the_page_compute_what_plain_torch_does(tmp_path: Path) -> None:
    drawn = torch.Generator().manual_seed(1)
    ids = torch.randint(64, (8, 5), generator=drawn)
    mask = torch.rand(8, 5, 1, generator=drawn)
    targets = torch.randint(64, (8, 5), generator=drawn)

    names = run(code("docs/pipelines.md", 0), ids=ids, mask=mask, targets=targets, data=range(12))
    plain = Plain(names["Layer"], nn.Linear(16, 64))
    load_saved(plain, names["model"], tmp_path / "drop-in.pt")
    own = slice(4 * bmt.rank(), 4 * bmt.rank() + 4)
    torch.testing.assert_close(names["model"](ids[own], mask[own]), plain(ids[own], mask[own]))

    made, line, step = code("docs/pipelines.md", 1).partition("inputs = ")
    names = run(made, **names)
    plain = Plain(names["Layer"], None)
    load_saved(plain, names["model"], tmp_path / "inside.pt")
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    expected = names["loss_fn"](plain(ids, mask), targets)
    expected.backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    optimizer.step()
    names = run(line + step, **names)
    torch.testing.assert_close(names["loss"], expected.detach())
    trained = copy.deepcopy(plain)
    load_saved(trained, names["model"], tmp_path / "inside.pt")
    torch.testing.assert_close(trained.state_dict(), plain.state_dict(), rtol=1e-3, atol=1e-5)

    names = run(code("docs/pipelines.md", 2), **names)
    assert (names["sampler"].num_replicas, names["sampler"].rank) == (1, 0)

    targets[0] = targets[5:, 2:] = -100
    names = run(code("docs/pipelines.md", 3), **names)
    logits = trained(ids, mask).flatten(0, 1)
    expected = nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=-100)
    torch.testing.assert_close(names["loss"], expected.detach())


def load_saved(plain: nn.Module, model: nn.Module, path: Path) -> None:
    """Give ``plain`` the parameters of ``model``, by a file. Collective."""
    bmt.save(model, str(path))
    bmt.synchronize()
    plain.load_state_dict(torch.load(path))


# --- mixed-precision.md: float8 ---


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_layers_in_float8_train(device: str) -> None:
    pytest.importorskip("torchao", reason="float8 layers are torchao's")
    (losses,) = run_ranks(losses_in_float8, 1, device, init={"device": device}, timeout=120)
    assert losses[-1] < losses[0] - 0.5


def losses_in_float8(device: str) -> list[float]:
    from compile_models import from_new
    from float8_models import Gpt, batch

    script = code("docs/mixed-precision.md", 5)
    if device == "cpu":  # which rounds to float8 and multiplies in float32
        line = "convert_to_float8_training(layer"
        emulated = f"{line}, config=torchao.float8.Float8LinearConfig(emulate=True)"
        script = "import torchao.float8\n" + script.replace(line, emulated)
    with from_new("aot_eager" if device == "cpu" else "inductor"):
        model = run(script, bmt=bmt, model=Gpt().to(device).bfloat16())["model"]
        assert [type(layer.up).__name__ for layer in model.layers] == ["Float8Linear"] * 4
        optimizer = bmt.optim.AdamW(model.parameters(), lr=1e-2)
        manager = bmt.optim.OptimManager()
        manager.add_optimizer(optimizer)
        losses = []
        for _ in range(10):
            loss = model(batch(0).to(device))
            manager.backward(loss)
            manager.step()
            manager.zero_grad()
            losses.append(loss.item())
    return losses


# --- tensor-parallel.md ---


def logits_of_the_split_models(directory: str, ids: torch.Tensor) -> list[Any]:
    names = run(code("docs/tensor-parallel.md", 0), directory=directory, ids=ids)
    again = run(code("docs/tensor-parallel.md", 1), **names)
    with torch.no_grad():
        logits = [each(input_ids=ids).logits for each in (names["model"], again["model"])]
    bmt.shutdown()
    return [names["loss"].detach(), *logits]


def test_a_model_of_hugging_face_is_split_as_the_page_says(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the models are transformers'")
    plain = tiny_llama(transformers)
    plain.save_pretrained(tmp_path)
    ids = torch.arange(16).view(2, 8) % 40
    with torch.no_grad():
        expected = [plain(input_ids=ids, labels=ids).loss, *[plain(input_ids=ids).logits] * 2]
    for found in run_ranks(logits_of_the_split_models, 2, str(tmp_path), ids, init=None):
        torch.testing.assert_close(found, expected)


def tiny_llama(transformers: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        **options,
    )
    return transformers.LlamaForCausalLM(config)


# --- hugging-face.md ---


def loaded_from_the_hubs_files(directory: str, ids: torch.Tensor) -> Any:
    model = run(code("docs/hugging-face.md", 3), directory=directory)["model"]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    bmt.shutdown()
    return logits


def test_a_model_on_the_meta_device_gets_the_hubs_values(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the models are transformers'")
    plain = tiny_llama(transformers).bfloat16()
    plain.save_pretrained(tmp_path)
    ids = torch.arange(16).view(2, 8) % 40
    with torch.no_grad():
        expected = plain(input_ids=ids).logits
    for found in run_ranks(loaded_from_the_hubs_files, 2, str(tmp_path), ids, init=None):
        torch.testing.assert_close(found, expected)


@on_ranks(2)
def test_adapters_are_saved_whole(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the models are transformers'")
    peft = pytest.importorskip("peft", reason="adapters are PEFT's")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    plain = peft.get_peft_model(tiny_llama(transformers), config)
    expected = {name: p.detach().clone() for name, p in plain.named_parameters() if "lora" in name}
    run(code("docs/hugging-face.md", 2), tmp_path, model=bmt.BMTrainModelWrapper(plain), bmt=bmt)
    bmt.synchronize()
    read = peft.PeftModel.from_pretrained(tiny_llama(transformers), tmp_path / "adapters")
    found = {name: p.detach() for name, p in read.named_parameters() if "lora" in name}
    torch.testing.assert_close(found, expected)


def trained_by_the_trainer(folder: str, name: str) -> list[dict[str, float]]:
    from trainer_runs import accelerate_forgets

    ids = [[(start + step) % 40 for step in range(8)] for start in range(40)]
    rows = [{"input_ids": row, "labels": row} for row in ids]
    with accelerate_forgets():
        names = run(code("docs/hugging-face.md", 0), folder, name=name, train=rows, held_out=rows)
    log: list[dict[str, float]] = names["trainer"].state.log_history
    return log


def test_the_trainer_of_the_page_trains(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the Trainer is transformers'")
    pytest.importorskip("accelerate", reason="the Trainer needs it")
    tiny_llama(transformers).save_pretrained(tmp_path / "plain")
    # The plain Trainer is on the CPU, as this run is, where there is no GPU that it sees.
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    plain = str(tmp_path / "plain")
    log, *others = run_ranks(trained_by_the_trainer, 2, str(tmp_path), plain, env=hidden)
    losses = [entry["eval_loss"] for entry in log if "eval_loss" in entry]
    assert len(losses) == 3 and losses[-1] < losses[0]
    for other in others:
        assert [entry["eval_loss"] for entry in other if "eval_loss" in entry] == losses
    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert trained.config.vocab_size == 40


def trained_to_prefer(folder: str) -> list[float]:
    transformers: Any = pytest.importorskip("transformers")
    datasets: Any = pytest.importorskip("datasets")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from trainer_runs import accelerate_forgets

    words = Tokenizer(models.WordLevel({"<end>": 0, **{w: i + 1 for i, w in enumerate("abcdefg")}}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<end>", pad_token="<end>"
    )
    pair = {"prompt": "a b c", "chosen": " d e", "rejected": " f g"}
    names = {
        "load_model": lambda: tiny_llama(transformers, pad_token_id=0, eos_token_id=0),
        "pairs": datasets.Dataset.from_list([pair] * 32),
        "tokenizer": tokenizer,
    }
    # A checkpoint has the arguments, whose class must be in a module.
    source = code("docs/hugging-face.md", 1).replace('("out", ', '("out", save_strategy="no", ')
    with accelerate_forgets():
        trainer = run(source, folder, **names)["trainer"]
    log: list[dict[str, float]] = trainer.state.log_history
    return [entry["train_loss"] for entry in log if "train_loss" in entry]


def test_a_trainer_of_trl_and_bmt_trains(tmp_path: Path) -> None:
    for name in ("transformers", "trl", "peft"):
        pytest.importorskip(name)
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    first, second = run_ranks(
        trained_to_prefer, 2, str(tmp_path), init=None, env=hidden, timeout=120
    )
    assert first == second and first[0] <= 0.6932


@on_ranks(2)
def test_the_loop_in_place_of_the_trainer_trains(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the models are transformers'")
    if bmt.rank() == 0:
        tiny_llama(transformers).save_pretrained(tmp_path)
    bmt.synchronize()
    ids = torch.arange(32).view(4, 8) % 40
    names = run(
        code("docs/hugging-face.md", 4),
        bmt=bmt,
        torch=torch,
        AutoModelForCausalLM=transformers.AutoModelForCausalLM,
        name=tmp_path,
        loader=[{"input_ids": ids, "labels": ids}] * 60,
    )
    assert names["optimizer"].param_groups[0]["weight_decay"] == 0.1
    first = tiny_llama(transformers).bfloat16()(input_ids=ids, labels=ids).loss
    assert bmt.mean_loss(names["loss_sum"], count=names["tokens"]) < first


# --- hooks.md ---


@on_ranks(2, init=None)
def test_the_axis_of_the_page_is_in_the_grid() -> None:
    axis = run(code("docs/hooks.md", 0))
    plugin = types.SimpleNamespace(bmt_mesh_axes=axis["bmt_mesh_axes"])
    bmt.init_distributed(device="cpu", plugins=[plugin], axis_sizes={"ep": 2})
    topology = bmt.current().topology
    assert (topology.axis_size("ep"), topology.axis_size("dp")) == (2, 1)
    assert topology.axis_rank("ep") == bmt.rank()
    bmt.shutdown()


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.images = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
        self.texts = nn.Linear(4, 3)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images(rows[:, :5]), self.texts(rows[:, 5:])


def loss_of_pairs(images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
    """The loss of the page in one process."""
    logits = images @ texts.T
    chosen = logits.log_softmax(1).diagonal() + logits.log_softmax(0).diagonal()
    return -chosen.mean() / 2


def train_towers(
    model: nn.Module, loss_fn: Callable[..., torch.Tensor], rows: slice, manager: Any = None
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Take three steps with ``rows`` of each batch; return the losses and the model's state."""
    losses = []
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    if manager is not None:
        manager.add_optimizer(optimizer)
        optimizer = manager
    for step in range(3):
        batch = torch.arange(72.0, dtype=torch.float64).view(8, 9).mul(step + 1.3).sin()
        losses.append(loss_fn(*model(batch[rows])))
        optimizer.zero_grad()
        losses[-1].backward() if manager is None else manager.backward(losses[-1])
        optimizer.step()
    return [loss.detach() for loss in losses], dict(model.state_dict())


@on_ranks(1, 2, 4, init=None)
@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("is_managed", [False, True])
def test_the_contrastive_loss_of_the_page_is_that_of_the_whole_batch(
    world_size: int, ep: int, is_managed: bool
) -> None:
    plugin = types.SimpleNamespace(**run(code("docs/hooks.md", 0)))
    bmt.init_distributed(
        device="cpu",
        plugins=[plugin],
        axis_sizes={"ep": min(ep, world_size)},
        gradients="sum" if is_managed else "mean",
    )
    torch.manual_seed(0)
    model = TwoTowers().double()
    expected = train_towers(copy.deepcopy(model), loss_of_pairs, slice(None))
    model.images[0] = bmt.Block(model.images[0])
    rows = slice(bmt.rank() * 8 // world_size, (bmt.rank() + 1) * 8 // world_size)
    found = train_towers(
        bmt.BMTrainModelWrapper(model),
        run(code("docs/hooks.md", 1))["contrastive_loss"],
        rows,
        bmt.optim.OptimManager() if is_managed else None,
    )
    torch.testing.assert_close(found, expected)
    bmt.shutdown()


@pytest.mark.slow("bmt-checkpoint", "bmt-kernels", "bmt-testing", "docs/")
def test_kernels_and_format_of_the_page_pass_their_kits(tmp_path: Path) -> None:
    (tmp_path / "page_kernels.py").write_text(code("docs/hooks.md", 2))
    (tmp_path / "page_format.py").write_text(code("docs/hooks.md", 3))
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {Path(cells.__file__).parent}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["--pyargs", "bmt_testing.conformance"]
    command += ["--bmt-plugin", "page_kernels", "--bmt-kernels", "mine"]
    command += ["--bmt-plugin", "page_format", "--bmt-checkpoint-format", "json"]
    command += ["-k", "not what_ranks_save"]  # starting ranks would take most of the time
    done = subprocess.run(
        command, cwd=tmp_path, env=with_path(tmp_path), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| Scale multiplies in float32 and rounds once | passes |" in done.stdout
    assert "| A file that was cut off is an error | passes |" in done.stdout


def with_path(folder: Path) -> dict[str, str]:
    """Return the environment, with ``folder`` among those from which Python imports."""
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def test_the_command_of_the_page_is_one_of_the_program(tmp_path: Path) -> None:
    (tmp_path / "page_command.py").write_text(code("docs/hooks.md", 4))
    installed = tmp_path / "page_command-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: page-command\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[bmt]\npage-command = page_command\n")
    command = [sys.executable, "-m", "bmtrain", "greet", "Ada"]
    done = subprocess.run(
        command, env=with_path(tmp_path), capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "Hello, Ada.\n"), done.stderr


# --- how tests on several ranks are written ---

IMPORTS = """
import math
import pytest
import torch
from bmt_core.run.collectives import all_reduce
from cells import cells
"""


@pytest.mark.slow("bmt-testing", "docs/", "CONTRIBUTING.md")
def test_tests_on_several_ranks_pass_as_the_documents_write_them(tmp_path: Path) -> None:
    page = code("docs/verify.md", 2)
    (tmp_path / "test_pages.py").write_text(IMPORTS + page + code("CONTRIBUTING.md"))
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {Path(cells.__file__).parent}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert "6 passed" in done.stdout, done.stdout + done.stderr


# --- large-models.md ---


def values_of_a_model_made_on_the_meta_device() -> dict[str, torch.Tensor]:
    # The page's sizes would take 140 GB.
    script = code("docs/large-models.md", 0)
    for large, small in (("=80", "=2"), ("=8192", "=32"), ("=28672", "=64")):
        assert large in script
        script = script.replace(large, small)
    values = run(script)["model"].state_dict()
    bmt.shutdown()
    return dict(values)


def test_a_model_on_the_meta_device_gets_the_same_values_on_any_number_of_ranks() -> None:
    pytest.importorskip("transformers", reason="the model is one of transformers")
    (expected,) = run_ranks(values_of_a_model_made_on_the_meta_device, 1, init=None)
    assert len(expected) > 20 and all(
        value.std() > 0 for value in expected.values() if value.dim() > 1
    )
    for found in run_ranks(values_of_a_model_made_on_the_meta_device, 2, init=None):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
