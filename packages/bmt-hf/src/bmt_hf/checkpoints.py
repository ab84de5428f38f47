"""The directories ``checkpoint-N``: the model in the hub's layout, ``trainer_state.json``, and
bmt's checkpoint in ``training``.

A checkpoint is written in ``output_dir/unfinished-checkpoint`` and moved when it is complete, so
that every ``checkpoint-N`` is. ``training`` has the model, too, under its own names (of a model of
PEFT the adapters alone), because the hub's layout leaves out what ``from_pretrained`` does
not need.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import (
    PREFIX_CHECKPOINT_DIR,
    get_last_checkpoint,
    rotate_checkpoints,
    sort_checkpoints,
)

from bmt_checkpoint import load, load_checkpoint, save_checkpoint
from bmt_checkpoint.adapters import adapter_state, has_adapters
from bmt_core import rank
from bmt_core.comm.collective_section import collective_section
from bmt_core.comm.objects import broadcast_object
from bmt_core.errors import CheckpointError
from bmt_core.run.runtime import current
from bmt_hf.part_of_model import PartOfModel
from bmt_optim import OptimManager

TRAINING = "training"
UNFINISHED = "unfinished-checkpoint"


def save(trainer: Any, manager: OptimManager, order: torch.Tensor | None) -> None:
    """Write ``checkpoint-N`` for the current step, with the ``order`` of the data, and delete old
    ones as ``save_total_limit`` asks. Collective.
    """
    trainer.store_flos()
    state, output = trainer.state, Path(trainer.args.output_dir)
    name = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
    unfinished, final = output / UNFINISHED, output / name
    training: Path | None = None
    if not trainer.args.save_only_model:
        extra = {"lr_scheduler": trainer.lr_scheduler.state_dict(), "order": order}
        training = save_checkpoint(
            unfinished, _saved_part(trainer.model), manager, step=state.global_step, extra=extra
        )
    with collective_section(current().world, f"saving {final}"):
        if rank() == 0:
            shutil.rmtree(unfinished / name, ignore_errors=True)  # of a program that died
    trainer.save_model(str(unfinished / name))
    _note_best(trainer, output)
    state.stateful_callbacks = TrainerState(
        stateful_callbacks=exportable(trainer)
    ).stateful_callbacks
    with collective_section(current().world, f"saving {final}"):
        if rank() == 0:
            if training is not None:
                training.rename(unfinished / name / TRAINING)
            state.save_to_json(str(unfinished / name / TRAINER_STATE_NAME))
            _replace(final, unfinished / name)
            rotate_checkpoints(
                output_dir=str(output),
                save_total_limit=trainer.args.save_total_limit,
                best_model_checkpoint=state.best_model_checkpoint,
                use_mtime=True,
            )


def exportable(trainer: Any) -> list[Any]:
    """Return the callbacks, and the control, whose states are saved."""
    return [
        each
        for each in [*trainer.callback_handler.callbacks, trainer.control]
        if isinstance(each, ExportableState)
    ]


def find(resume_from_checkpoint: str | bool, output_dir: str) -> Path:
    """Return the checkpoint to resume from; True means the last one in ``output_dir``.
    Collective.
    """
    with collective_section(current().world, "looking for the checkpoint") as results:
        if rank() == 0:
            found = (
                _last(output_dir)
                if isinstance(resume_from_checkpoint, bool)
                else Path(resume_from_checkpoint)
            )
            if not (found / TRAINING).is_dir() or not (found / TRAINER_STATE_NAME).is_file():
                raise CheckpointError(
                    f"{found} lacks {TRAINING} or {TRAINER_STATE_NAME}: it is no checkpoint of"
                    " bmt_hf.Trainer, or one with save_only_model=True. To begin with its weights,"
                    " load the model from it."
                )
            results.own = found
    checkpoint: Path = results.of_ranks[0]
    return checkpoint


def restore(trainer: Any, manager: OptimManager, checkpoint: Path) -> torch.Tensor | None:
    """Restore model, optimizer, scheduler, loss scale and random generators; return the order of
    the data. Collective.
    """
    restored = load_checkpoint(checkpoint / TRAINING, _saved_part(trainer.model), manager)
    trainer.lr_scheduler.load_state_dict(restored["extra"]["lr_scheduler"])
    order: torch.Tensor | None = restored["extra"].get("order")  # older checkpoints have none
    return order


def load_best(trainer: Any) -> None:
    """Load the weights of ``state.best_model_checkpoint``. Collective."""
    load(_saved_part(trainer.model), Path(trainer.state.best_model_checkpoint) / TRAINING / "model")


def finish(trainer: Any) -> None:
    """Delete the last checkpoint if only the best one is to stay, and what saving has left.
    Collective.
    """
    best, output = trainer.state.best_model_checkpoint, trainer.args.output_dir
    with collective_section(current().world, "deleting checkpoints"):
        if rank() == 0:
            shutil.rmtree(Path(output) / UNFINISHED, ignore_errors=True)
            if best is not None and trainer.args.save_total_limit == 1:
                for checkpoint in sort_checkpoints(output_dir=output, best_model_checkpoint=best):
                    if not os.path.samefile(checkpoint, best):
                        shutil.rmtree(checkpoint, ignore_errors=True)


def _last(output_dir: str) -> Path:
    found = get_last_checkpoint(output_dir) if os.path.isdir(output_dir) else None
    if found is None:
        raise CheckpointError(
            f"resume_from_checkpoint=True, and {output_dir} has no {PREFIX_CHECKPOINT_DIR}-N. Name"
            " a checkpoint, or leave resume_from_checkpoint out to start anew."
        )
    return Path(found)


def _saved_part(model: nn.Module) -> nn.Module:
    return PartOfModel(adapter_state(model)) if has_adapters(model) else model


def _note_best(trainer: Any, output: Path) -> None:
    """Set ``state.best_model_checkpoint``, if the best step was saved or is being saved.
    Collective.
    """
    state = trainer.state
    if state.best_global_step:
        best = output / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
        is_there = best.exists() or state.best_global_step == state.global_step
        if broadcast_object(is_there, current().world):
            state.best_model_checkpoint = str(best)


def _replace(final: Path, complete: Path) -> None:
    """Move ``complete`` to ``final``; a checkpoint of an earlier training there is deleted."""
    if final.exists():
        old = complete.with_name("replaced")
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        shutil.rmtree(old, ignore_errors=True)
    complete.rename(final)
