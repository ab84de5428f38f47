"""``layers_of``: the layers of a plain model, which become Blocks; ``describe_blocks`` says how
many there are and how large.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from torch import nn

from bmt_params.parameter import DistributedParameter
from bmt_zero.block import Block
from bmt_zero.param_dtype import compute_dtype

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the members of the outermost lists of ``model``, each once.

    All members of an ``nn.ModuleList`` are layers; those without a forward are searched instead. Of
    an ``nn.Sequential`` or ``nn.ModuleDict`` those are which have submodules and parameters, and
    stand beside others of the same class whose names differ only in their numbers: ``"0"`` and
    ``"1"``, or ``"layer_0"`` and ``"layer_1"``.

    >>> layer = lambda: nn.TransformerEncoderLayer(4, 2, 8)
    >>> model = nn.Sequential(nn.Linear(4, 4), layer(), layer(), nn.Linear(4, 4))
    >>> [type(found).__name__ for found in layers_of(model)]
    ['TransformerEncoderLayer', 'TransformerEncoderLayer']
    >>> len(layers_of(nn.ModuleDict({"teacher": layer(), "student": layer()})))
    0
    """
    return list({id(layer): layer for layer in _walk(model)}.values())


def _walk(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, nn.ModuleList):
        for member in module:
            # A member without a forward is never called itself, but what is in it.
            is_called = type(member).forward is not nn.Module.forward
            yield from [member] if is_called else _walk(member)
        return
    members = _members_of_like_kind(module) if isinstance(module, _CONTAINERS) else []
    for child in module.children():
        if any(child is member for member in members):
            yield child
        elif not isinstance(child, Block):
            yield from _walk(child)


def _members_of_like_kind(container: nn.Module) -> list[nn.Module]:
    kinds = {
        name: (type(child), re.sub(r"\d+", "", name)) for name, child in container.named_children()
    }
    count = Counter(kinds.values())
    return [
        child
        for name, child in container.named_children()
        if count[kinds[name]] > 1
        and not isinstance(child, (Block, *_CONTAINERS))
        and _is_composite(child)
    ]


def _is_composite(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def describe_blocks(model: nn.Module) -> str:
    """Return one line: the number of Blocks in a wrapped ``model``, the bytes of the largest, and
    the bytes outside of Blocks.
    """
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    outside = _in_words(
        parameter for parameter in model.parameters() if id(parameter) not in inside
    )
    name = type(model).__name__
    if not blocks:
        return (
            f"bmt: {name}: 0 Blocks, {outside} of parameters are gathered together. Hold its layers"
            " in an nn.ModuleList, or make each a Block before the model is wrapped, and a few"
            " layers at a time are gathered."
        )
    largest = max((list(block.parameters()) for block in blocks), key=_bytes)
    count = f"{len(blocks)} Block{'s' if len(blocks) > 1 else ''}"
    return (
        f"bmt: {name}: {count} of up to {_in_words(largest)}; {outside} outside of Blocks are"
        " gathered together"
    )


def _bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(
        (compute_dtype(p) or p.dtype).itemsize
        * (p.full_shape.numel() if isinstance(p, DistributedParameter) else p.numel())
        for p in parameters
    )


def _in_words(parameters: Iterable[nn.Parameter]) -> str:
    size = float(_bytes(parameters))
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
