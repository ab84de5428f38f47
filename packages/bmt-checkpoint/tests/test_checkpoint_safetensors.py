"""Safetensors: files and directories that other libraries read and write, at any number of ranks,
and what does not fit.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import shutil
import struct
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from dying_saves import OF_MODEL, die_at_every_moment
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file, save_model
from scratch_axes import SLICE, STAGE, grid_with
from test_checkpoint import (
    distributed_net,
    load_net,
    plain_net,
    save_net,
    try_to_load,
    whole_state,
)
from torch import nn

import bmt_checkpoint
import bmt_core
from bmt_checkpoint import SafetensorsFormat, loading, wait_for_saves
from bmt_core.errors import CheckpointError
from bmt_core.settings import MeshAxis
from bmt_params.locality import Locality, local_along
from bmt_params.make_distributed import make_distributed
from bmt_params.parameter import DistributedParameter
from bmt_params.shard import Shard
from bmt_params.state.index import Index, TensorEntry
from bmt_testing import run_ranks

INDEX = "model.safetensors.index.json"
library_writes = pytest.mark.skipif(
    find_spec("numpy") is None, reason="the library safetensors writes by numpy; bmt does not"
)


def read_directory(folder: Path) -> dict[str, torch.Tensor]:
    """Read a directory as Hugging Face's libraries do: by the index and nothing else."""
    content = json.loads((folder / INDEX).read_text())
    tensors = {}
    for name, file in content["weight_map"].items():
        with safe_open(folder / file, framework="pt") as shard:
            assert shard.metadata()["format"] == "pt"
            tensors[name] = shard.get_tensor(name)
    assert content["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    return tensors


def assert_is_plain_net(read: dict[str, torch.Tensor]) -> None:
    expected = {
        name: value
        for name, value in plain_net().state_dict().items()
        if isinstance(value, torch.Tensor)
    }
    del expected["head.weight"]  # tied to embedding, and stored once
    assert read.keys() == expected.keys()
    for name, value in expected.items():
        assert read[name].dtype == value.dtype and read[name].shape == value.shape
        assert torch.equal(
            read[name].contiguous().view(-1).float(), value.contiguous().view(-1).float()
        ), name


@pytest.mark.parametrize(("saving", "loading"), [(1, 4), (2, 2), (4, 1), (4, 2)])
def test_files_and_directories_of_any_world_size_load_at_any_other(
    saving: int, loading: int, tmp_path: Path
) -> None:
    file, folder = tmp_path / "model.safetensors", tmp_path / "folder"
    run_ranks(save_net, saving, str(file))
    run_ranks(save_net, saving, f"{folder}/")
    assert_is_plain_net(load_file(file))
    assert_is_plain_net(read_directory(folder))
    assert len(list(folder.iterdir())) == saving + 1
    for path in (file, folder, folder / INDEX):
        assert run_ranks(load_net, loading, str(path)) == [whole_state(plain_net())] * loading


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Embedding(5, 3)
        self.outer = nn.Linear(3, 5, bias=False)
        self.outer.weight = self.inner.weight


def files_of_others(folder: Path) -> list[Path]:
    """The model :class:`Tied`, as several libraries write it."""
    weight = torch.arange(15.0).view(5, 3)
    model = Tied()
    with torch.no_grad():
        model.inner.weight.copy_(weight)
    save_model(model, str(folder / "library.safetensors"))
    save_file({"inner.weight": weight}, folder / "first_name.safetensors")
    save_file({"outer.weight": weight}, folder / "last_name.safetensors")
    save_file(
        {"inner.weight": weight, "outer.weight": weight.clone()}, folder / "twice.safetensors"
    )
    for name, file, write in (
        ("tensors", "model-00001-of-00001.safetensors", save_file),
        ("torch", "pytorch_model-1.bin", torch.save),
    ):
        (folder / name).mkdir()
        write({"inner.weight": weight}, folder / name / file)
        index = INDEX if name == "tensors" else "pytorch_model.bin.index.json"
        (folder / name / index).write_text(
            json.dumps({"metadata": {}, "weight_map": {"inner.weight": file}})
        )
    (folder / "one").mkdir()
    save_file({"inner.weight": weight}, folder / "one" / "model.safetensors")
    return sorted(folder.iterdir())


def load_tied(paths: list[str]) -> list[Any]:
    found = []
    for path in paths:
        model = nn.Module()
        model.inner, model.outer = nn.Module(), nn.Module()
        model.inner.register_parameter("weight", DistributedParameter(torch.zeros(5, 3)))
        model.outer.register_parameter("weight", model.inner.weight)
        keys = bmt_checkpoint.load(model, path)
        found.append(
            (keys.missing_keys, keys.unexpected_keys, model.inner.weight.gather().tolist())
        )
    return found


def test_opening_a_file_keeps_nothing_of_its_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {str(number): torch.zeros(2, number) for number in range(50)}
    index = Index(
        entries={
            name: TensorEntry(shape=tensor.shape, dtype=tensor.dtype, source=name)
            for name, tensor in tensors.items()
        }
    )
    SafetensorsFormat().write(path, index, tensors.items())
    SafetensorsFormat().open(path).close()
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(20):
        SafetensorsFormat().open(path).close()
    gc.collect()
    assert sys.getallocatedblocks() - before < 500  # of 1,000 tensors


@library_writes
def test_tensors_with_several_elements_in_a_byte_are_read(tmp_path: Path) -> None:
    four_bits = torch.arange(12, dtype=torch.uint8).view(3, 4).view(torch.float4_e2m1fn_x2)
    save_file({"weight": four_bits}, path := tmp_path / "packed.safetensors")
    reader = SafetensorsFormat().open(path)
    entry, read = reader.index.entries["weight"], reader.read("weight")
    assert (entry.shape, entry.dtype) == (read.shape, read.dtype) == ((3, 4), four_bits.dtype)
    assert torch.equal(read.view(torch.uint8), four_bits.view(torch.uint8))
    reader.close()


@library_writes
def test_tied_weights_in_files_of_others_load_under_any_of_their_names(tmp_path: Path) -> None:
    paths = files_of_others(tmp_path)
    assert len(paths) == 7
    expected = [([], [], torch.arange(15.0).view(5, 3).tolist())] * len(paths)
    assert run_ranks(load_tied, 2, [str(path) for path in paths]) == [expected] * 2


def test_a_tensor_called_as_the_format_that_the_file_names_loads(tmp_path: Path) -> None:
    model, other = nn.ParameterDict({"pt": torch.ones(2)}), nn.ParameterDict({"pt": torch.zeros(2)})
    bmt_checkpoint.save(model, tmp_path / "model.safetensors")
    bmt_checkpoint.load(other, tmp_path / "model.safetensors")
    assert torch.equal(other["pt"], model["pt"])


def test_tied_weights_load_by_the_library(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    bmt_checkpoint.save(model, tmp_path / "model.safetensors")
    load_model(other, str(tmp_path / "model.safetensors"))
    assert torch.equal(model.inner.weight, other.outer.weight)


# ---- who reads ----


def load_net_watched(path: str) -> tuple[dict[str, Any], int]:
    """What was loaded, and how many tensors were broadcast. Of rank 1's path, ``{rank}`` is 1."""
    broadcasts = 0
    original = loading._broadcast

    def counted(*args: Any) -> torch.Tensor:
        nonlocal broadcasts
        broadcasts += 1
        return original(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "_broadcast", counted)
        return load_net(path.format(rank=bmt_core.rank())), broadcasts


def test_ranks_read_by_themselves_where_all_see_the_files_and_are_sent_tensors_where_not(
    tmp_path: Path,
) -> None:
    run_ranks(save_net, 2, f"{tmp_path / 'shared'}/")
    shutil.copytree(tmp_path / "shared", tmp_path / "alone-0")  # rank 1 has nothing
    shutil.copytree(tmp_path / "shared", tmp_path / "other-0")
    run_ranks(save_net, 2, f"{tmp_path / 'other-1'}/", seed=3)  # rank 1 has another model
    for path, is_sent in (("shared", False), ("alone-{rank}", True), ("other-{rank}", True)):
        for state, broadcasts in run_ranks(load_net_watched, 2, str(tmp_path / path)):
            assert state == whole_state(plain_net())
            assert (broadcasts > 0) == is_sent


# ---- ranks with different parts ----


def staged_net(seed: int) -> nn.Module:
    """A layer of the rank's stage between two that every rank has."""
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(5, 3, generator=generator) for _ in range(4)]
    stage = bmt_core.current().topology.axis_rank("stage")
    model = nn.Module()
    model.register_parameter("first", DistributedParameter(draw[0]))
    with local_along(("stage",)):
        model.register_parameter(f"layer{stage}", DistributedParameter(draw[1 + stage]))
    model.register_parameter("last", DistributedParameter(draw[3]))
    return model


def save_and_load_staged(path: str) -> bool:
    bmt_checkpoint.save(staged_net(0), path)
    wait_for_saves()
    model = staged_net(1)
    bmt_checkpoint.load(model, path)
    return all(
        p.gather().equal(q.gather())
        for p, q in zip(model.parameters(), staged_net(0).parameters(), strict=True)
    )


def test_a_directory_has_the_parts_of_all_stages(tmp_path: Path) -> None:
    assert all(run_ranks(save_and_load_staged, 4, f"{tmp_path}/", init=grid_with(STAGE)))
    generator = torch.Generator().manual_seed(0)
    expected = {
        name: torch.randn(5, 3, generator=generator)
        for name in ("first", "layer0", "layer1", "last")
    }
    read = read_directory(tmp_path)
    assert read.keys() == expected.keys() and all(
        read[name].equal(value) for name, value in expected.items()
    )


ROWS = MeshAxis("rows", 2, 90, shards_data=False)


def cut_in_all_ways() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Parameters that lie over the ranks in every way, and the whole tensors of which they are."""
    topology = bmt_core.current().topology
    model, wholes = nn.Module(), {}
    for number, (name, locality) in enumerate(
        {
            "columns": [Locality("slice", split_dim=1)],
            "rows": [Locality("slice", split_dim=0)],
            "sections": [Locality("slice", split_dim=0, sections=(4, 8))],
            "middle": [Locality("slice", split_dim=1, sections=(2, 4))],
            "both": [Locality("slice", split_dim=0), Locality("rows", split_dim=1)],
            "twice": [Locality("rows", split_dim=1), Locality("slice", split_dim=1)],
            "copies": [Locality("slice", gradients="whole")],
            "all": [],
            "few": [Locality("slice", gradients="share")],
        }.items()
    ):
        whole = wholes[name] = torch.randn(
            12, 8 if name != "middle" else 6, 3, generator=seeded(number)
        )
        slice_ = whole
        for place in locality:
            if place.split_dim is not None:
                slice_ = place.cut(
                    slice_, topology.axis_rank(place.axis), topology.axis_size(place.axis)
                )
        # The others hold the same.
        group = topology.group(("dp", "slice")) if name == "few" else None
        model.register_parameter(name, DistributedParameter(slice_, locality=locality, group=group))
    wholes["everywhere"] = torch.randn(5, 3, generator=seeded(99))
    shard = Shard(
        torch.Size((5, 3)),
        ((0, 15),) * topology.world_size,
        bmt_core.current().world,
        replicated=True,
    )
    model.everywhere = make_distributed(
        nn.Parameter(wholes["everywhere"]), shard, wholes["everywhere"].flatten()
    )
    wholes["turned"] = torch.randn(4, 6, generator=seeded(100)).t()
    model.register_buffer("turned", wholes["turned"])
    return model, {name: whole.clone() for name, whole in wholes.items()}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def save_without_gathering(folder: str) -> dict[str, torch.Tensor]:
    def gathered(*arguments: Any) -> None:
        raise AssertionError("a tensor was gathered")

    model, wholes = cut_in_all_ways()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("assemble", "assemble_on"):
            patch.setattr(Shard, name, gathered)
        bmt_checkpoint.save(model, f"{folder}/now/")
        bmt_checkpoint.save(model, f"{folder}/beside/", non_blocking=True)
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.zero_()
        wait_for_saves()
    return wholes


@pytest.mark.parametrize("axes", [(SLICE,), (SLICE, ROWS)])
def test_ranks_write_their_parts_of_tensors_however_they_are_cut_and_gather_nothing(
    axes: tuple[MeshAxis, ...], tmp_path: Path
) -> None:
    expected = run_ranks(save_without_gathering, 4, str(tmp_path), init=grid_with(*axes))[0]
    for folder in ("now", "beside"):
        read = read_directory(tmp_path / folder)
        assert read.keys() == expected.keys()
        for name, whole in expected.items():
            assert read[name].equal(whole), (folder, name)
        loaded = nn.Module()
        for name, whole in expected.items():
            loaded.register_buffer(name, torch.zeros(whole.shape))
        bmt_checkpoint.load(loaded, tmp_path / folder)  # compares checksums
        assert all(buffer.equal(expected[name]) for name, buffer in loaded.named_buffers())


# ---- what does not fit ----


def flipped(path: Path, position: int) -> bytes:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    return bytes(data)


def broken(folder: Path) -> dict[str, tuple[str, ...]]:
    """Write files and directories that do not load; name -> what the message must hold."""
    good = {
        name: value
        for name, value in plain_net(seed=1).state_dict().items()
        if isinstance(value, torch.Tensor)
    }
    good = {name: value.contiguous() for name, value in good.items() if name != "head.weight"}
    bmt_checkpoint.save(plain_net(seed=1), folder / "whole.safetensors")
    whole = folder / "whole.safetensors"
    data = whole.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])

    for name, changes in {
        "shape": {"low": torch.zeros(2, 3)},
        "dtype": {"bytes": torch.zeros(9)},
        "unexpected": {"extra": torch.zeros(2)},
    }.items():
        save_file({**good, **changes}, folder / f"{name}.safetensors")
    save_file(
        {name: value for name, value in good.items() if name != "single"},
        folder / "missing.safetensors",
    )
    damaged = {
        "empty": b"",
        "half_header": data[: length // 2],
        "short": data[:-1],
        "text": b"step 5, loss 2.3\n" * 50,
        "value": flipped(whole, len(data) - 2),
        "huge": struct.pack("<Q", 1 << 62) + data[8:],
    }
    for name, content in damaged.items():
        (folder / f"{name}.safetensors").write_bytes(content)
    messages = {
        "shape": ("low: the file has shape (2, 3), the model (3, 3)",),
        "dtype": ("bytes: the file has torch.float32, which torch.uint8 of the model cannot hold",),
        "unexpected": ("only the file has: extra",),
        "missing": ("single",),
        "nowhere": ("There is no checkpoint file",),
        **dict.fromkeys(damaged, ("not a whole safetensors file",)),
    }
    return {f"{name}.safetensors": parts for name, parts in messages.items()} | broken_directories(
        folder
    )


def broken_directories(folder: Path) -> dict[str, tuple[str, ...]]:
    whole, other = folder / "directory", folder / "later"
    run_ranks(save_net, 2, f"{whole}/", seed=1)
    run_ranks(save_net, 2, f"{other}/", seed=2)
    one, two = sorted(path.name for path in whole.glob("*.safetensors"))

    def index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], object]:
        def write(copy: Path) -> None:
            content = json.loads((copy / INDEX).read_text())
            (copy / INDEX).write_text(json.dumps(change(content) or content))

        return write

    changes: dict[str, tuple[Callable[[Path], object], str]] = {
        "no_index": (
            lambda copy: (copy / INDEX).unlink(),
            "is a directory, and no file in it is one of",
        ),
        "half_index": (
            lambda copy: (copy / INDEX).write_text((copy / INDEX).read_text()[:300]),
            "is damaged",
        ),
        "list": (index(lambda content: [1]), "is damaged"),
        "numbers": (index(lambda content: content["weight_map"].update(single=3)), "is damaged"),
        "outside": (
            index(lambda content: content["weight_map"].update(single=f"../later/{two}")),
            "it names the file '../",
        ),
        "mixed_up": (
            index(lambda content: content["weight_map"].update(embedding=two, single=two)),
            "it is not there",
        ),
        "hole": (
            index(lambda content: content["weight_map"].pop("single") and None),
            "only the model has: single",
        ),
        "no_shard": (
            lambda copy: (copy / two).unlink(),
            f"names the file {two}, which is not there",
        ),
        "swapped": (lambda copy: (copy / one).rename(copy / two), "which is not there"),
        "of_another": (
            lambda copy: shutil.copy(other / two, copy / two),
            "is not the file that was saved with",
        ),
        "cut": (
            lambda copy: (copy / two).write_bytes((copy / two).read_bytes()[:-1]),
            "is not the file that was saved",
        ),
        "value": (
            lambda copy: (copy / two).write_bytes(flipped(copy / two, -2)),
            "not a whole safetensors file",
        ),
    }
    for name, (change, _) in changes.items():
        shutil.copytree(whole, folder / name)
        change(folder / name)
    return {name: (part,) for name, (_, part) in changes.items()}


@library_writes
def test_what_does_not_load_is_one_clear_error_on_every_rank_and_changes_nothing(
    tmp_path: Path,
) -> None:
    expected = broken(tmp_path)
    results = run_ranks(try_to_load, 2, [str(tmp_path / name) for name in expected], timeout=60)
    for (name, parts), zero, one in zip(expected.items(), *results, strict=True):
        assert zero[1] and one[1], f"{name} changed the model"
        for part in parts:
            assert part in zero[0] and part in one[0], (name, zero[0], one[0])


# ---- writing ----


def save_what_safetensors_cannot_hold(paths: list[str]) -> list[str]:
    model = distributed_net()
    model.register_parameter("wide", DistributedParameter(torch.zeros(3, dtype=torch.complex128)))
    messages = []
    for path in paths:
        with pytest.raises(CheckpointError) as caught:
            bmt_checkpoint.save(model, path)
        messages.append(str(caught.value))
    return messages


def test_a_dtype_that_safetensors_lacks_is_an_error_and_the_previous_checkpoint_stays(
    tmp_path: Path,
) -> None:
    paths = [str(tmp_path / "model.safetensors"), str(tmp_path / "folder") + "/"]
    for path in paths:
        run_ranks(save_net, 2, path)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    for messages in run_ranks(save_what_safetensors_cannot_hold, 2, paths, timeout=30):
        for message in messages:
            assert "wide is of torch.complex128, which safetensors files cannot hold" in message
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
    for path in paths:
        assert run_ranks(load_net, 2, path) == [whole_state(plain_net())] * 2


@library_writes
def test_a_directory_keeps_other_files_and_no_files_of_the_former_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"old": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / ".model-00001-of-00003.safetensors.tmp").write_text("of a save that died")
    for world_size in (2, 1, 2, 2):
        run_ranks(save_net, world_size, str(tmp_path))
        present = {path.name for path in tmp_path.iterdir()}
        files = set(json.loads((tmp_path / INDEX).read_text())["weight_map"].values())
        assert present == {"config.json", INDEX, *files} and len(files) == world_size
        assert_is_plain_net(read_directory(tmp_path))


def save_to_a_directory_of_each_rank(folder: str) -> str:
    with pytest.raises(CheckpointError) as error:
        bmt_checkpoint.save(distributed_net(), f"{folder}/{bmt_core.rank()}", format="safetensors")
    return str(error.value)


def test_a_directory_that_ranks_do_not_share_is_an_error_and_no_model(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    for message in run_ranks(save_to_a_directory_of_each_rank, 2, str(tmp_path)):
        assert "Save to a directory that all ranks share" in message
    assert [path.name for path in tmp_path.glob("*/*")] == []


def save_directory_in_background(good: str, bad: str) -> list[Any]:
    model = distributed_net()
    bmt_checkpoint.save(model, good, non_blocking=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    wait_for_saves()
    saved = load_net(good)
    with pytest.MonkeyPatch.context() as patch:
        if bmt_core.rank() == 1:
            patch.setattr(os, "pwrite", write_to_a_full_disk)
        bmt_checkpoint.save(model, bad, non_blocking=True)
        with pytest.raises(CheckpointError) as caught:
            wait_for_saves()
    wait_for_saves()  # told once
    return [saved, str(caught.value)]


def write_to_a_full_disk(file: int, data: Any, place: int) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_directory_is_written_in_the_background_and_errors_come_out_of_the_next_call(
    tmp_path: Path,
) -> None:
    bad = tmp_path / "bad"
    for saved, message in run_ranks(
        save_directory_in_background, 2, str(tmp_path / "good") + "/", str(bad) + "/"
    ):
        assert saved == whole_state(plain_net())
        assert "The disk is full: cannot write" in message.splitlines()[0]
    assert not list(bad.iterdir())


# ---- faults drawn at random, and at every moment ----


def mutated(data: bytes, draw: random.Random) -> bytes:
    """A file with a few bits flipped, cut short, lengthened, or with two of its parts exchanged."""
    changed, kind = bytearray(data), draw.randrange(5)
    if kind < 2:
        for _ in range(draw.choice((1, 1, 2, 8))):
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    elif kind == 2:
        del changed[draw.randrange(len(changed)) :]
    elif kind == 3:
        changed += draw.randbytes(draw.randrange(1, 9))
    else:
        size = draw.randrange(1, 64)
        one, two = (draw.randrange(len(changed) - size) for _ in range(2))
        changed[one : one + size], changed[two : two + size] = (
            changed[two : two + size],
            changed[one : one + size],
        )
    return bytes(changed)


@pytest.mark.parametrize("seed", range(3))
def test_no_mutation_of_a_checkpoint_loads_other_values_or_raises_another_error(
    seed: int, tmp_path: Path
) -> None:
    file, folder, draw = tmp_path / "model.safetensors", tmp_path / "folder", random.Random(seed)
    bmt_checkpoint.save(plain_net(seed=1), file)
    bmt_checkpoint.save(plain_net(seed=1), f"{folder}/")
    (shard,) = folder.glob("*.safetensors")
    model = plain_net()
    before, after = whole_state(model), whole_state(plain_net(seed=1))
    refused = 0
    for path, source in ((file, file), (shard, folder), (folder / INDEX, folder)):
        whole = path.read_bytes()
        for _ in range(40):
            path.write_bytes(mutated(whole, draw))
            try:
                bmt_checkpoint.load(model, source)
            except CheckpointError:
                refused += 1
                assert whole_state(model) == before
            else:  # something that does not matter, such as a blank in the index
                assert whole_state(model) == after
                model = plain_net()
        path.write_bytes(whole)
    assert refused > 90


@pytest.mark.slow("bmt-checkpoint")
def test_a_crash_at_any_moment_leaves_a_whole_directory(tmp_path: Path) -> None:
    count, entries = die_at_every_moment(OF_MODEL, tmp_path / "model")
    assert count > 8 and len(entries) == 2  # the last save deleted what the crashes left
