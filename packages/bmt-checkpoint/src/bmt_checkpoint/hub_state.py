"""``HubState``: a model's tensors under the names and in the layouts that Hugging Face's hub has
for its class.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bmt_checkpoint.hub_names import (
    Group,
    Rules,
    WholeModel,
    is_hugging_face,
    rules_to_save,
    without_values,
)
from bmt_core.run.runtime import world_group
from bmt_params.state.index import Index, TensorEntry
from bmt_params.state.whole_state import OwnPart, WholeState


class HubState:
    """``state`` of ``model`` in the layout of the hub, for a save by all ranks. ``index`` lists
    its entries.

    Tensors that transformers' rules only rename are written in parts, as those of
    :class:`WholeState`. Those that rules join or cut are gathered on one rank, which converts and
    writes them: one group of tensors at a time on each rank.
    """

    def __init__(self, state: WholeState, rules: Rules, model: nn.Module) -> None:
        """Make the index. Communicates nothing."""
        self._state, self._rules = state, rules
        own = state.index.own_tensors
        self._model = WholeModel(
            model, {name: (entry.shape, entry.dtype) for name, entry in own.items()}
        )
        self._names: dict[str, str] = {}
        matches: list[tuple[str, str, str]] = []
        for name in rules.in_order(own):
            found, pattern = rules.name_in_file(name)
            if pattern is None:
                self._names[name] = found
            else:
                matches.append((found, pattern, name))
        self._groups = rules.groups(matches)
        self.index = Index(entries=self._entries(), metadata=state.index.metadata)

    def _entries(self) -> dict[str, Any]:
        """Return the entries: first those that keep their values, in the order of the model, then
        converted tensors.
        """
        entries: dict[str, Any] = {}
        for name, entry in self._state.index.entries.items():
            if not isinstance(entry, TensorEntry):
                entries[name] = entry
            elif entry.source in self._names:
                new, pattern = self._rules.name_in_file(name)
                if pattern is None:
                    source = self._names[entry.source]
                    entries[new] = TensorEntry(shape=entry.shape, dtype=entry.dtype, source=source)
        own = self._state.index.own_tensors
        for group in self._groups:
            for name, tensor in self._converted(
                group, {n: without_values(own[n]) for _, n in group.sources}
            ).items():
                entries[name] = TensorEntry(shape=tensor.shape, dtype=tensor.dtype, source=name)
        return entries

    def _converted(self, group: Group, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        made = group.convert(self._model, tensors)
        return {self._rules.renamed(name): tensor for name, tensor in made.items()}

    def batches(self) -> Iterator[Sequence[OwnPart]]:
        """Yield this rank's parts, which together with those of the other ranks have every
        element once.

        Collective, with equally many batches on every rank. If a conversion fails, the rank takes
        part in the remaining gathers and raises at the end.
        """
        own = self._state.own_parts()
        yield [
            part._replace(name=self._names[part.name]) for part in own if part.name in self._names
        ]
        failure: Exception | None = None
        size = world_group().size
        for start in range(0, len(self._groups), size):
            parts: list[OwnPart] = []
            for rank, group in enumerate(self._groups[start : start + size]):
                tensors = self._state.gathered_on(rank, [name for _, name in group.sources])
                try:
                    if tensors is not None and failure is None:
                        parts += self._converted_parts(group, tensors)
                except Exception as error:
                    failure = error
            yield parts
        if failure is not None:
            raise failure

    def _converted_parts(self, group: Group, tensors: dict[str, torch.Tensor]) -> list[OwnPart]:
        made = {
            name: tensor.contiguous() for name, tensor in self._converted(group, tensors).items()
        }
        return [
            OwnPart(name, t.dtype, [(0, t.numel())], partial(t.view, -1))
            for name, t in made.items()
        ]


def hub_state(state: WholeState, model: nn.Module) -> WholeState | HubState:
    """Return ``state`` in the layout of the hub, or as it is if transformers has no rules
    for ``model``.
    """
    rules = rules_to_save(model)
    return state if rules is None or not rules.all else HubState(state, rules, model)


def hub_files(model: nn.Module, tokenizer: Any = None) -> dict[str, bytes]:
    """Return the files that ``from_pretrained`` reads beside the weights, by name: of the
    configurations and of ``tokenizer``.
    """
    saved = [] if tokenizer is None else [tokenizer]
    if is_hugging_face(model):
        hub_model: Any = model
        config = copy.deepcopy(hub_model.config)
        config.architectures, config.dtype = (
            [type(model).__name__],
            str(hub_model.dtype).removeprefix("torch."),
        )
        saved = [
            config,
            *([hub_model.generation_config] if hub_model.can_generate() else []),
            *saved,
        ]
    with tempfile.TemporaryDirectory() as folder:
        for item in saved:
            item.save_pretrained(folder)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {str(path.relative_to(folder)): path.read_bytes() for path in files}
