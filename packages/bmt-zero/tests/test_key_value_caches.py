"""Caches among a block's arguments: recomputation finds each as forward found it, whatever way it
is written.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from zero_models import grads_of

from bmt_testing import on_ranks
from bmt_zero import Block
from bmt_zero.forward_state import with_own_caches
from cells import cells

WIDTH = 3


class Growing:
    """Keys of one layer, replaced by longer ones."""

    def __init__(self) -> None:
        self.keys = torch.zeros(0, WIDTH)

    def get_seq_length(self) -> int:
        return len(self.keys)

    def update(self, keys: torch.Tensor) -> torch.Tensor:
        self.keys = torch.cat([self.keys, keys])
        return self.keys


class State:
    """A running sum of one layer, written where it lies, and made at the first update."""

    is_compileable = True

    def __init__(self) -> None:
        self.states: dict[int, torch.Tensor | None] = {0: None}

    def update_conv_state(self, keys: torch.Tensor) -> torch.Tensor:
        if self.states[0] is None:
            self.states[0] = torch.zeros(WIDTH)
        total = self.states[0] + keys.sum(0)
        self.states[0].copy_(total.detach())
        return torch.stack([total, total.square()])


class Cache:
    def __init__(self, kind: type) -> None:
        self.layers = [kind(), kind()]

    def get_seq_length(self) -> int:
        return sum(layer.get_seq_length() for layer in self.layers if isinstance(layer, Growing))


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.keys = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, past: dict[str, Any]) -> torch.Tensor:
        layer = past["cache"][0].layers[self.index]
        update = layer.update if isinstance(layer, Growing) else layer.update_conv_state
        keys = update(self.keys(x))
        return x + torch.softmax(x @ keys.T, dim=-1) @ keys


@on_ranks(1)
@cells("kind", [Growing, State])
def test_recomputation_finds_the_cache_as_forward_found_it(kind: type) -> None:
    torch.manual_seed(0)
    plain = nn.ModuleList([Layer(0), Layer(1)])
    blocks = nn.ModuleList([Block(layer, use_checkpoint=True) for layer in copy.deepcopy(plain)])
    x = torch.randn(4, WIDTH)
    caches = Cache(kind), Cache(kind)
    for used in (1, 2):  # an empty cache, and one that holds something
        for layers, cache in zip((plain, blocks), caches, strict=True):
            layers.zero_grad()
            h = x
            for layer in layers:
                h = layer(h, past={"cache": (cache,)})
            loss = h.square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
            if kind is Growing:
                for held in cache.layers:
                    held.keys = held.keys.detach()
                assert cache.get_seq_length() == 2 * 4 * used
        expected = grads_of(plain)
        assert all(grad.abs().sum() > 0 for grad in expected.values())
        torch.testing.assert_close(grads_of(blocks), expected)


def test_only_what_is_written_in_place_is_copied() -> None:
    growing, state, tensor, plain = Cache(Growing), Cache(State), torch.ones(2), [1, {"a": None}]
    state.layers[0].update_conv_state(torch.ones(1, WIDTH))
    assert with_own_caches(plain) is plain
    (own, other), mine = with_own_caches(((growing, tensor), {"state": state}))
    assert other is tensor and own is not growing and own.layers[1] is not growing.layers[1]
    assert own.layers[1].keys is growing.layers[1].keys
    kept = mine["state"].layers[0].states[0]
    state.layers[0].update_conv_state(torch.ones(1, WIDTH))
    assert kept.tolist() == [1.0] * WIDTH and state.layers[0].states[0].tolist() == [2.0] * WIDTH
