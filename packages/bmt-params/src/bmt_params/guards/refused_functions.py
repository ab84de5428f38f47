"""Makes functions of torch raise that would treat this rank's parts as whole parameters; the errors
say what to do instead.

``DistributedDataParallel``, which libraries such as accelerate and Hugging Face's Trainer put
around a model, would overwrite every rank's parts with those of rank 0. FSDP would shard the parts
again. ``clip_grad_norm_`` and ``get_total_norm`` would compute a different norm on every rank, and
a ``GradScaler`` would skip a step on some ranks only. Rules of ``torch.nn.init`` that need rows and
columns would see one dimension. Collectives of ``torch.distributed`` would combine other elements
on every rank, and wait for ever where parts differ in size. An optimizer of torch would go on from
the state of another rank's parts, or fail in its next step with whole states. None of these
functions calls a method of the parameter that could raise, so the functions themselves are wrapped,
from the start of a run to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.modules import module as torch_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.optim import Optimizer

from bmt_core.comm.torch_backend import is_own_call
from bmt_core.errors import CheckpointError, ConfigError
from bmt_core.run.runtime import Runtime, current
from bmt_core.torch_internals import (
    CLIPPING,
    COLLECTIVES,
    FANS,
    call_after,
    call_before,
    explain_error,
    functions_of_fsdp,
    pruned_name,
    storage_key,
)
from bmt_params.guards.part_data import PartData
from bmt_params.guards.part_guard import INITIALISE_INSTEAD, watch_steps
from bmt_params.models_of_run import ModelsOfRun
from bmt_params.modules.gathered_copy import GatheredCopy
from bmt_params.parameter import DistributedParameter

_INSTEAD = (
    " bmt shards the model and reduces its gradients itself: call the model as it is, and step by"
    " an OptimManager, or by a loop of"
    ' your own after init_distributed(gradients="mean"). Trainers that wrap the model themselves,'
    " such as Hugging Face's or"
    " accelerate's prepare(), cannot train it: use bmt_hf.Trainer in place of Hugging Face's;"
    " docs/hugging-face.md has this, and their options as lines of a loop."
)


def refuse_torch_functions(runtime: Runtime) -> None:
    """Have torch raise :class:`ConfigError` until shutdown where it would treat parts as
    whole parameters.
    """
    runtime.at_shutdown += watch_steps()
    runtime.at_shutdown += [call_before(*place, check) for place, check in _refused()]
    runtime.at_shutdown += [
        call_before(*place, _refuse_collective, unless=is_own_call) for place in COLLECTIVES
    ]
    runtime.at_shutdown += [
        # A hook, because the assignment to a buffer that exists calls no method.
        torch_module.register_module_buffer_registration_hook(_refuse_copy).remove,
        call_after(Optimizer, "state_dict", _say_whose_parts),
        explain_error(Optimizer, "__init__", ValueError, _what_a_rank_without_parameters_passes),
    ]


def _refused() -> list[tuple[tuple[Any, str], Callable[..., None]]]:
    """Return owner and name of each function that is refused, and the check that gets the arguments
    of each call. Where a program may have imported a function by its name before the run, a row has
    what that function calls.
    """
    # Not at the top: see functions_of_fsdp.
    from torch.distributed.fsdp import FullyShardedDataParallel

    pruning = prune.BasePruningMethod
    return [
        ((DistributedDataParallel, "__init__"), _refuse_data_parallel),
        ((FullyShardedDataParallel, "__init__"), _refuse_wrapping_by_fsdp),
        *((place, partial(_refuse_fsdp, name)) for name, place in functions_of_fsdp().items()),
        *(((nn.init, name), partial(_refuse_rule_of_shape, name)) for name in _RULES_OF_SHAPE),
        (FANS, partial(_refuse_rule_of_shape, "")),
        ((parametrize.ParametrizationList, "__init__"), _refuse_parametrization),
        *(((kind, "apply"), _refuse_norm) for kind in (WeightNorm, SpectralNorm)),
        *(((kind, "remove"), _refuse_removal_of_norm) for kind in (WeightNorm, SpectralNorm)),
        ((pruning, "apply"), _refuse_pruning),
        ((pruning, "remove"), _refuse_removal_of_pruning),
        # Not by torch's hook, which comes after its own refusal of what is part of a graph.
        ((nn.Module, "register_parameter"), _refuse_copy),
        (CLIPPING, _refuse_clipping),
        ((nn.utils, "get_total_norm"), _refuse_total_norm),
        ((Optimizer, "load_state_dict"), _refuse_state_of_others),
        *(((GradScaler, name), _refuse_scaler) for name in ("unscale_", "step")),
    ]


def _refuse_data_parallel(wrapper: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    if has_sharded_parameters(module):
        raise ConfigError(
            f"DistributedDataParallel would overwrite the parts of {type(module).__name__}'s"
            " sharded parameters with rank 0's."
            f"{_INSTEAD}"
        )


def _refuse_wrapping_by_fsdp(wrapper: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    _refuse_fsdp("FullyShardedDataParallel", module)


def _refuse_fsdp(wrapper: str, given: nn.Module | Iterable[nn.Module], *args: Any) -> None:
    for module in [given] if isinstance(given, nn.Module) else given:
        if has_sharded_parameters(module):
            raise ConfigError(
                f"{wrapper} would shard the parameters of {type(module).__name__} once more: bmt"
                f" has sharded them.{_INSTEAD}"
            )


def _refuse_parametrization(
    made: nn.Module, modules: Any, original: torch.Tensor, *args: Any, **kwargs: Any
) -> None:
    _refuse_change_of_form(original)


def _refuse_norm(module: nn.Module, name: str, *args: Any, **kwargs: Any) -> None:
    _refuse_change_of_form(module._parameters.get(name))


def _refuse_removal_of_norm(norm: Any, module: nn.Module) -> None:
    for suffix in ("_g", "_v", "_orig"):
        _refuse_change_of_form(module._parameters.get(norm.name + suffix))


def _refuse_pruning(kind: Any, module: nn.Module, name: str, *args: Any, **kwargs: Any) -> None:
    _refuse_change_of_form(module._parameters.get(name))


def _refuse_removal_of_pruning(method: prune.BasePruningMethod, module: nn.Module) -> None:
    _refuse_change_of_form(module._parameters.get(f"{pruned_name(method)}_orig"))


def _refuse_change_of_form(weight: torch.Tensor | None) -> None:
    if isinstance(weight, (DistributedParameter, GatheredCopy)):
        raise ConfigError(
            "A weight that bmt shards was to be parametrized, normalised or pruned, or this to be"
            " undone, where it is not whole. Do it on every rank inside"
            " bmt.whole_parameters(module), where parameters are ordinary ones: with"
            " bmt.whole_parameters(layer): prune.l1_unstructured(layer, 'weight', 0.5)."
        )


def _refuse_copy(module: nn.Module, name: str, param: object) -> None:
    if isinstance(param, GatheredCopy):
        raise ConfigError(
            f"{type(module).__name__} was given a copy of a sharded parameter as its own {name!r}:"
            " reading the parameter has made the copy, which is not trained. To share the"
            " parameter, assign it itself, model.get_parameter('head.weight'), before the optimizer"
            " is made; for one of its own, nn.Parameter(copy.detach().clone())."
        )


def _refuse_total_norm(tensors: Any, *args: Any, **kwargs: Any) -> None:
    """``tensors`` are gradients, or parameters. A generator is left alone: it can be read once."""
    every = current().state(ModelsOfRun).parameters.values()
    by_gradient = {storage_key(p.grad): p for p in every if p.grad is not None}
    given = tensors if isinstance(tensors, (list, tuple)) else [tensors]
    dense = [t for t in given if isinstance(t, torch.Tensor) and t.layout == torch.strided]
    _refuse_clipping([*dense, *(by_gradient.get(storage_key(tensor)) for tensor in dense)])


def _refuse_clipping(parameters: Any, *args: Any) -> None:
    found = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    if any(
        isinstance(parameter, DistributedParameter) and parameter.is_part for parameter in found
    ):
        raise ConfigError(
            "torch's norm would be that of this rank's parts of the gradients, which differs"
            " between ranks. Call"
            " bmt.optim.OptimManager().clip_grad_norm(model.parameters(), max_norm), which computes"
            " the norm over all ranks; it works without the manager's step() too."
        )


def _refuse_collective(tensors: Any, name: str) -> None:
    for tensor in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
        if isinstance(tensor, torch.Tensor):
            _refuse_to_combine(tensor)


def _refuse_to_combine(tensor: torch.Tensor) -> None:
    if isinstance(tensor, (DistributedParameter, PartData)):
        if tensor.is_part:
            raise ConfigError(
                "A collective of torch.distributed was given this rank's part of"
                f" {tensor.description}, and other ranks have other elements of it. To begin with"
                " the values of rank 0 on all ranks, wrap the model by BMTrainModelWrapper(model,"
                ' sync="rank0") or load them by bmt.load(); to read or write whole'
                " parameters, enter"
                " bmt.whole_parameters(module). If you mean the part itself, pass"
                " parameter.detach()."
            )
        return
    parameter = _parameter_of_gradient(tensor)
    if parameter is not None:
        raise ConfigError(
            "A collective of torch.distributed was given this rank's gradient of"
            f" {parameter.description}. bmt has summed it over the ranks in the backward pass, and"
            " each rank keeps its part, so that other ranks have other elements of it. Leave"
            ' the call out: init_distributed(gradients="mean") makes gradients means, and so does'
            " OptimManager.backward(loss);"
            " OptimManager().clip_grad_norm(...) computes norms over all ranks. If you mean the"
            " part itself, pass parameter.grad.clone()."
        )


def _parameter_of_gradient(tensor: torch.Tensor) -> DistributedParameter | None:
    """Return the distributed parameter of whose gradient ``tensor`` is a view; None if it is no
    such view.
    """
    if tensor.layout != torch.strided:
        return None
    key = storage_key(tensor)
    found = [
        p
        for p in current().state(ModelsOfRun).parameters.values()
        if isinstance(p, DistributedParameter) and p.grad is not None and storage_key(p.grad) == key
    ]
    # Gradients of parameters that are gathered together are views of one tensor.
    return min(found, key=lambda p: not _begin_alike(p, tensor), default=None)


def _begin_alike(parameter: DistributedParameter, tensor: torch.Tensor) -> bool:
    grad = parameter.grad
    assert grad is not None
    return grad.storage_offset() == tensor.storage_offset() and grad.numel() == tensor.numel()


def _refuse_scaler(
    scaler: GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
) -> None:
    if scaler.is_enabled() and _has_parts(optimizer):
        raise ConfigError(
            "torch's GradScaler would look for inf and NaN in this rank's parts of the gradients"
            " only: a rank without any would take a step that others skip. Let"
            " OptimManager(loss_scale=...) scale the loss; it asks all ranks."
        )


def _has_parts(optimizer: Optimizer) -> bool:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return any(isinstance(p, DistributedParameter) and p.is_part for p in parameters)


def _say_whose_parts(optimizer: Optimizer, state: dict[str, Any]) -> None:
    if _has_parts(optimizer):
        run = current()
        state.update(world_size=run.world_size, rank=run.rank, grid=run.topology.grid)


def _refuse_state_of_others(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    own = current().rank, current().world_size, current().topology.grid
    keys = "rank", "world_size", "grid"
    saved = [state_dict.get(key, here) for key, here in zip(keys, own, strict=True)]
    if saved != [*own] and _has_parts(optimizer):
        raise CheckpointError(
            f"The optimizer state is that of rank {saved[0]} of {saved[1]} ({saved[2]}), and this"
            f" is rank {own[0]} of {own[1]} ({own[2]}): state_dict() of an optimizer has the states"
            f" of this rank's parts alone. {_STATES_THAT_LOAD}"
        )
    if "rank" not in state_dict:
        _refuse_states_of_other_shapes(optimizer, state_dict)


def _refuse_states_of_other_shapes(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Refuse a state that was not saved from parts, as by one process in plain torch: it would be
    broadcast, or fail in a step.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state_dict.get("param_groups", ()) for number in group["params"]]
    for p, number in zip(parameters, numbers, strict=False):  # torch compares the lengths
        if not isinstance(p, DistributedParameter):
            continue
        for key, value in state_dict.get("state", {}).get(number, {}).items():
            if (
                # Numbers, such as a count of steps, are the same for a part and the whole.
                not isinstance(value, torch.Tensor)
                or key == "step"
                or not value.dim()
                or value.shape == p.shape
            ):
                continue
            is_whole = value.shape == p.whole_shape
            if p.is_part or is_whole:
                raise CheckpointError(
                    f"The optimizer state has {key} of shape {tuple(value.shape)} for a part of"
                    f" shape {tuple(p.shape)} of {p.description}: it is not of this rank's parts."
                    f" {_WHOLE_STATES if is_whole else _STATES_THAT_LOAD}"
                )


_STATES_THAT_LOAD = (
    "Save by bmt.save_checkpoint(directory, model, manager), or"
    " OptimManager.state_dict(gather_opt=True), which hold whole states and load at any number"
    " of ranks."
)
_WHOLE_STATES = (
    "Whole states, as plain torch saves them, load by bmt_optim.scatter_state(manager,"
    " model.named_parameters(), states): docs/checkpoints.md has an example."
)


def _what_a_rank_without_parameters_passes(error: Exception) -> str:
    if "empty parameter list" not in str(error) or not current().topology.other_axes:
        return ""
    return (
        f": rank {current().rank} has no parameter to train. If that is right, because its layers"
        " are frozen and other ranks have"
        ' others, pass [{"params": [...]}] on every rank, or bmt.optim.param_groups(model).'
    )


_RULES_OF_SHAPE = ("orthogonal_", "sparse_", "eye_", "dirac_")


def _refuse_rule_of_shape(rule: str, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """``rule`` is "" for Xavier's and Kaiming's rules."""
    # While a model is initialised, its parameters are whole.
    if len(tensor.shape) > 1 or not isinstance(tensor, (DistributedParameter, PartData)):
        return
    if tensor.ndim > 1:
        shape = "" if isinstance(tensor, PartData) else f" of shape {tuple(tensor.full_shape)}"
        needs = (
            f"{rule} needs rows and columns"
            if rule
            else "Xavier's and Kaiming's rules need fan in and fan out"
        )
        raise ConfigError(
            f"{needs}, and this is one rank's part of a parameter{shape}: it has one dimension."
            f" {INITIALISE_INSTEAD}"
        )


def has_sharded_parameters(module: nn.Module) -> bool:
    """Whether any parameter of ``module`` is sharded by bmt."""
    return any(isinstance(parameter, DistributedParameter) for parameter in module.parameters())
