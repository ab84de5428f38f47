"""Trainers of other libraries with ``bmt_hf.Trainer`` as a second base, in either order of the two:
their losses, gradient norms and metrics are those of one process.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("trl")
pytest.importorskip("peft")

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

import datasets
import torch
import transformers
import trl
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from trainer_runs import accelerate_forgets, trained, without_times

import bmt_hf
from bmt_testing import run_ranks
from bmt_zero import BMTrainModelWrapper

SETTINGS = {
    "max_steps": 3,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "bf16": False,
    "use_cpu": True,
}
SIZES = {"vocab_size": 257, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
TEXTS = [
    "".join(chr(97 + (i * 7 + j * (i % 5 + 1)) % 26) for j in range(5 + i % 7)) for i in range(32)
]


def tokenizer() -> Any:
    words = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<end>", pad_token="<end>"
    )


def llama(seed: int = 0, kind: Any = transformers.LlamaForCausalLM, **options: Any) -> Any:
    torch.manual_seed(seed)
    ends = {"pad_token_id": 0, "eos_token_id": 0, "bos_token_id": 0}
    return kind(transformers.LlamaConfig(**SIZES, **ends, num_attention_heads=2, **options))


def fine_tuning(wrap: Any) -> Any:
    rows = [{"text": text} for text in TEXTS]
    return trl.SFTTrainer, trl.SFTConfig, {}, {"model": llama()}, rows


def packed_fine_tuning(wrap: Any) -> Any:
    rows = [{"text": text} for text in TEXTS * 2]
    options = {"packing": True, "max_length": 16}
    return trl.SFTTrainer, trl.SFTConfig, options, {"model": llama()}, rows


def preferences() -> list[dict[str, str]]:
    return [{"prompt": t, "chosen": t[::-1], "rejected": t[1:] + "z"} for t in TEXTS]


def preferred_to_a_reference(wrap: Any) -> Any:
    given = {"model": llama(), "ref_model": wrap(llama(1))}
    return trl.DPOTrainer, trl.DPOConfig, {}, given, preferences()


def preferred_to_no_adapter(wrap: Any) -> Any:
    lora = LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    given = {"model": wrap(llama()), "peft_config": lora}
    return trl.DPOTrainer, trl.DPOConfig, {}, given, preferences()


def rewards(wrap: Any) -> Any:
    model = llama(kind=transformers.LlamaForSequenceClassification, num_labels=1)
    rows = [{"chosen": t + t[::-1], "rejected": t + "zz"} for t in TEXTS]
    return trl.RewardTrainer, trl.RewardConfig, {}, {"model": model}, rows


CASES = {
    case.__name__: case
    for case in (
        fine_tuning,
        packed_fine_tuning,
        preferred_to_a_reference,
        preferred_to_no_adapter,
        rewards,
    )
}


def both(other: Any, own: Any, order: str) -> Any:
    """A class of both, in this module, where a checkpoint's arguments look for theirs."""
    name = f"{other.__name__}, {order}"
    bases = (other, own) if order == "other first" else (own, other)
    return globals().setdefault(name, type(name, bases, {"__module__": __name__}))


def trainer_of(case: str, folder: str, order: str, rows: int, **options: Any) -> Any:
    """The plain trainer, or one of both classes in the given order."""
    datasets.disable_progress_bars()
    is_plain = order == "plain"
    kind, config, of_case, given, data = CASES[case](
        (lambda model: model) if is_plain else BMTrainModelWrapper
    )
    if not is_plain:
        kind = both(kind, bmt_hf.Trainer, order)
        config = dataclass(both(config, bmt_hf.TrainingArguments, order))
    settings = {**SETTINGS, **of_case, "per_device_train_batch_size": rows, **options}
    torch.manual_seed(2)
    return kind(
        args=config(folder, **settings),
        train_dataset=datasets.Dataset.from_list(data),
        processing_class=tokenizer(),
        **given,
    )


def without_flos(log: list[dict[str, float]]) -> list[dict[str, float]]:
    """Without what depends on how far each rank's micro-batches are padded."""
    return [{key: line[key] for key in line if key != "total_flos"} for line in log]


# Each case in one order, and the first in both.
ORDERS = [("fine_tuning", "bmt first"), *zip(CASES, ["other first", "bmt first"] * 3, strict=False)]


