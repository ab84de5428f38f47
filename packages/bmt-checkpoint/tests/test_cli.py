"""``bmt checkpoint``: what it prints, and its exit status."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from test_checkpoint import plain_net, whole_state
from torch import nn

import bmt_checkpoint
from bmt_params.state.state_tensors import TensorPart
from bmtrain._program import main


def bmt(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["checkpoint", *map(str, arguments)])
    return result.exit_code, result.output


def test_files_directories_and_trainings_are_inspected_verified_and_compared(
    tmp_path: Path,
) -> None:
    model = plain_net()
    paths = [
        tmp_path / "model.pt",
        tmp_path / "model.safetensors",
        tmp_path / "folder",
        tmp_path / "run",
    ]
    bmt_checkpoint.save(model, paths[0])
    bmt_checkpoint.save(model, paths[1])
    bmt_checkpoint.save(model, f"{paths[2]}/")
    bmt_checkpoint.save_checkpoint(paths[3], model, step=7)
    for path in paths:
        status, output = bmt("inspect", path)
        assert (
            status == 0
            and "tied to embedding" in output
            and "float8_e4m3fn" in output
            and "18 entries" in output
        )
        assert ("step 7, saved by 1 rank(s), optimizer state: none" in output) == (
            path.name == "run"
        )
        assert bmt("verify", path) == (
            0,
            f"All of {path} was read, and agrees with what checksums it has.\n",
        )
        holds_more = f"The models are equal. {path} also holds a training's state.\n"
        assert bmt("diff", paths[0], path) == (0, holds_more if path.name == "run" else "Equal.\n")
    data = bytearray(paths[1].read_bytes())
    data[-2] ^= 1
    paths[1].write_bytes(data)
    status, output = bmt("verify", paths[1])
    assert status == 1 and "not a whole safetensors file" in output
    shutil.copytree(paths[3] / "step-7" / "model", paths[3] / "step-7" / "optimizer")
    paths[1].replace(next((paths[3] / "step-7" / "optimizer").glob("*.safetensors")))
    status, output = bmt("verify", paths[3])
    assert status == 1 and "optimizer/model-00001-of-00001.safetensors is not" in output


def test_a_conversion_loads_like_its_source_and_differences_are_listed(tmp_path: Path) -> None:
    model, other = plain_net(), plain_net(seed=1)
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    target = tmp_path / "model.safetensors"
    told = f"The model of {tmp_path / 'plain.pt'} is in {target}: 18 entries, format safetensors.\n"
    assert bmt("convert", tmp_path / "plain.pt", target) == (0, told)
    assert "head.weight" not in load_file(tmp_path / "model.safetensors")
    assert bmt("convert", tmp_path / "model.safetensors", tmp_path / "again.pt")[0] == 0
    other.load_state_dict(torch.load(tmp_path / "again.pt", weights_only=True))
    assert whole_state(other) == whole_state(model)

    state = {name: value for name, value in model.state_dict().items() if name != "single"}
    state |= {"plain": state["plain"] + 0.5, "low": torch.zeros(2), "more": torch.zeros(1)}
    torch.save(state, tmp_path / "changed.pt")
    status, output = bmt("diff", tmp_path / "plain.pt", tmp_path / "changed.pt")
    assert status == 1
    assert sorted(line.partition(": ")[2] for line in output.splitlines()) == sorted(
        [
            f"only in {tmp_path / 'plain.pt'}",
            f"only in {tmp_path / 'changed.pt'}",
            "differs by up to 0.5",
            "bfloat16(3, 3) and float32(2,)",
        ]
    )


class Scaled(nn.Module):
    def __init__(self, history: list[float]) -> None:
        super().__init__()
        self.history = history

    def get_extra_state(self) -> Any:
        return {"history": self.history, "scale": torch.tensor(self.history[-1])}

    def set_extra_state(self, state: Any) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors", "model.dcp"])
def test_extra_states_that_differ_are_not_equal(tmp_path: Path, name: str) -> None:
    for folder, history in (("one", [1.0, 2.0]), ("same", [1.0, 2.0]), ("other", [1.0, 3.0])):
        bmt_checkpoint.save(Scaled(history), tmp_path / folder / name)
    one = tmp_path / "one" / name
    assert bmt("diff", one, tmp_path / "same" / name) == (0, "Equal.\n")
    status, output = bmt("diff", one, tmp_path / "other" / name)
    assert status == 1 and output.splitlines() == [
        "_extra_state.history.1: 2.0 and 3.0",
        "_extra_state.scale: differs by up to 1",
    ]


def test_files_with_values_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "one.pt")
    torch.save({"weight": torch.ones(2), "step": 3}, tmp_path / "other.pt")
    status, output = bmt("diff", tmp_path / "one.pt", tmp_path / "other.pt")
    assert status == 2 and "other.pt holds more than tensors: step. Save the state dict" in output


class Manager:
    """The least that save_checkpoint() asks of a manager, with one state for each rank, or with a
    whole one.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


