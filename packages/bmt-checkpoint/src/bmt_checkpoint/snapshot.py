"""``snapshot``: copies of a rank's parts for a save in the background, in host memory that the next
snapshot reuses.

The system hands out memory by pages, and fills each with zeros when it is first touched. That takes
several times as long as the copy to it, and to pin memory for a copy from a GPU takes longer still.
One save is under way at a time, so one set is enough.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import chain

import torch

from bmt_core.run.runtime import current, is_initialized
from bmt_params.state.whole_state import OwnPart

_BufferKey = tuple[int, torch.dtype]  # number of elements, and their dtype

_memory: defaultdict[_BufferKey, list[torch.Tensor]] = defaultdict(list)
"""The tensors of the last snapshot."""


def snapshot(*parts: Sequence[OwnPart]) -> list[list[OwnPart]]:
    """Return each of ``parts`` with copies of its elements in host memory, pinned if they come from
    a GPU. Communicates nothing. Raises :class:`CallError` if the run has failed.

    The memory is kept until ``shutdown()``, and the next snapshot writes to it, so the save of this
    one must have ended before.
    """
    if is_initialized() and _memory.clear not in current().at_shutdown:
        current().at_shutdown.append(_memory.clear)
    wanted = Counter(map(_key_of, chain(*parts)))
    free = {key: tensors[: wanted[key]] for key, tensors in _memory.items()}
    _memory.clear()  # memory of another model's sizes is freed before more is allocated
    with torch.no_grad():
        copies = [[_copied(part, free) for part in of_save] for of_save in parts]
    if is_initialized() and current().device.type == "cuda":
        torch.cuda.current_stream(current().device).synchronize()
        # A failure elsewhere ends calls on the GPU with wrong results.
        current().observer.raise_failure()
    return copies


def _key_of(part: OwnPart) -> _BufferKey:
    return part.numel, part.dtype


def _copied(part: OwnPart, free: dict[_BufferKey, list[torch.Tensor]]) -> OwnPart:
    """Return ``part`` with a copy of its elements, in memory from ``free`` if any fits. Copies from
    a GPU are asynchronous.
    """
    value = part.read()
    if type(value) is not torch.Tensor:
        value = value.detach().as_subclass(torch.Tensor)
    is_pinned, key = value.is_cuda, (value.numel(), value.dtype)
    fitting = free.get(key)
    copy = fitting.pop() if fitting else None
    if copy is None or (is_pinned and not copy.is_pinned()):
        copy = torch.empty(value.numel(), dtype=value.dtype, device="cpu", pin_memory=is_pinned)
    _memory[key].append(copy)
    (copy if value.dim() == 1 else copy.view(value.shape)).copy_(value, non_blocking=is_pinned)
    return part.with_elements(copy)
