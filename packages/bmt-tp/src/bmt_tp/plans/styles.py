"""Styles: how a plan splits the parameters of one module.

A style gives the split of each parameter along ``tp`` and the module's new forward. All styles are
checked before the model is changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import nn

from bmt_core.errors import ConfigError
from bmt_params import DistributedModule, Locality
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
"""The order of the dims of activations of all positions: (batch, sequence, features) or (sequence,
batch, features).
"""

Localities = dict[str, Locality]
"""The locality along ``tp`` of each parameter of a module, by name."""

OWN_ROWS = Locality(AXIS, gradients="share")
"""The locality of a parameter that each rank uses for rows of its own. The ranks' gradients
are summed.
"""


@dataclass(frozen=True, kw_only=True)
class PlannedModule:
    """A module that an entry of a plan names."""

    name: str
    module: nn.Module
    config: Any
    tp_size: int

    def misfit(self, text: str) -> ConfigError:
        """Return an error that names the module and its parameters, followed by ``text``."""
        shapes = [
            f"{name} of shape {tuple(p.shape)}"
            for name, p in self.module.named_parameters(recurse=False)
        ]
        return ConfigError(
            f"{self.name}, a {type(self.module).__name__} with"
            f" {', '.join(shapes) or 'no parameters'}: {text}"
        )

    def misfit_of_kind(self, style: str, kinds: str) -> ConfigError:
        """Return the error for a module that is none of the ``kinds`` that ``style`` can split."""
        if callable(getattr(type(self.module), "get_base_layer", None)):
            return self.misfit(
                f"it has an adapter (LoRA), which is made for the whole layer, and {style} would"
                " split the layer. Merge it first (merge_and_unload() of PEFT's models), train it"
                " with tp_size=1, or add adapters only to modules that the plan leaves whole."
            )
        return self.misfit(f"{style} is a style of {kinds}. Choose another style for this module.")

    def check_divisible(self, number: int, what: str, way_out: str = "") -> None:
        """Raise :class:`ConfigError` if tp does not divide ``number``."""
        if number % self.tp_size:
            way_out = way_out or "Choose another tp_size."
            raise self.misfit(f"tp_size={self.tp_size} does not divide {what}, {number}. {way_out}")

    def output_dim(self, style: str) -> int:
        """Return the weight's dim of output features: 0 in nn.Linear, 1 in Hugging
        Face's Conv1D.
        """
        if type(self.module).forward is nn.Linear.forward:
            return 0
        if is_conv1d(self.module):
            return 1
        raise self.misfit_of_kind(style, "nn.Linear and of Hugging Face's Conv1D")

    def number_of(self, heads: str | int) -> int:
        """Return the number of heads; a plan gives the number, or the name of an attribute of the
        model's config.
        """
        if isinstance(heads, int):
            return heads
        found = getattr(self.config, heads, None)
        if not isinstance(found, int):
            raise self.misfit(
                f"the plan says heads={heads!r}, but the model's config has no such number. Give"
                " the number of heads itself."
            )
        return found


class Style(Protocol):
    """How a plan splits the parameters of one module."""

    def localities(self, planned: PlannedModule) -> Localities:
        """Return the locality of each parameter along ``tp``. Raises :class:`ConfigError` if the
        module does not fit the style.
        """

    def layer_class(self, module: nn.Module) -> type[nn.Module]:
        """Return the class with the module's new forward. It is put in front of the module's
        own class.
        """


@dataclass(frozen=True, kw_only=True)
class Column:
    """A linear layer that is split by its output features.

    With ``gather`` the input is this rank's rows, gathered while the product is computed, and the
    output has the given layout. Otherwise the input must already have all rows: the layer is inside
    a module that :attr:`Plan.gathered` names.

    ``heads`` is the number of heads in the output, or its name in ``model.config``; tp must divide
    it, so that each rank gets whole heads. ``sections`` are the sizes of consecutive parts of the
    output, or their ratio; each is split separately. Queries, keys and values in one matrix are (1,
    1, 1).
    """

    heads: str | int | None = None
    sections: tuple[int, ...] = ()
    gather: Layout | None = None

    def localities(self, planned: PlannedModule) -> Localities:
        dim = planned.output_dim("Column")
        module: Any = planned.module
        features = module.weight.shape[dim]
        if self.heads is not None:
            name = (
                f"the number of heads ({self.heads})"
                if isinstance(self.heads, str)
                else "the number of heads"
            )
            planned.check_divisible(planned.number_of(self.heads), name)
        if self.sections and features % sum(self.sections):
            raise planned.misfit(
                f"{features} output features cannot be cut in the ratio of sections"
                f" {self.sections}."
            )
        sections = tuple(features * section // sum(self.sections) for section in self.sections)
        for section in sections or (features,):
            planned.check_divisible(section, "the number of output features")
        return _localities(
            module,
            Locality(AXIS, split_dim=dim, sections=sections),
            Locality(AXIS, split_dim=0, sections=sections),
        )

    def layer_class(self, module: nn.Module) -> type[nn.Module]:
        if is_conv1d(module):
            return ColumnSplit
        # Without communication, nn.Linear's own forward is right for a slice, and Blocks have a
        # fast path for it.
        return DistributedModule if self.gather is None else LinearColumnSplit


@dataclass(frozen=True, kw_only=True)
class Row:
    """A linear layer that is split by its input features. The input has all positions, in the
    layout ``input``.

    The output is reduce-scattered: each rank gets its rows. The bias stays whole; each rank adds it
    to its rows, and the ranks' gradients of it are summed.
    """

    input: Layout

    def localities(self, planned: PlannedModule) -> Localities:
        dim = 1 - planned.output_dim("Row")
        module: Any = planned.module
        planned.check_divisible(module.weight.shape[dim], "the number of input features")
        return _localities(module, Locality(AXIS, split_dim=dim), OWN_ROWS)

    def layer_class(self, module: nn.Module) -> type[nn.Module]:
        return RowSplit if is_conv1d(module) else LinearRowSplit


@dataclass(frozen=True)
class VocabularyEmbedding:
    """An ``nn.Embedding`` that is split by its vocabulary.

    All ranks pass the same ids (batch, sequence), and all get the same vectors.
    """

    def localities(self, planned: PlannedModule) -> Localities:
        module = planned.module
        if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
            raise planned.misfit_of_kind("VocabularyEmbedding", "nn.Embedding")
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise planned.misfit(
                "max_norm, scale_grad_by_freq and sparse gradients do not work with a split table."
                " Turn them off, or use Whole()."
            )
        planned.check_divisible(module.num_embeddings, "the size of the vocabulary", _PAD)
        return {"weight": Locality(AXIS, split_dim=0)}

    def layer_class(self, module: nn.Module) -> type[nn.Module]:
        return VocabularySplit


@dataclass(frozen=True, kw_only=True)
class Head:
    """The linear layer that computes the logits, outside of the layers. It is split by
    the vocabulary.

    With ``gather_output`` every rank gets the logits of the whole vocabulary, so that any loss
    works. Otherwise each rank gets those of its part, for ``FusedCrossEntropy(parallel=True)``.
    """

    gather_output: bool = True

    def localities(self, planned: PlannedModule) -> Localities:
        dim = planned.output_dim("Head")
        module: Any = planned.module
        planned.check_divisible(module.weight.shape[dim], "the size of the vocabulary", _PAD)
        return _localities(module, Locality(AXIS, split_dim=dim), Locality(AXIS, split_dim=0))

    def layer_class(self, module: nn.Module) -> type[nn.Module]:
        return HeadSplit


@dataclass(frozen=True)
class Whole:
    """A module outside of the layers that every rank computes whole, from whole activations.

    So every rank has the same whole gradients of its parameters, and they are not summed
    over ``tp``.
    """

    def localities(self, planned: PlannedModule) -> Localities:
        locality = Locality(AXIS, gradients="whole")
        return {
            name: locality for name, _ in planned.module.named_parameters(remove_duplicate=False)
        }

    def layer_class(self, module: nn.Module) -> type[nn.Module]:
        return DistributedModule


@dataclass(frozen=True)
class PerPosition:
    """A module inside of the layers that computes each position separately, on this rank's rows.
    Its parameters stay whole.

    Norms are treated this way without being named.
    """

    def localities(self, planned: PlannedModule) -> Localities:
        return {
            name: OWN_ROWS for name, _ in planned.module.named_parameters(remove_duplicate=False)
        }

    def layer_class(self, module: nn.Module) -> type[nn.Module]:
        return DistributedModule


_PAD = (
    "Pad the vocabulary (model.resize_token_embeddings(pad_to_multiple_of=tp_size) of Hugging"
    " Face's models), or keep it whole on every rank: plan_for(model, split_vocabulary=False)."
)


def _localities(module: nn.Module, weight: Locality, bias: Locality) -> Localities:
    return {"weight": weight} if module.bias is None else {"weight": weight, "bias": bias}
