"""Every private function of torch that bmt uses, under a name of bmt's. No other module of bmt
uses one.

A test of each says what breaks without it (``tests/test_torch_internals.py``), so that a new
release of torch shows here first. Functions that are called once per block and pass are torch's own
objects, without a wrapper, which would cost host time.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from types import CodeType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.utils.clip_grad as clip_grad
import torch.optim.optimizer as torch_optimizer
import torch.utils._foreach_utils as foreach_utils
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn.modules.module import _IncompatibleKeys
from torch.nn.utils import prune

CallableT = TypeVar("CallableT", bound=Callable[..., Any])
TensorT = TypeVar("TensorT", bound=torch.Tensor)
_NOTHING = nullcontext()

backward_pass: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the backward pass that runs on this thread, -1 outside of any. No two passes
have the same number.
"""

unflatten: Callable[[torch.Tensor, list[torch.Tensor]], Sequence[torch.Tensor]] = (
    torch._C._nn.unflatten_dense_tensors
)
"""Return consecutive views of a flat tensor, in the shapes of the given tensors (which may be on
the meta device), in one call.
"""

fused_adam_: Callable[..., None] = torch._fused_adam_
"""Adam with coupled weight decay on lists of tensors, in one kernel."""

fused_adamw_: Callable[..., None] = torch._fused_adamw_
"""Adam with decoupled weight decay on lists of tensors, in one kernel."""

grouped_mm: Callable[..., torch.Tensor] = torch._grouped_mm
"""What ``F.grouped_mm`` calls, and a ``TorchFunctionMode`` sees in its place."""

are_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether the caller runs inside of ``torch.func.vmap``, ``grad`` or another transform."""


without_torch_functions: Callable[[], AbstractContextManager[object]] = (
    torch._C.DisableTorchFunctionSubclass
)
"""Inside, ``__torch_function__`` of tensor subclasses is not called, and results are ordinary
tensors. Code that reads many parameters enters it: each read of a parameter's attribute would call
that function.
"""

LoadResult = _IncompatibleKeys
"""The class of what ``load_state_dict`` returns: ``missing_keys`` and ``unexpected_keys``."""

without_script_optimization: Callable[[], AbstractContextManager[None]] = functools.partial(
    torch.jit.optimized_execution, False
)
"""Inside, functions of ``torch.jit.script`` are not optimized: optimized ones save other tensors
after their first call.
"""


def unsaved_buffers(module: nn.Module) -> set[str]:
    """Return the names of the buffers of ``module`` itself that its state dict lacks
    (``persistent=False``).
    """
    names: set[str] = module._non_persistent_buffers_set
    return names


def state_dict_hooks(
    module: nn.Module,
) -> tuple[Iterable[Callable[..., Any]], Iterable[Callable[..., Any]]]:
    """Return the functions that ``state_dict()`` calls before and after it has read
    ``module`` itself.
    """
    return module._state_dict_pre_hooks.values(), module._state_dict_hooks.values()


def load_hooks(
    module: nn.Module,
) -> tuple[dict[Any, Callable[..., Any]], dict[Any, Callable[..., Any]]]:
    """Return the functions that ``load_state_dict`` calls before and after it loads ``module``, by
    key, in order; to be changed.
    """
    return module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor of which ``tensor`` is a view; None if it is none."""
    return tensor._base


def code_of(function: Any) -> CodeType:
    """Return the code object of a Python function. ``torch.compile`` counts its compilations
    by it.
    """
    code: CodeType = function.__code__
    return code


