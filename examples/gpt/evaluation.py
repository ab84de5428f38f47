"""``Evaluation``: the loss on held-out text, the same number whatever the number of ranks."""

from __future__ import annotations

import math

import torch

import bmtrain as bmt
from windows import Windows

BATCH_SIZE = 32


class Evaluation:
    """Mean loss, in nats per byte, over ``num_windows`` windows spread evenly over the
    held-out text.
    """

    def __init__(self, windows: Windows, num_windows: int) -> None:
        if len(windows) == 0:
            raise ValueError(
                f"The held-out text is shorter than one window of {windows.length} bytes."
            )
        count = min(num_windows, len(windows))
        self._windows = windows
        self._loss_func = bmt.loss.FusedCrossEntropy(reduction="none", parallel=True)
        # Which windows form a batch does not depend on the number of ranks, so that neither does
        # any rounding. The ranks of a pipeline pass batches of one shape, so the last one is filled
        # up, with windows that do not count.
        indices = torch.arange(count) * len(windows) // count
        self._batches = torch.split(
            torch.nn.functional.pad(indices, (0, -count % BATCH_SIZE)), BATCH_SIZE
        )
        self._num_bytes = count * windows.length

    @torch.no_grad()
    def __call__(self, model: torch.nn.Module) -> float:
        """Evaluate ``model``; every rank gets the result. Collective."""
        device = next(model.parameters()).device
        topology = bmt.current().topology
        rounds = -(-len(self._batches) // topology.data_size)
        sums = torch.zeros(rounds, dtype=torch.float64)
        was_training = model.training
        model.eval()
        for number in range(rounds):
            index = number * topology.data_size + topology.data_rank
            # A rank with no batch left runs the last one for nothing: the others need its part of
            # the parameters.
            inputs, targets = self._windows.take(self._batches[min(index, len(self._batches) - 1)])
            positions = torch.arange(inputs.shape[1], device=device).expand_as(inputs)
            logits = model(inputs.to(device), positions)
            losses = self._loss_func(logits.flatten(0, 1), targets.to(device).flatten())
            # Ranks along tp have the same losses, and one of them counts.
            if bmt.config["tp_rank"] == 0:
                rest = self._num_bytes - index * BATCH_SIZE * self._windows.length
                sums[number] = losses[: max(0, rest)].double().sum()
        model.train(was_training)
        # fsum rounds once, so the order, which depends on the number of ranks, does not matter.
        return math.fsum(bmt.gather_result(sums).tolist()) / self._num_bytes
