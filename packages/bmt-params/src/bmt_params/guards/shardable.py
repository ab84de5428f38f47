"""Refuses tensors of which a part cannot be cut, and modules whose parameters cannot be sharded."""

from __future__ import annotations

import torch
from torch import nn

from bmt_core.errors import ConfigError
from bmt_params.guards.part_guard import PartGuard
from bmt_params.whole_parameter import WholeParameter


def check_can_be_sharded(root: nn.Module) -> None:
    """Raise :class:`ConfigError` if ``root`` has a module whose parameters cannot be sharded.

    A module that writes to its parameters in forward would write to a gathered copy, and the writes
    would be lost. A scripted module keeps its parameters in C++.
    """
    for name, module in root.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                check_is_ordinary(parameter)
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"{name or 'The module'} is a module of torch.jit.script, whose parameters cannot"
                " be sharded. Leave the module as it was, and script functions inside of it."
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            kind = type(module).__name__
            raise ConfigError(
                f"{name or kind} is an nn.{kind} with max_norm={module.max_norm}, which shortens"
                " rows of its weight in forward; with a sharded weight this would be lost. Set"
                " max_norm to None, and limit the rows after the optimizer's step if you need it."
            )


def check_is_ordinary(data: torch.Tensor) -> None:
    """Raise an error if the elements of ``data`` are not in its own memory, where a part could be
    cut out of them, or if it is of a class of parameters that forward would not find again.
    """
    if not isinstance(data, torch.Tensor):
        raise TypeError(
            f"A DistributedParameter is made of a tensor, not of {type(data).__name__}."
        )
    if nn.parameter.is_lazy(data):
        raise ConfigError(
            "Lazy modules have no shape yet. Run one forward pass in plain torch before you make"
            " them distributed."
        )
    if type(data).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise ConfigError(
            f"A parameter of shape {tuple(data.shape)} is a {type(data).__name__}, a subclass of"
            " torch.Tensor that says itself where its elements are, so they cannot be sharded."
            " Expected is an nn.Parameter of an ordinary tensor: leave out the option or the"
            " wrapper that made it, such as enable_fsdp_float8_all_gather of torchao or"
            " fully_shard of torch."
        )
    if isinstance(data, nn.Parameter):
        kind = type(data)
        if kind is not nn.Parameter and not issubclass(kind, (WholeParameter, PartGuard)):
            raise ConfigError(
                f"A parameter of shape {tuple(data.shape)} is a {kind.__name__}, a subclass of"
                " nn.Parameter, and forward would read a plain tensor in its place. Assign an"
                " nn.Parameter, and set what the class adds as attributes of it, which forward"
                " reads: parameter.scale = 2.0."
            )
