"""``plan_load``: compare a model with a checkpoint, before anything is written, and list the steps
of the load.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bmt_checkpoint.format import ForeignEntry
from bmt_core.errors import CheckpointError
from bmt_core.torch_internals import load_hooks, version_of
from bmt_params.modules.distributed_module import PARTS_HOOK
from bmt_params.state.index import Index, TensorEntry
from bmt_params.state.model_tensors import named_targets, whole_shape

_SHOWN = 8


@dataclass(frozen=True)
class Step:
    """Write ``value`` to ``target``, or give it to ``module`` as its extra state if ``target``
    is None.

    ``value`` is a :class:`TensorEntry` of the file, or a tensor that a module's own code added.
    """

    module: nn.Module
    target: torch.Tensor | None
    value: Any


@dataclass
class LoadPlan:
    """The steps of a load on this rank, and the names that only the model (missing) or only the
    file has (unexpected).
    """

    steps: list[Step] = field(default_factory=list)
    extra_states: list[tuple[nn.Module, Any]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)

    @property
    def sources(self) -> list[str]:
        """Names of the file's tensors that the steps need, in order."""
        return list(
            dict.fromkeys(
                step.value.source for step in self.steps if isinstance(step.value, TensorEntry)
            )
        )


def plan_load(
    model: nn.Module, index: Index, *, source: str, strict: bool, elsewhere: Collection[str] = ()
) -> LoadPlan:
    """Compare ``model`` with the ``index`` of a file; raise one :class:`CheckpointError` that lists
    all that does not fit.

    ``elsewhere`` are the names in other ranks' parts of the model.
    """
    values, complaints = _renamed_by_modules(model, index, strict)
    plan = LoadPlan()
    expected: set[str] = set()
    done: set[tuple[int, str]] = set()
    absent: list[tuple[str, torch.Tensor | None]] = []
    for name, module, target in named_targets(model):
        expected.add(name)
        if name not in values:
            absent.append((name, target))
            continue
        value = values[name]
        if target is None and not isinstance(value, (TensorEntry, torch.Tensor)):
            plan.extra_states.append((module, value))
            continue
        complaint = None if target is None else _compare(name, value, target)
        if complaint is not None:
            complaints.append(complaint)
            continue
        # A parameter that is tied in the model and in the file is written once.
        key = (id(target), value.source if isinstance(value, TensorEntry) else name)
        if target is None or key not in done:
            plan.steps.append(Step(module, target, value))
            done.add(key)
    # A tied parameter needs one of its names: Hugging Face's files have the first one only.
    loaded = {id(step.target) for step in plan.steps if step.target is not None}
    plan.missing = [name for name, target in absent if id(target) not in loaded]
    plan.unexpected = [name for name in values if name not in expected and name not in elsewhere]
    if strict:
        complaints = [*_key_complaints(plan, values), *complaints]
    if complaints:
        raise CheckpointError(_message(type(model).__name__, source, complaints, plan, strict))
    return plan


def _renamed_by_modules(
    model: nn.Module, index: Index, strict: bool
) -> tuple[dict[str, Any], list[str]]:
    """Run the code by which modules rename or add keys, on meta tensors in place of the file's."""
    stand_ins: OrderedDict[str, Any] = OrderedDict()
    origins: dict[int, TensorEntry] = {}
    for name, entry in index.entries.items():
        if isinstance(entry, TensorEntry):
            stand_ins[name] = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            origins[id(stand_ins[name])] = entry
        else:
            stand_ins[name] = entry
    kept = list(stand_ins.values())  # so that no id is reused
    complaints: list[str] = []
    for path, module in model.named_modules(remove_duplicate=False):
        _run_own_code(module, path, stand_ins, index.metadata.get(path, {}), strict, complaints)
    values: dict[str, Any] = {}
    for name, value in stand_ins.items():
        is_meta = isinstance(value, torch.Tensor) and value.is_meta
        # A version above 0: written in place.
        if is_meta and (id(value) not in origins or version_of(value) > 0):
            complaints.append(f"{name}: {_OWN_CODE} computes with this tensor. {_REMEDY}")
        values[name] = origins.get(id(value), value)
    del kept
    return values, complaints


