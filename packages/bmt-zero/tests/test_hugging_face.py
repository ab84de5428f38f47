"""Hugging Face models from their configurations wrap, initialise and train as in one plain process."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from hf_models import MODELS, built, initialized_by_hugging_face, inputs, plain, sharded, train, wrapped
from meta_models import MemoryMeter, kept_bytes, whole_bytes, without_sums_of_first_values
from torch import nn
from transformers import DynamicCache, Trainer, TrainingArguments

import bmt_core
from bmt_checkpoint import load, save
from bmt_core.errors import ConfigError
from bmt_core.run import runtime
from bmt_testing import run_ranks
from bmt_zero import Block, BMTrainModelWrapper


@pytest.mark.parametrize(
    ("world_size", "name", "levels", "use_checkpoint", "on_meta"),
    [
        (1, "gpt2", (3,), True, True),
        (1, "mixtral", (2, 0), False, False),
        (1, "t5", (3,), True, True),
        (2, "gpt2", (3, 2), False, True),
        (2, "gpt2", (1, 3), True, False),
        (2, "gpt2", (0, 3), True, True),
        (2, "llama", (3, 3), True, True),
        (2, "llama", (2, 0), False, False),
        (2, "t5", (3, 1), True, False),
        (2, "t5", (2, 3), False, True),
        (2, "mixtral", (3, 3), True, True),
        (2, "mixtral", (3, 1), False, False),
        (4, "llama", (3, 2), True, False),
        (4, "mixtral", (3, 3), True, True),
        (4, "t5", (0, 3), False, True),
    ],
)
def test_training_equals_plain_torch(
    world_size: int, name: str, levels: tuple[int, ...], use_checkpoint: bool, on_meta: bool
) -> None:
    expected = plain(name, world_size, on_meta=on_meta)
    results = run_ranks(sharded, world_size, name, levels, use_checkpoint, on_meta)
    torch.testing.assert_close(sum(result["loss"] for result in results), expected["loss"])
    for result in results:
        torch.testing.assert_close(result["grad"], expected["grad"], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(result["state"], expected["state"], rtol=1e-4, atol=1e-6)


def initial(name: str) -> Any:
    model = wrapped(name, (3,), True, True)
    assert any(isinstance(module, Block) for module in model.modules())
    names = [path for path, _ in model.named_parameters()]
    return names, {**model.state_dict(), **dict(model.named_buffers())}


@pytest.mark.parametrize("name", MODELS)
def test_values_from_meta_are_those_of_the_model_itself(name: str) -> None:
    model = initialized_by_hugging_face(name)
    for names, values in run_ranks(initial, 2, name):
        assert names == [path for path, _ in model.named_parameters()]
        expected = {**model.state_dict(), **dict(model.named_buffers())}
        torch.testing.assert_close(values, expected, rtol=0, atol=0)


def frozen_below(model: nn.Module) -> nn.Module:
    """All but the last block and the final norm frozen, the tied embedding too: what a light fine-tuning trains."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("transformer.h.1", "transformer.ln_f")))
    return model


def fine_tuned(use_checkpoint: bool, from_level: int) -> dict[str, Any]:
    model = frozen_below(wrapped("gpt2", (from_level, 3), use_checkpoint, True))
    return train(model, [runtime.rank()], runtime.world_size())


