"""``own_random_numbers``: draws that differ between the ranks along ``tp``.

Ranks along ``tp`` see the same data, and draw the same random numbers, so that what each of them holds whole stays alike.
Where each holds its own rows or features of an activation, dropout must differ. What a rank draws there follows from one number
that all ranks draw alike, so that a recomputation that repeats the generators' states repeats it too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bmt_core.run.random_numbers import rank_seed
from bmt_core.run.runtime import current
from bmt_tp.tensor_group import AXIS, tensor_size


@contextmanager
def own_random_numbers() -> Iterator[None]:
    """Inside, each rank along ``tp`` draws random numbers of its own, for activations of which it has a part.

    For dropout in models that call the parallel layers themselves; the plans of :func:`parallelize` bring it along. With
    ``tp_size=1`` it changes nothing.
    """
    if tensor_size() == 1:
        yield
        return
    topology = current().topology
    # With the data rank, for a Block that is called inside takes this stream for that of its data rank.
    place = topology.data_rank * tensor_size() + topology.axis_rank(AXIS)
    seed = rank_seed(int(torch.randint(2**62, ())), place)
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
