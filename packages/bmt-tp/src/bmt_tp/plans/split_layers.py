"""The classes that ``parallelize`` puts in front of a module's own class, with a forward for this
rank's slice of the weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from bmt_core.errors import ConfigError
from bmt_params import DistributedModule
from bmt_params.guards.same_data import Occasions
from bmt_params.modules.layer_gradients import LayerGradients
from bmt_tp.embedding import split_lookup
from bmt_tp.linear_function import ReduceType, parallel_linear
from bmt_tp.plans.same_inputs import TakesSameInputs
from bmt_tp.tensor_group import tensor_size


def is_conv1d(module: nn.Module) -> bool:
    """Whether ``module`` is Hugging Face's Conv1D: a linear layer with the transposed weight
    (in_features, out_features).
    """
    names = [(kind.__module__, kind.__name__) for kind in type(module).__mro__]
    return ("transformers.pytorch_utils", "Conv1D") in names


class _SplitLinear(DistributedModule):
    def _operands(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the weight as (output features, input features), and the bias."""
        weight: torch.Tensor = self.weight
        return (weight if isinstance(self, nn.Linear) else weight.t()), self.bias

    def _block_gradients(self) -> LayerGradients | None:
        return getattr(self, "layer_gradients", None)


class ColumnSplit(_SplitLinear):
    """See :class:`bmt_tp.plans.Column`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return all rows with this rank's output features, from this rank's rows if the style
        gathers, otherwise from all rows.
        """
        gather = style_of(self).gather
        if gather is None:
            return linear(input, *self._operands())
        gradients = self._block_gradients()
        output = parallel_linear(
            input, *self._operands(), gather_input=True, gradients=gradients, compares=False
        )
        return output.transpose(0, 1) if gather == "batch_first" else output


class LinearColumnSplit(ColumnSplit):
    """The same for ``nn.Linear``, where a Block sets ``layer_gradients`` to receive the weight's
    gradient directly.
    """

    layer_gradients: LayerGradients | None = None


class RowSplit(_SplitLinear):
    """See :class:`bmt_tp.plans.Row`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of the output, from all rows with this rank's features."""
        rows = input.transpose(0, 1) if style_of(self).input == "batch_first" else input
        return parallel_linear(
            rows,
            *self._operands(),
            reduce_output_type=ReduceType.REDUCE_SCATTER,
            gradients=self._block_gradients(),
            compares=False,
        )


class LinearRowSplit(RowSplit):
    """The same for ``nn.Linear``, where a Block sets ``layer_gradients`` to receive the weight's
    gradient directly.
    """

    layer_gradients: LayerGradients | None = None


class HeadSplit(_SplitLinear):
    """See :class:`bmt_tp.plans.Head`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the logits of this rank's part of the vocabulary, or of all of it, from
        whole activations.
        """
        occasions = self.__dict__.setdefault("_bmt_occasions", Occasions())
        gathers = style_of(self).gather_output
        return parallel_linear(input, *self._operands(), gather_output=gathers, occasions=occasions)


class VocabularySplit(TakesSameInputs):
    """See :class:`bmt_tp.plans.VocabularyEmbedding`."""

    padding_idx: int | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the vectors of ids; all ranks pass the same ids."""
        return split_lookup(input, self.weight, scattered=False, padding_idx=self.padding_idx)


class RefusesGeneration(DistributedModule):
    """A model of Hugging Face that was split: ``generate`` raises."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Raise :class:`ConfigError`: generation feeds single tokens, and the layers split
        sequences by positions.
        """
        raise ConfigError(
            "generate() cannot run on a model that parallelize() has split over"
            f" tp_size={tensor_size()} ranks: it feeds single tokens, and the ranks divide each"
            " sequence among them. Save the model, and load the file with tp_size=1 to generate."
        )


def style_of(module: nn.Module) -> Any:
    """Return the style by which :func:`parallelize` split ``module``."""
    return module.__dict__["_bmt_style"]
