"""``CALLBACKS``: functions that hand the metrics of a run on, to TensorBoard or to Weights
& Biases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

Callback = Callable[[int, Mapping[str, float]], None]
"""Called with the step and with what was measured, by name."""


def tensorboard(folder: Path, first_step: int) -> Callback:
    """Return a callback that writes for TensorBoard; what an earlier run wrote for steps after
    ``first_step`` is dropped.
    """
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)

    def write(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return write


def wandb(folder: Path, first_step: int) -> Callback:
    """Return a callback that writes a run of Weights & Biases, whose own variables
    (``WANDB_PROJECT``, ...) configure it.
    """
    import wandb

    run = wandb.init(dir=folder)

    def write(step: int, metrics: Mapping[str, float]) -> None:
        run.log(dict(metrics), step=step)

    return write


CALLBACKS: Mapping[str, Callable[[Path, int], Callback]] = {
    "tensorboard": tensorboard,
    "wandb": wandb,
}
"""By the names of the packages that they need: functions of the run's directory and of the step
that it goes on from.
"""