_OWN_CODE = "a load_state_dict pre-hook or an override of _load_from_state_dict"
_REMEDY = (
    "Here it can only rename and add tensors: use model.load_state_dict(torch.load(...)) on"
    " every rank"
)


class _ReachedTorch(BaseException):  # no Exception, which an override may catch
    """Ends ``_load_from_state_dict`` where torch would copy values from ``state``."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state


def _run_own_code(
    module: nn.Module,
    path: str,
    state: dict[str, Any],
    metadata: dict[str, Any],
    strict: bool,
    complaints: list[str],
) -> None:
    """Let ``_load_from_state_dict`` and the pre-hooks of ``module`` change ``state``, and
    nothing else.
    """

    def stop(module: nn.Module, given: dict[str, Any], *args: Any) -> None:
        raise _ReachedTorch(given)

    prefix, shown = f"{path}." if path else "", path or type(module).__name__
    # It takes tensors with values; each load registers it anew.
    load_hooks(module)[0].pop(PARTS_HOOK, None)
    last = nn.Module.register_load_state_dict_pre_hook(module, stop)  # type: ignore[no-untyped-call]
    try:
        module._load_from_state_dict(state, prefix, metadata, strict, [], [], complaints)
    except _ReachedTorch as reached:
        if reached.state is not state:  # children do not see a copy, as in torch
            own = {key: value for key, value in reached.state.items() if _is_own(key, prefix)}
            for key in [key for key in state if _is_own(key, prefix)]:
                del state[key]
            state.update(own)
    except Exception as error:
        complaints.append(f"{shown}: {_OWN_CODE} raised {type(error).__name__}: {error}. {_REMEDY}")
    else:
        if module._parameters or module._buffers:
            complaints.append(
                f"{shown}: an override of _load_from_state_dict does not call that of"
                f" nn.Module. {_REMEDY}"
            )
    finally:
        last.remove()


def _is_own(key: str, prefix: str) -> bool:
    return key.startswith(prefix) and "." not in key[len(prefix) :]


def _compare(name: str, value: Any, target: torch.Tensor) -> str | None:
    if not isinstance(value, (TensorEntry, torch.Tensor)):
        found = value.type_name if isinstance(value, ForeignEntry) else type(value).__name__
        return f"{name}: the file has a {found}, the model a tensor"
    shape = whole_shape(target)
    if value.shape != shape:
        return f"{name}: the file has shape {tuple(value.shape)}, the model {tuple(shape)}"
    if not _can_convert(value.dtype, target.dtype):
        return f"{name}: the file has {value.dtype}, which {target.dtype} of the model cannot hold"
    if target.is_meta:
        return (
            f"{name}: the model's tensor is on the meta device, so there is no memory to load into"
        )
    return None


def _can_convert(source: torch.dtype, target: torch.dtype) -> bool:
    # torch.can_cast refuses integers to booleans, but masks in old files are uint8.
    are_integers = not any(
        dtype.is_floating_point or dtype.is_complex for dtype in (source, target)
    )
    return are_integers or torch.can_cast(source, target)


def _key_complaints(plan: LoadPlan, values: Mapping[str, Any]) -> list[str]:
    complaints = []
    if plan.missing:
        complaints.append(f"only the model has: {_listed(plan.missing)}")
    if plan.unexpected:
        complaints.append(f"only the file has: {_listed(plan.unexpected)}")
    foreign = [name for name in plan.unexpected if isinstance(values[name], ForeignEntry)]
    nested = [name for name in foreign if values[name].type_name in ("dict", "OrderedDict")]
    if nested:
        complaints.append(
            f"{_listed(nested)} in the file is a dict of its own: if it is the state dict, save"
            " it alone"
        )
    return complaints


def _message(
    model: str, source: str, complaints: Sequence[str], plan: LoadPlan, strict: bool
) -> str:
    shown = [
        *complaints[:_SHOWN],
        *([f"and {len(complaints) - _SHOWN} more"] if len(complaints) > _SHOWN else []),
    ]
    remedy = "Load a checkpoint of this model"
    if strict and (plan.missing or plan.unexpected):
        remedy += ", or pass strict=False to load the keys that both have"
    lines = "\n".join(f"  {complaint}" for complaint in shown)
    return f"{source} does not fit {model}; nothing was loaded.\n{lines}\n{remedy}."


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
