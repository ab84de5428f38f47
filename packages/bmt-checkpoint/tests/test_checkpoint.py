"""save and load: what is in the file, at any number of ranks, and what does not fit."""

from __future__ import annotations

import hashlib
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scratch_axes import grid_with
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.two_tensor import TwoTensor

import bmt_checkpoint
import bmt_core
import bmt_params
from bmt_checkpoint import loading
from bmt_core.errors import CheckpointError
from bmt_core.settings import MeshAxis
from bmt_params.parameter import DistributedParameter
from bmt_params.shard import Shard
from bmt_testing import gpu_ranks, on_ranks, rank_pool, run_ranks


class Counter(nn.Module):
    """A module with extra state and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = {"tokens": 12, "text": "a"}

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


class Contents(nn.Module):
    """Every kind of thing that a state dict can hold, at sizes that no number of ranks divides."""

    child_class: type[nn.Module] = nn.Module

    def __init__(self, make: Callable[..., nn.Parameter], seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
        self.embedding = make(draw(7, 5))
        self.single = make(draw(1))
        self.none = make(draw(0, 3))
        self.low = make(draw(3, 3).bfloat16())
        self.bytes = make(
            torch.randint(256, (9,), dtype=torch.uint8, generator=generator), requires_grad=False
        )
        self.eight = make(draw(5).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_parameter("absent", None)
        self.plain = nn.Parameter(draw(3))
        self.norm = nn.BatchNorm1d(3)
        self.counter = Counter()
        self.register_buffer("mask", draw(4) > 0)
        self.register_buffer("scalar", torch.tensor(seed))
        self.register_buffer("window", draw(8)[2:5])
        self.register_buffer("transposed", draw(4, 6).t())
        self.register_buffer("cache", draw(2), persistent=False)
        self.head = self.child_class()
        self.head.register_parameter("weight", self._parameters["embedding"])


class Net(bmt_params.DistributedModule, Contents):
    child_class = bmt_params.DistributedModule


def plain_net(seed: int = 0) -> Contents:
    return Contents(nn.Parameter, seed)


def distributed_net(seed: int = 0) -> Net:
    return Net(DistributedParameter, seed)


def whole_state(model: nn.Module) -> dict[str, Any]:
    """The model's whole tensors, in a form that can be compared and sent to another process."""
    return {
        name: (value.to(torch.float32).tolist(), str(value.dtype))
        if isinstance(value, torch.Tensor)
        else value
        for name, value in model.state_dict().items()
    }


def save_net(path: str, seed: int = 0) -> None:
    bmt_checkpoint.save(distributed_net(seed), path)


def load_net(path: str) -> dict[str, Any]:
    model = distributed_net(seed=1)
    assert model.head._parameters["weight"] is model._parameters["embedding"]
    result = bmt_checkpoint.load(model, path)
    assert result.missing_keys == [] and result.unexpected_keys == []
    assert model.head._parameters["weight"] is model._parameters["embedding"]
    return whole_state(model)


# ---- the file ----


