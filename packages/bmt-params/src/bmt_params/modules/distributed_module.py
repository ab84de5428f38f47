"""``DistributedModule``: a module whose distributed parameters read as whole tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import nn

from bmt_core.errors import ConfigError
from bmt_core.torch_internals import load_hooks
from bmt_params.modules.gathered_copy import GatheredCopy, is_copy_of
from bmt_params.modules.outermost_call import gather_once, module_call, reading_parts
from bmt_params.parameter import DistributedParameter, note_whole_values
from bmt_params.uninitialized import UNINITIALIZED, require_values

ModuleT = TypeVar("ModuleT", bound=nn.Module)


_OF_OTHER_WRAPPERS = {
    "module": "BMTrainModelWrapper returns the model itself: write model in place of model.module.",
    "no_sync": "Write `with bmt.no_sync(model):` around all but the last micro-batch.",
    "set_requires_gradient_sync": (
        "Write `with bmt.no_sync(model):` around all but the last micro-batch."
    ),
}
"""Attributes that scripts for DistributedDataParallel and FSDP use, and what to write for them."""


class DistributedModule(nn.Module):
    """``nn.Module`` with sharded parameters.

    Reading an attribute that is a :class:`DistributedParameter` gives the whole tensor, gathered
    (collective; once per call of the outermost module, however often it is read). Inside a Block it
    is what the Block put there. A constructor may write to what it reads
    (``self.weight.data[0].zero_()``): see :mod:`bmt_params.modules.gathered_copy`. ``parameters()``
    gives the local parts; ``state_dict()`` whole tensors (collective), ``load_state_dict()`` takes
    them. ``repr`` communicates nothing.
    """

    def __getattr__(self, name: str) -> Any:
        # It is missing while the module is made or copied.
        parameters = self.__dict__.get("_parameters")
        if parameters is not None:
            found = parameters.get(name)
            # A Block gathers its own, and puts whole tensors here while it runs.
            if isinstance(found, DistributedParameter) and not found._in_block:
                return gather_once(found)
            if found is not None:
                return found
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name in _OF_OTHER_WRAPPERS:
                # With a name and without ``obj``: Python would suggest another attribute.
                raise AttributeError(f"{error}. {_OF_OTHER_WRAPPERS[name]}", name=name) from None
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        # A GatheredCopy passes for an nn.Parameter, so it is looked for by itself.
        is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
        if (is_tensor or isinstance(value, GatheredCopy)) and name in self.__dict__.get(
            "_parameters", ()
        ):
            if is_copy_of(value, self._parameters[name]):
                return  # as when plain torch assigns a parameter to itself
            raise TypeError(
                f"{type(self).__name__}.{name} is a parameter, and what was assigned to it is a"
                " tensor. A parameter that is read from a sharded module is such a tensor: a whole"
                " copy. Tie weights before BMTrainModelWrapper. Or assign the parameter itself,"
                " model.get_parameter('embedding.weight'), or call tie_weights() of a Hugging Face"
                " model, before the optimizer is made."
            )
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """See :meth:`nn.Module.register_parameter`; errors will call the parameter by this name."""
        super().register_parameter(name, param)
        if isinstance(param, DistributedParameter) and not param.label:
            param.label = f"{type(self).__name__}.{name}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if UNINITIALIZED in self.__dict__:
            require_values(self)
        with module_call(self):
            return super().__call__(*args, **kwargs)

    def extra_repr(self) -> str:
        """Return the module's ``extra_repr``, computed from the parts: printing on one rank alone
        must not gather.
        """
        with reading_parts():
            return super().extra_repr()

    def get_parameter(self, target: str) -> nn.Parameter:
        """Return the parameter itself, of which this rank has a part; reading it as an attribute
        gathers it.
        """
        with reading_parts():
            return super().get_parameter(target)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, True)  # the parts, made whole below
        for key in [prefix + name for name in (*self._parameters, *self._buffers)]:
            value = destination.get(key)
            if isinstance(value, torch.Tensor) and not keep_vars:
                destination[key] = whole_value(value)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        load_own_parts([self])
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_extended(self, protocol)


def whole_value(value: torch.Tensor) -> torch.Tensor:
    """Return ``value`` for a state dict: a distributed parameter gathered (collective), any other
    tensor detached.
    """
    if not isinstance(value, DistributedParameter):
        return value.detach()
    with torch.no_grad():
        return value.gather_all()


PARTS_HOOK = -1
"""The key of our hook among a module's ``load_state_dict`` pre-hooks; torch numbers its
own from 0.
"""


def load_own_parts(modules: Iterable[nn.Module]) -> None:
    """Have ``modules`` cut this rank's parts out of whole tensors as the last thing before they
    load their own parameters.

    Called when the load begins: overrides of ``_load_from_state_dict`` and all pre-hooks, also
    those registered since the last load, come first and see whole tensors. The hook stays, because
    a module that has several names loads several times.
    """
    for module in modules:
        hooks, _ = load_hooks(module)
        hooks.pop(PARTS_HOOK, None)
        registered = module.register_load_state_dict_pre_hook(_replace_by_parts)  # type: ignore[no-untyped-call]
        # Under a key of ours, by which the next load finds it, and behind all others.
        hooks[PARTS_HOOK] = hooks.pop(registered.id)


def _replace_by_parts(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    # It would put whole tensors in the place of parts.
    if local_metadata.get("assign_to_params_buffers"):
        raise ConfigError(
            "load_state_dict(assign=True) cannot fill sharded parameters. Leave assign out: values"
            " are copied."
        )
    for name, parameter in module._parameters.items():
        _replace_by_part(state_dict, prefix + name, parameter, error_msgs)


def _replace_by_part(
    state_dict: dict[str, Any], key: str, parameter: torch.Tensor | None, error_msgs: list[str]
) -> None:
    """Replace the whole tensor at ``key`` by the part that this rank's ``parameter`` keeps; report
    a wrong shape.
    """
    value = state_dict.get(key)
    if not isinstance(parameter, DistributedParameter) or not isinstance(value, torch.Tensor):
        return
    parameter.wait_for_updates(despite_errors=True)
    if isinstance(value, DistributedParameter):  # a part already
        return
    if value.shape != parameter.whole_shape:
        error_msgs.append(
            f"{key}: the checkpoint has shape {tuple(value.shape)}, the model"
            f" {tuple(parameter.whole_shape)}."
        )
        del state_dict[key]
        return
    # torch's copy to it is one write.
    note_whole_values(parameter, value.detach(), version=parameter._version + 1)
    # torch loads from a copy of the caller's dict.
    state_dict[key] = parameter.local_part(parameter.own_slice(value.detach()))


def extended_class(mixin: type[nn.Module], base: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of ``mixin`` and ``base``, made once for each pair; ``base`` itself if it
    is a subclass of ``mixin``.
    """
    if issubclass(base, mixin):
        return base
    if (mixin, base) not in _extended:
        _extended[mixin, base] = _make_class(mixin, base)
    return _extended[mixin, base]


