"""``whole``: an optimizer of any class over whole tensors, for parameters of which every rank has a
part.

[Note: one optimizer per tensor] Each whole tensor has an optimizer of the user's class of its own,
on the rank that owns it. So the gradients of the tensors need not exist at once, states are found
by parameter, and a counter that the class keeps in its parameter group counts every step once. What
the class changes in a group is brought back to the group that the program sees, and must be the
same for all tensors of the group. With ``together`` one rank has one optimizer with all tensors.

[Note: the order of a step] A team is the ranks that share a parameter. Its tensors are stepped in
rounds: in each, every owner has some of its tensors, of at most ``bucket_bytes`` or one. The
gradients of the next round are sent in a lane while this one is computed, and so are the new values
of the last one. Every rank of a team takes part in every round.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch

from bmt_core.comm.objects import all_gather_object
from bmt_core.errors import ConfigError
from bmt_core.run.runtime import is_initialized, rank
from bmt_core.user_warnings import warn_user
from bmt_optim.adam.parameter_state import MASTER
from bmt_optim.current_run import with_a_group, world
from bmt_optim.managed_optimizer import ManagedOptimizer, managed, widened
from bmt_optim.state.logical_state import gathered_state, load_logical_state
from bmt_optim.state.nested_values import with_each_tensor
from bmt_optim.state.torch_state import check_torch_state, with_all_options
from bmt_optim.whole_tensors.option_link import PARAMETERS, merge
from bmt_optim.whole_tensors.ownership import Cost, Ownership, distinct, team_of, whole_shape
from bmt_optim.whole_tensors.team_step import TeamStep
from bmt_optim.whole_tensors.whole_tensor import Factory, Unit, WholeTensor
from bmt_params.guards.elementwise import need_of_whole_tensors, note_replaced
from bmt_params.guards.optimizer_kind import DRAWS_NUMBERS, has_required_closure, kind_of
from bmt_params.parameter_holders import axes_of_owners
from bmt_params.state.state_tensors import StateOwner

BUCKET_BYTES = 64 << 20


class WholeOptimizer(ManagedOptimizer, torch.optim.Optimizer):
    """Steps whole tensors with optimizers of another class; what :func:`whole` returns.

    Its ``param_groups`` have the program's parameters, and every option of that class. ``state``
    has the states of the parameters that this rank owns.
    """

    bmt_elementwise = True  # it gets parts, and trains what the class trains on whole tensors

    def __init__(
        self,
        params: Any,
        factory: Factory,
        *,
        kind: type,
        cost: Cost | None,
        together: bool,
        bucket_bytes: int,
    ) -> None:
        self._factory = factory
        self._kind = kind
        self._together = together
        self._bucket_bytes = bucket_bytes
        self._ownership = Ownership(cost)
        self._tensors: dict[torch.nn.Parameter, WholeTensor] = {}
        self._units: dict[torch.nn.Parameter, Unit] = {}
        self._new: list[tuple[torch.nn.Parameter, int]] = []
        self._is_built = False
        self._teams: list[TeamStep] = []
        self.original: torch.optim.Optimizer | None = None
        """The optimizer in whose place this one steps; its groups are these groups."""
        torch.optim.Optimizer.__init__(self, with_a_group(params), {})
        self._build()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See ``torch.optim.Optimizer``; with ``together``, all groups are given to the
        constructor.
        """
        if self._is_built and self._together:
            raise ConfigError(
                "With together=True one optimizer has all tensors from the start. Give it all"
                " groups at once."
            )
        super().add_param_group(param_group)
        if self._is_built:
            self._build()

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Any] | None = None,
        *,
        scale: float = 1,
        found_inf: torch.Tensor | None = None,
    ) -> None:
        """Take a step with the gradients divided by ``scale``, on the owners. Collective over all
        ranks.

        A parameter without gradient on all ranks is skipped, as in torch; :class:`ConfigError` on
        all ranks if only some have one. ``closure`` is refused: a class may call it several times,
        with other values in the parameters, which are not there.
        """
        if closure is not None:
            raise ConfigError(
                f"{self._kind.__name__} steps whole tensors on the ranks that own them, where a"
                " closure would find the parameters' old values. Call backward() before step(), and"
                " step() without a closure."
            )
        if self.original is not None and self._has_new_parameters:
            self._build()
        self._check_groups()
        counted: dict[int, dict[str, Any]] = {}
        for team in self._teams:
            for index, options in team.step(self.param_groups, float(scale)).items():
                try:
                    merge(counted.setdefault(index, {}), options, self._kind.__name__)
                except ConfigError as error:
                    team.note_failure(error)
        for index, options in counted.items():
            self.param_groups[index].update(options)
        for team in self._teams:
            team.compare_options(self.param_groups)
        for p, tensor in self._tensors.items():
            if tensor.is_owned and tensor.whole is not None:
                self._show_state(p, tensor)
        if self.original is not None:
            # torch's schedulers of it look whether it stepped.
            self.original._opt_called = True  # type: ignore[attr-defined]

    def state_dict(self, gather: bool = False) -> dict[str, Any]:
        """Return the state of the parameters that this rank owns, for the same rank and grid.

        ``gather``: that of all parameters, whole, on rank 0, as :meth:`AdamOptimizer.state_dict`
        does. Collective then.
        """
        if gather:
            return gathered_state([self], None)
        shown = self.state
        self.state = defaultdict(
            dict, {p: state for p in self._tensors if (state := self.portable_state(p))}
        )
        try:
            return super().state_dict()
        finally:
            self.state = shown

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned on this rank, or a gathered state of any grid.

        Raises :class:`CheckpointError`, and changes nothing, if the state is another optimizer's or
        another rank's.
        """
        if isinstance(state_dict, Mapping) and "parameters" in state_dict:
            load_logical_state([self], state_dict, None)
            return
        check_torch_state(self, state_dict)
        saved_groups = with_all_options(self, state_dict)["param_groups"]
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            for p, index in zip(group["params"], saved["params"], strict=True):
                entry = state_dict["state"].get(index, {})
                self.load_portable_state(
                    p, {key: _on_device(key, value, p, saved) for key, value in entry.items()}
                )
            group.update({key: value for key, value in saved.items() if key not in PARAMETERS})

    def portable_state(self, p: torch.nn.Parameter) -> dict[str, Any]:
        """Return the state of the whole of ``p``, with its master; empty on ranks that do not own
        it.
        """
        unit, tensor = self._of(p)
        if unit.optimizer is None or tensor.whole is None:
            return {}
        return {**unit.optimizer.state.get(tensor.whole, {}), **tensor.master()}

    def load_portable_state(self, p: torch.nn.Parameter, state: Mapping[str, Any]) -> None:
        unit, tensor = self._of(p)
        if not tensor.is_owned or (not state and unit.optimizer is None):
            return
        optimizer = unit.make_optimizer(self.param_groups, self._factory)
        assert tensor.whole is not None
        if MASTER in state:
            tensor.load_master(state[MASTER])
        of_class = {key: value for key, value in state.items() if key != MASTER}
        if MASTER not in state and tensor.dtype != p.dtype:  # of steps without masters
            of_class = {key: widened(value, tensor.whole) for key, value in of_class.items()}
        optimizer.state.pop(tensor.whole, None)
        if of_class:
            optimizer.state[tensor.whole] = of_class
        self._show_state(p, tensor)

    def complaint_about_state(
        self, shapes: Mapping[str, torch.Size | None], shape: torch.Size
    ) -> str | None:
        if not self._kind.__module__.startswith("torch.optim"):
            return None
        return managed(self._template([])).complaint_about_state(shapes, shape)

    def state_owner(self, p: torch.nn.Parameter) -> StateOwner | None:
        _, tensor = self._of(p)
        return StateOwner(tensor.team.ranks[tensor.owner], tensor.team)

    def bytes_per_step(self) -> int:
        """Return how many bytes the ranks that share this rank's parameters send in one step."""
        return sum(tensor.bytes_per_step() for tensor in self._tensors.values())

    def counted_options(self, index: int) -> dict[str, Any]:
        """Return the options of group ``index`` that the class has changed on this rank."""
        keys = set[str]().union(*(team.counted.get(index, ()) for team in self._teams))
        return {key: self.param_groups[index][key] for key in sorted(keys)}

    @property
    def _has_new_parameters(self) -> bool:
        return sum([len(group["params"]) for group in self.param_groups]) != len(self._tensors)

    def _check_groups(self) -> None:
        """Let all ranks raise if a parameter is not in the group that it was given in."""
        found = {p: index for index, group in enumerate(self.param_groups) for p in group["params"]}
        if found != {p: tensor.group_index for p, tensor in self._tensors.items()}:
            error = ConfigError(
                f"Parameters of {self._kind.__name__} were taken out of a group, or put into"
                " another one, and an optimizer over whole tensors keeps each in its group. Let"
                " those that shall rest have no gradient, by requires_grad_(False); add others by"
                " add_param_group(); or make a new optimizer."
            )
            for team in self._teams:
                team.note_failure(error)

    def _of(self, p: torch.nn.Parameter) -> tuple[Unit, WholeTensor]:
        if p not in self._tensors:  # of a group that was added to :attr:`original` since
            self._build()
        return self._units[p], self._tensors[p]

    def _show_state(self, p: torch.nn.Parameter, tensor: WholeTensor) -> None:
        optimizer, whole = self._units[p].optimizer, tensor.whole
        if optimizer is not None and whole is not None and whole in optimizer.state:
            self.state[p] = optimizer.state[whole]
        else:
            self.state.pop(p, None)

    def _build(self) -> None:
        """Choose owners for the parameters that have none, and complete the options of their
        groups.
        """
        template = self._template(self.param_groups)
        for group, whole_group in zip(self.param_groups, template.param_groups, strict=True):
            for key, value in whole_group.items():
                group.setdefault(key, value)
        self.defaults = template.defaults
        new = [
            (p, index)
            for index, group in enumerate(self.param_groups)
            for p in group["params"]
            if p not in self._tensors
        ]
        teams = [team_of(p) for p, _ in new]
        if self._together:
            self._check_together([p for p, _ in new])
            owners = [0] * len(new)
        else:
            owners = self._ownership.owners([p for p, _ in new], teams)
        made = [
            WholeTensor(p, index, team, owner)
            for (p, index), team, owner in zip(new, teams, owners, strict=True)
        ]
        self._tensors |= {tensor.p: tensor for tensor in made}
        units = [Unit(made)] if self._together and made else [Unit([tensor]) for tensor in made]
        self._units |= {tensor.p: unit for unit in units for tensor in unit.tensors}
        self._teams = self._team_steps()
        if not self._together and not self._is_built:
            check_steps_alone(template)
        self._is_built = True

    def _team_steps(self) -> list[TeamStep]:
        units = list(dict.fromkeys(self._units.values()))
        teams = distinct([world(), *[unit.tensors[0].team for unit in units]])
        known = {step.team.ranks: step for step in self._teams}
        steps = []
        for team in teams:
            own = [unit for unit in units if unit.tensors[0].team.ranks == team.ranks]
            step = known.get(team.ranks) or TeamStep(
                team, self._factory, self._kind.__name__, self._bucket_bytes
            )
            step.set_units(own, self._ownership)
            # The team of all ranks meets even if this rank has nothing to share with it, because
            # another stage may have.
            if own or (team.size > 1 and team.ranks == world().ranks):
                steps.append(step)
        return steps

    def _template(self, groups: Iterable[Mapping[str, Any]]) -> torch.optim.Optimizer:
        """Return an optimizer over tensors of the whole shapes without memory, for its options."""
        return self._factory(
            [
                {
                    **{key: value for key, value in group.items() if key not in PARAMETERS},
                    "params": [_without_memory(p) for p in group["params"]],
                }
                for group in groups
            ]
            or [{"params": []}]
        )

    def _check_together(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        axes = axes_of_owners(parameters) if is_initialized() else frozenset()
        if axes:
            raise ConfigError(
                f"together=True steps all tensors on one rank, and along {', '.join(sorted(axes))}"
                " ranks have parameters of their own, as stages of a pipeline have. Use"
                f" {self._kind.__name__} without these axes, or an optimizer that decides for each"
                " tensor by itself."
            )


def whole(
    kind: type[torch.optim.Optimizer],
    params: Any,
    *,
    cost: Cost | None = None,
    together: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
    **options: Any,
) -> WholeOptimizer:
    """Return an optimizer that steps as ``kind(params, **options)`` does on whole parameters.

    For classes that need whole tensors (Muon, Shampoo, SOAP, Adafactor, any that takes a norm or a
    mean of a tensor), while every rank has a part of each parameter. Each tensor belongs to one
    rank of those that share it. In a step the parts of its gradient go to this rank, an optimizer
    of class ``kind`` steps the whole tensor there, and its new values come back. The tensor is an
    ordinary ``torch.nn.Parameter`` of the whole shape, in float32 if the parameter is of a half
    type (a master). Of a tensor of n bytes that is sharded over N ranks, (N-1)/N * n bytes go to
    the owner, and as many come back.

    ``params``: parameters or groups, as for ``kind``; sharded and ordinary ones. ``cost``: a
    function of a whole shape, by which owners are balanced: ``lambda shape: shape.numel() *
    min(shape)`` for the products of Muon; by default the bytes of the tensor. A step needs memory
    for at most three rounds, each with ``bucket_bytes`` of gradients per owner, or one larger
    tensor.

    Tensors are stepped one by one: see [Note: one optimizer per tensor]. A class that decides
    something from all of its tensors (the step size of Prodigy, a norm over all gradients) needs
    ``together``: one rank steps all tensors, and keeps their states and gradients. Without it, the
    class is tried on small tensors at the start, and :class:`ConfigError` is raised if it steps a
    tensor otherwise beside others than alone, or if an option later comes out differently for
    different tensors. Such an optimizer cannot have stages of a pipeline.

    The constructor and ``state_dict()`` communicate nothing, except that ``together`` compares
    stages. ``step()`` is collective. Works with :class:`OptimManager`, schedulers, checkpoints
    (states are saved whole, by name) and in plain loops.

    >>> parameter = torch.nn.Parameter(torch.eye(2))
    >>> optimizer = whole(torch.optim.Muon, [parameter], lr=0.5, weight_decay=0.0)
    >>> parameter.grad = torch.eye(2)
    >>> optimizer.step()
    >>> bool(parameter[0, 0] < 1), optimizer.param_groups[0]["momentum"]
    (True, 0.95)
    """
    _check_kind(kind)
    if not bucket_bytes > 0:
        raise ValueError(f"bucket_bytes must be positive, it is {bucket_bytes}.")

    def factory(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return kind(groups, **options)

    return WholeOptimizer(
        params, factory, kind=kind, cost=cost, together=together, bucket_bytes=bucket_bytes
    )


def whole_of(optimizer: Any) -> WholeOptimizer:
    """Return a :class:`WholeOptimizer` in place of ``optimizer``, which has not stepped yet, and
    whose ``step``, ``state_dict`` and ``load_state_dict`` raise from now on.

    They have the same groups. So schedulers of ``optimizer`` change the options of both. Its
    attributes are shared by the optimizers of the tensors.
    """
    if isinstance(optimizer, WholeOptimizer):
        return optimizer
    _check_kind(type(optimizer))
    if optimizer in _replaced:
        raise _already_replaced(optimizer, "added once more")
    if optimizer.state:
        raise ConfigError(
            f"This {type(optimizer).__name__} has states of parts already. Make it anew, as"
            f" bmt.optim.whole({type(optimizer).__name__}, params, ...), and load its state from"
            " a checkpoint."
        )
    hooks = {key: value for key, value in vars(optimizer).items() if key.startswith("_optimizer_")}
    # ``step`` is there if a scheduler of torch has replaced it: it would step ``optimizer``.
    shared = ("param_groups", "state", "step", *hooks)
    own = {key: value for key, value in vars(optimizer).items() if key not in shared}
    _check_attributes(optimizer, own)

    def factory(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        made: Any = object.__new__(type(optimizer))
        vars(made).update(copy.deepcopy(own))
        vars(made).update({key: type(value)() for key, value in hooks.items()})
        made.param_groups, made.state = groups, defaultdict(dict)
        return made  # type: ignore[no-any-return]

    groups = optimizer.param_groups
    made = WholeOptimizer(
        groups, factory, kind=type(optimizer), cost=None, together=False, bucket_bytes=BUCKET_BYTES
    )
    made.param_groups, made.original = groups, optimizer
    vars(made).update(hooks)
    _refuse_calls_of(optimizer)
    return made


_replaced: WeakSet[torch.optim.Optimizer] = WeakSet()


def _refuse_calls_of(original: torch.optim.Optimizer) -> None:
    """Have the methods of ``original`` raise that would step or save what is not trained."""

    def refusal_of(call: str) -> Callable[..., None]:
        # The hooks are those of the optimizer in its place, too.
        def refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if optimizer in _replaced:
                raise _already_replaced(optimizer, call)

        return refuse

    _replaced.add(original)
    note_replaced(original)
    original.register_step_pre_hook(refusal_of("stepped by itself"))
    original.register_state_dict_pre_hook(refusal_of("asked for its state, which is empty"))
    original.register_load_state_dict_pre_hook(refusal_of("given a state"))


def _already_replaced(optimizer: torch.optim.Optimizer, call: str) -> ConfigError:
    return ConfigError(
        f"{type(optimizer).__name__} is {call}, and an OptimManager has another optimizer in its"
        " place, which steps whole tensors. Call step(), state_dict() and load_state_dict() of the"
        " manager, and give the manager to save_checkpoint(); manager.optimizers has the optimizer"
        " with the states. This one has the groups, which schedulers may change."
    )


def whole_if_needed(optimizer: Any) -> Any:
    """Return :func:`whole_of` ``optimizer`` if it needs whole tensors on any rank, which rank 0
    says; else ``optimizer``. Collective.
    """
    if isinstance(optimizer, ManagedOptimizer) or not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    needs = all_gather_object(need_of_whole_tensors(optimizer), world())
    reason = next((need for need in needs if need is not None), None)
    if reason is None:  # the same on every rank
        return optimizer
    made = whole_of(optimizer)
    if world().rank == 0:
        warn_user(
            f"{type(optimizer).__name__} needs whole tensors: {reason}. Each is stepped on one of"
            f" the ranks that share it, which send {made.bytes_per_step()} bytes per step. This is"
            ' said once; pass whole=True if you want it, or whole="refuse" to have it refused.'
        )
    return made


def check_steps_alone(optimizer: Any) -> None:
    """Raise :class:`ConfigError` if ``optimizer`` steps a tensor otherwise beside others than
    alone, by a trial; warn on rank 0 if it fails. Nothing is communicated.

    What ``optimizer`` declares is taken from it: it says nothing of other tensors.
    """
    optimizer.bmt_elementwise = None
    for group in optimizer.param_groups:
        group.pop("bmt_elementwise", None)
    kind, name = kind_of(optimizer), type(optimizer).__name__
    if kind.needs == "all tensors":
        raise ConfigError(
            f"{name} steps a tensor otherwise beside others than alone: it decides something from"
            " all of its tensors, such as a step size or a norm. Use bmt.optim.whole(...,"
            " together=True): then one rank steps all tensors."
        )
    if kind.needs == "unknown" and kind.reason != DRAWS_NUMBERS and rank() == 0:
        warn_user(
            f"{name} could not be tried on small tensors ({kind.reason}), to find out whether it"
            " decides something from all of its tensors. If it does (a step size, a norm of all"
            " gradients), pass together=True."
        )


def _check_attributes(optimizer: torch.optim.Optimizer, attributes: Mapping[str, Any]) -> None:
    parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, value in attributes.items():
        items = list(value.values()) if isinstance(value, Mapping) else value
        held = items if isinstance(items, (list, tuple, set)) else [items]
        if any(
            id(item) in parameters or isinstance(item, (torch.optim.Optimizer, torch.nn.Module))
            for item in [*held, *(value if isinstance(value, Mapping) else ())]
        ):
            kind = type(optimizer).__name__
            raise ConfigError(
                f"{kind} keeps parts of parameters in its attribute {name!r}. Make it anew with"
                f" whole tensors: bmt.optim.whole({kind}, params, ...). If the constructor of"
                f" {kind} takes another optimizer or a model in place of params, derive a class"
                " whose constructor takes params and makes them itself."
            )


def _check_kind(kind: Any) -> None:
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise TypeError(
            "An optimizer over whole tensors is of a subclass of torch.optim.Optimizer,"
            f" not {kind!r}."
        )
    if issubclass(kind, ManagedOptimizer):
        raise ConfigError(
            f"{kind.__name__} trains parts of parameters as they are. Use it without whole."
        )
    if has_required_closure(kind):
        raise ConfigError(
            f"The step of {kind.__name__} needs a closure, which would find the parameters' old"
            " values on the ranks that do not own them. Use an optimizer that steps without one."
        )


def _without_memory(p: torch.Tensor) -> torch.nn.Parameter:
    dtype = torch.promote_types(p.dtype, torch.float32)
    return torch.nn.Parameter(
        torch.empty(whole_shape(p), dtype=dtype, device="meta"), p.requires_grad
    )


def _on_device(key: str, value: Any, p: torch.Tensor, group: Mapping[str, Any]) -> Any:
    """Return a copy of a value of a state; torch's optimizers expect counts on the host."""
    is_count = key == "step" and not group.get("capturable") and not group.get("fused")
    device = torch.device("cpu") if is_count else p.device
    return with_each_tensor(key, value, lambda _, tensor: tensor.detach().to(device, copy=True))