def set_code(function: Any, code: CodeType) -> None:
    """Have a Python function run ``code``."""
    function.__code__ = code


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` is what ``torch.compile`` returns for a module."""
    return isinstance(module, torch._dynamo.OptimizedModule)


def when_backward_ends(callback: Callable[[], Any]) -> None:
    """Call ``callback`` when the current backward pass has succeeded. If it fails, torch frees
    ``callback`` without calling it.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def accumulates(leaf: torch.Tensor) -> bool:
    """Whether the current backward pass will add to ``leaf.grad``; ``torch.autograd.grad``, for
    example, does not.
    """
    if not leaf.requires_grad:  # frozen since forward: autograd skips it
        return False
    return accumulates_at(torch.autograd.graph.get_gradient_edge(leaf).node)


def accumulates_at(node: torch.autograd.graph.Node | None) -> bool:
    """:func:`accumulates` for the leaf with the ``AccumulateGrad`` node ``node``; False for None:
    the leaf needs no gradient.
    """
    if node is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch raises if the leaf's gradient is returned and not accumulated
        return False


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that is the same for tensors that share memory, as long as that memory lives,
    even if it has no bytes.
    """
    key: int = tensor.untyped_storage()._cdata
    return key


def version_of(tensor: torch.Tensor) -> int:
    """Return how often ``tensor`` was modified in place, by torch's version counter; 0 if it was
    made in inference mode and so counts no versions.
    """
    return 0 if tensor.is_inference() else tensor._version


@contextmanager
def counting_versions() -> Iterator[None]:
    """Inside, new tensors count their versions, although the caller may be in inference mode, which
    makes other tensors. Then no gradients are recorded inside.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def memory_states(tensors: Iterable[torch.Tensor | None]) -> list[tuple[int, int, int] | None]:
    """Return each tensor's version and place in memory, which stay equal until the tensor is
    written to or replaced.
    """
    return [
        None if t is None else (t._version, int(t.storage_offset()), t.untyped_storage()._cdata)
        for t in tensors
    ]


class Seen:
    """Remembers tensors, and says which of them were written to since, or got other memory.

    >>> tensor, seen = torch.zeros(2), Seen()
    >>> seen.note([tensor])
    >>> seen.written([tensor])
    []
    >>> seen.written([tensor.add_(1)])
    [tensor([1., 1.])]
    """

    def __init__(self) -> None:
        self._states: dict[torch.Tensor, tuple[int, int]] = {}

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """Remember ``tensors`` as they are now."""
        self._states.update({t: (t._version, t.data_ptr()) for t in tensors})

    def written(self, tensors: Iterable[TensorT]) -> list[TensorT]:
        """Return those of ``tensors`` that were written to since they were noted, or never were
        noted.
        """
        states = self._states
        return [t for t in tensors if states.get(t) != (t._version, t.data_ptr())]

    def forget(self, tensor: torch.Tensor) -> None:
        """Let ``tensor`` count as written."""
        self._states.pop(tensor, None)


def has_gradient_hooks(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether somebody registered a hook on the gradient of any of ``tensors``."""
    for tensor in tensors:  # noqa: SIM110  # any() would make a call for each
        if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
            return True
    return False


def has_module_hooks(module: torch.nn.Module) -> bool:
    """Whether somebody registered a hook on forward or backward of ``module`` itself."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def never_compiled(function: CallableT, *, recursive: bool = True) -> CallableT:
    """Exclude ``function`` from torch.compile, and unless ``recursive`` is False what it calls;
    unlike ``torch.compiler.disable`` this does not import the compiler.
    """
    kept_out: Any = torch._disable_dynamo(function, recursive=recursive)
    return kept_out  # type: ignore[no-any-return]


def named_in_trace(text: str) -> AbstractContextManager[object]:
    """Label the work inside as ``text`` in traces of torch's profiler; without a profiler this
    costs nothing.
    """
    return (
        torch.profiler.record_function(text)
        if torch.autograd.profiler._is_profiler_enabled
        else _NOTHING
    )


def has_internal_overlap(tensor: torch.Tensor) -> bool:
    """Whether elements of ``tensor`` share memory, as those of an expanded tensor do."""
    return torch._debug_has_internal_overlap(tensor) == 1


def make_subclass(kind: type[Any], data: torch.Tensor, requires_grad: bool) -> Any:
    """Return a tensor of class ``kind`` on the memory of ``data``, a leaf of the autograd graph."""
    return torch.Tensor._make_subclass(kind, data, requires_grad)


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Do ``tensor.data = data`` as for a plain tensor, even if a subclass overrides ``data``."""
    _data.__set__(tensor, data)


_data: Any = torch._C.TensorBase.__dict__["data"]


def swap_memory(one: torch.Tensor, other: torch.Tensor) -> None:
    """Swap the tensors of two Python objects, each of which keeps its hooks.

    ``torch.utils.swap_tensors`` refuses a tensor with weak references to it, as ``nn.LSTM`` has to
    its parameters.
    """
    hooks: Any = one._backward_hooks, one._post_accumulate_grad_hooks
    torch._C._swap_tensor_impl(one, other)
    one._backward_hooks, one._post_accumulate_grad_hooks = hooks


def register_foreach_type(kind: type[torch.Tensor]) -> None:
    """Let torch's optimizers take their foreach and fused paths for tensors of class ``kind``, as
    for DTensor. Repeatable.
    """
    for types in _foreach_types():
        if kind not in types:
            types.append(kind)


def unregister_foreach_type(kind: type[torch.Tensor]) -> None:
    """Undo :func:`register_foreach_type`."""
    for types in _foreach_types():
        if kind in types:
            types.remove(kind)


def _foreach_types() -> list[list[Any]]:
    return [torch_optimizer._foreach_supported_types, foreach_utils._foreach_supported_types]


@contextmanager
def without_optimizer_hooks() -> Iterator[None]:
    """Call no hooks that were registered for the steps of all optimizers inside."""
    # Others in their place, and not emptied: a step that goes on may be calling them.
    before = (
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    torch_optimizer._global_optimizer_pre_hooks = OrderedDict()
    torch_optimizer._global_optimizer_post_hooks = OrderedDict()
    try:
        yield
    finally:
        (
            torch_optimizer._global_optimizer_pre_hooks,
            torch_optimizer._global_optimizer_post_hooks,
        ) = before


CLIPPING = (clip_grad, "_clip_grads_with_norm_")
"""Owner and name of what ``torch.nn.utils.clip_grad_norm_`` calls with the parameters."""

COLLECTIVES = (
    (distributed_c10d, "_check_single_tensor"),
    (distributed_c10d, "_check_tensor_list"),
)
"""The same of what collectives, sends and receives of torch call with a tensor, and with a list."""

FANS = (nn.init, "_calculate_fan_in_and_fan_out")
"""The same of what Xavier's and Kaiming's rules call with the tensor."""


def functions_of_fsdp() -> dict[str, tuple[Any, str]]:
    """Return owner and name of what ``fully_shard``, and the ``replicate`` that is built on it,
    call with the module or the modules to shard.
    """
    # Not at the top: these imports take a second, which torch takes anyway at the first optimizer.
    from torch.distributed._composable import replicate_with_fsdp
    from torch.distributed.fsdp._fully_shard import _fully_shard

    return {
        "fully_shard": (_fully_shard, "_validate_module"),
        "replicate": (replicate_with_fsdp, "_validate_module"),
    }


def pruned_name(method: prune.BasePruningMethod) -> str:
    """Return the name of the parameter that ``method`` prunes."""
    return method._tensor_name


def call_before(
    owner: Any, name: str, check: Callable[..., None], *, unless: Callable[[], bool] = bool
) -> Callable[[], None]:
    """Call ``check`` with the arguments of each call of ``owner.name``, before it, unless
    ``unless()`` is true; return a function that undoes this.
    """

    def make(function: Any) -> Any:
        def checked(*args: Any, **kwargs: Any) -> Any:
            if not unless():
                check(*args, **kwargs)
            return function(*args, **kwargs)

        return checked

    return _wrap(owner, name, make)


def call_after(owner: Any, name: str, change: Callable[[Any, Any], None]) -> Callable[[], None]:
    """Call ``change(self, result)`` after each call of the method ``owner.name``; return a function
    that undoes this.
    """

    def make(function: Any) -> Any:
        def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = function(self, *args, **kwargs)
            change(self, result)
            return result

        return changed

    return _wrap(owner, name, make)


def explain_error(
    owner: Any, name: str, kind: type[Exception], explain: Callable[[Exception], str]
) -> Callable[[], None]:
    """Add the text of ``explain(error)`` to errors of ``kind`` in calls of ``owner.name``; return a
    function that undoes this.
    """

    def make(function: Any) -> Any:
        def explained(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except kind as error:
                text = explain(error)
                if not text:
                    raise
                raise kind(f"{error}{text}") from None

        return explained

    return _wrap(owner, name, make)


def _wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    original = vars(owner)[name]
    is_bound = isinstance(original, (classmethod, staticmethod))
    function = original.__func__ if is_bound else original
    made = functools.wraps(function)(make(function))
    wrapped = type(original)(made) if is_bound else made
    setattr(owner, name, wrapped)

    def undo() -> None:
        if vars(owner)[name] is wrapped:
            setattr(owner, name, original)

    return undo


def stream_address(device: int) -> int:
    """Return the address of the current stream of that CUDA device; ``torch.cuda.current_stream``
    takes ten times as long.
    """
    address: int = torch._C._cuda_getCurrentRawStream(device)
    return address


def make_process_group(
    ranks: Sequence[int],
    rank: int,
    *,
    backend: str,
    store: dist.Store,
    name: str,
    timeout: timedelta,
) -> dist.ProcessGroup:
    """Return the process group of ``ranks``, of which this process is ``rank``. Only members call
    it, all with one ``name``.

    ``torch.distributed.new_group`` numbers groups by counting those that this process knows:
    members that have made different numbers of groups before would wait for each other under
    different names.
    """
    members = list(ranks)
    helper: Any = distributed_c10d._new_process_group_helper
    made, _ = helper(
        len(members),
        members.index(rank),
        members,
        dist.Backend(backend),
        store,
        name,
        timeout=timeout,
    )
    distributed_c10d._world.pg_group_ranks[made] = {
        member: index for index, member in enumerate(members)
    }
    return made  # type: ignore[no-any-return]


def abort_on_device(process_group: dist.ProcessGroup) -> None:
    """End NCCL's operations of a process group, those under way with wrong results. Later ones
    raise. ``ProcessGroup.abort`` would end those of gloo, too, in torch's group of all ranks.
    """
    of_device: Any = process_group._get_backend(torch.device("cuda"))
    of_device.abort()
