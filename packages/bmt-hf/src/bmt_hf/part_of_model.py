"""``PartOfModel``: some tensors of a model, as a model of their own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


class PartOfModel(nn.Module):
    """A module with some tensors of another one, under the names that they have there: to save and
    load them alone.
    """

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in state.items():
            *path, last = name.split(".")
            module: nn.Module = self
            for part in path:
                module = module._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
            if isinstance(tensor, nn.Parameter):
                module._parameters[last] = tensor
            else:
                module._buffers[last] = tensor
