"""``own_random_numbers``: random numbers that differ between the ranks along ``tp``.

Ranks along ``tp`` see the same data and draw the same random numbers, so that activations which
every rank holds whole stay equal. Where each rank holds its own rows or features of an activation,
dropout masks must differ. A rank's own random numbers there are seeded by one number that all ranks
draw from the common generator. A recomputation restores this generator, and so draws the same
masks again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bmt_core.run.runtime import current
from bmt_params.modules.outermost_call import rank_seed
from bmt_tp.tensor_group import AXIS, tensor_size


@contextmanager
def own_random_numbers() -> Iterator[None]:
    """Inside, each rank along ``tp`` draws random numbers of its own, for activations of which it
    has a part.

    Use it for dropout in models that call the parallel layers themselves; :func:`parallelize` does
    it for its models. With ``tp_size=1`` it changes nothing.
    """
    if tensor_size() == 1:
        yield
        return
    topology = current().topology
    # The seed depends on the rank's rows and tokens too: a Block called inside treats the current
    # stream as that of these.
    index = topology.sum_rank * tensor_size() + topology.axis_rank(AXIS)
    seed = rank_seed(int(torch.randint(2**62, (), device="cpu")), index)
    generators = [torch.default_generator]
    if current().device.type == "cuda":
        generators.append(torch.cuda.default_generators[current().device.index])
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
