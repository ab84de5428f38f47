"""``BlockState``: what a block knows about its parameters, and how one call runs."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from bmt_core.comm import Group
from bmt_core.errors import ConfigError
from bmt_core.modules.block_use import BlockUse
from bmt_core.modules.outermost_call import gather_once
from bmt_core.params.owner import owner_of
from bmt_core.params.parameter import DistributedParameter
from bmt_core.run.runtime import current
from bmt_core.settings import ReduceDtype
from bmt_zero.buffers import Buffers
from bmt_zero.engine import engine
from bmt_zero.flat import FlatShard
from bmt_zero.linear import direct_linears
from bmt_zero.nested import map_tensors, tensors_in
from bmt_zero.placement import Placement, WatchForParts, is_compiled, present_hooks
from bmt_zero.recompute import Recomputation
from bmt_zero.saved import saved_for_backward
from bmt_zero.steps import watch_steps
from bmt_zero.structure import running, structure_epoch, watch_structure
from bmt_zero.use import Enter, Leave, Use


class Place(NamedTuple):
    """Where a module keeps a parameter."""

    holder: dict[str, Any]
    name: str
    parameter: DistributedParameter


_numbers = itertools.count()


class BlockState:
    """The engine of one block. It holds parameters and places, never the block itself."""

    def __init__(
        self,
        *,
        use_checkpoint: bool,
        level: int,
        local_axes: Collection[str] = (),
        reduce_dtype: ReduceDtype = "fp32-sum",
        compile: bool = False,
    ) -> None:
        self.use_checkpoint = use_checkpoint
        self.level = level
        self.local_axes = tuple(local_axes)
        self.reduce_dtype: ReduceDtype = reduce_dtype
        self.compile = compile
        self.flats: list[FlatShard] = []
        self.running = False
        self.use: Use | None = None
        self.schedule = BlockUse()
        self.is_called_again = False  # whether backward calls parts of the block: see bmt_zero.placement
        self.number = next(_numbers)
        self.following: int | None = None  # the block after this one in a list
        self.preceding: int | None = None  # the block whose forward ran before this one's
        self._places: list[Place] = []
        self._own: list[tuple[dict[str, Any], str, int]] = []
        self._foreign: list[Place] = []
        self._direct: list[Any] = []
        self._placements: list[Placement] = []  # of uses whose backward runs, the last of which is in place
        self._buffers = Buffers([])
        self._leaf: torch.Tensor | None = None
        self._epoch = -1
        self._is_watched = False  # whether a forward has shown if it is called again
        self._pin: Use | None = None

    def __reduce__(self) -> Any:
        # A copy lays its own parameters out when it is first used.
        return _copy_of, (self.use_checkpoint, self.level, self.local_axes, self.reduce_dtype, self.compile)

    def __del__(self) -> None:
        for flat in self.flats:
            flat.discard()

    def parameters(self) -> list[DistributedParameter]:
        """The parameters that this block shards, in the order of its flat shards."""
        return [parameter for flat in self.flats for parameter in flat.parameters]

    def set_use(self, use: BlockUse) -> None:
        """See :class:`bmt_core.modules.block_use.Scheduled`."""
        self.schedule = use

    def set_level(self, level: int) -> None:
        """Change the level between steps."""
        if level != self.level and 0 in (level, self.level):
            raise ConfigError(
                f"zero_level cannot change from {self.level} to {level}: level 0 replicates what the others shard, and the"
                " optimizer's state would no longer fit. Choose it when the Block is made."
            )
        self.level = level
        for flat in self.flats:
            flat.level = level
            flat.free_unless_held()

    def refresh(self, block: nn.Module) -> None:
        """Take over parameters that were added, replaced, or given other memory since the last look.

        Collective if there are any.
        """
        watch_structure()
        watch_steps()
        if self._epoch == structure_epoch() and True not in [flat.stale for flat in self.flats] and self._in_place():
            return
        # A copy may be called for the first time under inference_mode, and must be trainable later.
        with torch.inference_mode(False):
            self._take_over(block)

    @property
    def bytes_ahead(self) -> int:
        """How much memory the full parameters take that nobody holds."""
        return sum(
            [
                flat.full_bytes
                for flat in self.flats
                if not (flat.is_whole or flat.is_held or (flat.level < 2 and flat.is_available))
            ]
        )

    def gather_ahead(self) -> bool:
        """Start the gathers of the next use, and keep what they bring; False when that use must lay out first. Collective."""
        if not self.flats or True in [flat.stale for flat in self.flats]:
            return False
        for flat in self.flats:
            if not flat.is_available:
                flat.observe()
                flat.start_gather()
            flat.want(True)
        return True

    def no_longer_wanted(self) -> None:
        """Undo :meth:`gather_ahead`: what nobody holds is freed."""
        for flat in self.flats:
            flat.want(False)

    def place(self, flats: list[FlatShard], foreign: dict[int, torch.Tensor]) -> Placement:
        """Put whole parameters, which are gathered, into the modules until :meth:`displace`; of others by their ids."""
        self._placements.append(Placement(flats, self._own, self._foreign, foreign))
        self.settle()
        return self._placements[-1]

    def displace(self, placement: Placement) -> None:
        """Undo :meth:`place`."""
        self._placements = [other for other in self._placements if other is not placement]
        if not self.running:
            self._put_all()
            self.settle()

    def put_parameters(self) -> None:
        """Put the parameters themselves into the modules, until :meth:`settle`, if others are there."""
        if self._placements and not self.running:
            self._put_all()

    def settle(self) -> None:
        """Put into the modules what belongs there outside of forward: whole parameters, if the block's backward runs."""
        if self._placements and not self.running:  # forward settles when it ends
            self._placements[-1].put()
            for attributes, forward in self._direct:
                attributes["forward"] = forward

    def _put_all(self) -> None:
        if torch._C._current_graph_task_id() == -1:
            self._placements = []  # left over by a backward pass that failed
        for holder, name, parameter in self._places:
            holder[name] = parameter
        for attributes, _ in self._direct:
            attributes.pop("forward", None)

    def _in_place(self) -> bool:
        found = [holder.get(name) for holder, name, _ in self._places]
        return not any(map(operator.is_not, found, [parameter for _, _, parameter in self._places]))

    def _take_over(self, block: nn.Module) -> None:
        self._epoch = structure_epoch()
        self._is_watched = self.compile or any(is_compiled(module) for module in block.modules())
        self.is_called_again = False
        engine().prefetch.know(self)
        places = list(_places_of(block))
        wanted = list(dict.fromkeys(place.parameter for place in places))
        kept = [flat for flat in self.flats if not flat.stale and any(_is_in(p, wanted) for p in flat.parameters)]
        for flat in self.flats:
            if flat not in kept:
                flat.discard()
        own = {id(parameter) for flat in kept for parameter in flat.parameters}
        new = [p for p in wanted if id(p) not in own and not getattr(p, "_shared", False)]
        self.flats = kept + self._lay_out(new, places)
        self._places = [Place(*place) for place in places]
        where = {id(parameter): index for index, parameter in enumerate(self.parameters())}
        self._own = [(holder, name, where[id(p)]) for holder, name, p in self._places if id(p) in where]
        self._foreign = [place for place in self._places if id(place.parameter) not in where]
        lies = {id(p): (number, i) for number, flat in enumerate(self.flats) for i, p in enumerate(flat.parameters)}
        self._direct = [] if self.compile else direct_linears(self, block, lies)
        device = current().device
        self._buffers = Buffers([module._buffers for module in block.modules()])
        for home in self._buffers.homes:
            for name, buffer in home.items():
                if buffer is not None:
                    home[name] = buffer.to(device)

    def run(self, block: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the inner module with the full parameters in place. Collective."""
        self.put_parameters()
        self.refresh(block)
        for flat in self.flats:
            flat.forget_cleared_gradients()
        use = Use(self)
        use.begin_forward()
        backward_follows = False
        try:
            token, fulls = self._enter(use)
            if self.use_checkpoint and not self.compile and torch.is_grad_enabled():
                again = Recomputation(
                    lambda a, k: self._inside(call, use, fulls, a, k), use, self._buffers, args, kwargs
                )
                outputs = again.forward()
                del again  # what autograd saved keeps it
            elif self.level == 3 and torch.is_grad_enabled():
                with saved_for_backward(use):
                    outputs = self._inside(call, use, fulls, args, kwargs)
            else:
                outputs = self._inside(call, use, fulls, args, kwargs)
            if True in [full._backward_hooks is not None for full in fulls]:
                use.writes_directly = False  # what watches a full gradient must see it
            outputs = self._leave(use, token, (args, kwargs), outputs)
            self._pin_between_uses(use.schedule.last_forward)
            backward_follows = any(output.requires_grad for output in tensors_in(outputs))
            return outputs
        finally:
            use.end_forward(backward_follows=backward_follows)

    def _enter(self, use: Use) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        parameters = self.parameters()
        if torch.is_grad_enabled() and True in [parameter.requires_grad for parameter in parameters]:
            if self._leaf is None:
                with torch.inference_mode(False):
                    self._leaf = torch.empty(0, requires_grad=True)
            token, *fulls = Enter.apply(use, self._leaf, *parameters)  # type: ignore[no-untyped-call]
            return token, fulls
        return None, [view.detach() for flat in self.flats for view in flat.views()]

    def _inside(
        self,
        call: Callable[..., Any],
        use: Use,
        fulls: list[torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        with self._substituted(use, fulls) as foreign:
            if self._is_watched or not torch.is_grad_enabled():
                return call(*args, **kwargs)
            with WatchForParts(use, [*fulls, *foreign.values()]):
                outputs = call(*args, **kwargs)
            self._is_watched, self.is_called_again = True, use.is_called_again
            return outputs

    @contextmanager
    def _substituted(self, use: Use, fulls: list[torch.Tensor]) -> Iterator[dict[int, torch.Tensor]]:
        before, self.use = self.use, use
        was_running, self.running = self.running, True
        running.append(self.flats)
        # Recomputed by a backward pass inside of its own forward, which goes on with what it has.
        inside = [place._replace(parameter=place.holder[place.name]) for place in self._places] if was_running else []
        try:
            for holder, name, index in self._own:
                holder[name] = fulls[index]
            foreign = {id(place.parameter): gather_once(place.parameter) for place in self._foreign}
            for holder, name, parameter in self._foreign:
                holder[name] = foreign[id(parameter)]
            for attributes, forward in self._direct:
                attributes["forward"] = forward
            use.hooks = present_hooks()
            yield foreign
            if use.is_called_again and not use.foreign:
                use.foreign = {key: full.detach() for key, full in foreign.items()}
        finally:
            running.remove(self.flats)
            self.use, self.running, use.hooks = before, was_running, None
            for holder, name, parameter in inside:
                holder[name] = parameter
            if not was_running:
                self._put_all()
                self.settle()

    def _leave(self, use: Use, token: torch.Tensor | None, inputs: Any, outputs: Any) -> Any:
        # A parameter that is returned must outlive the buffer.
        outputs = map_tensors(lambda t: t.clone() if any(f.is_full_storage(t) for f in self.flats) else t, outputs)
        gated = [output for output in tensors_in(outputs) if output.requires_grad]
        if token is not None and not gated:
            # The parameters took no part on this rank, but may have on others: the block must be in the graph on all.
            gated = [output for output in tensors_in(outputs) if output.is_floating_point()]
        if not gated or not torch.is_grad_enabled():
            return outputs
        if token is None:
            # All parameters are frozen: there is no Enter to run after the block, but its inputs' gradients come last.
            token = torch.empty(0, device=gated[0].device)
            sources = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
            # Torch cannot watch several leaves in autograd.grad(); after leaves little follows, and the pass ends.
            if sources and True not in [source.is_leaf for source in sources]:
                use.hook = register_multi_grad_hook(sources, _Ends(use))
        left = Leave.apply(use, token, *gated)  # type: ignore[no-untyped-call]
        passed = {id(old): new for old, new in zip(gated, left, strict=True)}
        return map_tensors(lambda t: passed.get(id(t), t), outputs)

    def _pin_between_uses(self, last: bool) -> None:
        # Between the micro-batches of a schedule the parameters stay gathered, whatever each single use lets go.
        if last:
            pin, self._pin = self._pin, None
            if pin is not None:
                pin.let_go()
        elif self._pin is None:
            self._pin = Use(self)
            self._pin.pin()

    def _lay_out(self, parameters: list[nn.Parameter], places: list[Place]) -> list[FlatShard]:
        kinds: dict[Any, tuple[Group, list[nn.Parameter]]] = {}
        for parameter in parameters:
            group = self._group_of(parameter, places)
            index = parameter._flat_index if isinstance(parameter, DistributedParameter) else None
            # Where it lay before, or by whether it trains now: freezing later must not move what the optimizer knows.
            key = (index, parameter.dtype, parameter.requires_grad if index is None else None, group.ranks)
            kinds.setdefault(key, (group, []))[1].append(parameter)
        device = current().device
        made = [
            FlatShard(
                members,
                level=self.level,
                group=group,
                device=device,
                reduce_dtype=self.reduce_dtype,
                name=f"blocks.{self.number}",
            )
            for group, members in kinds.values()
        ]
        used = [p._flat_index for flat in self.flats for p in flat.parameters if p._flat_index is not None]
        for number, flat in enumerate(made, start=max(used, default=-1) + 1):
            for parameter in flat.parameters:
                parameter.make_local(self.local_axes)
                parameter._flat_index = number if parameter._flat_index is None else parameter._flat_index
        return made

    def _group_of(self, parameter: nn.Parameter, places: list[Place]) -> Group:
        topology = current().topology
        if not isinstance(parameter, DistributedParameter):
            return topology.shard_group(self.local_axes)
        owner = owner_of(parameter)
        if owner is not None and owner not in self.flats:
            name = next(place.name for place in places if place.parameter is parameter)
            raise ConfigError(
                f"Parameter {name!r} is shared with another Block, and a parameter can be sharded by one Block only."
                " Keep it outside of both, or let BMTrainModelWrapper wrap the whole model."
            )
        if not self.local_axes:
            return parameter.group
        shared = [place.axis for place in parameter.locality if place.is_sharded and place.axis in self.local_axes]
        if shared:
            name = next(place.name for place in places if place.parameter is parameter)
            raise ConfigError(
                f"Parameter {name!r} has a share of its gradient on each rank along {shared[0]!r}, and its Block is local along"
                " that axis, so that the shares would not be summed. Declare gradients='whole', or make the Block sharded along it."
            )
        return topology.shard_group({*self.local_axes, *parameter.local_axes})


def _copy_of(
    use_checkpoint: bool, level: int, local_axes: tuple[str, ...], reduce_dtype: ReduceDtype, compile: bool
) -> BlockState:
    return BlockState(
        use_checkpoint=use_checkpoint, level=level, local_axes=local_axes, reduce_dtype=reduce_dtype, compile=compile
    )


def _places_of(block: nn.Module) -> Iterator[Any]:
    """Every place of a parameter in ``block``, except inside blocks that are nested in it."""
    pending = [block]
    seen: set[int] = set()
    while pending:
        module = pending.pop(0)
        if id(module) in seen or ("_bmt_block" in module.__dict__ and module is not block):
            continue
        seen.add(id(module))
        for name, parameter in module._parameters.items():
            if parameter is not None and not isinstance(parameter, nn.Parameter):
                raise ConfigError(
                    f"Parameter {name!r} of a Block was replaced by a plain tensor (by functional_call?), which would not be"
                    " sharded. Assign an nn.Parameter, or call the module before it becomes a Block."
                )
            if parameter is not None:
                yield Place(module._parameters, name, parameter)  # type: ignore[arg-type]
        pending += [child for child in module._modules.values() if child is not None]


class _Ends:
    """Ends a use when called; does not keep it alive, for the hook may live on a tensor that outlives the graph."""

    def __init__(self, use: Use) -> None:
        self._use = weakref.ref(use)

    def __call__(self, grads: Any) -> None:
        use = self._use()
        if use is not None:
            use.end()


def _is_in(parameter: nn.Parameter, parameters: list[Any]) -> bool:
    return any(parameter is other for other in parameters)
