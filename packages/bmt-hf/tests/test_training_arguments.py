"""Every argument of transformers is kept, done by bmt or refused by name; making them starts
the run.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("transformers", minversion="5.23")

import torch
import transformers
from trainer_runs import accelerate_forgets

import bmt_core
import bmt_hf
from bmt_core.errors import ConfigError
from bmt_hf.argument_tables import DONE_BY_BMT, KEPT, REFUSED, check_no_refused
from bmt_testing import run_ranks

ROOT = Path(__file__).parents[3]


def test_every_field_of_transformers_is_in_one_table() -> None:
    tables = [*KEPT, *DONE_BY_BMT, *REFUSED]
    assert len(tables) == len(set(tables))
    assert set(tables) == {
        field.name for field in dataclasses.fields(transformers.TrainingArguments)
    }


def test_the_page_names_what_bmt_does_in_its_own_way_and_what_it_refuses() -> None:
    page = (ROOT / "docs" / "hugging-face.md").read_text()
    assert [name for name in (*DONE_BY_BMT, *REFUSED) if f"`{name}" not in page] == []


VALUES: dict[str, Any] = {
    "ddp_backend": "gloo",
    "ddp_bucket_cap_mb": 25,
    "debug": "underflow_overflow",
    "deepspeed": {"stage": 3},
    "fsdp": "full_shard",
    "fsdp_config": {"xla": True},
    "hub_strategy": "end",
    "liger_kernel_config": {"rope": True},
    "optim_target_modules": ["q_proj"],
    "parallelism_config": object(),
    "skip_memory_metrics": False,
    "torch_compile_backend": "eager",
    "torch_compile_mode": "default",
}
IN_PART: list[tuple[dict[str, Any], str]] = [
    ({"optim": "adafactor"}, "optim='adafactor'; it knows adamw_torch"),
    ({"optim": "sgd", "offload_optimizer": True}, "needs optim='adamw_torch', and optim is 'sgd'"),
    ({"activation_checkpointing_kwargs": {"use_reentrant": True}}, "use_reentrant=True"),
    ({"activation_checkpointing_kwargs": {"offload": True}}, "offload=True"),
    ({"accelerator_config": {"even_batches": False}}, "even_batches=False"),
    ({"accelerator_config": {"split_batches": True}}, "split_batches=True, with which"),
    ({"eval_use_gather_object": True}, "drops some of them"),
    (
        {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
        "sync_each_batch",
    ),
    (
        {
            "save_only_model": True,
            "load_best_model_at_end": True,
            "eval_strategy": "steps",
            "eval_steps": 1,
        },
        "save_only_model=True leaves out",
    ),
    (
        {"activation_checkpointing_kwargs": {"keep": "activations"}},
        "keep must be 'attention', 'products'",
    ),
    (
        {"activation_checkpointing_kwargs": {"keep": "attention"}},
        "set gradient_checkpointing=True, or leave out keep",
    ),
    (
        {
            "activation_checkpointing": True,
            "activation_checkpointing_kwargs": {"keep": lambda operation, args: True},
        },
        "Give a function at the top level of a module",
    ),
]
ACCEPTED: list[dict[str, Any]] = [
    {"eval_use_gather_object": True, "eval_do_concat_batches": False},
    {"deepspeed": "", "fsdp": False, "debug": [], "ddp_find_unused_parameters": False},
    {
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": False, "every_n_layers": 2},
    },
    {
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"keep": ["attention", "products"]},
    },
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"keep": "attention"}},
    {
        "gradient_checkpointing": True,
        "optim": "adamw_torch",
        "offload_optimizer": True,
        "zero_level": 2,
    },
]


ENVIRONMENT = {
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
    "ACCELERATE_MIXED_PRECISION": "fp8",
}


def refusals(folder: str) -> tuple[list[str], list[str]]:
    def refusal(options: dict[str, Any]) -> str:
        with pytest.raises(ConfigError) as raised:
            bmt_hf.TrainingArguments(folder, use_cpu=True, **options)
        return str(raised.value)

    with accelerate_forgets():
        for name, value in ENVIRONMENT.items():
            with mock.patch.dict(os.environ, {name: value}):
                assert name in refusal({})
        bmt_core.shutdown()
        by_name = [refusal({name: VALUES.get(name, True)}) for name in REFUSED]
        assert not bmt_core.is_initialized()  # nothing has been started
        bmt_core.init_distributed(device="cpu", zero_level=2)
        in_part = [refusal(options) for options, _ in IN_PART]
        for options in ACCEPTED:
            made = bmt_hf.TrainingArguments(folder, **options)
            assert dataclasses.replace(made, seed=1).seed == 1
        return by_name, in_part


def test_what_cannot_be_kept_is_refused_by_name_with_the_way_out(tmp_path: Path) -> None:
    for by_name, in_part in run_ranks(refusals, 2, str(tmp_path), init=None):
        for (name, remedy), text in zip(REFUSED.items(), by_name, strict=True):
            assert f"cannot keep {name}=" in text and remedy in text
        for (_, expected), text in zip(IN_PART, in_part, strict=True):
            assert expected in text


def test_a_field_that_a_newer_version_adds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = dataclasses.make_dataclass(
        "Newer", [("soup", bool, False)], bases=(transformers.TrainingArguments,)
    )
    monkeypatch.setattr(
        "bmt_hf.argument_tables.transformers", SimpleNamespace(TrainingArguments=newer)
    )
    made = SimpleNamespace(**{field.name: field.default for field in dataclasses.fields(newer)})
    check_no_refused(made)
    made.soup = True
    with pytest.raises(ConfigError, match="soup=True: this version of bmt-hf does not know it"):
        check_no_refused(made)


def parsed(folder: str) -> Any:
    parser = transformers.HfArgumentParser(bmt_hf.TrainingArguments)
    line = (
        f"--output_dir {folder} --use_cpu --zero_level 1 --offload_optimizer --seed 5 --ddp_timeout"
        " 77 --learning_rate 0.5"
    )
    with accelerate_forgets():
        (made,) = parser.parse_args_into_dataclasses(line.split())
        settings = bmt_core.current().settings
        again = dataclasses.replace(made, learning_rate=0.25)
        place = made.world_size, made.process_index, made.device.type, made.n_gpu
        return (
            (
                settings.zero_level,
                settings.seed,
                settings.timeout,
                settings.gradients,
                torch.initial_seed(),
            ),
            place == (bmt_core.world_size(), bmt_core.rank(), "cpu", 0),
            (
                made.learning_rate,
                again.learning_rate,
                made.offload_optimizer,
                made.to_dict()["zero_level"],
            ),
        )


@pytest.mark.parametrize("world_size", [1, 2])
def test_arguments_from_the_command_line_start_the_run(world_size: int, tmp_path: Path) -> None:
    expected = (1, 5, 77, "mean", 5), True, (0.5, 0.25, True, 1)
    assert run_ranks(parsed, world_size, str(tmp_path), init=None) == [expected] * world_size


def by_open_mpi(folder: str) -> Any:
    names = {
        "RANK": "RANK",
        "WORLD_SIZE": "SIZE",
        "LOCAL_RANK": "LOCAL_RANK",
        "LOCAL_WORLD_SIZE": "LOCAL_SIZE",
    }
    for name, theirs in names.items():
        os.environ[f"OMPI_COMM_WORLD_{theirs}"] = os.environ.pop(name)
    with accelerate_forgets():
        made = bmt_hf.TrainingArguments(folder, use_cpu=True)
        return bmt_core.current().launch.launcher, made.world_size, made.process_index


def test_ranks_that_another_launcher_started_are_those_of_accelerate(tmp_path: Path) -> None:
    assert run_ranks(by_open_mpi, 2, str(tmp_path), init=None) == [
        ("Open MPI", 2, 0),
        ("Open MPI", 2, 1),
    ]


def beside_a_run(folder: str) -> list[str]:
    found = []
    with accelerate_forgets():
        assert bmt_hf.TrainingArguments(folder).use_cpu  # as the run
        for options in ({"zero_level": 3}, {"zero_level": 3, "use_cpu": True}):
            with pytest.raises(ConfigError) as raised:
                bmt_hf.TrainingArguments(folder, **options)
            found.append(str(raised.value))
    return found


def test_arguments_that_contradict_the_run_are_refused(tmp_path: Path) -> None:
    for texts in run_ranks(beside_a_run, 2, str(tmp_path), init={"zero_level": 2}):
        assert all("zero_level=3, and the run was started with level 2" in text for text in texts)


def in_a_grid(folder: str) -> str:
    with pytest.raises(ConfigError) as raised:
        bmt_hf.TrainingArguments(folder)
    return str(raised.value)


def test_ranks_with_the_same_data_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("bmt_tp")
    for text in run_ranks(in_a_grid, 2, str(tmp_path), init={"tp_size": 2}):
        assert "this run has the axes {'tp': 2} beside" in text
