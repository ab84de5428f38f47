"""``SameBatches``: finds ranks that should see different data, and train on the same batches.

After ``init_distributed(seed=...)`` all ranks draw the same numbers, so a batch drawn by
``torch.randint``, or by a loader that is not divided among ranks, is the same on all of them.
The training is right, and the work of all ranks but one is wasted.
"""

from __future__ import annotations

import math

import torch

from bmt_core.comm.protocols import Group
from bmt_core.run.runtime import current, is_initialized, rank
from bmt_core.user_warnings import warn_user
from bmt_params.guards.same_data import fingerprints_of_ranks

STEPS = 3
_COLLECTIVES = ("AllGatherBackward", "AllReduceBackward", "BroadcastBackward")


class SameBatches:
    """Warns once, on rank 0, if in each of the first steps the losses of all ranks that should see
    different data are equal to the last bit.

    Losses that are 0, or the same in every step, say nothing of the data, nor do those of half
    types, which have few different values. A loss that depends on what other ranks computed, such
    as one of ``sum_loss``, may be the same on purpose. After the first steps, or the first with
    different losses, nothing is compared.
    """

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []  # since the last step
        self._found: list[torch.Tensor] = []  # fingerprints of the losses of the steps so far
        self.is_over = False
        """Whether nothing is compared any more, and no method need be called."""

    def note(self, loss: torch.Tensor) -> None:
        """Remember the ``loss`` of a backward pass until the step."""
        if not is_initialized() or current().topology.data_size == 1:
            return
        is_evidence = loss.dtype.itemsize >= 4 and not _depends_on_other_data(loss)
        own = loss.detach() if is_evidence else torch.full_like(loss, math.nan)
        self._losses.append(own.to(current().device, torch.float64).sum())

    def forget(self) -> None:
        """The gradients of the losses so far were used, or cleared."""
        self._losses.clear()

    def compare(self) -> None:
        """Compare the losses of this step, if it is one of the first. Collective then; the host
        waits for the device.
        """
        if not is_initialized() or current().topology.data_size == 1:
            return
        group, nothing = (
            current().topology.data_group,
            torch.full((), math.nan, dtype=torch.float64, device="cpu"),
        )
        own = torch.stack(self._losses or [nothing.to(current().device)])
        of_ranks = fingerprints_of_ranks([own], group, "to compare the losses of ranks")[:, 0]
        self.forget()
        first = of_ranks[0]
        # NaN is not equal to itself.
        self.is_over = not bool(first.any()) or not bool((of_ranks == first).all())
        self._found.append(first)
        if self.is_over or len(self._found) < STEPS:
            return
        self.is_over = True
        if rank() == 0 and not all(torch.equal(found, first) for found in self._found):
            warn_user(
                f"The losses of the first {STEPS} steps are equal to the last bit on all"
                f" {group.size} ranks, which should see different data: all of them seem to train"
                " on the same batches, so that the work of all but one is wasted."
                " init_distributed seeds all ranks alike: take other rows on each, by"
                " DistributedSampler(dataset, topology.data_size, topology.data_rank) of"
                " bmt.current().topology, or draw them by a generator with a seed of its own. If"
                " this is on purpose, all is well. This is said once."
            )


def _depends_on_other_data(loss: torch.Tensor) -> bool:
    """Whether ``loss`` was computed by a collective with values of ranks that see other data."""
    data_ranks = set(current().topology.data_group.ranks)
    seen, left = set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        group = getattr(node, "group", None) if node.name() in _COLLECTIVES else None
        if isinstance(group, Group) and len(data_ranks.intersection(group.ranks)) > 1:
            return True
        left += [before for before, _ in node.next_functions]
    return False
