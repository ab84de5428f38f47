"""The names under which Hugging Face's hub stores a model, where they differ from the names of the
model's parameters.

Files on the hub keep the names of their time: experts one by one, modules that were renamed since.
transformers has rules that rename tensors, join them and cut them when it loads a file, and that do
the reverse when it saves one. Here these rules run on a sharded model: first on tensors without
values, to know what a checkpoint will hold, then on one group of tensors at a time. bmt imports
nothing of transformers: a model of one of its classes exists only if the program has imported it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from bmt_checkpoint.format import CheckpointReader
from bmt_core.errors import CheckpointError, cause_of
from bmt_params.state.index import Index, TensorEntry
from bmt_params.state.model_tensors import named_targets, whole_shape

Shapes = dict[str, tuple[torch.Size, torch.dtype]]
"""The shapes and dtypes of whole tensors, by the model's names."""


def shapes_of(model: nn.Module) -> Shapes:
    """Return the whole shapes of this rank's tensors. Communicates nothing."""
    targets = ((name, tensor) for name, _, tensor in named_targets(model))
    return {
        name: (whole_shape(tensor), tensor.dtype) for name, tensor in targets if tensor is not None
    }


def is_hugging_face(model: nn.Module) -> bool:
    """Whether ``model`` is of a class of transformers, and its weights are its own, not those of
    adapters in it.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    is_one = isinstance(model, getattr(modeling, "PreTrainedModel", ()))
    return is_one and not getattr(model, "_hf_peft_config_loaded", False)


@dataclass(frozen=True)
class Group:
    """Tensors that transformers converts together. ``sources`` are pairs of a rule's pattern and
    the name that it matches.
    """

    rule: Any
    layer: str
    sources: Sequence[tuple[str, str]]

    def convert(self, model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the results by name, made of ``tensors``, which has all sources."""
        rule = copy.deepcopy(self.rule)  # it keeps tensors
        for pattern, name in self.sources:
            rule.add_tensor(self.layer, name, pattern, tensors[name])
        try:
            made = rule.convert(self.layer, model=model, config=model.config)
        except Exception as error:
            raise CheckpointError(
                f"transformers cannot convert {', '.join(name for _, name in self.sources)}"
                f" ({cause_of(error)}). Tensors are missing or have other shapes than the model's"
                " configuration says: take the config.json that belongs to the files."
            ) from error
        return {
            name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()
        }


