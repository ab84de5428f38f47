"""The torch format: the file that ``torch.save(model.state_dict())`` of the plain model writes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from bmt_checkpoint.format import CheckpointFormat, CheckpointReader, ForeignEntry
from bmt_checkpoint.torch_file import read_torch_file, write_torch_file
from bmt_core.errors import CheckpointError
from bmt_core.run.runtime import world_group
from bmt_params.state.index import EXTRA_STATE, Index, TensorEntry
from bmt_params.state.model_tensors import memory_key


class TorchFormat(CheckpointFormat):
    """Files for ``torch.load(weights_only=True)``. Writing one takes rank 0 host memory for the
    whole model.
    """

    name = "torch"
    suffixes = (".pt", ".pth", ".bin", ".ckpt")

    def write(self, path: Path, index: Index, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        by_name = dict(tensors)
        state: OrderedDict[str, Any] = OrderedDict()
        for name, entry in index.entries.items():
            state[name] = by_name[entry.source] if isinstance(entry, TensorEntry) else entry
        state._metadata = OrderedDict(index.metadata)  # type: ignore[attr-defined]
        write_torch_file(path, state)

    def open(self, path: Path) -> CheckpointReader:
        return _TorchReader(path)


class _TorchReader(CheckpointReader):
    def __init__(self, path: Path) -> None:
        state = read_torch_file(path)
        if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
            raise CheckpointError(
                f"{path} holds a {type(state).__name__}, not a state dict (tensors by name)."
                " Save model.state_dict(), or use bmt's save()."
            )
        self._tensors = {
            name: value.detach() for name, value in state.items() if isinstance(value, torch.Tensor)
        }
        metadata = getattr(state, "_metadata", None) or {}
        if not isinstance(metadata, Mapping) or not all(
            isinstance(value, Mapping) for value in metadata.values()
        ):
            raise CheckpointError(
                f"{path}: the versions of modules, in the state dict's _metadata, are damaged."
            )
        self.index = Index(entries=_entries(path, state), metadata=dict(metadata))

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name].resolve_conj().resolve_neg().contiguous()

    def close(self) -> None:
        self._tensors = {}


def _entries(path: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    first_names: dict[Any, str] = {}
    entries: dict[str, Any] = {}
    is_sent = world_group().size > 1
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            is_extra = name.endswith(EXTRA_STATE)
            entries[name] = value if is_extra else ForeignEntry(type_name=type(value).__name__)
            continue
        is_dense = value.layout == torch.strided and not (value.is_quantized or value.is_nested)
        # One with its elements in other tensors is not sent to other ranks.
        if not is_dense or value.is_meta or (is_sent and value.numel() and not value.data_ptr()):
            raise CheckpointError(
                f"{path}: {name} is a {_unusual(value)} tensor, which cannot be distributed. Save"
                " it as a dense one, with values."
            )
        source = first_names.setdefault(memory_key(value), name) if value.numel() else name
        entries[name] = TensorEntry(shape=value.shape, dtype=value.dtype, source=source)
    return entries


def _unusual(tensor: torch.Tensor) -> str:
    kinds = {"meta": tensor.is_meta, "quantized": tensor.is_quantized, "nested": tensor.is_nested}
    kinds["sparse"] = tensor.layout != torch.strided
    return next((kind for kind, applies in kinds.items() if applies), type(tensor).__name__)