@pytest.mark.parametrize(("use_checkpoint", "first_level"), [(True, 3), (False, 0)])
def test_frozen_parts_stay_and_the_others_train(use_checkpoint: bool, first_level: int) -> None:
    expected = train(frozen_below(initialized_by_hugging_face("gpt2")), range(2), 2)
    assert sum(grad is not None for grad in expected["grad"].values()) == 14
    for result in run_ranks(fine_tuned, 2, use_checkpoint, first_level):
        torch.testing.assert_close(result["grad"], expected["grad"], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(result["state"], expected["state"], rtol=1e-4, atol=1e-6)


def memory(name: str) -> tuple[float, float, float]:
    """In sizes of a Block: the most beside what is kept, the whole model, and what ranks send each other when they compare it."""
    with without_sums_of_first_values(), MemoryMeter() as meter:
        model = wrapped(name, (3,), True, True)
    own = kept_bytes(model)
    assert meter.current >= own  # the meter sees what it should
    blocks = [module._bmt_block for module in model.modules() if isinstance(module, Block)]
    block = max(sum(group.flat.full_bytes for group in engine.state.groups) for engine in blocks)
    sent = 512 * (1 + runtime.world_size())
    return (meter.peak - own) / block, whole_bytes(model) / block, sent / block


@pytest.mark.parametrize("name", MODELS)
def test_one_block_is_whole_at_a_time(name: str) -> None:
    for blocks, model, sent in run_ranks(memory, 4, name):
        assert model > 1.8
        # Gloo's thread may let go of an exchange a moment after its end.
        assert 0.75 < blocks < 1.02 + sent


def from_checkpoint(name: str, path: str) -> Any:
    with torch.device("meta"):
        model: Any = MODELS[name]()
    BMTrainModelWrapper(model, init=False)
    with pytest.raises(ConfigError, match="have no values"):
        model(**inputs(0, 0, 1))
    load(model, path)
    return model.eval()(**inputs(0, 0, 1)).logits.detach(), dict(model.named_buffers())


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_of_the_plain_model_fills_it(name: str, tmp_path: Path) -> None:
    model: Any = built(name).eval()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    # In the names of the model: by default transformers renames Mixtral's experts when it saves, and back when it loads.
    model.save_pretrained(tmp_path / "pretrained", max_shard_size="10KB", save_original_format=False)
    assert (tmp_path / "pretrained" / "model.safetensors.index.json").is_file()
    expected = model(**inputs(0, 0, 1)).logits.detach()
    for path in ("model.pt", "pretrained"):
        for logits, buffers in run_ranks(from_checkpoint, 2, name, str(tmp_path / path)):
            torch.testing.assert_close(logits, expected)
            torch.testing.assert_close(buffers, dict(model.named_buffers()), rtol=0, atol=0)


def save_directory(name: str, path: str) -> None:
    save(wrapped(name, (3,), True, False), path)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_from_pretrained_reads_a_directory_that_four_ranks_wrote(name: str, tmp_path: Path) -> None:
    model: Any = built(name)
    model.config.save_pretrained(tmp_path)
    run_ranks(save_directory, 4, name, str(tmp_path))
    assert len(list(tmp_path.glob("*.safetensors"))) == 4
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


def caches(name: str) -> list[Any]:
    """Loss and gradients with a cache that was asked for, and one that holds a prefix."""
    model = wrapped(name, (3,), True, False)
    model.train()
    return with_caches(model)


def with_caches(model: nn.Module) -> list[Any]:
    prefix = DynamicCache()
    with torch.no_grad():
        model(input_ids=inputs(1, 0, 1)["input_ids"], past_key_values=prefix, use_cache=True)
    batch = inputs(0, 0, 1)
    found: list[Any] = []
    for cache in (None, prefix):
        model.zero_grad()
        length = 0 if cache is None else cache.get_seq_length()
        mask = torch.cat([torch.ones(len(batch["labels"]), length, dtype=torch.int64), batch["attention_mask"]], dim=1)
        output = model(**{**batch, "attention_mask": mask}, past_key_values=cache, use_cache=True)
        output.loss.backward()
        assert output.past_key_values.get_seq_length() == length + batch["labels"].shape[1]
        found.append((output.loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]))  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_recomputation_finds_the_cache_as_forward_found_it(name: str) -> None:
    model = built(name)
    model.train()
    for results in run_ranks(caches, 1, name):
        for (loss, grads), (expected_loss, expected) in zip(results, with_caches(model), strict=True):
            torch.testing.assert_close(loss, expected_loss)
            torch.testing.assert_close([grad.flatten() for grad in grads], [grad.flatten() for grad in expected])


