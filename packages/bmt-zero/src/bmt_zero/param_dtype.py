"""``param_dtype``: parameters that are sharded and stepped in one dtype, and gathered and computed
in another, such as float32 and bfloat16.

[Note: compute dtypes] Each rank casts its part and sends the result, so a gather has the bytes of
``param_dtype``. The modules of a forward hold parameters in that dtype. Gradients are computed in
it and sent in it, and ``reduce_dtype`` says how they are summed; ``.grad`` has the dtype of the
part. A Block that casts parameters casts the floating tensors among its arguments, too, and so does
the wrapped model if it casts parameters outside of Blocks: what torch's
``MixedPrecisionPolicy(cast_forward_inputs=True)`` does. Nothing else is cast: no buffer, no output.

Some parameters keep their dtype: those that a model of Hugging Face names in
``_keep_in_fp32_modules`` or ``_keep_in_fp32_modules_strict``, such as the routers of experts, and
those of a module with an attribute ``param_dtype``, which says the dtype for the modules in it,
too: ``layer.router.param_dtype = torch.float32``. Arguments of such a module are not cast, so its
code must fit: it computes as if the model had been made in ``param_dtype`` and this module not.

The dtype in which a forward reads a parameter is noted on it, once: it decides in which flat shard
the parameter lies.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from bmt_core.comm.protocols import Group, Work
from bmt_core.errors import ConfigError
from bmt_params.nested import map_tensors

_KEPT_BY_HUGGING_FACE = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")


def check_param_dtype(dtype: object) -> torch.dtype | None:
    """Return ``dtype``, or raise :class:`ConfigError` if no module computes in it.

    >>> check_param_dtype(torch.bfloat16)
    torch.bfloat16
    """
    if dtype is None or (isinstance(dtype, torch.dtype) and _is_computed_in(dtype)):
        return dtype
    raise ConfigError(
        "param_dtype is the dtype in which parameters are gathered and computed: a floating dtype"
        f" of at least two bytes, such as torch.bfloat16, or None, not {dtype!r}."
    )


def note_compute_dtypes(root: nn.Module, param_dtype: torch.dtype) -> None:
    """Note on each parameter of ``root``, without nested Blocks, in which dtype a forward reads it,
    unless that is known.
    """
    kept = dict(kept_by_hugging_face(root))
    pending, seen = [(root, param_dtype)], set()
    while pending:
        module, dtype = pending.pop(0)
        is_nested = "_bmt_block" in module.__dict__ and module is not root
        if id(module) in seen or is_nested:
            continue
        seen.add(id(module))
        dtype = declared_dtype(module) or dtype
        for parameter in module._parameters.values():
            if parameter is not None and compute_dtype(parameter) is None:
                casts = _is_computed_in(parameter.dtype) and parameter not in kept
                note_compute_dtype(parameter, dtype if casts else parameter.dtype)
        pending += [(child, dtype) for child in module.children()]


def kept_by_hugging_face(root: nn.Module) -> Iterator[tuple[nn.Parameter, str]]:
    """Yield the parameters of ``root``, with their names, that models of Hugging Face in it name in
    ``_keep_in_fp32_modules`` or ``_keep_in_fp32_modules_strict``.
    """
    for module in root.modules():
        found = [getattr(module, attribute, None) for attribute in _KEPT_BY_HUGGING_FACE]
        names = sorted({name for each in found if each for name in each})
        if names:
            # Whole names between dots, in which a star stands for anything.
            patterns = [re.escape(name).replace(r"\*", ".*") for name in names]
            pattern = re.compile(rf"(^|\.)({'|'.join(patterns)})(\.|$)")
            for path, parameter in module.named_parameters():
                if pattern.search(path):
                    yield parameter, path


def compute_dtype(parameter: nn.Parameter) -> torch.dtype | None:
    """Return the dtype in which a forward reads ``parameter``; None if nothing was noted."""
    return getattr(parameter, "_compute_dtype", None)


def note_compute_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Note that a forward is to read ``parameter`` in ``dtype``."""
    noted: Any = parameter
    noted._compute_dtype = dtype


def is_cast(parameter: nn.Parameter) -> bool:
    """Whether a forward reads ``parameter`` in another dtype than its own."""
    return compute_dtype(parameter) not in (None, parameter.dtype)


def declared_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the attribute ``param_dtype`` of ``module``, if it is a dtype."""
    declared = getattr(module, "param_dtype", None)
    return check_param_dtype(declared) if isinstance(declared, torch.dtype) else None


def cast_floats(dtype: torch.dtype, value: Any) -> Any:
    """Return ``value``, arguments of a forward, with floating tensors in it cast to ``dtype``."""
    return map_tensors(partial(_cast, dtype), value)


class CastsInputs:
    """A forward pre-hook that casts the arguments of a wrapped model to ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast_floats(self.dtype, (args, kwargs))


def gather_in_dtype(group: Group, part: torch.Tensor, output: torch.Tensor) -> Work:
    """Start to fill ``output`` with the parts of all ranks, cast to its dtype. Collective."""
    if part.dtype != output.dtype:
        # In place: what is cast needs no memory of its own.
        own = output.view(group.size, -1)[group.rank]
        part = own.copy_(part)
    return group.all_gather(output, part)


def _is_computed_in(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if _is_computed_in(tensor.dtype) else tensor
