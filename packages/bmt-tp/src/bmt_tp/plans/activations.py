"""``ActivationChange``: a module that takes, or returns, activations in another layout than the code around it.

How activations lie where: see :class:`bmt_tp.plans.Plan`.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from bmt_core import DistributedModule
from bmt_tp.plans.styles import Layout
from bmt_tp.random_numbers import own_random_numbers
from bmt_tp.row_exchange import gather_input_rows, gather_rows, own_rows
from bmt_tp.tensor_group import tensor_size


@dataclass(frozen=True, kw_only=True)
class Change:
    """What happens to the first argument of a module, and to its output."""

    argument: str
    """Name of the first argument."""
    input: Literal["own_rows"] | Layout | None = None
    """Take whole activations to this rank's rows, or gather rows for products of this rank, in a layout."""
    output_is_whole: bool = False
    """Gather the rows of the output, alike for every rank."""
    own_random_numbers: bool = False
    """Draw other random numbers than the other ranks, in training: for dropout."""

    def entering(self, x: torch.Tensor) -> torch.Tensor:
        """Return the first argument as the module takes it."""
        if self.input is None:
            return x
        if self.input == "own_rows":
            _check_sequence(x, tensor_size())
            return own_rows(x.transpose(0, 1))
        gathered = gather_input_rows(x)
        # Contiguous: several products read it, and each would copy it.
        return gathered.transpose(0, 1).contiguous() if self.input == "batch_first" else gathered

    def leaving(self, output: Any) -> Any:
        """Return the output as the code around the module takes it."""
        if not self.output_is_whole:
            return output
        return gather_rows(output).transpose(0, 1).contiguous()


class ActivationChange(DistributedModule):
    """A module, with this class before its own, that changes activations as its :class:`Change` says."""

    # Not in forward(), which Block(compile=True) compiles.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        change: Change = self.__dict__["_bmt_change"]
        if args:
            args = (change.entering(args[0]), *args[1:])
        else:
            kwargs = {**kwargs, change.argument: change.entering(kwargs[change.argument])}
        with own_random_numbers() if change.own_random_numbers and self.training else nullcontext():
            output = super().__call__(*args, **kwargs)
        return change.leaving(output)


def _check_sequence(x: torch.Tensor, size: int) -> None:
    if x.dim() < 3 or x.shape[1] % size:
        raise ValueError(
            f"Expected hidden states (batch, sequence, features) of a sequence that tp_size={size} divides, not of shape"
            f" {tuple(x.shape)}. Pad the sequences to a multiple of {size}, with attention_mask 0 and labels -100."
        )