@pytest.mark.parametrize("world_size", [1, 4])
def test_file_is_the_state_dict_of_the_plain_model(world_size: int, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    run_ranks(save_net, world_size, str(path))
    read = torch.load(path, weights_only=True)
    plain = plain_net()
    expected = plain.state_dict()
    assert list(read) == list(expected)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert type(read[name]) is torch.Tensor and read[name].dtype == value.dtype
            assert torch.equal(read[name].view(value.shape).float(), value.float()), name
        else:
            assert read[name] == value
    assert read._metadata == expected._metadata
    assert plain_net(seed=1).load_state_dict(read).missing_keys == []
    # Tied once, views without the memory around them.
    assert read["embedding"].data_ptr() == read["head.weight"].data_ptr()
    assert read["window"].untyped_storage().nbytes() == 3 * 4
    torch.save(expected, tmp_path / "plain.pt")
    assert path.stat().st_size <= 1.05 * (tmp_path / "plain.pt").stat().st_size


def test_file_of_plain_torch_loads(tmp_path: Path) -> None:
    torch.save(plain_net().state_dict(), tmp_path / "plain.pt")
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(plain_net().state_dict(), tmp_path / "no_sums.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    for name in ("plain.pt", "no_sums.pt"):
        assert run_ranks(load_net, 2, str(tmp_path / name)) == [whole_state(plain_net())] * 2


def test_file_of_the_time_before_torch_1_6_loads(tmp_path: Path) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    torch.save(model.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    bmt_checkpoint.load(other, tmp_path / "old.pt")
    assert torch.equal(model.weight, other.weight)


def test_without_init_plain_modules_save_and_load(tmp_path: Path) -> None:
    assert not bmt_core.is_initialized()
    path = tmp_path / "new" / "folder" / "model"
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    bmt_checkpoint.save(model, path)
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    bmt_checkpoint.load(other, path)
    for one, two in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(one, two)
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["model"]


@on_ranks(2)
def test_loading_keeps_the_dtype_of_the_model(tmp_path: Path) -> None:
    if bmt_core.rank() == 0:
        torch.save({"weight": torch.tensor([1.0, 2.0, 1.00001])}, tmp_path / "model.pt")
    bmt_core.synchronize()
    model = bmt_params.DistributedModule()
    model.weight = DistributedParameter(torch.zeros(3, dtype=torch.bfloat16))
    before = model._parameters["weight"]._version
    bmt_checkpoint.load(model, tmp_path / "model.pt")
    assert model._parameters["weight"]._version > before  # whoever caches the parameter must notice
    with torch.no_grad():
        assert model.weight.dtype == torch.bfloat16 and model.weight.tolist() == [1.0, 2.0, 1.0]


def test_a_link_is_followed_and_its_target_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "model.pt").symlink_to(tmp_path / "real" / "model.pt")
    bmt_checkpoint.save(nn.Linear(2, 2), tmp_path / "model.pt")
    assert (tmp_path / "model.pt").is_symlink() and (tmp_path / "real" / "model.pt").is_file()


@pytest.mark.gpu
def test_models_on_devices_save_and_load(tmp_path: Path) -> None:
    path, world_size = str(tmp_path / "model.pt"), min(2, gpu_ranks())
    run_ranks(save_net, world_size, path, init={"device": "cuda"})
    assert not any(
        getattr(value, "is_cuda", False) for value in torch.load(path, weights_only=True).values()
    )
    for init in ({"device": "cuda"}, {"device": "cpu"}):
        assert (
            run_ranks(load_net, world_size, path, init=init)
            == [whole_state(plain_net())] * world_size
        )


# ---- one tensor at a time ----


def whole_at_once(path: str) -> tuple[int, int]:
    """The largest number of whole tensors that exist at once while saving, and while loading."""
    seen: list[StorageWeakRef] = []
    peak = 0

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal peak
            made = function(*args)
            if made is None:
                return None
            seen.append(StorageWeakRef(made.untyped_storage()))
            peak = max(peak, sum(not storage.expired() for storage in seen))
            return made

        return call

    model = nn.Module()
    for i in range(6):
        model.register_parameter(f"p{i}", DistributedParameter(torch.full((10, 10), float(i))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shard, "assemble_on", watched(Shard.assemble_on))
        bmt_checkpoint.save(model, path)
    at_saving, peak = peak, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "_broadcast", watched(loading._broadcast))
        bmt_checkpoint.load(model, path)
    return at_saving, peak


def test_one_tensor_is_whole_at_a_time(tmp_path: Path) -> None:
    # Of six. Two, because the thread of the process group lets the last one go a moment after its
    # wait() has returned.
    (zero, _), one = run_ranks(whole_at_once, 2, str(tmp_path / "model.safetensors"))
    assert zero <= 2
    assert max(one) <= 2


# ---- what does not fit ----


def fingerprint(model: nn.Module) -> str:
    return hashlib.sha256(pickle.dumps(whole_state(model))).hexdigest()


def try_to_load(paths: list[str], strict: bool = True) -> list[tuple[str, bool]]:
    """For each file the error and whether the model is what it was."""
    model = distributed_net()
    results = []
    for path in paths:
        before = fingerprint(model)
        try:
            bmt_checkpoint.load(model, path, strict)
            message = ""
        except CheckpointError as error:
            message = str(error)
        results.append((message, fingerprint(model) == before))
    return results


class Custom:
    pass


def broken_files(folder: Path) -> dict[str, tuple[str, ...]]:
    """Write files that do not load; file name -> what the message must hold."""
    good = plain_net(seed=1).state_dict()

    def write(name: str, value: Any) -> None:
        torch.save(value, folder / name)

    def changed(**changes: Any) -> OrderedDict[str, Any]:
        return OrderedDict({**good, **changes})

    write("whole.pt", good)
    data = (folder / "whole.pt").read_bytes()
    write(
        "missing.pt", OrderedDict((name, value) for name, value in good.items() if name != "single")
    )
    write("unexpected.pt", changed(extra=torch.zeros(2)))
    write("shape.pt", changed(low=torch.zeros(2, 3)))
    write("dtype.pt", changed(bytes=torch.zeros(9)))
    write("value.pt", changed(plain=[1, 2, 3]))
    write("nested.pt", {"model": good, "step": 3})
    write("list.pt", [1, 2])
    write("sparse.pt", changed(plain=torch.zeros(3).to_sparse()))
    write("object.pt", {**good, "custom": Custom()})
    for name, length in {
        "empty.pt": 0,
        "short.pt": 100,
        "half.pt": len(data) // 2,
        "almost.pt": len(data) - 1,
    }.items():
        (folder / name).write_bytes(data[:length])
    (folder / "text.pt").write_text("step 5, loss 2.3\n" * 50)
    with zipfile.ZipFile(folder / "archive.pt", "w") as archive:
        archive.writestr("readme", "not by torch")
    (folder / "flipped.pt").write_bytes(flip_a_weight(folder / "whole.pt"))
    (folder / "folder.pt").mkdir()
    return {
        "missing.pt": ("only the model has: single", "strict=False"),
        "unexpected.pt": ("only the file has: extra", "strict=False"),
        "shape.pt": ("low: the file has shape (2, 3), the model (3, 3)",),
        "dtype.pt": (
            "bytes: the file has torch.float32, which torch.uint8 of the model cannot hold",
        ),
        "value.pt": ("plain: the file has a list, the model a tensor",),
        "nested.pt": ("only the file has: model, step", "model in the file is a dict of its own"),
        "list.pt": ("holds a list, not a state dict",),
        "sparse.pt": ("plain is a sparse tensor",),
        "object.pt": ("holds more than tensors and plain values", "Custom"),
        "empty.pt": ("not a whole file",),
        "short.pt": ("not a whole file",),
        "half.pt": ("not a whole file",),
        "almost.pt": ("not a whole file",),
        "text.pt": ("not a whole file",),
        "archive.pt": ("not a whole file",),
        "flipped.pt": ("not a whole file",),
        "folder.pt": ("is a directory",),
        "nowhere.pt": ("There is no checkpoint file",),
        "model.gguf": (".gguf", "Known: torch (.pt)"),
    }


def flip_a_weight(path: Path) -> bytes:
    """The file with one bit of one tensor's values changed."""
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        record = next(info for info in archive.infolist() if info.filename.endswith("data/0"))
    data[record.header_offset + 128] ^= 1  # records are aligned to 64 bytes, headers are shorter
    return bytes(data)


def test_what_does_not_load_is_one_clear_error_on_every_rank_and_changes_nothing(
    tmp_path: Path,
) -> None:
    expected = broken_files(tmp_path)
    results = run_ranks(try_to_load, 2, [str(tmp_path / name) for name in expected], timeout=60)
    for (name, parts), zero, one in zip(expected.items(), *results, strict=True):
        assert zero[1] and one[1], f"{name} changed the model"
        for part in parts:
            assert part in zero[0], (name, zero[0])
            assert part in one[0], (name, one[0])
        assert str(tmp_path / name) in zero[0]


def test_all_complaints_come_at_once(tmp_path: Path) -> None:
    good = plain_net(seed=1).state_dict()
    del good["single"]
    torch.save(
        {**good, "extra": torch.zeros(1), "low": torch.zeros(1), "plain": torch.zeros(4)},
        tmp_path / "model.pt",
    )
    (message, _), _ = (
        result[0] for result in run_ranks(try_to_load, 2, [str(tmp_path / "model.pt")])
    )
    for part in (
        "single",
        "extra",
        "low: the file",
        "plain: the file",
        "does not fit Net; nothing was loaded",
    ):
        assert part in message


def load_what_fits(path: str) -> Any:
    model = distributed_net()
    single = whole_state(model)["single"]
    result = bmt_checkpoint.load(model, path, strict=False)
    state = whole_state(model)
    assert state.pop("single") == single
    return type(result).__name__, result.missing_keys, result.unexpected_keys, state


def test_not_strict_loads_what_both_have_and_tells_the_rest(tmp_path: Path) -> None:
    good = plain_net(seed=1).state_dict()
    del good["single"]
    torch.save({**good, "extra": torch.zeros(1)}, tmp_path / "model.pt")
    expected = whole_state(plain_net(seed=1))
    del expected["single"]
    for result in run_ranks(load_what_fits, 2, str(tmp_path / "model.pt")):
        assert result == ("_IncompatibleKeys", ["single"], ["extra"], expected)


def load_into_different_models(path: str) -> None:
    # Whatever a program does wrong: here one rank built another model.
    model = nn.Linear(2, 2) if bmt_core.rank() == 0 else nn.Linear(3, 2)
    bmt_checkpoint.load(model, path)


def test_when_one_rank_cannot_load_all_ranks_raise(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "model.pt")
    outcomes = rank_pool(2).outcomes(
        load_into_different_models, str(tmp_path / "model.pt"), timeout=30
    )
    assert [outcome.error_type for outcome in outcomes] == ["CheckpointError", "CheckpointError"]
    assert "Rank 1 failed in loading" in outcomes[0].error_message


def test_meta_model_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    bmt_checkpoint.save(model, tmp_path / "model.pt")
    empty = nn.Linear(2, 2, device="meta")
    with pytest.raises(CheckpointError, match="weight is on the meta device"):
        bmt_checkpoint.save(empty, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="weight: the model's tensor is on the meta device"):
        bmt_checkpoint.load(empty, tmp_path / "model.pt")


@on_ranks(4)
def test_a_parameter_without_values_cannot_be_saved_on_any_rank(tmp_path: Path) -> None:
    model = nn.Module()
    # One rank of four holds nothing of it, and must say the same as the others.
    model.weight = DistributedParameter(torch.empty(3, device="meta"))
    with pytest.raises(CheckpointError, match="weight was made on the meta device"):
        bmt_checkpoint.save(model, tmp_path / "model.pt")
    assert not list(tmp_path.iterdir())


# ---- modules with a say ----


class Renamed(nn.Linear):
    """Was saved under another name once."""

    def __init__(self) -> None:
        super().__init__(2, 2, bias=False)
        self.register_load_state_dict_pre_hook(self._rename)
        self.register_load_state_dict_post_hook(
            lambda module, keys: setattr(module, "loaded", keys)
        )

    @staticmethod
    def _rename(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}kernel" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")


def test_load_hooks_of_modules_are_called(tmp_path: Path) -> None:
    torch.save({"0.kernel": torch.full((2, 2), 3.0)}, tmp_path / "model.pt")
    model = nn.Sequential(Renamed())
    bmt_checkpoint.load(model, tmp_path / "model.pt")
    assert model[0].weight.tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert model[0].loaded.missing_keys == []


class Transposes(nn.Linear):
    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].t()
        super()._load_from_state_dict(state, prefix, *args)


