"""``save``: the whole model in one file, gathered tensor by tensor."""

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
from bmt_core.comm.objects import together


def save(
    model: nn.Module, path: str | os.PathLike[str], non_blocking: bool = False, *, format: FormatChoice = None
) -> None:
    """Write the state dict of ``model`` to ``path``, as whole tensors under the names of the plain model. Collective.

    In the torch format, which is the default, the file is what ``torch.save(model.state_dict())`` of the unwrapped
    model writes: ``torch.load(path, weights_only=True)`` reads it, and the unwrapped model's ``load_state_dict``
    takes it. Tied parameters are stored once. Where ranks hold different parts of the model, as pipeline stages do, the
    file has all of them. Of tensors that are not distributed (buffers, plain parameters), those of the first rank that has
    them are saved.

    One tensor is gathered at a time; the file's tensors are in rank 0's host memory only. The file appears whole or
    not at all: if the program dies at any moment, what was at ``path`` is still there. With ``non_blocking`` the
    tensors are copied now and written on a thread; an error comes out of the next ``save``, ``load`` or
    :func:`wait_for_saves`.

    ``format`` is the name of a registered format, or a :class:`CheckpointFormat`; by default the file's suffix decides.
    Raises :class:`CheckpointError` on every rank when rank 0 cannot write.
    """
    wait_for_saves()
    group = world_group()
    target = Path(path)
    with together(group, f"saving {target}"):
        chosen = choose_format(target, format)
    state = ModelState(model, f"saving {target}")
    with together(group, f"saving {target}"):
        index, tensors = state.index, state.tensors(keep=group.rank == 0)
        try:
            if group.rank == 0 and non_blocking:
                copies = list(tensors)
                start_save(f"saving {target}", lambda: _write(target, chosen, index, copies))
            elif group.rank == 0:
                _write(target, chosen, index, tensors)
        finally:
            # A rank that keeps nothing, or whose disk is full, still takes part in every gather.
            deque(tensors, maxlen=0)


def _write(target: Path, chosen: CheckpointFormat, index: Index, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    with replacing(target) as temporary:
        chosen.write(temporary, index, tensors)
