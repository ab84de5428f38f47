"""``Training``: a model and its optimizer under some toolkit, and the step that is timed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

import bmtrain as bmt
from bench.case import Case
from bench.models import SEED, Size
from bench.real_models import RealModel

WEIGHT_DECAY = 0.01


class Training(ABC):
    """One case ready to train. A toolkit is a subclass; making one builds the model sharded.
    Collective.
    """

    name: ClassVar[str]
    model: nn.Module
    optimizer: torch.optim.Optimizer

    @abstractmethod
    def __init__(self, case: Case, device: torch.device) -> None: ...

    @classmethod
    @abstractmethod
    def version(cls) -> str:
        """Version of the toolkit."""

    @classmethod
    def obstacle(cls, case: Case) -> str | None:
        """Why this toolkit cannot run ``case``; None if it can."""
        return None

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Forward, backward, optimizer step, gradients cleared. Returns the rank's loss, on
        the device.
        """
        loss = self.loss(self.model(tokens), targets)
        self.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy of this rank's tokens. ``targets`` are (batch, length)."""
        return token_loss(logits, targets)

    def data_ranks(self) -> list[int]:
        """Return the ranks whose sequences this rank trains on: its own, or those of all ranks that
        share its data.
        """
        return [bmt.rank()]

    def backward(self, loss: torch.Tensor) -> None:
        """Make the gradients of the mean of the ranks' losses."""
        loss.backward()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Let go of the model, the optimizer, and what would outlive the object."""
        self.__dict__.clear()


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of all tokens, in float32."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def learning_rate(size: Size | RealModel) -> float:
    """Return a rate that changes the output of a layer about as much at every width.

    1e-5 at 5120: the loss of a batch that is seen again and again falls step by step, without
    a schedule.
    """
    return 0.05 / size.dim_model


def make_batch(
    size: Size | RealModel, *, batch: int, rank: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and targets of ``rank``, each (batch, sequence): random, and the same for
    every toolkit.

    The same batch serves every step, so a model that learns shows by its loss.
    """
    generator = torch.Generator().manual_seed(SEED + rank)
    text = torch.randint(size.vocabulary, (batch, size.sequence + 1), generator=generator).to(
        device
    )
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()
