"""The order of the training data, where it is not drawn from a seed and the number of the epoch.

accelerate seeds its random order by epoch. But samplers such as those of ``group_by_length`` and
torch's ``WeightedRandomSampler``, and data sets without length, draw from a generator: by default
torch's own, which is in another state on each rank as soon as a collator draws for batches of
another shape, and in another state in the middle of an epoch than at its beginning.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.data_loader import DataLoaderStateMixin
from torch.utils.data import SequentialSampler

from bmt_core.comm.objects import broadcast_object
from bmt_core.run.runtime import current


def set_order(loader: Any, saved: torch.Tensor | None) -> torch.Tensor | None:
    """Set the generator that the next epoch of ``loader`` is drawn from to ``saved``, or on all
    ranks to the state of rank 0; return its state. None if nothing needs it. Collective.
    """
    if not isinstance(loader, DataLoaderStateMixin):
        return None  # not accelerate's: what each rank reads of it is the program's choice
    batches = getattr(loader, "batch_sampler", None)
    # On several ranks inside of accelerate's BatchSamplerShard.
    batches = getattr(batches, "batch_sampler", batches)
    sampler = getattr(batches, "sampler", None)
    if sampler is None or hasattr(sampler, "set_epoch") or isinstance(sampler, SequentialSampler):
        return None
    generator = getattr(sampler, "generator", None) or torch.default_generator
    own = generator.get_state() if saved is None else saved
    state: torch.Tensor = broadcast_object(own, current().world)
    generator.set_state(state)
    return state