def all_by_bmt(folder: str) -> dict[tuple[str, str], Any]:
    with accelerate_forgets():
        return {
            (case, order): trained(trainer_of(case, folder, order, 2)) for case, order in ORDERS
        }


def test_trainers_of_trl_give_the_numbers_of_one_process(tmp_path: Path) -> None:
    expected = {}
    for case in CASES:
        with accelerate_forgets():
            expected[case] = trained(trainer_of(case, str(tmp_path), "plain", 4))
    for found in run_ranks(all_by_bmt, 2, str(tmp_path), timeout=300):
        assert len(found) == 6
        for (case, order), training in found.items():
            plain = expected[case]
            assert training["events"] == plain["events"], (case, order)
            torch.testing.assert_close(
                without_flos(training["log"]),
                without_flos(plain["log"]),
                rtol=1e-4,
                atol=1e-5,
                msg=lambda text: f"{case}, {order}: {text}",  # noqa: B023
            )
            torch.testing.assert_close(training["state"], plain["state"], rtol=1e-3, atol=1e-5)
            assert sum("loss" in line for line in training["log"]) == SETTINGS["max_steps"]


def trained_and_resumed(folder: str) -> list[Any]:
    options = {"save_strategy": "steps", "save_steps": 2}
    with accelerate_forgets():
        found = []
        for resume in (None, f"{folder}/checkpoint-2"):
            trainer = trainer_of("preferred_to_no_adapter", folder, "other first", 2, **options)
            found.append(trained(trainer, resume)["state"])
        return found


def test_a_training_of_trl_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    for first, resumed in run_ranks(trained_and_resumed, 2, str(tmp_path), timeout=180):
        assert first.keys() == resumed.keys()
        assert all(torch.equal(value, resumed[name]) for name, value in first.items())


def t5() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2}
    config = transformers.T5Config(
        **sizes, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config)
    model.generation_config.max_length = 5
    return model


def written(prediction: Any) -> dict[str, float]:
    return {"sum": float(prediction.predictions.sum()), "rows": len(prediction.predictions)}


def sequence_trainer(folder: str, order: str, rows: int, accumulation: int) -> Any:
    kind, config = transformers.Seq2SeqTrainer, transformers.Seq2SeqTrainingArguments
    if order != "plain":
        kind = both(kind, bmt_hf.Trainer, order)
        config = dataclass(both(config, bmt_hf.TrainingArguments, order))
    args = config(
        folder,
        **{**SETTINGS, "gradient_accumulation_steps": accumulation},
        predict_with_generate=True,
        per_device_train_batch_size=rows // accumulation,
        per_device_eval_batch_size=rows // 2,
    )
    drawn = torch.Generator().manual_seed(1)
    data = [
        {"input_ids": ids, "labels": ids[::-1]}
        for ids in torch.randint(2, 40, (24, 4), generator=drawn).tolist()
    ]
    return kind(
        t5(),
        args,
        transformers.default_data_collator,
        train_dataset=data,
        compute_metrics=written,
    )


def evaluated(folder: str, order: str, size: int, rows: int, accumulation: int) -> tuple[Any, Any]:
    trainer = sequence_trainer(folder, order, rows, accumulation)
    log = trained(trainer)["log"]
    trainer.eval_dataset = trainer.train_dataset[:size]
    return log, without_times([trainer.evaluate()])[0]


SEQUENCES = {"other first": 12, "bmt first": 11}
"""How many rows are evaluated. Only the first class's ``prediction_step`` sees the generated
texts, so rows that fill the last batch up are left out of the loss if it is bmt's.
"""


def sequences_by_bmt(folder: str) -> list[tuple[Any, Any]]:
    with accelerate_forgets():
        return [evaluated(folder, order, size, 4, 2) for order, size in SEQUENCES.items()]


def test_a_trainer_of_sequences_trains_and_generates_as_one_process(tmp_path: Path) -> None:
    expected = []
    for size in SEQUENCES.values():
        with accelerate_forgets():
            # With several micro-batches the plain trainer's gradients are larger as many times,
            # because T5's loss ignores num_items_in_batch.
            expected.append(evaluated(str(tmp_path), "plain", size, 8, 1))
    for found in run_ranks(sequences_by_bmt, 2, str(tmp_path), timeout=180):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
