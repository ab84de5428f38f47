"""The rules for a format of checkpoint files: each test is one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bmt_checkpoint
from bmt_checkpoint.format import CheckpointFormat, CheckpointReader
from bmt_core.errors import CheckpointError
from bmt_params.modules.distributed_module import DistributedModule
from bmt_params.parameter import DistributedParameter
from bmt_params.state.index import Index, TensorEntry
from bmt_testing.conformance.offer import Offer
from bmt_testing.pool import run_ranks

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
# A format may have no place for these, and says so by a CheckpointError.
OTHER_DTYPES = (
    torch.complex128,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their number of bytes
Tensors = Mapping[str, torch.Tensor]


def test_tensors_of_every_type_come_back(offer: Offer, tmp_path: Path) -> None:
    values = torch.tensor([0.0, 1.0, 5.0, 100.0, 3.0])
    tensors = {str(dtype): values.to(dtype) for dtype in DTYPES}
    _check(_written(offer, tmp_path, tensors), tensors)


def test_tensors_of_other_types_come_back_or_are_refused(offer: Offer, tmp_path: Path) -> None:
    each_byte = torch.arange(256).to(torch.uint8)
    _check_types(offer, tmp_path, each_byte.view, OTHER_DTYPES)


def test_numbers_come_back_that_narrower_types_cannot_hold(offer: Offer, tmp_path: Path) -> None:
    def widest(dtype: torch.dtype) -> torch.Tensor:
        if dtype == torch.bool:
            return torch.tensor([True, False])
        if not _is_float(dtype):
            info = torch.iinfo(dtype)
            return torch.tensor([info.max, info.max - 1, info.min], dtype=dtype)
        limits = torch.finfo(_real(dtype))
        numbers = [limits.max, limits.min, limits.tiny, 1 + limits.eps]
        return torch.tensor(numbers, dtype=_real(dtype)).view(dtype)

    _check_types(offer, tmp_path, widest)


def test_infinities_and_the_signs_of_zeros_come_back(offer: Offer, tmp_path: Path) -> None:
    def special(dtype: torch.dtype) -> torch.Tensor:
        numbers = [-0.0, 0.0, torch.inf, -torch.inf]
        return torch.tensor(numbers, dtype=_real(dtype)).view(dtype)

    _check_types(offer, tmp_path, special, filter(_is_float, DTYPES))


def test_numbers_below_the_smallest_normal_one_come_back(offer: Offer, tmp_path: Path) -> None:
    def subnormal(dtype: torch.dtype) -> torch.Tensor:
        normal = _bits_of(torch.finfo(dtype).tiny, dtype)
        return _of_bits([1, 2, normal // 2, normal - 1], dtype)

    _check_types(offer, tmp_path, subnormal, filter(_is_float, DTYPES))


def test_every_nan_comes_back_with_its_bits(offer: Offer, tmp_path: Path) -> None:
    def nans(dtype: torch.dtype) -> torch.Tensor:
        infinity, quiet = (_bits_of(number, dtype) for number in (torch.inf, torch.nan))
        return _of_bits([infinity + 1, quiet, quiet + 3, quiet + 5], dtype)

    _check_types(offer, tmp_path, nans, filter(_is_float, DTYPES))


def test_tensors_without_dimensions_or_elements_come_back(offer: Offer, tmp_path: Path) -> None:
    shapes: tuple[tuple[int, ...], ...] = ((), (0,), (3, 0), (1, 1, 1), (2, 3, 5))
    tensors = {str(shape): torch.full(shape, 2.5) for shape in shapes}
    _check(_written(offer, tmp_path, tensors), tensors)


def test_names_of_all_kinds_come_back(offer: Offer, tmp_path: Path) -> None:
    names = ["layers.10.weight", "layers.9.weight", "größe", "two words", "a" * 300, "Weight"]
    tensors = {name: torch.full((2,), float(number)) for number, name in enumerate(names)}
    reader = _written(offer, tmp_path, tensors)
    # In any order: loading looks them up.
    assert sorted(reader.index.entries) == sorted(names)
    _check(reader, tensors)


def test_tied_names_come_back_with_their_tensor(offer: Offer, tmp_path: Path) -> None:
    weight = torch.arange(6.0).view(2, 3)
    reader = _written(
        offer, tmp_path, {"inner.weight": weight}, tied={"outer.weight": "inner.weight"}
    )
    entries = reader.index.entries
    assert sorted(entries) == ["inner.weight", "outer.weight"]
    sources, keeps_ties = {entry.source for entry in entries.values()}, _format(offer).keeps_ties
    for source in sources:
        assert torch.equal(reader.read(source), weight), source
    assert len(sources) == (1 if keeps_ties else 2), f"the format says keeps_ties = {keeps_ties}"


def test_versions_of_modules_come_back_if_it_keeps_them(offer: Offer, tmp_path: Path) -> None:
    metadata = {"": {"version": 1}, "norm": {"version": 2}}
    reader = _written(offer, tmp_path, {"weight": torch.ones(2)}, metadata=metadata)
    found = {name: dict(value) for name, value in reader.index.metadata.items()}
    keeps_versions = _format(offer).keeps_versions
    assert found == (metadata if keeps_versions else {}), (
        f"the format says keeps_versions = {keeps_versions}"
    )


def test_tensors_are_read_in_any_order_and_more_than_once(offer: Offer, tmp_path: Path) -> None:
    tensors = {name: torch.full((3, 2), float(number)) for number, name in enumerate("abcd")}
    reader = _written(offer, tmp_path, tensors)
    for name in ("d", "a", "d", "c"):
        found = reader.read(name)
        assert found.is_contiguous() and found.device.type == "cpu"
        assert torch.equal(found, tensors[name]), name


def test_readers_have_an_identity_only_of_the_same_file(offer: Offer, tmp_path: Path) -> None:
    identities = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        first = _written(offer, folder, {"weight": torch.full((2,), float(number))})
        second = _format(offer).open(_path(offer, folder))
        assert first.identity == second.identity, "two readers of one file"
        identities.append(first.identity)
    assert identities[0] is None or identities[0] != identities[1], "readers of two files"


@pytest.mark.parametrize("kept", ["nothing", "half", "all but a byte"])
def test_a_file_that_was_cut_off_is_an_error(offer: Offer, tmp_path: Path, kept: str) -> None:
    tensors = {name: torch.randn(500) for name in "abc"}
    _written(offer, tmp_path, tensors).close()
    path = _path(offer, tmp_path)
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size)
    size = largest.stat().st_size
    os.truncate(largest, {"nothing": 0, "half": size // 2, "all but a byte": size - 1}[kept])
    with pytest.raises(CheckpointError):
        _read_all(offer, path)


def test_a_file_of_another_kind_is_an_error(offer: Offer, tmp_path: Path) -> None:
    path = _path(offer, tmp_path)
    if _format(offer).is_directory:
        path.mkdir()
        path = path / "notes.txt"
    path.write_text("These are notes about a training, and no tensors.\n" * 20)
    with pytest.raises(CheckpointError):
        _read_all(offer, _path(offer, tmp_path))


def test_what_ranks_save_another_number_of_ranks_loads(offer: Offer, tmp_path: Path) -> None:
    path = str(_path(offer, tmp_path))
    init = offer.run_settings()
    run_ranks(_save, 2, offer, path, init=init)
    for found in run_ranks(_load, 3, offer, path, init=init):
        for name, value in _values(1.0).items():
            assert torch.equal(found[name], value), name


def _save(offer: Offer, path: str) -> None:
    bmt_checkpoint.save(_model(1.0), path, format=_format(offer))


def _load(offer: Offer, path: str) -> dict[str, torch.Tensor]:
    model = _model(0.0)
    # By its name or suffix where it is installed; a module's plugin is known to this run.
    bmt_checkpoint.load(model, path)
    params: dict[str, Any] = dict(model.named_parameters())
    return {name: p.gather().detach().clone() for name, p in params.items()}


def _model(factor: float) -> nn.Module:
    model = DistributedModule()
    for name, value in _values(factor).items():
        model.register_parameter(name, DistributedParameter(value))
    return model


def _values(factor: float) -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {"matrix": (7, 5), "vector": (11,), "one": (1,)}
    return {
        name: torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape) * factor
        for name, shape in shapes.items()
    }


def _written(
    offer: Offer,
    folder: Path,
    tensors: Tensors,
    *,
    tied: Mapping[str, str] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> CheckpointReader:
    """Write ``tensors``, ``tied`` names of some of them and ``metadata``; open what was written."""
    entries: dict[str, Any] = {
        name: TensorEntry(shape=value.shape, dtype=value.dtype, source=name)
        for name, value in tensors.items()
    }
    for name, source in (tied or {}).items():
        entries[name] = entries[source]
    path, chosen = _path(offer, folder), _format(offer)
    if chosen.is_directory:
        path.mkdir()
    index = Index(entries=entries, metadata=metadata or {})
    chosen.write(path, index, iter([(name, value.clone()) for name, value in tensors.items()]))
    return chosen.open(path)


def _check_types(
    offer: Offer,
    folder: Path,
    make: Callable[[torch.dtype], torch.Tensor],
    dtypes: Iterable[torch.dtype] = DTYPES,
) -> None:
    """Check that a tensor of each type comes back from a file of its own, or is refused if a format
    may have no place for its type.
    """
    for dtype in dtypes:
        own = folder / str(dtype)
        own.mkdir()
        tensors = {str(dtype): make(dtype)}
        try:
            reader = _written(offer, own, tensors)
        except CheckpointError:
            if dtype in DTYPES:
                raise
        else:
            _check(reader, tensors)


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _real(dtype: torch.dtype) -> torch.dtype:
    """Return the type of the parts of a complex number, and any other type itself."""
    return dtype.to_real() if dtype.is_complex else dtype


def _bits_of(number: float, dtype: torch.dtype) -> int:
    real = _real(dtype)
    return int(torch.tensor([number], dtype=real).view(_INTEGERS[real.itemsize]))


def _of_bits(bits: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers of these bits, and those with the other sign."""
    integer = _INTEGERS[_real(dtype).itemsize]
    negative = [each + torch.iinfo(integer).min for each in bits]
    return torch.tensor([*bits, *negative], dtype=integer).view(_real(dtype)).view(dtype)


def _check(reader: CheckpointReader, tensors: Tensors) -> None:
    """Check that ``reader`` has ``tensors``, in every bit."""
    for name, value in tensors.items():
        entry, found = reader.index.entries[name], reader.read(name)
        assert (entry.dtype, entry.shape) == (value.dtype, value.shape), name
        assert (found.dtype, found.shape) == (value.dtype, value.shape), name
        as_bytes = [tensor.reshape(-1).view(torch.uint8) for tensor in (found, value)]
        assert torch.equal(*as_bytes), f"{name}: {value} was written, and {found} read"
    reader.close()


def _read_all(offer: Offer, path: Path) -> None:
    """Do what loading does: open, verify, read."""
    reader = _format(offer).open(path)
    reader.verify(0, 1)
    for name in reader.index.own_tensors:
        reader.read(name)


def _format(offer: Offer) -> CheckpointFormat:
    made: CheckpointFormat = offer.find()()
    return made


def _path(offer: Offer, folder: Path) -> Path:
    return folder / f"model{_format(offer).suffixes[0]}"
