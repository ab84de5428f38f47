"""``Index``: names, shapes and dtypes of the tensors in a state or a checkpoint, without
their values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

EXTRA_STATE = "_extra_state"
"""The last part of the key under which a state dict holds a module's extra state
(``Module.get_extra_state``).
"""


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor of a state or a checkpoint.

    ``source`` is the first name of the tensor: its own name, or that of the tensor to which it
    is tied.
    """

    shape: torch.Size
    dtype: torch.dtype
    source: str


@dataclass(frozen=True, kw_only=True)
class Index:
    """What a state or a checkpoint holds, without the values of tensors.

    ``entries`` maps all names, in order, to a :class:`TensorEntry`, to the value of a module's
    extra state (names that end in ``_extra_state``), or, for another value in a file, to a
    ``ForeignEntry`` of bmt-checkpoint. ``metadata`` is torch's: the modules' versions by prefix.
    """

    entries: Mapping[str, Any]
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def own_tensors(self) -> dict[str, TensorEntry]:
        """The tensors, in order: tied ones once, under the first name."""
        tensors = {
            name: entry for name, entry in self.entries.items() if isinstance(entry, TensorEntry)
        }
        return {name: entry for name, entry in tensors.items() if entry.source == name}
