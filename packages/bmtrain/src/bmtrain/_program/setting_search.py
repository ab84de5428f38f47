"""``fastest``: the fastest setting of a training that fits into the memory of a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from bmtrain._program.model_shape import ModelShape
from bmtrain._program.step_memory import Setting, kept_activations, memory_of, most_kept

GIB = 2**30
_MOST_TP = 8  # every layer communicates along tp, which pays within a host


def fastest(
    model: ModelShape, wanted: Setting, room: float, *, fixed: frozenset[str] = frozenset()
) -> Setting | None:
    """Return the setting that fits into ``room`` bytes and loses least time; None if none fits.

    What ``fixed`` names stays as ``wanted`` has it. In this order: states on the device before
    states on the host, fewer ranks along ``tp`` and ``pp``, a loss of whole logits, less
    recomputation, and level 2, which gathers each layer once, before level 3. Within a host and
    with enough tokens that is the order of the time lost (``docs/choosing.md``); on a slow network,
    measure.
    """
    fitting = [
        setting
        for setting in _candidates(model, wanted, room, fixed)
        if memory_of(model, setting).peak <= room
    ]
    return min(fitting, key=lambda setting: _cost(model, setting), default=None)


def _candidates(
    model: ModelShape, wanted: Setting, room: float, fixed: frozenset[str]
) -> Iterator[Setting]:
    powers = [2**power for power in range(11)]
    choices: dict[str, Sequence[int]] = {
        "offload": (False, True),
        "tp": [n for n in powers if n <= _MOST_TP and model.attention % n == 0],
        "pp": [n for n in powers if n <= model.layers],
        "fused_loss": (wanted.fused_loss, True),
        "level": (2, 3),
    }
    for name in fixed & choices.keys():
        choices[name] = [getattr(wanted, name)]
    for offload, tp, pp, fused_loss, level in product(*choices.values()):
        if wanted.gpus % (tp * pp * wanted.cp) == 0:
            batches = max(wanted.micro_batches, 4 * pp if pp > 1 else 1)
            grid = replace(
                wanted,
                offload=bool(offload),
                tp=tp,
                pp=pp,
                fused_loss=bool(fused_loss),
                level=level,
                micro_batches=batches,
            )
            yield from _recomputations(model, grid, room, "keep" in fixed)


def _recomputations(
    model: ModelShape, setting: Setting, room: float, is_fixed: bool
) -> Iterator[Setting]:
    if is_fixed:
        yield setting
        return
    yield replace(setting, keep="all")
    least = replace(setting, keep="none")
    yield least
    used = memory_of(model, least).at
    spare = room - max(used["loss"], used["start of backward"])
    budget = min(int(spare), most_kept(model, setting)) // GIB * GIB
    if budget > 0:
        yield replace(setting, keep=budget)


def _cost(model: ModelShape, setting: Setting) -> tuple[float, ...]:
    most = max(most_kept(model, setting), 1)
    kept = {"all": 1.0, "none": 0.0}.get(str(setting.keep))
    if kept is None:
        none = kept_activations(model, replace(setting, keep="none"))
        kept = 0.99 * (kept_activations(model, setting) - none) / most
    level = setting.level if setting.shard > 1 else 3 - setting.level  # one rank: the default
    return (setting.offload, setting.tp * setting.pp, setting.pp, setting.fused_loss, -kept, level)
