"""``ActivationChange``: a module whose input or output has another layout than the code around it.

:class:`bmt_tp.plans.Plan` describes the layouts.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from bmt_params import DistributedModule
from bmt_params.guards.same_data import Occasions
from bmt_tp.plans.styles import Layout
from bmt_tp.random_numbers import own_random_numbers
from bmt_tp.row_exchange import gather_input_rows, gather_rows, own_rows
from bmt_tp.tensor_group import tensor_size


@dataclass(frozen=True, kw_only=True)
class Change:
    """The changes of layout of a module's first argument and output."""

    argument: str
    """Name of the first argument."""
    input: Literal["own_rows"] | Layout | None = None
    """``own_rows``: keep this rank's rows of whole activations. A layout: gather the rows of all
    ranks into it. None: no change.
    """
    output_is_whole: bool = False
    """Gather the rows of the output, so that every rank has all of them."""
    own_random_numbers: bool = False
    """In training, draw other random numbers than the other ranks, for dropout."""

    def entering(self, x: torch.Tensor) -> torch.Tensor:
        """Return the first argument in the layout that the module expects."""
        if self.input is None:
            return x
        if self.input == "own_rows":
            _check_sequence(x, tensor_size())
            return own_rows(x.transpose(0, 1))
        gathered = gather_input_rows(x)
        # Several products read it, and each would make its own contiguous copy.
        return gathered.transpose(0, 1).contiguous() if self.input == "batch_first" else gathered


class ActivationChange(DistributedModule):
    """A class in front of a module's own, which changes the layout of its activations as the
    module's :class:`Change` says.
    """

    @property
    def _bmt_batch_dims(self) -> tuple[int, int]:
        """The dims of the batch in the hidden states that the layer gets and returns, for a
        pipeline.
        """
        change: Change = self.__dict__["_bmt_change"]
        return 0 if change.input == "own_rows" else 1, 0 if change.output_is_whole else 1

    # In __call__ and not in forward(), because Block(compile=True) compiles forward().
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        change: Change = self.__dict__["_bmt_change"]
        if args:
            args = (change.entering(args[0]), *args[1:])
        else:
            kwargs = {**kwargs, change.argument: change.entering(kwargs[change.argument])}
        with own_random_numbers() if change.own_random_numbers and self.training else nullcontext():
            output = super().__call__(*args, **kwargs)
        if not change.output_is_whole:
            return output
        occasions = self.__dict__.setdefault("_bmt_gradient_occasions", Occasions())
        return gather_rows(output, occasions).transpose(0, 1).contiguous()


def _check_sequence(x: torch.Tensor, size: int) -> None:
    if x.dim() < 3 or x.shape[1] % size:
        raise ValueError(
            "Expected hidden states (batch, sequence, features) with a sequence length that"
            f" tp_size={size} divides, not of shape {tuple(x.shape)}. Pad the sequences to a"
            f" multiple of {size}, with attention_mask 0 and labels -100."
        )
