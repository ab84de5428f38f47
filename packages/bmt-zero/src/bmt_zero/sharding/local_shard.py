"""``LocalShard``: this rank's parts of several parameters of one dtype, in one flat tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bmt_core.comm import Group
from bmt_core.params.parameter import DistributedParameter
from bmt_core.torch_internals import has_gradient_hooks


class LocalShard:
    """The flat tensor ``shard``, cut into consecutive ``pieces``, of which piece ``indices[i]`` is parameter i's part.

    The shards of all ranks are gathered into one tensor of ``total`` elements. ``is_replicated``: each rank's shard is all
    of it. A subclass lists the ``parameters``, lets their data be views of the shard, and knows where they lie in the whole.
    """

    parameters: list[DistributedParameter]

    def __init__(
        self,
        pieces: Sequence[int],
        indices: Sequence[int],
        *,
        ranks: Group,
        replicated: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.pieces = list(pieces)
        self.indices = list(indices)
        self.ranks = ranks
        self.is_replicated = replicated
        self.dtype = dtype
        self.device = device
        self.shard = torch.zeros(sum(pieces), dtype=dtype, device=device)
        self.total = self.shard.numel() * (1 if replicated else ranks.size)

    @property
    def full_bytes(self) -> int:
        """Size of all parameters, padding included."""
        return self.total * self.dtype.itemsize

    @property
    def versions(self) -> list[int]:
        """How often each parameter's part was modified in place, as far as torch counts."""
        return [parameter._version for parameter in self.parameters]

    @property
    def is_hooked(self) -> bool:
        """Whether the user watches gradients of these parameters, so that each must reach autograd."""
        return has_gradient_hooks(self.parameters)
