"""``DistributedParameter``: a parameter of which every rank keeps one part.

[Note: aliasing] The registered parameter is the 1-D local part; the optimizer updates it in place.
Inside a Block the parts of many parameters lie in one flat shard that is gathered as a whole, so a
part must stay a view of it. ``.data`` therefore hands out a tensor that shares the version counter
(writes through it are seen, unlike with torch's own ``.data``), and assigning ``.data`` tells
the owner.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils.hooks import RemovableHandle

from bmt_core.comm.annotate import annotate
from bmt_core.comm.autograd import AllGather, gather_stacked
from bmt_core.comm.protocols import Group
from bmt_core.errors import ConfigError
from bmt_core.run.runtime import current, is_initialized
from bmt_core.torch_internals import (
    accumulates,
    has_gradient_hooks,
    make_subclass,
    set_data,
    storage_key,
    when_backward_ends,
    without_torch_functions,
)
from bmt_params.gradient_sum import GradientSum
from bmt_params.guards.first_values import FirstValues
from bmt_params.guards.gradient_comparison import GradientComparison
from bmt_params.guards.part_data import PartData
from bmt_params.guards.part_guard import PartGuard
from bmt_params.guards.shardable import check_is_ordinary
from bmt_params.locality import (
    Locality,
    check_locality,
    local_axes_of,
    made_local,
    tensor_locality,
)
from bmt_params.models_of_run import ModelsOfRun
from bmt_params.owner import OwnerReference, ParameterOwner
from bmt_params.shard import Shard, own_part, ranges_within, whole_tensor_shard
from bmt_params.uninitialized import has_values, mark_uninitialized, read_uninitialized

InitMethod = Callable[[torch.Tensor], Any]
_History = tuple[bool, bool, int | None, bool, torch.dtype | None]


class DistributedParameter(PartGuard, torch.nn.Parameter):
    """A parameter of which this rank keeps a slice of the flattened ``data`` (1-D, possibly empty).

    Every rank passes the same values (``init_distributed`` gives all ranks one seed) and keeps its
    part; nothing is communicated. The parameter is sharded over all ranks, unless ``locality`` says
    otherwise for some axes of the rank grid: see :class:`Locality`. If it is cut along a dim, pass
    this rank's slice as ``data``. Make parameters that only this rank has, such as the layers of a
    pipeline stage, inside :func:`local_along`. ``tp_mode`` and ``tp_split_dim`` are BMTrain's
    spelling for tensor parallelism: cut along that dim, or with -1 replicated, where each rank
    computes a share of the gradient. ``group`` is BMTrain's label, any text, by which
    :func:`grouped_parameters` groups. It may also be a :class:`Group` of ranks over which to shard;
    the default is all ranks that hold the same slice.

    ``init_method`` is called by :func:`init_parameters` with the whole tensor, of
    :attr:`whole_shape`. ``data`` on the meta device has no values: the part gets memory, and must
    be initialised or loaded before it is read.

    ``.grad`` is this rank's part of the gradient, in the parameter's dtype: the *sum* over the
    group, or, after ``init_distributed(gradients="mean")``, the mean over the ranks that see
    different data.

    Raises :class:`ConfigError` when ``group`` reaches over an axis along which the parameter
    is local.
    """

    _shard: Shard
    locality: tuple[Locality, ...]
    """How the parameter lies along those axes of the rank grid along which it is not
    simply sharded.
    """
    label: str = ""
    """The parameter's name for errors, empty if it is not known."""
    _init_method: InitMethod | None
    _group: str | None
    _in_block: bool  # a Block gathers it, and puts it whole into its modules
    owner_reference: OwnerReference | None
    _initialized: bool  # the values are final, so init_parameters() leaves them alone
    _shared: bool  # several Blocks use it, so none may shard it with its own
    # In which of its Block's flat shards it lies: laying out again must change no rank's part.
    _flat_index: int | None
    _compute_dtype: torch.dtype | None = None
    """The dtype in which a forward reads it: what ``param_dtype`` of its model or Block says."""
    # Of gradients that it gets alone; those that it gets with others are its owner's.
    _sum: GradientSum | None
    _comparison: GradientComparison | None
    # Parameter groups were made by its whole shape: see bmt_params.guards.ndim_groups.
    _is_grouped_by_shape: bool = False
    # Whole, or a placeholder, inside whole_parameters() or while the model is initialised.
    _is_lent: bool = False

    def __new__(
        cls,
        data: torch.Tensor,
        requires_grad: bool = True,
        init_method: InitMethod | None = None,
        group: str | Group | None = None,
        tp_mode: bool = False,
        tp_split_dim: int = -1,
        *,
        locality: Sequence[Locality] = (),
    ) -> DistributedParameter:
        runtime = current()
        check_is_ordinary(data)
        checked = check_locality([*tensor_locality(tp_mode, tp_split_dim), *locality], data.dim())
        checked = made_local(checked)
        label, ranks = (group, None) if isinstance(group, str) else (None, group)
        chosen = _checked_group(ranks, local_axes_of(checked))
        usual = runtime.topology.shard_group(local_axes_of(checked))
        # On ranks that the program has chosen, the gradient is summed over these alone.
        replicas = runtime.topology.replica_group if chosen.ranks == usual.ranks else None
        shard = whole_tensor_shard(data.shape, chosen, replicas)
        self: DistributedParameter = make_subclass(
            cls, own_part(data, shard, runtime.device), requires_grad
        )
        self._set_layout(shard, init_method, checked, label)
        if not has_values(data):
            mark_uninitialized(self)
        note_first_values(self, data, is_filled=has_values(data))
        return self

    @property
    def group(self) -> str | None:
        """The label that was given as ``group``; None without one."""
        return self._group

    @property
    def shard_group(self) -> Group:
        """The ranks over which this parameter is sharded and its gradient is summed."""
        return self._shard.group

    @property
    def _owner(self) -> ParameterOwner | None:
        """What gathers this parameter together with others; None if it is sharded alone."""
        return None if self.owner_reference is None else self.owner_reference()

    @property
    def shard(self) -> Shard:
        """Which elements of the tensor of :attr:`full_shape` each rank of
        :attr:`shard_group` holds.
        """
        return self._shard

    @property
    def cuts(self) -> list[tuple[Locality, int]]:
        """The localities by which :attr:`full_shape` is cut from :attr:`whole_shape`, in order,
        each with the number of slices.
        """
        return [
            (locality, current().topology.axis_size(locality.axis)) for locality, _ in self._cuts()
        ]

    @property
    def full_shape(self) -> torch.Size:
        """Shape of the tensor that is sharded over :attr:`shard_group`: this rank's slice, if the
        parameter is cut.
        """
        return self._shard.shape

    @property
    def whole_shape(self) -> torch.Size:
        """Shape of the whole tensor, of which :attr:`full_shape` is this rank's slice."""
        cuts = self._cuts()
        if not cuts:
            return self.full_shape
        shape = list(self.full_shape)
        for locality, dim in cuts:
            shape[dim] *= current().topology.axis_size(locality.axis)
        return torch.Size(shape)

    @property
    def ds_shape(self) -> torch.Size:
        """DeepSpeed's name of :attr:`whole_shape`. PEFT and other libraries read it to size what
        they add to a layer.
        """
        return self.whole_shape

    @property
    def local_axes(self) -> frozenset[str]:
        """The axes of the rank grid along which this parameter is not sharded, and its gradient
        not summed.
        """
        return local_axes_of(self.locality)

    @property
    def is_sharded(self) -> bool:
        """Whether :attr:`shard_group` has several ranks, each with a part. False at ZeRO level 0,
        which does not shard.
        """
        return not self._shard.replicated and len(self._shard.ranges) > 1

    @property
    def is_part(self) -> bool:
        """Whether other ranks hold other elements or other layers, so that a norm over this rank is
        not the model's.
        """
        if self._is_lent or self.is_sharded:
            return not self._is_lent
        local = [
            locality.axis
            for locality in self.locality
            if locality.is_own or locality.split_dim is not None
        ]
        return (
            bool(local)
            and is_initialized()
            and any(current().topology.axis_size(axis) > 1 for axis in local)
        )

    @property
    def is_indexable(self) -> bool:
        """Whether an index selects the same elements as in the whole tensor; a part is flat and
        begins anywhere.
        """
        return self._is_lent or (not self.is_sharded and self.shape == self.whole_shape)

    @property
    def is_untrained(self) -> bool:
        """Whether only user code can have changed it: it never had a gradient, and no owner gathers
        it for a forward.
        """
        return self.owner_reference is None and self._sum is None and self.grad is None

    @property
    def replicas(self) -> int:
        """Number of ranks of the world that hold the same elements as this rank does.

        A global norm is the sum of ``|local|**p / replicas`` over all parameters and all ranks.
        """
        sizes = [
            current().topology.axis_size(locality.axis)
            for locality in self.locality
            if locality.gradients == "whole"
        ]
        shard = self._shard
        copies = shard.group.size if shard.replicated else 1
        return math.prod(sizes) * copies * (shard.replicas.size if shard.replicas else 1)

    # BMTrain's name; torch's gather is torch.gather(p, …).
    def gather(self, dtype: torch.dtype | None = None) -> torch.Tensor:  # type: ignore[override]
        """Return the tensor unsharded, of :attr:`full_shape`; an ordinary tensor, part of the
        autograd graph. With ``dtype`` each rank casts its part before it sends it.

        For a parameter that is cut along an axis this is the slice of this rank's line;
        :meth:`gather_all` joins the slices.

        Backward: the gradient is summed over :attr:`shard_group`, in float32 for half types, and
        this rank keeps its part, or its part of the mean: see the class. Collective.
        """
        if not has_values(self):
            return read_uninitialized(self.full_shape, dtype or self.dtype)
        if self._sum is not None:
            self._sum.forget_if_cleared()  # zero_grad() may have come since the last pass
        self.wait_for_updates()
        gathered: torch.Tensor = _Gather.apply(self, self, None, dtype)  # type: ignore[no-untyped-call]
        return gathered

    def gathered_as(self, full: torch.Tensor) -> torch.Tensor:
        """Return ``full``, an earlier result of :meth:`gather`, with a new node in the graph. Only
        backward is collective.
        """
        gathered: torch.Tensor = _Gather.apply(self, self, full)  # type: ignore[no-untyped-call]
        return gathered

    @property
    def description(self) -> str:
        """The parameter's name and shape for errors."""
        return f"{self.label or 'a parameter'} of shape {tuple(self.whole_shape)}"

    def gather_all(self) -> torch.Tensor:
        """Return the whole tensor, of :attr:`whole_shape`: gathered, and joined from the slices if
        it is cut. Collective.

        An ordinary tensor, part of the autograd graph. Backward: this rank's slice gets its part of
        this rank's gradient.
        """
        whole = self.gather()
        # The last cut first, because it has cut the slice that the one before it left.
        for locality, _ in reversed(self._cuts()):
            slices: torch.Tensor = AllGather.apply(
                whole, current().topology.group((locality.axis,)), False
            )  # type: ignore[no-untyped-call]
            whole = locality.join(slices.unbind(0))
        return whole

    def gather_like(self, part: torch.Tensor) -> torch.Tensor:
        """Gather a tensor that is sharded like this parameter, such as optimizer state, in
        :attr:`full_shape`. Collective.

        ``part`` is this rank's part of that tensor. If every rank holds all of it (one rank, ZeRO
        level 0), a view is returned.
        """
        self.wait_for_updates()
        with annotate(f"for {self.description}"):
            return self._shard.assemble(part)

    def gather_all_like(self, part: torch.Tensor) -> torch.Tensor:
        """Like :meth:`gather_like`, with the slices joined to :attr:`whole_shape`. Collective."""
        whole = self.gather_like(part)
        for locality, _ in reversed(self._cuts()):
            whole = locality.join(
                gather_stacked(whole, current().topology.group((locality.axis,))).unbind(0)
            )
        return whole

    def gather_on(self, rank: int, part: torch.Tensor | None = None) -> torch.Tensor | None:
        """Return the whole tensor, of :attr:`whole_shape`, detached, on ``rank`` of the world,
        which has a part; None on others.

        With ``part``, this rank's part of another tensor that is sharded like this parameter, that
        tensor is gathered instead. Collective over the ranks that have a part. Each part is sent
        once, whereas :meth:`gather_all` sends it to all ranks.
        """
        with torch.no_grad():
            if self._cuts():
                # Slices are joined by an all-gather, so every rank has the result anyway.
                whole = self.gather_all() if part is None else self.gather_all_like(part)
                return whole if current().rank == rank else None
            if rank not in self.shard_group.ranks:  # ``rank`` gets the same values in another group
                return None
            self.wait_for_updates()
            own = self.detach() if part is None else part
            return self._shard.assemble_on(self.shard_group.ranks.index(rank), own)

    def saved_elements(self) -> tuple[slice, list[tuple[int, int]]]:
        """Return the elements that this rank writes to a checkpoint; all ranks together write every
        element once.

        They are a slice of this rank's part, ``detach()``, and the consecutive ranges of these
        elements in the flattened tensor of :attr:`whole_shape`. Communicates nothing.
        """
        topology = current().topology
        fixed = {
            locality.axis
            for locality in self.locality
            if locality.split_dim is not None or locality.is_own
        }
        # Others write the same values.
        if topology.sharing_group(fixed).ranks[0] not in self.shard_group.ranks:
            return slice(0, 0), []
        start, end = self._shard.saved_range
        ranges, shape, cuts = [(start, end)], list(self.whole_shape), []
        for locality, dim in self._cuts():
            size = topology.axis_size(locality.axis)
            cuts.append(locality.ranges(shape, topology.axis_rank(locality.axis), size))
            shape[dim] //= size
        # From positions in this rank's slice outwards, to those in the whole tensor.
        for cut in reversed(cuts):
            ranges = ranges_within(cut, ranges)
        return slice(start - self._shard.start, end - self._shard.start), ranges

    def own_slice(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice, of :attr:`full_shape`, of a ``whole`` tensor of
        :attr:`whole_shape`.
        """
        if whole.shape != self.whole_shape:
            raise ValueError(
                f"Expected a tensor of shape {tuple(self.whole_shape)}, not {tuple(whole.shape)}."
            )
        topology = current().topology
        for locality, _ in self._cuts():
            whole = locality.cut(
                whole, topology.axis_rank(locality.axis), topology.axis_size(locality.axis)
            )
        return whole

    def make_local(self, axes: Iterable[str]) -> None:
        """Declare this parameter the rank's own along those of ``axes`` that its locality does
        not mention.
        """
        self.locality = made_local(self.locality, axes)

    def local_part(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's 1-D part of a ``full`` tensor of :attr:`full_shape`. Nothing
        is communicated.
        """
        if full.shape != self.full_shape:
            raise ValueError(
                f"Expected a tensor of shape {tuple(self.full_shape)}, not {tuple(full.shape)}."
            )
        return self._shard.part(full)

    def register_hook(self, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> RemovableHandle:
        """See ``torch.Tensor.register_hook``; as in plain torch, not called when there is
        no gradient.
        """
        # Parameters that are gathered together are one node of the graph, also those that the call
        # did not read. For these, which have no gradient, autograd calls hooks with None.
        handle: RemovableHandle = super().register_hook(
            lambda grad: None if grad is None else hook(grad)
        )  # type: ignore[no-untyped-call]
        return handle

    @property
    def data(self) -> torch.Tensor:
        """The local part; writes through it are seen: see [Note: aliasing]. It refuses some of
        them: see :class:`PartData`.
        """
        self.wait_for_updates()
        part = self.detach()  # shares the version counter, as torch's own .data does not
        return PartData.of(self, part) if self.is_part or not self.is_indexable else part

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.shape != self.shape:
            raise ConfigError(
                f"{self.description} was given data of shape {tuple(value.shape)}, and this rank's"
                f" part has shape {tuple(self.shape)}. Give whole values inside"
                " whole_parameters(module), or by model.load_state_dict(values, strict=False)."
            )
        # The storage, not the address: every rank must notice, also one whose part is empty and has
        # no address.
        before = storage_key(self), self.storage_offset(), self.dtype, self.shape
        set_data(self, value)
        if before == (storage_key(self), self.storage_offset(), self.dtype, self.shape):
            return
        owner = self._owner
        if owner is not None:
            owner.note_replaced_memory()

    # torch annotates nothing.
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"DistributedParameter(shape={tuple(self.full_shape)}, dtype={self.dtype},"
            f" device={self.device}, elements {self._shard.start}:{self._shard.end} on rank"
            f" {self.shard_group.rank} of {self.shard_group.size})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedParameter:
        if id(self) not in memo:
            if len(self.shape) != 1 or self.numel() != self._shard.end - self._shard.start:
                raise ConfigError(
                    "A parameter was copied while its model is initialised: the copy would not be"
                    " sharded. Copy the module before or after."
                )
            self.wait_for_updates()
            # Without an owner: a copied Block makes groups of its own at its first call.
            copied = make_subclass(type(self), self.detach().clone(), self.requires_grad)
            copied._set_layout(self._shard, self._init_method, self.locality, self._group)
            copied._set_history(self._history())
            memo[id(self)] = copied
        found: DistributedParameter = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.wait_for_updates()
        # The ranks of groups, because groups belong to one run.
        layout = (
            self._shard.shape,
            self._shard.ranges,
            self.shard_group.ranks,
            self._shard.replicated,
            self._shard.replicas is not None,
        )
        arguments = (
            # The memory of a view would be pickled whole, with all parameters of the Block.
            self.detach().clone(),
            self.requires_grad,
            layout,
            self._init_method,
            self.locality,
            self._history(),
            self._group,
        )
        return _rebuild, arguments

    def _cuts(self) -> list[tuple[Locality, int]]:
        """The axes of size above 1 along which the parameter is cut, each with the dim, in the
        order of the cuts.
        """
        if not self.locality:
            return []
        sizes = current().topology.sizes
        found = [
            (locality, locality.split_dim)
            for locality in self.locality
            if sizes.get(locality.axis, 1) > 1
        ]
        return [(locality, dim) for locality, dim in found if dim is not None]

    def _set_layout(
        self,
        shard: Shard,
        init_method: InitMethod | None,
        locality: tuple[Locality, ...],
        label: str | None = None,
    ) -> None:
        self._shard = shard
        self._init_method = init_method
        self._group = label
        self.locality = locality
        self._in_block = False
        self.owner_reference = None
        self._sum = None
        self._comparison = None
        self._set_history((False, False, None, False, self._compute_dtype))
        if is_initialized():
            current().state(ModelsOfRun).parameters[id(self)] = self

    def wait_for_updates(self, *, despite_errors: bool = False) -> None:
        """Make the current stream wait for overlapped updates of this parameter and its
        optimizer state.

        Raises the error of an update that failed. Code that replaces the values, such as a load,
        passes ``despite_errors``.
        """
        owner = self._owner
        if owner is not None:
            owner.wait_for_updates(despite_errors=despite_errors)

    def _history(self) -> _History:
        is_uninitialized = not has_values(self)
        dtype = self._compute_dtype
        return self._initialized, self._shared, self._flat_index, is_uninitialized, dtype

    def _set_history(self, history: _History) -> None:
        # What a copy has in common with its original, also in another process.
        self._initialized, self._shared, self._flat_index, is_uninitialized, dtype = history
        self._compute_dtype = dtype
        if is_uninitialized:
            mark_uninitialized(self)

    def _check_own_gradient(self, grad: torch.Tensor) -> None:
        """Compare ``grad``, the whole gradient that this rank has computed: see
        :class:`GradientComparison`. Collective.
        """
        if self._comparison is None:
            self._comparison = GradientComparison()
        self._comparison.check([self], lambda: [grad])

    def _gradient_sum(self) -> GradientSum:
        if self._sum is None:
            # A proxy: a parameter that refers to itself would be freed by the garbage
            # collector only.
            self._sum = GradientSum([weakref.proxy(self)], [self.numel()], [0])
        return self._sum


def reduce_held_back(parameters: Iterable[torch.Tensor]) -> None:
    """Reduce the gradients of ``parameters`` that were held back, so that ``.grad`` is complete.
    Collective.

    Optimizers call it before a step. Gradients are held back between micro-batches, and a block may
    take no part in the last one.
    """
    references = [p.owner_reference for p in parameters if isinstance(p, DistributedParameter)]
    with without_torch_functions():
        # In the order of the parameters, the same on all ranks, because reductions are collective.
        for owner in dict.fromkeys([found() for found in references if found is not None]):
            if owner is not None:
                owner.reduce_held_back()


def note_first_values(
    parameter: DistributedParameter, full: torch.Tensor, *, is_filled: bool
) -> None:
    """Note the values of ``full``, of :attr:`full_shape`, of which the new ``parameter`` keeps this
    rank's part, if it has any.
    """
    runtime = current()
    group = parameter.shard_group
    whole_along = {
        locality.axis for locality in parameter.locality if locality.gradients == "whole"
    }
    if not runtime.topology.is_own_choice(group, parameter.local_axes):
        # Ranks that have it whole keep no part of these values, but must begin with the same.
        group = runtime.topology.sharing_group(parameter.local_axes - whole_along)
    runtime.state(FirstValues).note(parameter, full, group, is_filled=is_filled)


def note_whole_values(
    parameter: DistributedParameter, whole: torch.Tensor, *, version: int | None
) -> None:
    """Note that this rank was given ``whole``, of :attr:`whole_shape`, before the first call: see
    :meth:`FirstValues.note_anew`.

    Every way by which a program sets whole values tells it, so that ranks that were given different
    ones find out.
    """
    first_values = current().state(FirstValues)
    if first_values.is_awaited(parameter) and not whole.is_meta:
        # A parameter that is cut has noted its slice, or the whole if the whole was cut here.
        first_values.note_anew(parameter, whole, version=version)
        if parameter.full_shape != parameter.whole_shape:
            first_values.note_anew(parameter, parameter.own_slice(whole), version=version)


def add_to_gradient(parameter: DistributedParameter, reduced: torch.Tensor) -> torch.Tensor | None:
    """Add ``reduced``, this rank's part of the summed gradient, to ``.grad``; or return it if
    autograd must use it itself.
    """
    gradient = parameter._gradient_sum()
    if not accumulates(parameter):
        return gradient.rounded(reduced, [True])[0]
    owner = parameter._owner
    if owner is not None:
        owner.expect_gradient()
    for_hooks = None
    if has_gradient_hooks([parameter]):
        for_hooks = gradient.seen_by_hooks(reduced, [True])[0]
    else:
        gradient.add_now(reduced, [True])
        when_backward_ends(gradient.finish)
    # After finish(): torch calls both in this order, and the owner watches what is set by then.
    if owner is not None:
        when_backward_ends(owner.gradient_is_set)
    return for_hooks


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        part: torch.Tensor,
        parameter: DistributedParameter,
        full: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        ctx.parameter = parameter
        if full is not None:
            return full.detach()
        with annotate(f"for {parameter.description}"):
            full = parameter._shard.assemble(part.detach().to(dtype or part.dtype))
        # A write to a gathered tensor must not depend on the number of ranks: with one rank it
        # would be the part itself, and with several a view, into which autograd lets nobody write.
        return full.clone() if storage_key(full) == storage_key(part) else full.data

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        parameter: DistributedParameter = ctx.parameter
        grad = grads[0].to_dense() if grads[0].is_sparse else grads[0]
        parameter._check_own_gradient(grad)
        with annotate(f"for the gradient of {parameter.description}"):
            reduced = parameter._shard.reduce(grad, current().gradient_divisor)
        return add_to_gradient(parameter, reduced), None, None, None


def _rebuild(
    part: torch.Tensor,
    requires_grad: bool,
    layout: tuple[torch.Size, tuple[tuple[int, int], ...], tuple[int, ...], bool, bool],
    init_method: InitMethod | None,
    locality: tuple[Locality, ...],
    history: _History,
    label: str | None = None,
) -> DistributedParameter:
    shape, ranges, ranks, replicated, has_replicas = layout
    topology = current().topology
    replicas = topology.replica_group if has_replicas else None
    if has_replicas and replicas is None:
        raise ConfigError(
            "This parameter was pickled in a run with another shard_size or other optimizer_shards:"
            " other ranks had its part, too. Load it in a run with the same settings, or save it"
            " with bmt.save()."
        )
    shard = Shard(shape, ranges, topology.group_of(ranks), replicated, replicas)
    parameter: DistributedParameter = make_subclass(DistributedParameter, part, requires_grad)
    parameter._set_layout(shard, init_method, locality, label)
    parameter._set_history(history)
    return parameter


def _checked_group(group: Group | None, local_axes: frozenset[str]) -> Group:
    topology = current().topology
    if group is None:
        return topology.shard_group(local_axes)
    for axis in local_axes:
        if any(topology.axis_rank(axis, rank) != topology.axis_rank(axis) for rank in group.ranks):
            raise ConfigError(
                f"The parameter is local along {axis!r}, and its group of ranks {group.ranks}"
                " reaches over that axis. Leave group out, or pass"
                " topology.shard_group(local_axes)."
            )
    return group
