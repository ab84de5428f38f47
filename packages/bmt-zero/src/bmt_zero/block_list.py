"""``TransformerBlockList``: blocks that run one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, overload

import torch
from torch import nn

from bmt_zero.block import Block


class TransformerBlockList(nn.Module):
    """A list of blocks; call it, or loop over it.

    ``modules`` may be any iterable; raw modules become :class:`Block`. The same raw module twice shares its
    parameters. The same Block twice is an ``AssertionError``. ``num_hidden`` is how many leading arguments flow
    through: the first ``num_hidden`` outputs of a block replace the first ``num_hidden`` inputs of the next, the
    other arguments reach every block as they are.
    """

    def __init__(self, modules: Iterable[nn.Module], num_hidden: int = 1) -> None:
        super().__init__()
        if num_hidden < 1:
            raise ValueError(f"num_hidden must be at least 1, not {num_hidden}.")
        self.num_hidden = num_hidden
        members = list(modules)
        blocks = [member for member in members if isinstance(member, Block)]
        assert len(blocks) == len({id(block) for block in blocks}), (
            "A Block stands twice in this list. Pass the raw module twice to share its parameters."
        )
        for index, member in enumerate(members):
            self.add_module(str(index), member if isinstance(member, Block) else Block(member))
        sharded = [block._bmt_block.block for block in self._blocks() if isinstance(block, Block)]
        for block, following in itertools.pairwise(sharded):
            block.following = following.number

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._blocks())

    @overload
    def __getitem__(self, index: int | str) -> nn.Module: ...
    @overload
    def __getitem__(self, index: slice) -> list[nn.Module]: ...
    def __getitem__(self, index: int | str | slice) -> nn.Module | list[nn.Module]:
        return self._blocks()[int(index) if isinstance(index, str) else index]

    def forward(self, *args: Any, return_hidden_states: bool = False, **kwargs: Any) -> Any:
        """Run all blocks.

        Returns the hidden state (``num_hidden`` 1) or a tuple of them; with ``return_hidden_states`` a tuple that
        goes on with one tensor per hidden state, the inputs of all blocks stacked along a new dim 0.
        """
        count = self.num_hidden
        if len(args) < count:
            raise TypeError(f"This list passes {count} hidden state(s) on and got {len(args)} positional argument(s).")
        hidden, rest = args[:count], args[count:]
        inputs: list[tuple[Any, ...]] = []
        for block in self._blocks():
            inputs.append(hidden)
            hidden = _hidden_of(block(*hidden, *rest, **kwargs), count)
        if not return_hidden_states:
            return hidden[0] if count == 1 else hidden
        return *hidden, *(torch.stack(states) for states in zip(*inputs, strict=True))

    def _blocks(self) -> list[nn.Module]:
        return [module for module in self._modules.values() if module is not None]


def _hidden_of(output: Any, count: int) -> tuple[Any, ...]:
    if isinstance(output, (tuple, list)):
        if len(output) < count:
            raise ValueError(f"A block returned {len(output)} values where the list passes {count} hidden states on.")
        return tuple(output[:count])
    if count > 1:
        raise ValueError(f"A block returned {type(output).__name__} where the list passes {count} hidden states on.")
    return (output,)
