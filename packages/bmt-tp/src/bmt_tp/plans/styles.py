"""Styles: what an entry of a plan says about the parameters of a module.

A style tells how each parameter lies along ``tp``, and which forward the module gets. It is checked before anything changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import nn

from bmt_core import DistributedModule, Locality
from bmt_core.errors import ConfigError
from bmt_tp.plans.split_layers import (
    ColumnSplit,
    HeadSplit,
    LinearColumnSplit,
    LinearRowSplit,
    RowSplit,
    VocabularySplit,
    is_conv1d,
)
from bmt_tp.tensor_group import AXIS

Layout = Literal["batch_first", "sequence_first"]
"""The order of the dims of activations of all positions: (batch, sequence, features) or (sequence, batch, features)."""

Places = dict[str, Locality | None]
"""How each parameter of a module lies along ``tp``; None: as one that the plan does not name."""


@dataclass(frozen=True, kw_only=True)
class PlannedModule:
    """A module that an entry of a plan names."""

    name: str
    module: nn.Module
    config: Any
    tp_size: int

    def misfit(self, text: str) -> ConfigError:
        """Return the error that says what does not fit."""
        shapes = [f"{name} of shape {tuple(p.shape)}" for name, p in self.module.named_parameters(recurse=False)]
        return ConfigError(
            f"{self.name}, a {type(self.module).__name__} with {', '.join(shapes) or 'no parameters'}: {text}"
        )

    def check_divisible(self, number: int, what: str, way_out: str = "") -> None:
        """Raise :class:`ConfigError` if tp does not divide ``number``."""
        if number % self.tp_size:
            way_out = way_out or "Choose another tp_size."
            raise self.misfit(f"tp_size={self.tp_size} does not divide {what}, {number}. {way_out}")

    def output_dim(self, style: str) -> int:
        """Return the dim of the weight that is its output: 0 of nn.Linear, 1 of Hugging Face's Conv1D."""
        if type(self.module).forward is nn.Linear.forward:
            return 0
        if is_conv1d(self.module):
            return 1
        raise self.misfit(f"{style} is a style of nn.Linear and of Hugging Face's Conv1D.")

    def number_of(self, heads: str | int) -> int:
        """Return the number of heads that the plan gives, or names as an attribute of the model's config."""
        if isinstance(heads, int):
            return heads
        found = getattr(self.config, heads, None)
        if not isinstance(found, int):
            raise self.misfit(f"the model's config has no number {heads!r}, which the plan names as a number of heads.")
        return found