def unasked(name: str) -> list[bool]:
    """Whether a cache comes without asking: training without and with recomputation, and without gradients."""
    model = wrapped(name, (3,), False, False)
    model.train()
    found = [model(**inputs(0, 0, 1)).past_key_values is not None]
    blocks: list[Any] = [module for module in model.modules() if isinstance(module, Block)]
    blocks[-1]._use_checkpoint = True  # one is enough
    found.append(model(**inputs(0, 0, 1)).past_key_values is not None)
    with torch.no_grad():
        found.append(model(**inputs(0, 0, 1)).past_key_values is not None)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_no_cache_is_built_where_blocks_recompute(name: str) -> None:
    assert built(name).train()(**inputs(0, 0, 1)).past_key_values is not None
    assert run_ranks(unasked, 1, name) == [[True, False, True]]


def switches() -> list[list[bool]]:
    model: Any = wrapped("llama", (3,), True, False)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    every_second = functools.partial(model.activation_checkpointing_enable, every_n_layers=2)
    found = []
    for switch in (model.activation_checkpointing_disable, model.activation_checkpointing_enable, every_second):
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            switch()
        found.append([block._use_checkpoint for block in blocks])
        model.train()
        model(**inputs(0, runtime.rank(), 2)).loss.backward()
    return found


def test_the_model_s_switch_of_checkpointing_is_that_of_the_blocks() -> None:
    assert run_ranks(switches, 2) == [[[False, False], [True, True], [True, False]]] * 2


def packed_loss(model: Any) -> torch.Tensor:
    ids, places = inputs(0, 0, 1)["input_ids"][:1], torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    labels = ids.masked_fill(places == 0, -100)
    loss: torch.Tensor = model(input_ids=ids, position_ids=places, labels=labels, use_cache=False).loss
    return loss.detach()


def packed() -> list[torch.Tensor]:
    model: Any = wrapped("llama", (3,), True, False).train()
    found = [packed_loss(model)]
    model.activation_checkpointing_disable()
    return [*found, packed_loss(model)]


def test_packed_sequences_do_not_see_each_other_without_a_cache() -> None:
    model = built("llama").train()
    ids = inputs(0, 0, 1)["input_ids"][:1]
    apart = [model(input_ids=part, labels=part).loss * (part.shape[1] - 1) for part in (ids[:, :3], ids[:, 3:])]
    expected = (torch.stack(apart).sum() / 6).detach()
    torch.testing.assert_close(packed_loss(model), expected)
    for found in run_ranks(packed, 2):
        torch.testing.assert_close(found, [expected, expected])


def generated(path: str) -> Any:
    model: Any = wrapped("llama", (3,), True, False)
    model.eval()
    save(model, path)
    ids = inputs(0, 0, 1)["input_ids"]
    return model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)


def test_a_wrapped_model_generates_and_is_saved_as_the_plain_one(tmp_path: Path) -> None:
    model: Any = built("llama").eval()
    expected = model.generate(inputs(0, 0, 1)["input_ids"], max_new_tokens=4, do_sample=False, eos_token_id=None)
    for tokens in run_ranks(generated, 2, str(tmp_path / "model.pt")):
        assert tokens.tolist() == expected.tolist()
    model.load_state_dict(torch.load(tmp_path / "model.pt"))


def hidden_states() -> Any:
    model: Any = wrapped("llama", (3,), True, False)
    output = model(**inputs(0, runtime.rank(), 2), output_hidden_states=True)
    (output.loss + output.hidden_states[1].square().sum()).backward()
    parameters = dict(model.named_parameters())
    return {name: p.gather_like(p.grad) for name, p in parameters.items()}


def test_a_loss_on_hidden_states_reaches_the_blocks() -> None:
    model: Any = built("llama")
    for part in range(2):
        output = model(**inputs(0, part, 2), output_hidden_states=True)
        (output.loss + output.hidden_states[1].square().sum()).backward()
    for result in run_ranks(hidden_states, 2):
        torch.testing.assert_close(result, {name: p.grad for name, p in model.named_parameters()}, rtol=1e-4, atol=1e-6)


def rewrapped() -> bool:
    model = BMTrainModelWrapper(built("gpt2"))
    tied: Any = model
    return tied.lm_head._parameters["weight"] is tied.transformer.wte._parameters["weight"]


