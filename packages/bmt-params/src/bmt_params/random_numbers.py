"""Random numbers of the forward pass: ranks that compute different rows or tokens draw from
different streams.

[Note: random streams] The user's program, and everything that makes parameters, draws from torch's
default generators, which ``init_distributed`` seeded alike on all ranks. Dropout must differ
between ranks that compute different rows, or different tokens of one sequence. So the outermost bmt
module that is called draws one number from the shared CPU generator, mixes it with the rank's index
among those whose losses are parts of one sum, and runs under generators seeded with the result;
when it returns, the states of the shared generators are restored. Tensor-parallel ranks have one
such index, so they agree.

Which stream is active is written in the seed itself (its top bits), not in a variable of this
process: activation checkpointing saves the generators' states in forward and restores them for the
recomputation, possibly on another thread, and a module called there must see what it saw the first
time. A run in which no two ranks compute different tokens draws exactly as plain torch does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bmt_core.run.runtime import Runtime

_MARK = 0x2B5A
_MARK_SHIFT = 48
_MIX = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads neighbouring indices


@contextmanager
def rank_random(runtime: Runtime) -> Iterator[None]:
    """Draw from this rank's own stream inside; see [Note: random streams]."""
    if runtime.topology.sum_size == 1 or torch.initial_seed() >> _MARK_SHIFT == _MARK:
        yield
        return
    draw = int(torch.randint(2**62, (), device="cpu"))
    cpu_state = torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state(runtime.device) if runtime.device.type == "cuda" else None
    seed = rank_seed(draw, runtime.topology.sum_rank)
    torch.default_generator.manual_seed(seed)
    if cuda_state is not None:
        torch.cuda.default_generators[runtime.device.index].manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(cpu_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state, runtime.device)


def rank_seed(draw: int, sum_rank: int) -> int:
    """Return the marked seed of ``sum_rank`` for one draw from the shared generator.

    >>> rank_seed(5, 0) != rank_seed(5, 1) and rank_seed(5, 1) >> 48 == 0x2B5A
    True
    """
    mixed = (draw + (sum_rank + 1) * _MIX) * _MIX % 2**64
    return _MARK << _MARK_SHIFT | mixed >> (64 - _MARK_SHIFT)