class Style(Protocol):
    """What an entry of a plan says about the parameters of a module."""

    def places(self, planned: PlannedModule) -> Places:
        """Return how the module's parameters lie along ``tp``, or raise :class:`ConfigError` if they do not fit."""

    def layer_class(self, module: nn.Module) -> type[nn.Module]:
        """Return the class that gives the module its forward, to stand before the module's own."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A linear layer of whose output features each rank computes its part.

    ``gather``: its input is this rank's rows, which are gathered beside the product, and the output is in the given
    layout. Without, the input is that of a module that :attr:`Plan.gathered` names.

    ``heads``: the output are features of so many heads, of which each rank gets whole ones; a number, or the name of one in
    ``model.config``. ``sections``: the sizes, or their ratio, of consecutive parts of the output, each of which is cut by
    itself: (1, 1, 1) for queries, keys and values in one matrix.
    """

    heads: str | int | None = None
    sections: tuple[int, ...] = ()
    gather: Layout | None = None

    def places(self, planned: PlannedModule) -> Places:
        """See :class:`Style`."""
        dim = planned.output_dim("Column")
        module: Any = planned.module
        features = module.weight.shape[dim]
        if self.heads is not None:
            name = f"the number of heads ({self.heads})" if isinstance(self.heads, str) else "the number of heads"
            planned.check_divisible(planned.number_of(self.heads), name)
        if self.sections and features % sum(self.sections):
            raise planned.misfit(f"{features} output features cannot be cut in the ratio of sections {self.sections}.")
        sections = tuple(features * section // sum(self.sections) for section in self.sections)
        for section in sections or (features,):
            planned.check_divisible(section, "the number of output features")
        return _places(
            module, Locality(AXIS, split_dim=dim, sections=sections), Locality(AXIS, split_dim=0, sections=sections)
        )

    def layer_class(self, module: nn.Module) -> type[nn.Module]:
        """See :class:`Style`."""
        if is_conv1d(module):
            return ColumnSplit
        # Without communication the forward of nn.Linear is right for a slice, and Blocks know it.
        return DistributedModule if self.gather is None else LinearColumnSplit


@dataclass(frozen=True, kw_only=True)
class Row:
    """A linear layer of whose input features each rank has its part, of all positions in the layout ``input``.

    The sum over the ranks is scattered: the output is this rank's rows. The bias is added to rows, and its gradients are summed.
    """

    input: Layout

    def places(self, planned: PlannedModule) -> Places:
        """See :class:`Style`."""
        dim = 1 - planned.output_dim("Row")
        module: Any = planned.module
        planned.check_divisible(module.weight.shape[dim], "the number of input features")
        return _places(module, Locality(AXIS, split_dim=dim), None)

    def layer_class(self, module: nn.Module) -> type[nn.Module]:
        """See :class:`Style`."""
        return RowSplit if is_conv1d(module) else LinearRowSplit


@dataclass(frozen=True)
class VocabularyEmbedding:
    """An ``nn.Embedding`` of whose table each rank has the vectors of its part of the vocabulary.

    Ids (batch, sequence) and their vectors are alike on every rank.
    """

    def places(self, planned: PlannedModule) -> Places:
        """See :class:`Style`."""
        module = planned.module
        if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
            raise planned.misfit("VocabularyEmbedding is a style of nn.Embedding.")
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise planned.misfit("max_norm, scale_grad_by_freq and sparse gradients do not work with a cut table.")
        planned.check_divisible(module.num_embeddings, "the size of the vocabulary", _PAD)
        return {"weight": Locality(AXIS, split_dim=0)}

    def layer_class(self, module: nn.Module) -> type[nn.Module]:
        """See :class:`Style`."""
        return VocabularySplit


@dataclass(frozen=True, kw_only=True)
class Head:
    """The linear layer to the logits, outside of the layers: each rank computes those of its part of the vocabulary.

    ``gather_output``: every rank gets the logits of the whole vocabulary, so that any loss works; otherwise its own part,
    as ``FusedCrossEntropy(parallel=True)`` takes them.
    """

    gather_output: bool = True

    def places(self, planned: PlannedModule) -> Places:
        """See :class:`Style`."""
        dim = planned.output_dim("Head")
        module: Any = planned.module
        planned.check_divisible(module.weight.shape[dim], "the size of the vocabulary", _PAD)
        return _places(module, Locality(AXIS, split_dim=dim), Locality(AXIS, split_dim=0))

    def layer_class(self, module: nn.Module) -> type[nn.Module]:
        """See :class:`Style`."""
        return HeadSplit


@dataclass(frozen=True)
class Whole:
    """A module outside of the layers that every rank computes whole, from whole activations.

    So the gradients of its parameters, at any depth, are whole and alike on every rank, and are not summed over ``tp``.
    """

    def places(self, planned: PlannedModule) -> Places:
        """See :class:`Style`."""
        place = Locality(AXIS, gradients="whole")
        return {name: place for name, _ in planned.module.named_parameters(remove_duplicate=False)}

    def layer_class(self, module: nn.Module) -> type[nn.Module]:
        """See :class:`Style`."""
        return DistributedModule


@dataclass(frozen=True)
class PerPosition:
    """A module inside of the layers that computes each position by itself, on this rank's rows: its parameters stay as they are.

    That is what happens to norms, which no entry has to name.
    """

    def places(self, planned: PlannedModule) -> Places:
        """See :class:`Style`."""
        return {name: None for name, _ in planned.module.named_parameters(remove_duplicate=False)}

    def layer_class(self, module: nn.Module) -> type[nn.Module]:
        """See :class:`Style`."""
        return DistributedModule


_PAD = (
    "Pad the vocabulary (model.resize_token_embeddings(pad_to_multiple_of=tp_size) of Hugging Face's models), or keep it whole"
    " on every rank: plan_for(model, split_vocabulary=False)."
)


def _places(module: nn.Module, weight: Locality, bias: Locality | None) -> Places:
    return {"weight": weight} if module.bias is None else {"weight": weight, "bias": bias}
