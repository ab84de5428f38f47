"""``bmt checkpoint``: what it prints, and its exit status."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from test_checkpoint import plain_net, whole_state

import bmt_core
from bmt_core.cli import main


def bmt(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["checkpoint", *map(str, arguments)])
    return result.exit_code, result.output


def test_files_directories_and_trainings_are_inspected_verified_and_compared(tmp_path: Path) -> None:
    model = plain_net()
    paths = [tmp_path / "model.pt", tmp_path / "model.safetensors", tmp_path / "folder", tmp_path / "run"]
    bmt_core.save(model, paths[0])
    bmt_core.save(model, paths[1])
    bmt_core.save(model, f"{paths[2]}/")
    bmt_core.save_checkpoint(paths[3], model, step=7)
    for path in paths:
        status, output = bmt("inspect", path)
        assert status == 0 and "tied to embedding" in output and "float8_e4m3fn" in output and "18 entries" in output
        assert ("step 7, saved by 1 rank(s), optimizer state: none" in output) == (path.name == "run")
        assert bmt("verify", path) == (0, f"{path} is whole.\n")
        assert bmt("diff", paths[0], path) == (0, "Equal.\n")
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
    assert bmt("convert", tmp_path / "plain.pt", tmp_path / "model.safetensors")[0] == 0
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
