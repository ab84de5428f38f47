"""``TakesSameInputs``: a module that ranks along ``tp`` compute together, so that all must call it
with the same inputs, and return the same losses.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from bmt_core.torch_internals import never_compiled
from bmt_params import DistributedModule
from bmt_params.guards.same_data import SAME_LOSS, Occasions, check_same
from bmt_params.nested import tensors_in
from bmt_tp.tensor_group import tensor_group

OWN_DATA = (
    "They compute one batch together. Choose a rank's data by current().topology.data_rank and"
    " data_size, not by rank() and world_size(), and draw random inputs from the same seed."
)


class TakesSameInputs(DistributedModule):
    """A class in front of a module's own, which compares the inputs of calls among the ranks along
    ``tp``, as occasions come, and losses in what they return.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compares = self._bmt_compare_inputs(args, kwargs)
        output = super().__call__(*args, **kwargs)
        if compares:
            self._bmt_compare_losses(output)
        return output

    @never_compiled
    def _bmt_compare_losses(self, output: Any) -> None:
        # Not those without gradients: a rank may count or measure something of its own.
        losses = [
            tensor for tensor in tensors_in(output) if tensor.dim() == 0 and tensor.requires_grad
        ]
        if losses:
            named = [(f"loss {number}", loss) for number, loss in enumerate(losses)]
            what = f"losses that {type(self).__name__} returns"
            check_same(named, tensor_group(), tolerance=1e-6, what=what, advice=SAME_LOSS)

    @never_compiled
    def _bmt_compare_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Compare the inputs, if the time has come for that, and return whether it has."""
        occasions: Occasions = self.__dict__.setdefault("_bmt_occasions", Occasions())
        has_come = occasions.has_come()
        if has_come:
            what = f"inputs of {type(self).__name__}"
            inputs = self._bmt_named_inputs(args, kwargs)
            # Other data differs by more; embeddings that each rank has computed by itself may
            # differ by rounding.
            check_same(inputs, tensor_group(), tolerance=1e-2, what=what, advice=OWN_DATA)
        return has_come

    def _bmt_named_inputs(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        names = [
            *inspect.signature(self.forward).parameters,
            *(f"argument {n}" for n in range(len(args))),
        ]
        for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
            for tensor in tensors_in(value):
                yield name, tensor
