"""What bmt-hf uses of transformers and accelerate without a promise that it stays. A test of each
says what breaks without it.
"""

from __future__ import annotations

from typing import Any

import torch

from bmt_optim import OptimManager


def note_tokens_before(trainer: Any) -> None:
    """Tell ``Trainer.log`` how many input tokens were seen before this training, to log the tokens
    of a second.
    """
    trainer._initial_num_input_tokens_seen = trainer.state.num_input_tokens_seen


def count_input_tokens(trainer: Any, inputs: Any) -> None:
    """Add the tokens of all ranks to ``state.num_input_tokens_seen``, as
    ``include_num_input_tokens_seen`` asks.
    """
    trainer._track_num_input_tokens(inputs)


def restore_callbacks(trainer: Any) -> None:
    """Give callbacks the states in ``trainer.state``, if
    ``restore_callback_states_from_checkpoint`` asks for it.
    """
    trainer._load_callback_state()


class ManagersScale:
    """Stands for the ``GradScaler`` of an ``Accelerator``: its ``backward(loss)`` scales the loss
    by the manager, too.
    """

    def __init__(self, manager: OptimManager) -> None:
        self._manager = manager

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to call ``backward()`` on."""
        return self._manager.scale_loss(loss)


def scale_losses_by(trainer: Any, manager: OptimManager) -> None:
    """Have ``trainer.accelerator.backward(loss)``, which ``training_step`` calls, scale
    by ``manager``.
    """
    trainer.accelerator.scaler = ManagersScale(manager)