_extended: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def _make_class(mixin: type[nn.Module], base: type[nn.Module]) -> type[nn.Module]:
    # The class keeps the name of ``base``, which libraries compare and write into files; ``repr``
    # of a module shows the mixin.
    shown = f"{mixin.__name__}[{base.__dict__.get('_bmt_shown_as', base.__name__)}]"
    own = {"_bmt_extends": (mixin, base), "_bmt_shown_as": shown, "__repr__": _repr_with_mixin}
    return type(
        base.__name__,
        (mixin, base),
        {"__module__": base.__module__, "__qualname__": base.__qualname__, **own},
    )


def _repr_with_mixin(module: Any) -> str:
    kind: Any = type(module)
    while "_bmt_extends" in kind.__dict__:
        kind = kind.__dict__["_bmt_extends"][1]
    text: str = kind.__repr__(module)
    # Not by _get_name(), which nn.Module calls for this: libraries compare what it returns with
    # names of classes.
    name = module._get_name()
    return f"{type(module)._bmt_shown_as}{text[len(name) :]}" if text.startswith(name) else text


def extend(module: nn.Module, mixin: type[nn.Module]) -> None:
    """Add the methods of ``mixin`` to ``module`` by changing its class. It stays the same object,
    with its names and hooks.
    """
    module.__class__ = extended_class(mixin, type(module))


def extend_where_parts_are_read(root: nn.Module) -> None:
    """Make those modules in ``root`` that hold parts, which no Block gathers for them, read whole
    parameters: :class:`DistributedModule`. A parametrization, for example, takes the parameter of
    its module.
    """
    for module in root.modules():
        if any(
            isinstance(p, DistributedParameter) and not (p._in_block or p._shared)
            for p in module._parameters.values()
        ):
            extend(module, DistributedModule)


def reduce_extended(module: nn.Module, protocol: Any) -> Any:
    """``__reduce_ex__`` of modules whose class was made by :func:`extended_class`, for copy
    and pickle.
    """
    mixins: list[type[nn.Module]] = []
    kind = type(module)
    while "_bmt_extends" in kind.__dict__:
        mixin, kind = kind.__dict__["_bmt_extends"]
        mixins.insert(0, mixin)
    if not mixins:
        return object.__reduce_ex__(module, protocol)
    return _new_extended, (kind, *mixins), module.__getstate__()  # type: ignore[no-untyped-call]


def _new_extended(kind: type[nn.Module], *mixins: type[nn.Module]) -> nn.Module:
    for mixin in mixins:
        kind = extended_class(mixin, kind)
    # Not by the class: Block(module) would extend a module that is there.
    made: nn.Module = object.__new__(kind)
    return made