class TransposesCopy(nn.Linear):
    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(
            {key: value.t() for key, value in state.items()}, prefix, *args
        )


class ScalesInPlace(nn.Linear):
    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        state[f"{prefix}weight"].mul_(2)
        super()._load_from_state_dict(state, prefix, *args)


class ReadsValues(nn.Linear):
    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        state[f"{prefix}weight"] /= state[f"{prefix}weight"].max().item()
        super()._load_from_state_dict(state, prefix, *args)


class LoadsAlone(nn.Linear):
    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        self.loaded = state[f"{prefix}weight"]


COMPUTING = [Transposes, TransposesCopy, ScalesInPlace, ReadsValues, LoadsAlone]


def load_with_computing_overrides(path: str) -> dict[str, str]:
    messages = {}
    for kind in COMPUTING:
        model = nn.Sequential(kind(2, 2, bias=False))
        before = model[0].weight.tolist()
        with pytest.raises(CheckpointError) as caught:
            bmt_checkpoint.load(model, path)
        assert model[0].weight.tolist() == before
        messages[kind.__name__] = str(caught.value)
    return messages


def test_an_override_that_computes_is_one_clear_error_on_every_rank(tmp_path: Path) -> None:
    torch.save({"0.weight": torch.randn(2, 2)}, tmp_path / "model.pt")
    for messages in run_ranks(load_with_computing_overrides, 2, str(tmp_path / "model.pt")):
        for name, message in messages.items():
            assert (
                "override of _load_from_state_dict" in message
                and "model.load_state_dict(torch.load" in message
            ), name


