"""``whole_parameters``: let code outside of forward and backward read and write
whole parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from bmt_core.errors import ConfigError
from bmt_core.torch_internals import Seen, counting_versions, set_data
from bmt_params.modules.distributed_module import extend_where_parts_are_read
from bmt_params.modules.outermost_call import is_call_under_way, reading_parts, refusing_calls
from bmt_params.parameter import DistributedParameter, note_whole_values
from bmt_params.uninitialized import has_values, list_names
from bmt_params.whole_parameter import WholeParameter


def _lend(parameter: DistributedParameter, data: torch.Tensor) -> torch.Tensor:
    """Give ``parameter`` whole ``data``, and return its part."""
    part = parameter.data
    set_data(parameter, data)
    parameter._is_lent = True
    return part


def _take_back(parameter: DistributedParameter, part: torch.Tensor) -> None:
    parameter.__class__ = DistributedParameter
    set_data(parameter, part)
    parameter._is_lent = False


@contextmanager
def whole_parameters(module: nn.Module) -> Iterator[None]:
    """Inside, the parameters of ``module`` are whole: code that knows nothing of sharding may read
    and write them.

    Use it to initialise by hand, to merge LoRA adapters, to prune or parametrize, or for code that
    reads the shape of a weight. A :class:`DistributedParameter` stays the same object, and is an
    ordinary ``nn.Parameter`` of ``whole_shape``, on every rank; a copy of it is one, too. At the
    end each rank keeps its part of the parameters that were written to; every rank must have
    written the same values, and before the model's first call this is compared. After an exception
    the old values are restored. Modules must not be called inside, nor an optimizer's step.

    Each rank needs memory for the whole of ``module``. For a large model take one Block after the
    other: ``for layer in model.layers: with whole_parameters(layer): ...``. Collective.

    Raises :class:`ConfigError` inside a forward, where parameters are whole anyway, and for
    parameters without values.
    """
    if is_call_under_way():
        raise ConfigError(
            "whole_parameters() was entered inside a forward, where the parameters of the running"
            " module are whole already. Leave it out there."
        )
    # A parameter that belongs to an outer whole_parameters() is an ordinary one until that ends.
    named = {
        p: name
        for name, p in module.named_parameters()
        if isinstance(p, DistributedParameter) and not p._is_lent
    }
    empty = [name for parameter, name in named.items() if not has_values(parameter)]
    if empty:
        raise ConfigError(
            f"{list_names(empty, [])} have no values yet. Call"
            " init_parameters(model) or load a checkpoint before they are gathered."
        )
    lent: dict[DistributedParameter, torch.Tensor] = {}
    seen = Seen()
    with counting_versions():
        try:
            with reading_parts(), refusing_calls():
                with torch.no_grad():
                    for parameter in named:
                        whole = parameter.gather_all_like(parameter.data)
                        # A clone, because with one rank the whole is the part itself, and an
                        # exception must restore the old values.
                        lent[parameter] = _lend(parameter, whole.clone())
                        # Operations on an object of its own class would go through PartGuard.
                        parameter.__class__ = WholeParameter  # type: ignore[assignment]
                    seen.note(lent)
                yield
        except BaseException:
            for parameter, part in lent.items():
                _take_back(parameter, part)
            raise
        _keep_own_parts(lent, seen, named)
    extend_where_parts_are_read(module)


def _keep_own_parts(
    lent: dict[DistributedParameter, torch.Tensor],
    seen: Seen,
    names: dict[DistributedParameter, str],
) -> None:
    wrong = []
    with torch.no_grad():
        for parameter in seen.written(lent):
            whole, part = parameter.data, lent.pop(parameter)
            _take_back(parameter, part)
            if whole.shape != parameter.whole_shape:
                wrong.append(
                    f"{names[parameter]} {tuple(whole.shape)} instead of"
                    f" {tuple(parameter.whole_shape)}"
                )
            else:
                part.copy_(parameter.local_part(parameter.own_slice(whole)))
                note_whole_values(parameter, whole, version=parameter._version)
        # Nobody wrote to the others.
        for parameter, part in lent.items():
            _take_back(parameter, part)
    if wrong:
        raise ConfigError(
            f"Inside whole_parameters(), parameters got data of other shapes: {', '.join(wrong)}."
            " They keep their old values. Assign a new nn.Parameter for another shape."
        )


@contextmanager
def whole_shapes(module: nn.Module) -> Iterator[None]:
    """Inside, the parameters of ``module`` have their whole shapes and no values, for code that
    counts them. Not collective.
    """
    lent = {
        p: _lend(p, torch.empty((), dtype=p.dtype, device=p.device).expand(p.whole_shape))
        for p in module.parameters()
        if isinstance(p, DistributedParameter) and not p._is_lent
    }
    try:
        with reading_parts():
            yield
    finally:
        for parameter, part in lent.items():
            _take_back(parameter, part)
