"""``save``: write a whole model to one file, gathering one tensor at a time."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from bmt_core.checkpoint.atomic import replacing
from bmt_core.checkpoint.background import start_save, wait_for_saves
from bmt_core.checkpoint.choice import FormatChoice, choose_format
from bmt_core.checkpoint.format import CheckpointFormat, Index
from bmt_core.checkpoint.model_state import ModelState, world_group
from bmt_core.comm.collective_section import collective_section


def save(
    model: nn.Module, path: str | os.PathLike[str], non_blocking: bool = False, *, format: FormatChoice = None
) -> None:
    """Write the state dict of ``model`` to ``path``, as whole tensors under the names of the plain model. Collective.

    In the torch format, which is the default, the file is what ``torch.save(model.state_dict())`` of the unwrapped
    model writes: ``torch.load(path, weights_only=True)`` reads it, and the unwrapped model's ``load_state_dict``
    accepts it. Tied parameters are stored once. If ranks hold different parts of the model, as pipeline stages do, the file
    has all parts. A tensor that is not distributed (a buffer or a plain parameter) is taken from the first rank that has it.

    One tensor is gathered at a time, and only rank 0 keeps them in host memory. The write is atomic: if the program dies at
    any moment, the previous file at ``path`` is still there. With ``non_blocking`` the tensors are copied to the host now and
    written on a thread; the next ``save``, ``load`` or :func:`wait_for_saves` raises an error that happens there.

    ``format`` is the name of a registered format or a :class:`CheckpointFormat`; by default the file's suffix decides.
    Raises :class:`CheckpointError` on every rank when rank 0 cannot write.
    """
    wait_for_saves()
    group = world_group()
    target = Path(path)
    with collective_section(group, f"saving {target}"):
        chosen = choose_format(target, format)
    state = ModelState(model, f"saving {target}")
    with collective_section(group, f"saving {target}"):
        index, tensors = state.index, state.tensors(keep=group.rank == 0)
        try:
            if group.rank == 0 and non_blocking:
                copies = list(tensors)
                start_save(f"saving {target}", lambda: _write(target, chosen, index, copies))
            elif group.rank == 0:
                _write(target, chosen, index, tensors)
        finally:
            # Gathers are collective: other ranks than 0, and a rank 0 whose disk is full, make them all too.
            deque(tensors, maxlen=0)


def _write(target: Path, chosen: CheckpointFormat, index: Index, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    with replacing(target) as temporary:
        chosen.write(temporary, index, tensors)
