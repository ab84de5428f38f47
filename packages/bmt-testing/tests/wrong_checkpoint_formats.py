"""Formats of checkpoint files that break one rule of the conformance kit each, and a plugin that
offers them.

All write what ``torch`` writes, but for the mistake, in files with suffixes of their own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from wrong_plugins import Named

from bmt_checkpoint import TorchFormat
from bmt_checkpoint.format import CheckpointReader
from bmt_core.errors import CheckpointError
from bmt_core.plugins.hookspecs import hookimpl
from bmt_params.state.index import Index


class Right(Named, TorchFormat):
    """Breaks no rule."""

    breaks = ""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.suffixes = (f".{cls.name}",)  # type: ignore[assignment]


class Reader(CheckpointReader):
    """Reads by the reader ``inner``."""

    def __init__(self, inner: CheckpointReader) -> None:
        self.inner, self.index, self.identity = inner, inner.index, inner.identity

    def read(self, name: str) -> torch.Tensor:
        return self.inner.read(name)

    def close(self) -> None:
        self.inner.close()


class CutsBfloat16(Right):
    """Writes bfloat16 as float16 beside other types."""

    breaks = "tensors_of_every_type_come_back"

    def write(self, path: Path, index: Index, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        if len({entry.dtype for entry in index.own_tensors.values()}) > 1:
            tensors = ((n, t.half() if t.dtype == torch.bfloat16 else t) for n, t in tensors)
        super().write(path, index, tensors)


class Changed(Right):
    """Writes other values than it is given."""

    def write(self, path: Path, index: Index, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().write(path, index, ((name, self.change(tensor)) for name, tensor in tensors))

    def change(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.complex64:
            return torch.view_as_complex(self.change_real(torch.view_as_real(tensor)))
        is_usual = tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1
        return self.change_real(tensor) if is_usual else tensor

    def change_real(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class CutsComplex128(Changed):
    """Writes complex128 as complex64."""

    breaks = "tensors_of_other_types_come_back_or_are_refused"

    def change(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.complex64) if tensor.dtype == torch.complex128 else tensor


class HasNoFloat8(Right):
    """Raises what it finds in its table of types."""

    breaks = "tensors_of_other_types_come_back_or_are_refused"

    def write(self, path: Path, index: Index, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for entry in index.own_tensors.values():
            if entry.dtype.itemsize == 1 and entry.dtype.is_floating_point:
                raise KeyError(entry.dtype)
        super().write(path, index, tensors)


class ThroughFloat32(Changed):
    """Rounds float64 to float32."""

    breaks = "numbers_come_back_that_narrower_types_cannot_hold"

    def change_real(self, tensor: torch.Tensor) -> torch.Tensor:
        is_usual = tensor.isfinite() & (tensor.abs() >= torch.finfo(tensor.dtype).tiny)
        return torch.where(is_usual, tensor.float().to(tensor.dtype), tensor)


class ThroughDouble(Changed):
    """Writes integers as numbers of JSON, which are float64."""

    breaks = "numbers_come_back_that_narrower_types_cannot_hold"

    def change(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.double().long() if tensor.dtype == torch.int64 else tensor


class OneZero(Changed):
    """Writes 0 without a sign."""

    breaks = "infinities_and_the_signs_of_zeros_come_back"

    def change_real(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.masked_fill(tensor == 0, 0.0)


class FlushesSubnormals(Changed):
    """Writes 0 for the smallest numbers, as a device that flushes them."""

    breaks = "numbers_below_the_smallest_normal_one_come_back"

    def change_real(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.where(tensor.abs() < torch.finfo(tensor.dtype).tiny, tensor * 0, tensor)


class OneNan(Changed):
    """Writes every NaN as the same one, as texts do."""

    breaks = "every_nan_comes_back_with_its_bits"

    def change_real(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.masked_fill(tensor.isnan(), torch.nan)


class NoScalars(Right):
    """Gives every tensor a dimension."""

    breaks = "tensors_without_dimensions_or_elements_come_back"

    def write(self, path: Path, index: Index, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().write(path, index, ((n, t if t.dim() else t.view(1)) for n, t in tensors))


class CutsNames(Right):
    """Has names of at most 255 characters, as a file system."""

    breaks = "names_of_all_kinds_come_back"

    def open(self, path: Path) -> CheckpointReader:
        reader = Reader(super().open(path))
        entries = {name[:255]: entry for name, entry in reader.index.entries.items()}
        reader.index = replace(reader.index, entries=entries)
        return reader


class ForgetsTiedNames(Right):
    """Has one name of each tensor."""

    breaks = "tied_names_come_back_with_their_tensor"

    def open(self, path: Path) -> CheckpointReader:
        reader = Reader(super().open(path))
        reader.index = replace(reader.index, entries=reader.index.own_tensors)
        return reader


class StoresTwice(Right):
    """Stores a tensor under each of its names, and does not say so."""

    breaks = "tied_names_come_back_with_their_tensor"

    def open(self, path: Path) -> CheckpointReader:
        reader = TwiceReader(super().open(path))
        entries = {
            name: replace(entry, source=name) for name, entry in reader.index.entries.items()
        }
        reader.index = replace(reader.index, entries=entries)
        return reader


class TwiceReader(Reader):
    """Has a tensor for each name."""

    def read(self, name: str) -> torch.Tensor:
        return super().read(self.inner.index.entries[name].source)


class SaysThatItStoresTwice(StoresTwice):
    """Breaks no rule."""

    breaks = ""
    keeps_ties = False


class ForgetsVersions(Right):
    """Has no place for the versions of modules, and does not say so."""

    breaks = "versions_of_modules_come_back_if_it_keeps_them"

    def write(self, path: Path, index: Index, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().write(path, replace(index, metadata={}), tensors)


class SaysThatItForgetsVersions(ForgetsVersions):
    """Breaks no rule."""

    breaks = ""
    keeps_versions = False


class MixesVersions(Right):
    """Has one version for all modules."""

    breaks = "versions_of_modules_come_back_if_it_keeps_them"

    def write(self, path: Path, index: Index, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        metadata = {name: {"version": 1} for name in index.metadata}
        super().write(path, replace(index, metadata=metadata), tensors)


class OnceReader(Reader):
    """Forgets what it has read."""

    def __init__(self, inner: CheckpointReader) -> None:
        super().__init__(inner)
        self.unread = set(self.index.entries)

    def read(self, name: str) -> torch.Tensor:
        self.unread.remove(name)
        return super().read(name)


class ReadsOnce(Right):
    breaks = "tensors_are_read_in_any_order_and_more_than_once"

    def open(self, path: Path) -> CheckpointReader:
        return OnceReader(super().open(path))


class OneIdentity(Right):
    """Says that all files are the same."""

    breaks = "readers_have_an_identity_only_of_the_same_file"

    def open(self, path: Path) -> CheckpointReader:
        reader = Reader(super().open(path))
        reader.identity = self.name
        return reader


class EmptyReader(CheckpointReader):
    index = Index(entries={})

    def read(self, name: str) -> torch.Tensor:
        raise KeyError(name)

    def close(self) -> None:
        pass


class TakesWhatIsLeft(Right):
    """Reads no tensors from a file whose table of contents is missing."""

    breaks = "a_file_that_was_cut_off_is_an_error"

    def open(self, path: Path) -> CheckpointReader:
        try:
            return super().open(path)
        except CheckpointError:
            if path.read_bytes()[:2] == b"PK":
                return EmptyReader()
            raise


class OtherErrors(Right):
    """Raises what its library raises."""

    breaks = "a_file_of_another_kind_is_an_error"

    def open(self, path: Path) -> CheckpointReader:
        if path.read_bytes()[:2] not in (b"PK", b""):
            raise ValueError(f"{path} is no archive.")
        return super().open(path)


class RankReader(Reader):
    """Has values on rank 0 alone."""

    def read(self, name: str) -> torch.Tensor:
        value = super().read(name)
        return value if os.environ.get("RANK", "0") == "0" else torch.zeros_like(value)


class FirstRankOnly(Right):
    """Says that every rank can read, and only rank 0 can."""

    breaks = "what_ranks_save_another_number_of_ranks_loads"

    def open(self, path: Path) -> CheckpointReader:
        reader = RankReader(super().open(path))
        reader.identity = str(path), path.stat().st_mtime_ns
        return reader


WRONG = Right.plugins


@hookimpl
def bmt_checkpoint_formats() -> list[type[TorchFormat]]:
    return WRONG
