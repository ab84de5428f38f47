"""save_checkpoint(format=...): checkpoints of a training in formats of plugins and of programs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import bmt_params
from bmt_checkpoint import (
    CheckpointFormat,
    CheckpointReader,
    load_checkpoint,
    save_checkpoint,
    wait_for_saves,
)
from bmt_core.errors import BmtError, ConfigError, PluginError
from bmt_core.plugins.hookspecs import hookimpl
from bmt_core.run import runtime
from bmt_optim import AdamOptimizer, OptimManager
from bmt_params.state.index import Index, TensorEntry
from bmt_testing import on_ranks, run_ranks
from bmtrain._program import main as bmt


class JsonReader(CheckpointReader):
    def __init__(self, path: Path) -> None:
        self._content = json.loads(path.read_text())
        self.index = Index(
            entries={
                name: TensorEntry(
                    shape=torch.Size(entry["shape"]),
                    dtype=getattr(torch, entry["dtype"]),
                    source=entry["source"],
                )
                for name, entry in self._content["entries"].items()
            }
        )

    def read(self, name: str) -> torch.Tensor:
        entry = self.index.entries[name]
        return torch.tensor(self._content["values"][name], dtype=entry.dtype).reshape(entry.shape)

    def close(self) -> None:
        pass


class Json(CheckpointFormat):
    """A format as anybody writes one: numbers as text."""

    name = "json"
    suffixes = (".weights.json",)

    def write(self, path: Path, index: Index, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        entries = {
            name: {
                "shape": list(entry.shape),
                "dtype": str(entry.dtype).removeprefix("torch."),
                "source": entry.source,
            }
            for name, entry in index.entries.items()
        }
        values = {name: tensor.double().reshape(-1).tolist() for name, tensor in tensors}
        path.write_text(json.dumps({"entries": entries, "values": values}))

    def open(self, path: Path) -> CheckpointReader:
        return JsonReader(path)


class Plugin:
    name = "json-files"

    @hookimpl
    def bmt_checkpoint_formats(self) -> list[type[CheckpointFormat]]:
        return [Json]


class Training:
    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.model = bmt_params.DistributedModule()
        self.model.weight = bmt_params.DistributedParameter(torch.randn(5, 3, generator=generator))
        self.model.bias = bmt_params.DistributedParameter(
            torch.randn(5, generator=generator).bfloat16()
        )
        self.model.register_buffer("count", torch.tensor([seed]))
        self.manager = OptimManager(loss_scale=8)
        self.manager.add_optimizer(AdamOptimizer(self.model.parameters(), lr=0.1))

    def run(self, steps: int) -> list[torch.Tensor]:
        for _ in range(steps):
            for p in self.model.parameters():
                assert isinstance(p, bmt_params.DistributedParameter)
                p.grad = p.local_part(
                    torch.arange(p.full_shape.numel()).reshape(p.full_shape).to(p.dtype)
                ).clone()
            self.manager.step()
        return [
            p.gather().clone()
            for p in self.model.parameters()
            if isinstance(p, bmt_params.DistributedParameter)
        ]


def saved(path: str, chosen: str, non_blocking: bool) -> list[torch.Tensor]:
    """Save after two steps, and return the parameters after two more."""
    with runtime_with_plugin():
        training = Training(1)
        training.run(2)
        format: Any = Json() if chosen == "object" else chosen
        save_checkpoint(
            path,
            training.model,
            training.manager,
            step=2,
            extra="more",
            format=format,
            non_blocking=non_blocking,
        )
        after = training.run(2)
        wait_for_saves()
        return after


def resumed(path: str) -> tuple[Any, list[torch.Tensor]]:
    with runtime_with_plugin():
        training = Training(2)
        told = load_checkpoint(path, training.model, training.manager)
        assert training.model.count.tolist() == [1]
        return told, training.run(2)


class runtime_with_plugin:
    def __enter__(self) -> None:
        runtime.init_distributed(device="cpu", plugins=[Plugin()])

    def __exit__(self, *exception: object) -> None:
        runtime.shutdown()


FILES = {
    "json": "weights.json",
    "object": "weights.json",
    "safetensors": "safetensors",
    "torch": "pt",
    "dcp": "dcp",
}


@pytest.mark.parametrize(
    ("chosen", "non_blocking"), [(chosen, number % 2 == 0) for number, chosen in enumerate(FILES)]
)
def test_a_training_saved_in_any_format_goes_on_at_any_number_of_ranks(
    tmp_path: Path, chosen: str, non_blocking: bool
) -> None:
    expected = run_ranks(saved, 2, str(tmp_path), chosen, non_blocking, init=None)[0]
    names = {path.name for path in (tmp_path / "step-2").iterdir()}
    assert names == {f"model.{FILES[chosen]}", f"optimizer.{FILES[chosen]}", "training.pt"}
    for world_size in (1, 4):
        for told, parameters in run_ranks(resumed, world_size, str(tmp_path), init=None):
            assert told == {"step": 2, "extra": "more"}
            assert all(
                torch.equal(one, other) for one, other in zip(parameters, expected, strict=True)
            )


def check_what_loading_says_without_plugin(path: str) -> None:
    training = Training(2)
    with pytest.raises(PluginError, match="No checkpoint format is named 'json'"):
        load_checkpoint(path, training.model, training.manager)
    asked = "was saved in json, and format='safetensors' asks for another one"
    with pytest.raises(BmtError, match=asked):
        load_checkpoint(path, training.model, training.manager, format="safetensors")
    assert load_checkpoint(path, training.model, training.manager, format=Json)["step"] == 2


def test_a_format_that_no_plugin_announces_is_named_on_every_rank_and_may_be_passed(
    tmp_path: Path,
) -> None:
    run_ranks(saved, 2, str(tmp_path), "json", False, init=None)
    run_ranks(check_what_loading_says_without_plugin, 2, str(tmp_path))


def save_in_different_formats(path: str) -> None:
    with pytest.raises(ConfigError, match=r"in different formats: \('safetensors', None\)"):
        save_checkpoint(path, Training(1).model, format=["safetensors", None][runtime.rank()])


def test_different_formats_on_different_ranks_are_refused(tmp_path: Path) -> None:
    run_ranks(save_in_different_formats, 2, str(tmp_path))
    assert not list(tmp_path.iterdir())


class Full(Json):
    """Writes the model, and finds the disk full at the optimizer's state."""

    def write(self, path: Path, index: Index, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().write(path, index, tensors)
        if "optimizer" in path.name:
            raise OSError(28, "No space left on device")


@on_ranks(2)
@pytest.mark.parametrize("non_blocking", [False, True])
def test_a_write_that_fails_is_an_error_on_every_rank_and_leaves_the_last_checkpoint(
    tmp_path: Path, non_blocking: bool
) -> None:
    training = Training(1)
    training.run(1)
    save: Any = partial(save_checkpoint, tmp_path, training.model, training.manager)
    save(step=1)
    with pytest.raises(BmtError, match="No space left on device"):
        save(step=2, format=Full, non_blocking=non_blocking)
        wait_for_saves()
    assert load_checkpoint(tmp_path, training.model, training.manager)["step"] == 1
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["latest", "step-1"]


def test_the_program_bmt_reads_the_model_of_a_checkpoint_in_any_format(tmp_path: Path) -> None:
    run_ranks(saved, 2, str(tmp_path), "safetensors", False, init=None)
    for command in ("inspect", "verify"):
        ended = CliRunner().invoke(bmt, ["checkpoint", command, str(tmp_path)])
        assert ended.exit_code == 0, ended.output
        assert ("weight" if command == "inspect" else "was read") in ended.output