class WholeManager(Manager):
    def logical_state(self, named_parameters: Any) -> dict[str, Any]:
        return self.state

    def load_logical_state(self, named_parameters: Any, state: dict[str, Any]) -> None:
        raise NotImplementedError


def part_of(value: float) -> TensorPart:
    """Return a tensor that is stored among the optimizer's."""
    tensor = torch.full((2,), value)
    return TensorPart(
        name="weight/exp_avg",
        shape=tensor.shape,
        dtype=tensor.dtype,
        parameter=nn.Parameter(tensor),
        value=lambda: tensor,
    )


@pytest.mark.parametrize(
    ("kind", "forms"),
    [
        (Manager, (None, None, None)),
        (WholeManager, (None, None, None)),
        (WholeManager, (None, "safetensors", "torch")),
    ],
)
def test_trainings_whose_optimizers_differ_are_not_equal(
    tmp_path: Path, kind: type[Manager], forms: Sequence[str | None]
) -> None:
    model = plain_net()
    state: dict[str, Any] = {"lr": 0.1, "betas": (0.9, float("nan")), "moment": torch.zeros(2)}
    states = [state, state, {**state, "lr": 0.2, "new": True, "moment": torch.full((2,), 0.5)}]
    if kind is WholeManager:
        states = [
            {**of_one, "avg": part_of(value)}
            for of_one, value in zip(states, (1.0, 1.0, 3.0), strict=True)
        ]
    folders = [tmp_path / name for name in ("one", "same", "other")]
    for folder, saved, form in zip(folders, states, forms, strict=True):
        bmt_checkpoint.save_checkpoint(folder, model, kind(saved), extra={"epoch": 1}, format=form)
    assert bmt("diff", *folders[:2]) == (0, "Equal.\n")
    status, output = bmt("diff", folders[0], folders[2])
    where = "optimizer-rank-0.pt" if kind is Manager else "optimizer_state"
    expected = [
        f"{where}.lr: 0.1 and 0.2",
        f"{where}.moment: differs by up to 0.5",
        f"{where}.new: nothing and True",
    ]
    if kind is WholeManager:
        expected.append("optimizer: weight/exp_avg: differs by up to 2")
    assert status == 1 and sorted(output.splitlines()) == sorted(expected)

    torch.rand(1)
    bmt_checkpoint.save_checkpoint(folders[2], model, step=3, extra={"epoch": 2})
    status, output = bmt("diff", folders[1], folders[2])
    lines = output.splitlines()
    assert status == 1 and {"step: 0 and 3", "extra.epoch: 1 and 2"} < set(lines)
    assert "random: the states of random generators differ" in lines


def test_a_conversion_of_conjugate_values_keeps_them(tmp_path: Path) -> None:
    values = torch.randn(3, dtype=torch.complex64)
    torch.save({"rotation": values.conj()}, tmp_path / "plain.pt")
    assert bmt("convert", tmp_path / "plain.pt", tmp_path / "model.safetensors")[0] == 0
    assert torch.equal(load_file(tmp_path / "model.safetensors")["rotation"], values.conj())
    assert bmt("diff", tmp_path / "plain.pt", tmp_path / "model.safetensors") == (0, "Equal.\n")


def test_a_conversion_to_a_suffix_of_no_format_is_refused(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "plain.pt")
    for name, hint in (
        ("model.safetensor", "Did you mean .safetensors?"),
        ("model.xyz", ".xyz files"),
        ("model", ".pt"),
    ):
        status, output = bmt("convert", tmp_path / "plain.pt", tmp_path / name)
        assert status == 2 and hint in output and "safetensors (.safetensors)" in output
    assert [path.name for path in tmp_path.iterdir()] == ["plain.pt"]


def test_a_broken_file_is_one_short_line(tmp_path: Path) -> None:
    model = plain_net()
    paths = [
        tmp_path / name for name in ("model.pt", "model.safetensors", "model.dcp/.metadata", "run")
    ]
    for path in paths[:2]:
        bmt_checkpoint.save(model, path)
    bmt("convert", paths[0], tmp_path / "model.dcp")
    bmt_checkpoint.save_checkpoint(paths[3], model)
    for path in (*paths[:3], paths[3] / "step-0" / "training.pt"):
        whole = path.read_bytes()
        for content in (whole[: len(whole) // 2], whole[:20], b"", b"{}", b"P is no pickle"):
            path.write_bytes(content)
            named = {".metadata": path.parent, "training.pt": paths[3]}.get(path.name, path)
            for command in ("inspect", "verify"):
                status, output = bmt(command, named)
                assert status == (1 if command == "verify" else 2), output
                assert output.startswith(f"Error: {path} "), output
                assert output.count("\n") == 1 and len(output) < 300 + len(str(path)), output
