"""Windows: the text cut into pieces of equal length, and which rank trains on which of them."""

from __future__ import annotations

import torch


class Windows:
    """A text as pieces of ``length`` inputs, each with its next byte as the target.

    Window i reads bytes ``i * length`` to ``(i + 1) * length - 1`` and predicts those one further
    on, so over all windows every byte is read once and predicted once.
    """

    def __init__(self, text: torch.Tensor, length: int) -> None:
        self._text = text
        self.length = length

    def __len__(self) -> int:
        return max(0, (self._text.numel() - 1) // self.length)

    def take(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of the windows ``indices``, both int64 (number of
        indices, length).
        """
        places = indices[:, None] * self.length + torch.arange(self.length)
        return self._text[places].long(), self._text[places + 1].long()


class Shard:
    """The windows that one data rank trains on, disjoint from every other's, for ever.

    Ranks along ``pp`` and ``tp`` are one data rank.

    The global batch has ``batch_size`` slots. Slot s owns the windows s, s + batch_size, s + 2 *
    batch_size, …, and a rank owns ``batch_size / world_size`` consecutive slots. Each slot goes
    through its windows in an order of its own, drawn anew in every epoch from ``seed``. So a step
    trains on the same windows whatever the number of ranks is, a window never changes ranks, and
    the step's number is all there is to know about the position in the data.

    >>> shards = [Shard(8, batch_size=4, seed=0, rank=rank, world_size=2) for rank in range(2)]
    >>> [shard.indices(0).remainder(4).tolist() for shard in shards]
    [[0, 1], [2, 3]]
    """

    def __init__(
        self, num_windows: int, *, batch_size: int, seed: int, rank: int, world_size: int
    ) -> None:
        if batch_size % world_size != 0:
            raise ValueError(
                f"A batch of {batch_size} sequences cannot be divided evenly among"
                f" {world_size} ranks."
            )
        if num_windows < batch_size:
            raise ValueError(
                f"The text has {num_windows} windows, and a batch needs {batch_size}."
                " Use more text, a smaller batch or shorter sequences."
            )
        self._batch_size = batch_size
        self._seed = seed
        self._steps_per_epoch = num_windows // batch_size
        size = batch_size // world_size
        self._slots = range(rank * size, (rank + 1) * size)
        self._epoch = -1
        self._order = torch.empty(0)

    def indices(self, step: int) -> torch.Tensor:
        """Return the windows of this rank in step ``step``, counted from 0, one per slot of
        the rank.
        """
        epoch, position = divmod(step, self._steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = (
                epoch,
                torch.stack([self._slot_order(slot, epoch) for slot in self._slots]),
            )
        return self._order[:, position] * self._batch_size + torch.tensor(self._slots)

    def _slot_order(self, slot: int, epoch: int) -> torch.Tensor:
        generator = torch.Generator()
        # The batch size bounds the slots, so no two pairs (epoch, slot) share a number.
        generator.manual_seed((self._seed << 32) % 2**63 + epoch * self._batch_size + slot)
        return torch.randperm(self._steps_per_epoch, generator=generator)