def test_tied_embeddings_stay_tied() -> None:
    assert run_ranks(rewrapped, 2) == [True, True]


# --- the Trainer and accelerate ---

ROWS = [{key: value[row] for key, value in inputs(0, 0, 1).items() if key != "attention_mask"} for row in range(4)]


@contextmanager
def as_torchrun_starts_ranks() -> Iterator[None]:
    """Inside, accelerate finds what it looks for, and knows nothing of it afterwards."""
    rank, size = runtime.rank(), runtime.world_size()
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    found = {**{name: str(value) for name, value in place.items()}, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with mock.patch.dict(os.environ, found):
        yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def trainer(folder: str, model: Any) -> Any:
    settings = {
        "max_steps": 2,
        "per_device_train_batch_size": 1,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": [],
    }
    return Trainer(model, TrainingArguments(folder, **settings), train_dataset=ROWS, eval_dataset=ROWS)


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as raised:
        call()
    return str(raised.value)


def around_a_wrapped_model(folder: str) -> tuple[list[str], str, float]:
    model = BMTrainModelWrapper(built("llama"))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with as_torchrun_starts_ranks():
        wrapping = [
            error_of(lambda: trainer(folder, model).train()),
            error_of(lambda: Accelerator(cpu=True).prepare(model, optimizer)),
        ]
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(optimizer)
        model(**inputs(0, runtime.rank(), runtime.world_size())).loss.backward()
        clipping = error_of(lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0))
        found = trainer(folder, model).evaluate()["eval_loss"]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    return wrapping, clipping, found


def test_a_trainer_is_refused_with_the_way_out_and_evaluates(tmp_path: Path) -> None:
    model: Any = built("llama").eval()
    batch = {key: torch.stack([row[key] for row in ROWS]) for key in ROWS[0]}
    losses = [model(**{key: value[part] for key, value in batch.items()}).loss for part in (slice(0, 2), slice(2, 4))]
    expected = torch.stack(losses).mean().item()
    for wrapping, clipping, found in run_ranks(around_a_wrapped_model, 2, str(tmp_path)):
        for text in wrapping:
            assert "DistributedDataParallel would overwrite the parts of LlamaForCausalLM" in text
            assert "step by an OptimManager" in text and "docs/hugging-face.md" in text
        assert "OptimManager().clip_grad_norm(model.parameters(), max_norm)" in clipping
        assert found == pytest.approx(expected, rel=1e-5)


def tied_again(name: str) -> bool:
    model: Any = BMTrainModelWrapper(built(name))
    before = [(name, id(parameter)) for name, parameter in model.named_parameters(remove_duplicate=False)]
    model.tie_weights()
    return before == [(name, id(parameter)) for name, parameter in model.named_parameters(remove_duplicate=False)]


def test_a_wrapped_model_may_tie_its_weights_again() -> None:
    assert run_ranks(tied_again, 2, "gpt2") == [True, True]


def tied_after_wrapping() -> Any:
    model: Any = BMTrainModelWrapper(built("llama"))
    model.config.tie_word_embeddings = True
    model.tie_weights()
    return train(model, [runtime.rank()], runtime.world_size())


def test_tie_weights_after_wrapping_ties_the_parameters() -> None:
    model: Any = built("llama")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    expected = train(model, range(2), 2)
    for result in run_ranks(tied_after_wrapping, 2):
        torch.testing.assert_close(result["state"], expected["state"], rtol=1e-4, atol=1e-6)


def after_training_arguments(folder: str) -> str:
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "1"})
    TrainingArguments(folder, use_cpu=True, report_to=[])
    with pytest.raises(ConfigError) as raised:
        bmt_core.init_distributed(device="cpu")
    torch.distributed.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
    return str(raised.value)


def test_training_arguments_come_after_init_distributed(tmp_path: Path) -> None:
    for text in run_ranks(after_training_arguments, 2, str(tmp_path), init=None):
        assert "call it before TrainingArguments or an Accelerator is made" in text