class WholeModel:
    """What transformers' rules ask of a model. Parameters are tensors of the whole shapes,
    without values.
    """

    def __init__(self, model: nn.Module, shapes: Shapes) -> None:
        self._model = model
        self.tensors = {
            name: torch.empty(shape, dtype=dtype, device="meta")
            for name, (shape, dtype) in shapes.items()
        }

    def get_parameter(self, name: str) -> torch.Tensor:
        """Return a tensor of the shape of the whole parameter."""
        return self.tensors[name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class Rules:
    """transformers' rules for one model, to load it or to save it."""

    def __init__(self, library: Any, rules: Sequence[Any]) -> None:
        self.all = rules
        self._library = library
        self._renamings = [rule for rule in rules if isinstance(rule, library.WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, library.WeightConverter)]
        self._by_pattern = {
            pattern: rule for rule in self._converters for pattern in rule.source_patterns
        }

    def name_in_model(self, name: str, model: WholeModel) -> tuple[str, str | None]:
        """Return the name of a file's tensor in the model, and the pattern of the rule that
        converts it, if there is one.
        """
        find, prefix = self._library.rename_source_key, model.base_model_prefix
        found: tuple[str, str | None] = find(
            name, self._renamings, self._converters, prefix, model.tensors
        )
        if found[0] not in model.tensors and name in model.tensors:  # a file in the names of today
            found = find(name, [], [], prefix, model.tensors)
        return found

    def name_in_file(self, name: str) -> tuple[str, str | None]:
        """Return the name for saving. With a pattern, it is the name to give to the rule, whose
        results are renamed afterwards.
        """
        converted, pattern = self._library.apply_converters(name, self._converters)
        return (converted, pattern) if pattern is not None else (self.renamed(name), None)

    def renamed(self, name: str) -> str:
        """Apply the rules that only rename."""
        result: str = self._library.apply_renamings(name, self._renamings)
        return result

    def in_order(self, names: Iterable[str]) -> list[str]:
        """Return ``names`` in transformers' order, on which rules depend: experts 0 to 10, not
        0, 1, 10.
        """
        return sorted(names, key=self._library.dot_natural_key)

    def groups(self, matches: Iterable[tuple[str, str, str]]) -> list[Group]:
        """Put together what is converted together: ``matches`` are the result's name, the pattern,
        and the name, in order.
        """
        found: dict[str, list[tuple[str, str]]] = {}
        for layer, pattern, name in matches:
            found.setdefault(layer, []).append((pattern, name))
        return [
            Group(self._by_pattern[sources[0][0]], layer, sources)
            for layer, sources in found.items()
        ]


def rules_to_load(model: nn.Module) -> Rules | None:
    """Return the rules to load ``model``; None if this is no model of a transformers that has
    such rules.
    """
    library, mapping = _library(model)
    return None if library is None else Rules(library, mapping.get_model_conversion_mapping(model))


def rules_to_save(model: nn.Module) -> Rules | None:
    """Return the rules to save ``model``: the reverse of those that loaded it, or else of those for
    its class.
    """
    library, mapping = _library(model)
    if library is None:
        return None
    rules: Any = getattr(model, "_weight_conversions", None)
    if rules is None:
        of_class = mapping.get_model_conversion_mapping(model, add_legacy=False)
        # Whether a file has a prefix more than the model is known from a file only.
        rules = [rule for rule in of_class if not isinstance(rule, library.PrefixChange)]
    return Rules(library, [rule.reverse_transform() for rule in reversed(rules)])


_NEEDED = (
    "PrefixChange",
    "WeightConverter",
    "apply_converters",
    "apply_renamings",
    "dot_natural_key",
    "rename_source_key",
)


def _library(model: nn.Module) -> tuple[Any, Any]:
    # transformers imports both modules with its models; before version 5 it had neither.
    library, mapping = (
        sys.modules.get(f"transformers.{name}")
        for name in ("core_model_loading", "conversion_mapping")
    )
    is_known = mapping is not None and all(hasattr(library, name) for name in _NEEDED)
    return (library, mapping) if is_known and is_hugging_face(model) else (None, None)


class HubIndex:
    """A file's ``index`` under the names of ``model``, of which other ranks may have other parts:
    ``shapes`` has all of them.
    """

    def __init__(self, rules: Rules, model: nn.Module, shapes: Shapes, index: Index) -> None:
        self._rules, self._model = rules, model
        self._whole_model = WholeModel(model, shapes)
        self._origins: dict[str, str | Group] = {}
        entries, matches = self._renamed(index)
        for group in rules.groups(matches):
            tensors = {name: without_values(index.entries[name]) for _, name in group.sources}
            for name, tensor in group.convert(self._whole_model, tensors).items():
                self._add(
                    entries,
                    name,
                    group,
                    TensorEntry(shape=tensor.shape, dtype=tensor.dtype, source=name),
                )
        self.index = Index(entries=self._without_ignored(entries), metadata=index.metadata)

    def opened(self, reader: CheckpointReader | None) -> CheckpointReader | None:
        """Return a reader of the tensors of :attr:`index`, made of those that ``reader`` reads."""
        return (
            None
            if reader is None
            else _HubReader(self.index, self._origins, self._whole_model, reader)
        )

    def note_rules(self) -> None:
        """Tell the model by which rules it was loaded, as transformers does: a save
        reverses them.
        """
        self._model._weight_conversions = [rule for rule in self._rules.all if rule.was_used()]  # type: ignore[assignment]

    def _renamed(self, index: Index) -> tuple[dict[str, Any], list[tuple[str, str, str]]]:
        """Return the entries that keep their values, under the model's names, and what matches the
        rules that convert.
        """
        entries: dict[str, Any] = {}
        matches = []
        first_names: dict[str, str] = {}
        for name in self._rules.in_order(index.entries):
            entry = index.entries[name]
            if not isinstance(entry, TensorEntry):
                entries[name] = entry
                continue
            new, pattern = self._rules.name_in_model(name, self._whole_model)
            if pattern is not None and new in self._whole_model.tensors:
                matches.append((new, pattern, name))
                continue
            # Complaints name what the file has.
            new = new if new in self._whole_model.tensors else name
            source = first_names.setdefault(entry.source, new)
            self._add(
                entries,
                new,
                entry.source,
                TensorEntry(shape=entry.shape, dtype=entry.dtype, source=source),
                name,
            )
        return entries, matches

    def _add(
        self,
        entries: dict[str, Any],
        name: str,
        origin: str | Group,
        entry: TensorEntry,
        of_file: str = "",
    ) -> None:
        if name in entries:
            raise CheckpointError(
                f"By transformers' rules two tensors of the file are {name} of the model, one of"
                f" them {of_file or 'a converted one'}. The file holds two versions of the model:"
                " remove one."
            )
        entries[name] = entry
        self._origins[name] = origin

    def _without_ignored(self, entries: dict[str, Any]) -> dict[str, Any]:
        """Leave out what transformers knows to be of no use in old files, such as the tables of
        positions of GPT-2.
        """
        unknown = {
            name
            for name in entries
            if name not in self._whole_model.tensors and name in self._origins
        }
        found = SimpleNamespace(missing_keys=set(), unexpected_keys=set(unknown))
        self._model._adjust_missing_and_unexpected_keys(found)  # type: ignore[operator]
        return {
            name: entry
            for name, entry in entries.items()
            if name not in unknown or name in found.unexpected_keys
        }


def converted_index(model: nn.Module, shapes: Shapes, index: Index) -> HubIndex | None:
    """Return ``index`` under the names of ``model``; None if it has them already, or transformers
    has no rules for the model.
    """
    tensors = {
        name: entry for name, entry in index.entries.items() if isinstance(entry, TensorEntry)
    }
    if all(name in shapes and shapes[name][0] == entry.shape for name, entry in tensors.items()):
        return None
    rules = rules_to_load(model)
    return None if rules is None else HubIndex(rules, model, shapes, index)


def without_values(entry: TensorEntry) -> torch.Tensor:
    """Return a tensor of the shape and dtype of ``entry``."""
    return torch.empty(entry.shape, dtype=entry.dtype, device="meta")


class _HubReader(CheckpointReader):
    """Reads the tensors of a :class:`HubIndex`, of whose groups it keeps the last one: its results
    are read one after the other.
    """

    def __init__(
        self,
        index: Index,
        origins: Mapping[str, str | Group],
        model: WholeModel,
        reader: CheckpointReader,
    ) -> None:
        self.index, self.identity = index, reader.identity
        self._origins, self._model, self._reader = origins, model, reader
        self._last: Group | None = None
        self._results: dict[str, torch.Tensor] = {}

    def read(self, name: str) -> torch.Tensor:
        origin = self._origins[name]
        if isinstance(origin, str):
            return self._reader.read(origin)
        if self._last is not origin:
            self._results = {}  # before the next ones are made
            tensors = {name: self._reader.read(name) for _, name in origin.sources}
            self._last, self._results = origin, origin.convert(self._model, tensors)
        return self._results[name].contiguous()

    def verify(self, part: int, parts: int) -> None:
        self._reader.verify(part, parts)

    def close(self) -> None:
        self._reader.close()