class Odd(nn.Module):
    def get_extra_state(self) -> Any:
        return Custom()

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("never loaded")


def test_state_that_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_text("previous")
    with pytest.raises(CheckpointError, match="plain values"):
        bmt_checkpoint.save(Odd(), tmp_path / "model.pt")
    assert (tmp_path / "model.pt").read_text() == "previous"
    assert len(list(tmp_path.iterdir())) == 1


class TensorExtra(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value: Any = torch.full((3,), value)

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


@on_ranks(2)
def test_extra_state_may_be_a_tensor_or_hold_some(tmp_path: Path) -> None:
    nested = {"scale": torch.ones(2).to(torch.float8_e5m2), "history": [torch.zeros(1), None]}
    for value in (torch.full((3,), 4.0), nested):
        saved, other = TensorExtra(0.0), TensorExtra(0.0)
        saved.value = value
        bmt_checkpoint.save(saved, tmp_path / "model.pt")
        bmt_checkpoint.load(other, tmp_path / "model.pt")
        if isinstance(value, torch.Tensor):
            assert torch.equal(other.value, value)
        else:
            assert other.value["scale"].dtype == torch.float8_e5m2
            assert other.value["history"] == nested["history"]


# ---- tensors whose memory does not have their values ----


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors", "model/", "model.dcp"])
def test_a_conjugate_buffer_is_saved_with_its_values(tmp_path: Path, name: str) -> None:
    saved, other = nn.Module(), nn.Module()
    values = torch.randn(4, 3, dtype=torch.complex64)
    saved.register_buffer("rotation", values.conj())
    other.register_buffer("rotation", torch.zeros(4, 3, dtype=torch.complex64))
    bmt_checkpoint.save(saved, f"{tmp_path}/{name}")
    bmt_checkpoint.load(other, tmp_path / name)
    assert torch.equal(other.rotation, values.conj())


def composed_net(*values: float) -> nn.Module:
    model = nn.Module()
    for number, value in enumerate(values):
        parts = torch.full((2, 2), value), torch.full((2, 2), -value)
        model.register_parameter(f"weight{number}", nn.Parameter(TwoTensor(*parts)))
    return model


def parts_of(model: nn.Module) -> list[Any]:
    return [[p.a.tolist(), p.b.tolist()] for p in model.parameters()]


def test_tensors_composed_of_others_are_not_taken_for_tied_and_fit_torchs_files_only(
    tmp_path: Path,
) -> None:
    saved, other = composed_net(1.0, 2.0), composed_net(0.0, 0.0)
    with torch.serialization.safe_globals([TwoTensor]):
        bmt_checkpoint.save(saved, tmp_path / "model.pt")
        bmt_checkpoint.load(other, tmp_path / "model.pt")
    assert parts_of(other) == parts_of(saved)
    refused = "weight0 is of TwoTensor, whose elements are in other tensors"
    for name in ("model.safetensors", "model/", "model.dcp"):
        with pytest.raises(CheckpointError, match=refused):
            bmt_checkpoint.save(saved, f"{tmp_path}/{name}")
    with pytest.raises(CheckpointError, match=refused):
        bmt_checkpoint.save_checkpoint(tmp_path / "run", saved)


def error_of_composed(path: str) -> str:
    with (
        torch.serialization.safe_globals([TwoTensor]),
        pytest.raises(CheckpointError) as caught,
    ):
        bmt_checkpoint.load(composed_net(0.0, 0.0), path)
    return str(caught.value)


def test_tensors_composed_of_others_are_refused_where_they_would_be_sent(tmp_path: Path) -> None:
    torch.save(composed_net(1.0, 2.0).state_dict(), tmp_path / "model.pt")
    for message in run_ranks(error_of_composed, 2, str(tmp_path / "model.pt"), timeout=30):
        assert "weight0 is a TwoTensor tensor, which cannot be distributed" in message


# ---- tensor-parallel slices ----


def parallel_net(seed: int) -> nn.Module:
    whole = {
        "rows": torch.randn(8, 3, generator=torch.Generator().manual_seed(seed)),
        "columns": torch.randn(3, 8, generator=torch.Generator().manual_seed(seed + 1)),
        "replicated": torch.randn(5, generator=torch.Generator().manual_seed(seed + 2)),
    }
    topology = bmt_core.current().topology
    size, rank = topology.axis_size("tp"), topology.axis_rank("tp")
    model = nn.Module()
    for (name, tensor), dim in zip(whole.items(), (0, 1, -1), strict=True):
        part = tensor if dim < 0 else tensor.chunk(size, dim)[rank]
        model.register_parameter(name, DistributedParameter(part, tp_mode=True, tp_split_dim=dim))
    return model


def save_parallel(path: str) -> None:
    bmt_checkpoint.save(parallel_net(seed=0), path)


def load_parallel(path: str) -> dict[str, Any]:
    model = parallel_net(seed=5)
    bmt_checkpoint.load(model, path)
    with torch.no_grad():
        return {
            name: parameter.gather_all().tolist() for name, parameter in model.named_parameters()
        }


def test_tensor_parallel_slices_are_saved_whole_and_cut_again(tmp_path: Path) -> None:
    path, grid = tmp_path / "model.pt", grid_with(MeshAxis("tp", 2, 100, shards_data=False))
    run_ranks(save_parallel, 4, str(path), init=grid)
    saved = torch.load(path, weights_only=True)
    assert {name: tuple(value.shape) for name, value in saved.items()} == {
        "rows": (8, 3),
        "columns": (3, 8),
        "replicated": (5,),
    }
    expected = {name: value.tolist() for name, value in saved.items()}
    assert saved["rows"].equal(torch.randn(8, 3, generator=torch.Generator().manual_seed(0)))
    assert saved["columns"].equal(torch.randn(3, 8, generator=torch.Generator().manual_seed(1)))
    assert run_ranks(load_parallel, 4, str(path), init=grid) == [expected] * 4
    assert run_ranks(load_parallel, 1, str(path)) == [expected]
