"""Optimizers by name, through the registry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bmt_core.errors import ConfigError
from bmt_core.plugins import Registry
from bmt_core.run.runtime import current, is_initialized
from bmt_optim.adam.adamw import AdamW
from bmt_optim.adam.optimizer import AdamOptimizer
from bmt_optim.offload.optimizer import AdamOffloadOptimizer
from bmt_params.parameter import DistributedParameter

OWN_OPTIMIZERS: Sequence[type[torch.optim.Optimizer]] = (AdamOptimizer, AdamW, AdamOffloadOptimizer)


def create(name: str, params: Any, **options: Any) -> torch.optim.Optimizer:
    """Return a new optimizer over ``params``, of the class that an installed package offers
    as ``name``.

    ``options`` are passed to its constructor. Raises :class:`PluginError` for an unknown name, and
    :class:`ConfigError` if the constructor takes whole parameters and not the 1-D slices of sharded
    ones. Works before ``init_distributed()`` too.

    >>> create("adam", [torch.nn.Parameter(torch.zeros(1))], lr=0.1).param_groups[0]["lr"]
    0.1
    """
    kind = _class_of(name)
    params = [params] if isinstance(params, torch.Tensor) else list(params)
    try:
        made: torch.optim.Optimizer = kind(params, **options)
    except Exception as error:  # of a constructor of anyone's
        if not _takes_whole(kind, params, options):
            raise
        raise ConfigError(
            f"{kind.__name__} cannot be made for sharded parameters, of which each rank has a 1-D"
            f" slice: {error} It takes whole ones: bmt.optim.whole({kind.__name__}, params, …). Or"
            " keep these parameters out of Blocks and wrappers."
        ) from error
    return made


def available() -> list[str]:
    """Return the names that :func:`create` knows, sorted.

    >>> "adam" in available()
    True
    """
    return sorted(_registry().optimizers)


def _class_of(name: str) -> Any:
    if not is_initialized():
        # The registry imports every installed plugin, which may take seconds. In a run it has
        # done so.
        for kind in OWN_OPTIMIZERS:
            if kind.name == name:  # type: ignore[attr-defined]
                return kind
    return _registry().find("optimizer", name)


def _takes_whole(kind: Any, params: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Whether the constructor takes ordinary parameters of the shapes of whole ones, some of
    ``params`` being sharded.
    """
    is_sharded = False

    def whole(p: Any) -> Any:
        nonlocal is_sharded
        if isinstance(p, (tuple, list)):
            return type(p)([whole(item) for item in p])
        if isinstance(p, Mapping):
            return {key: whole(value) if key == "params" else value for key, value in p.items()}
        if not isinstance(p, DistributedParameter):
            return p
        is_sharded = True
        return torch.nn.Parameter(
            torch.empty(p.whole_shape, dtype=p.dtype, device="meta"), p.requires_grad
        )

    shaped = [whole(p) for p in params]
    if not is_sharded:
        return False
    try:
        kind(shaped, **options)
    except Exception:
        return False
    return True


def _registry() -> Registry:
    return current().registry if is_initialized() else Registry.load()
