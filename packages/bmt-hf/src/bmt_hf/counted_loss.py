"""Whether a loss is a sum that was divided by ``num_items_in_batch``.

transformers' Trainer counts the targets in all micro-batches of all ranks. It passes this number to
each model whose ``forward`` has ``**kwargs``, and to ``compute_loss_func``, and takes what returns
for a sum divided by the number. But many models do not read it, such as those for classification
and T5: their loss is the mean of the micro-batch. The Trainer would multiply it by the number of
ranks, and not divide it by the number of micro-batches. So bmt computes the first loss with two
numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from bmt_core.run.collectives import all_reduce
from bmt_core.run.runtime import current


def reads_count(
    model: nn.Module, loss_for: Callable[[torch.Tensor], torch.Tensor], count: torch.Tensor | int
) -> bool | None:
    """Return whether ``loss_for(number)`` of any rank depends on the number, ``count`` or another;
    None if no rank has a loss to tell it by. Collective.

    ``loss_for`` calls ``model``, which is in evaluation mode meanwhile. Random generators are as
    before afterwards.
    """
    device = current().device
    number = torch.as_tensor(count, device=device)
    with _evaluating(model), torch.no_grad():
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            one, other = (loss_for(factor * number).float() for factor in (1, 1000))
    found = torch.stack([(one - other).abs() > one.abs() / 10, one.isfinite() & (one != 0)])
    differs, is_told = all_reduce(found.float(), "max").tolist()
    return bool(differs) if differs or is_told else None


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
