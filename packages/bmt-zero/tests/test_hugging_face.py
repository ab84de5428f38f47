"""Hugging Face models from their configurations wrap, initialise and train as in one
plain process.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterator
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
from hf_models import MODELS, built, inputs, plain, train, wrapped
from meta_models import MemoryMeter, kept_bytes, whole_bytes, without_sums_of_first_values
from torch import nn
from transformers import DynamicCache, Trainer, TrainingArguments
from zero_models import grads_of, of_all_ranks

import bmt_core
from bmt_core import ConfigError
from bmt_core.run.runtime import rank, world_size
from bmt_testing import on_ranks
from bmt_zero import Block, BMTrainModelWrapper
from cells import cells

# By the number of ranks: the model, the levels of its Blocks, whether they recompute, and whether
# it is built on meta.
TRAININGS: dict[int, list[tuple[str, tuple[int, ...], bool, bool]]] = {
    1: [("gpt2", (3,), True, True), ("mixtral", (2, 0), False, False), ("t5", (3,), True, True)],
    2: [
        ("gpt2", (3, 2), False, True),
        ("gpt2", (1, 3), True, False),
        ("gpt2", (0, 3), True, True),
        ("llama", (3, 3), True, True),
        ("llama", (2, 0), False, False),
        ("t5", (3, 1), True, False),
        ("t5", (2, 3), False, True),
        ("mixtral", (3, 3), True, True),
        ("mixtral", (3, 1), False, False),
    ],
    4: [
        ("llama", (3, 2), True, False),
        ("mixtral", (3, 3), True, True),
        ("t5", (0, 3), False, True),
    ],
}


def assert_trained_alike(
    found: dict[str, Any], expected: dict[str, Any], what: object = ""
) -> None:
    found["loss"] = sum(of_all_ranks(found["loss"]))
    torch.testing.assert_close(
        found, expected, rtol=1e-4, atol=1e-6, msg=lambda text: f"{what}: {text}"
    )


@on_ranks(1, 2, 4, timeout=120)
def test_training_equals_plain_torch(world_size: int) -> None:
    for name, levels, use_checkpoint, on_meta in TRAININGS[world_size]:
        found = train(wrapped(name, levels, use_checkpoint, on_meta), [rank()], world_size)
        assert_trained_alike(
            found, plain(name, world_size, on_meta=on_meta), (name, levels, use_checkpoint, on_meta)
        )


@on_ranks(4)
@cells("name", MODELS)
def test_one_block_is_whole_at_a_time(name: str) -> None:
    with without_sums_of_first_values(), MemoryMeter() as meter:
        model = wrapped(name, (3,), True, True)
    kept = kept_bytes(model)
    assert meter.current >= kept  # the meter sees what it should
    blocks: list[Any] = [
        module._bmt_block for module in model.modules() if isinstance(module, Block)
    ]
    block = max(sum(group.flat.full_bytes for group in engine.state.groups) for engine in blocks)
    sent = 512 * (1 + world_size())  # what ranks send each other when they compare it
    assert whole_bytes(model) > 1.8 * block
    # Gloo's thread may let go of an exchange a moment after its end.
    assert 0.75 * block < meter.peak - kept < 1.02 * block + sent


def with_caches(model: nn.Module) -> list[Any]:
    prefix = DynamicCache()
    with torch.no_grad():
        model(input_ids=inputs(1, 0, 1)["input_ids"], past_key_values=prefix, use_cache=True)
    batch = inputs(0, 0, 1)
    found: list[Any] = []
    for cache in (None, prefix):
        model.zero_grad()
        length = 0 if cache is None else cache.get_seq_length()
        mask = torch.cat(
            [torch.ones(len(batch["labels"]), length, dtype=torch.int64), batch["attention_mask"]],
            dim=1,
        )
        output = model(**{**batch, "attention_mask": mask}, past_key_values=cache, use_cache=True)
        output.loss.backward()
        assert output.past_key_values.get_seq_length() == length + batch["labels"].shape[1]
        found.append((output.loss.detach(), grads_of(model)))
    return found


@on_ranks(1)
@cells("name", ["gpt2", "llama"])
def test_recomputation_finds_the_cache_as_forward_found_it(name: str) -> None:
    found, expected = (
        with_caches(model.train()) for model in (wrapped(name, (3,), True, False), built(name))
    )
    torch.testing.assert_close(found, expected)


@on_ranks(1)
@cells("name", MODELS)
def test_no_cache_is_built_where_blocks_recompute(name: str) -> None:
    def has_cache(model: nn.Module) -> bool:
        return model(**inputs(0, 0, 1)).past_key_values is not None

    model = wrapped(name, (3,), False, False).train()
    assert has_cache(built(name).train()) and has_cache(model)
    blocks: list[Any] = [module for module in model.modules() if isinstance(module, Block)]
    blocks[-1]._use_checkpoint = True  # one is enough
    assert not has_cache(model)
    with torch.no_grad():
        assert has_cache(model)


@on_ranks(2)
def test_the_model_s_switch_of_checkpointing_is_that_of_the_blocks() -> None:
    model: Any = wrapped("llama", (3,), True, False)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    every_second = functools.partial(model.activation_checkpointing_enable, every_n_layers=2)
    for switch, expected in (
        (model.activation_checkpointing_disable, [False, False]),
        (model.activation_checkpointing_enable, [True, True]),
        (every_second, [True, False]),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            switch()
        assert [block._use_checkpoint for block in blocks] == expected
        model.train()
        model(**inputs(0, rank(), 2)).loss.backward()


def packed_loss(model: Any) -> torch.Tensor:
    ids, places = inputs(0, 0, 1)["input_ids"][:1], torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    labels = ids.masked_fill(places == 0, -100)
    loss: torch.Tensor = model(
        input_ids=ids, position_ids=places, labels=labels, use_cache=False
    ).loss
    return loss.detach()


@on_ranks(2)
def test_packed_sequences_do_not_see_each_other_without_a_cache() -> None:
    plain = built("llama").train()
    ids = inputs(0, 0, 1)["input_ids"][:1]
    apart = [
        plain(input_ids=part, labels=part).loss * (part.shape[1] - 1)
        for part in (ids[:, :3], ids[:, 3:])
    ]
    expected = (torch.stack(apart).sum() / 6).detach()
    torch.testing.assert_close(packed_loss(plain), expected)
    model: Any = wrapped("llama", (3,), True, False).train()
    torch.testing.assert_close(packed_loss(model), expected)
    model.activation_checkpointing_disable()
    torch.testing.assert_close(packed_loss(model), expected)


@on_ranks(2)
def test_a_loss_on_hidden_states_reaches_the_blocks() -> None:
    plain, model = built("llama"), wrapped("llama", (3,), True, False)
    for each, part in ((plain, 0), (plain, 1), (model, rank())):
        output = each(**inputs(0, part, 2), output_hidden_states=True)
        (output.loss + output.hidden_states[1].square().sum()).backward()
    torch.testing.assert_close(grads_of(model), grads_of(plain), rtol=1e-4, atol=1e-6)


@on_ranks(2)
def test_a_wrapped_model_may_tie_its_weights_again() -> None:
    model: Any = BMTrainModelWrapper(built("gpt2"))
    assert model.lm_head._parameters["weight"] is model.transformer.wte._parameters["weight"]
    before = dict(model.named_parameters(remove_duplicate=False))
    model.tie_weights()
    after = dict(model.named_parameters(remove_duplicate=False))
    assert before.keys() == after.keys() and all(
        after[name] is parameter for name, parameter in before.items()
    )


# --- the Trainer and accelerate ---


@on_ranks(2)
def test_tie_weights_after_wrapping_ties_the_parameters() -> None:
    plain: Any = built("llama")
    model: Any = BMTrainModelWrapper(built("llama"))
    for each in (plain, model):
        each.config.tie_word_embeddings = True
        each.tie_weights()
    assert_trained_alike(train(model, [rank()], 2), train(plain, range(2), 2))


ROWS = [
    {key: value[row] for key, value in inputs(0, 0, 1).items() if key != "attention_mask"}
    for row in range(4)
]


@contextmanager
def as_torchrun_starts_ranks() -> Iterator[None]:
    """Inside, accelerate finds what it looks for, and knows nothing of it afterwards."""
    own, size = rank(), world_size()
    place = {"RANK": own, "LOCAL_RANK": own, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    found = {
        **{name: str(value) for name, value in place.items()},
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
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
    return Trainer(
        model, TrainingArguments(folder, **settings), train_dataset=ROWS, eval_dataset=ROWS
    )


@on_ranks(2)
def test_a_trainer_is_refused_with_the_way_out_and_evaluates(tmp_path: Path) -> None:
    plain: Any = built("llama").eval()
    batch = {key: torch.stack([row[key] for row in ROWS]) for key in ROWS[0]}
    losses = [
        plain(**{key: value[part] for key, value in batch.items()}).loss
        for part in (slice(0, 2), slice(2, 4))
    ]
    model = BMTrainModelWrapper(built("llama"))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with as_torchrun_starts_ranks():
        for call in (
            lambda: trainer(str(tmp_path), model).train(),
            lambda: Accelerator(cpu=True).prepare(model, optimizer),
        ):
            with pytest.raises(
                ConfigError,
                match="DistributedDataParallel would overwrite the parts of LlamaForCausalLM",
            ) as caught:
                call()
            assert "step by an OptimManager" in str(caught.value) and "docs/hugging-face.md" in str(
                caught.value
            )
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(optimizer)
        model(**inputs(0, rank(), 2)).loss.backward()
        with pytest.raises(
            ConfigError,
            match=r"OptimManager\(\)\.clip_grad_norm\(model\.parameters\(\), max_norm\)",
        ):
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        evaluated = trainer(str(tmp_path), model).evaluate()["eval_loss"]
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0)
    assert evaluated == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)


@on_ranks(2, init=None)
def test_training_arguments_come_after_init_distributed(tmp_path: Path) -> None:
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "1"})
    TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(
        ConfigError, match="call it before TrainingArguments or an Accelerator is made"
    ):
        bmt_core.init_distributed(device="cpu")
    torch.distributed.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
