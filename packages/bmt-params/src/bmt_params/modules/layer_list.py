"""``LayerList``: layers that run one after the other; the base of ``TransformerBlockList`` and of
its pipelined form.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, overload

import torch
from torch import nn

from bmt_params.modules.outermost_call import module_call
from bmt_params.uninitialized import UNINITIALIZED, require_values

States = list[tuple[Any, ...]]
"""The hidden states that each layer was called with."""


class LayerList(nn.Module):
    """Layers in a row. The first ``num_hidden`` outputs of a layer are the first arguments of
    the next.

    All other arguments are passed to every layer unchanged. Calling the list counts as one
    outermost call (:mod:`bmt_params.modules.outermost_call`): its layers share gathered parameters
    and one stream of random numbers.
    """

    def __init__(self, num_hidden: int) -> None:
        super().__init__()
        if num_hidden < 1:
            raise ValueError(f"num_hidden must be at least 1, not {num_hidden}.")
        self.num_hidden = num_hidden

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if UNINITIALIZED in self.__dict__:
            require_values(self)
        with module_call(self):
            return super().__call__(*args, **kwargs)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.layers())

    @overload
    def __getitem__(self, index: int | str) -> nn.Module: ...
    @overload
    def __getitem__(self, index: slice) -> list[nn.Module]: ...
    def __getitem__(self, index: int | str | slice) -> nn.Module | list[nn.Module]:
        return self.layers()[int(index) if isinstance(index, str) else index]

    def layers(self) -> list[nn.Module]:
        """The layers, in order."""
        return [module for module in self._modules.values() if module is not None]

    def forward(self, *args: Any, return_hidden_states: bool = False, **kwargs: Any) -> Any:
        """Run all layers.

        Returns the hidden state (``num_hidden`` 1) or a tuple of them; with
        ``return_hidden_states`` a tuple that goes on with one tensor per hidden state, the inputs
        of all layers stacked along a new dim 0.
        """
        hidden, rest = self.split_arguments(args)
        states: States = []
        hidden = run_layers(self.layers(), hidden, rest, kwargs, states)
        if not return_hidden_states:
            return hidden[0] if self.num_hidden == 1 else hidden
        return *hidden, *(torch.stack(of_hidden) for of_hidden in zip(*states, strict=True))

    def split_arguments(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the hidden states among the positional arguments, and the others."""
        count = self.num_hidden
        if len(args) < count:
            raise TypeError(
                f"This list passes {count} hidden state(s) from layer to layer, but got {len(args)}"
                " positional argument(s). Pass the hidden states first, or change num_hidden."
            )
        return args[:count], args[count:]


def run_layers(
    layers: Iterable[nn.Module],
    hidden: tuple[Any, ...],
    rest: tuple[Any, ...],
    kwargs: dict[str, Any],
    states: States | None = None,
) -> tuple[Any, ...]:
    """Return the hidden states after ``layers``; append each layer's input to ``states``."""
    count = len(hidden)
    for layer in layers:
        if states is not None:
            states.append(hidden)
        hidden = _hidden_of(layer(*hidden, *rest, **kwargs), count)
    return hidden


def _hidden_of(output: Any, count: int) -> tuple[Any, ...]:
    if isinstance(output, (tuple, list)):
        if len(output) < count:
            raise ValueError(
                f"A layer returned {len(output)} values where the list passes {count} hidden"
                " states on."
            )
        return tuple(output[:count])
    if count > 1:
        raise ValueError(
            f"A layer returned {type(output).__name__} where the list passes {count} hidden"
            " states on."
        )
    return (output,)
