"""``WholeTensor``: the whole of a parameter at its owner, and ``Unit``: an optimizer with the whole
tensors that it steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from bmt_core.comm.protocols import Group
from bmt_core.errors import ConfigError
from bmt_core.torch_internals import Seen
from bmt_optim.adam.parameter_state import MASTER, followed_master
from bmt_optim.whole_tensors.layout import TensorLayout
from bmt_optim.whole_tensors.option_link import PARAMETERS, OptionLink
from bmt_optim.whole_tensors.ownership import described, whole_shape
from bmt_params.parameter import DistributedParameter

Factory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""Makes an optimizer of the user's class over parameter groups."""


class WholeTensor:
    """A parameter ``p`` of group ``group_index``, owned by the rank at index ``owner`` of ``team``.

    ``whole`` is an ordinary parameter of the whole shape on the owner, None elsewhere and before it
    is needed. It is a view of ``p`` where the owner has all of ``p`` in float32 or wider, and
    otherwise memory of its own: a float32 master of half types.
    """

    def __init__(self, p: torch.nn.Parameter, group_index: int, team: Group, owner: int) -> None:
        self.p = p
        self.group_index = group_index
        self.team = team
        self.owner = owner
        self.whole: torch.nn.Parameter | None = None
        self.is_met = False  # whether there was a gradient, on any rank
        self._has_values = False
        self._seen = Seen()  # this rank's elements, as the owner has them
        self._layout: tuple[object, TensorLayout] | None = None

    @property
    def is_owned(self) -> bool:
        """Whether this rank is the owner."""
        return self.team.rank == self.owner

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the whole tensor."""
        return torch.promote_types(self.p.dtype, torch.float32)

    @property
    def layout(self) -> TensorLayout:
        """Which rank has which elements now; a Block may lay its parameters out anew before the
        first step.
        """
        key = self.p.shard if isinstance(self.p, DistributedParameter) else None
        if self._layout is None or self._layout[0] is not key:
            self._layout = key, TensorLayout(self.p, self.team)
        return self._layout[1]

    @property
    def shares_memory(self) -> bool:
        """Whether ``whole`` is a view of the parameter on the owner; the same on every rank."""
        return self.dtype == self.p.dtype and self.layout.is_whole_on(self.owner)

    @property
    def text(self) -> str:
        """What must be alike on all ranks of the team."""
        pieces = [(piece.slice, piece.start, piece.end) for piece in self.layout.pieces]
        return f"{described(self.p)} of {self.p.dtype}, laid out as {pieces}"

    @property
    def part(self) -> torch.Tensor:
        """This rank's elements of the parameter, 1-D."""
        if not self.p.is_contiguous():
            raise ConfigError(
                f"{described(self.p)} is not contiguous (its strides are {self.p.stride()}). An"
                " optimizer over whole tensors needs parameter.data = parameter.data.contiguous()."
            )
        return self.p.detach().view(-1)

    def updated_part(self) -> torch.Tensor:
        """Return :attr:`part` with all updates done."""
        if isinstance(self.p, DistributedParameter):
            self.p.wait_for_updates()
        return self.part

    def new_values(self) -> torch.Tensor | None:
        """Return the whole tensor in the dtype of the parameter on the owner, None elsewhere."""
        return (
            self.whole.detach().to(self.p.dtype)
            if self.is_owned and self.whole is not None
            else None
        )

    @property
    def gradient_part(self) -> torch.Tensor:
        """This rank's elements of the gradient, 1-D; empty where it has none of either."""
        if self.p.grad is None:
            return self.part
        if self.p.grad.is_sparse:
            raise TypeError(
                f"The gradient of {described(self.p)} is sparse. Make it dense: sparse=False in"
                " the embedding."
            )
        return self.p.grad.detach().reshape(-1)

    @property
    def was_written(self) -> bool:
        """Whether this rank's elements were written since :meth:`note_values`."""
        return not self.shares_memory and bool(self._seen.written([self.p]))

    def note_values(self) -> None:
        """Note that the owner has the values of the parameter."""
        self._seen.note([self.p])

    def bytes_per_step(self) -> int:
        """Return what the ranks of the team send in one step: gradients to the owner, values
        from it.
        """
        layout = self.layout
        to_owner = sum(
            layout.pieces[i].numel for i in layout.sources(self.owner) if i != self.owner
        )
        from_owner = sum(piece.numel for i, piece in enumerate(layout.pieces) if i != self.owner)
        return (to_owner + from_owner) * self.p.dtype.itemsize

    def make_whole(self) -> torch.nn.Parameter:
        """Return ``whole`` on the owner, made without values if it is new and no view."""
        if self.shares_memory:
            view = self.part.view(whole_shape(self.p))
            if self.whole is None:
                self.whole = torch.nn.Parameter(view)
            elif self.whole.data_ptr() != view.data_ptr():
                self.whole.data = view
        elif self.whole is None:
            shape = whole_shape(self.p)
            self.whole = torch.nn.Parameter(
                torch.empty(shape, dtype=self.dtype, device=self.p.device)
            )
        return self.whole

    def take(
        self, values: torch.Tensor | None, gradient: torch.Tensor | None, scale: float
    ) -> None:
        """Take over the parameter's ``values``, if given, and give ``whole`` its ``gradient``,
        divided by ``scale`` in the dtype of ``whole``.

        A master keeps what the values have rounded away.
        """
        whole = self.make_whole()
        if values is not None:
            values = values.view(whole_shape(self.p))
            with torch.no_grad():
                if self._has_values and self.dtype != values.dtype:
                    values = followed_master(whole.detach(), values)
                whole.copy_(values)
            self._has_values = True
        if gradient is not None:
            wide = gradient.view(whole_shape(self.p)).to(self.dtype)
            whole.grad = wide if scale == 1 else wide / scale

    def load_master(self, master: torch.Tensor) -> None:
        """Set the master, which the next step compares with the parameter's values."""
        with torch.no_grad():
            self.make_whole().copy_(master.reshape(whole_shape(self.p)))
        self._has_values = True
        self._seen.forget(self.p)

    def master(self) -> dict[str, torch.Tensor]:
        """Return the master as an entry of a state; nothing if the parameter needs none."""
        if self.dtype == self.p.dtype or self.whole is None or not self._has_values:
            return {}
        return {MASTER: self.whole.detach()}


class Unit:
    """An optimizer of the user's class, which steps ``tensors`` of one owner."""

    def __init__(self, tensors: Sequence[WholeTensor]) -> None:
        self.tensors = tensors
        self.optimizer: torch.optim.Optimizer | None = None
        self.links: dict[int, OptionLink] = {}

    @property
    def owner(self) -> int:
        """Index of the owner in the team."""
        return self.tensors[0].owner

    @property
    def is_owned(self) -> bool:
        """Whether this rank is the owner."""
        return self.tensors[0].is_owned

    @property
    def is_met(self) -> bool:
        """Whether any of the tensors has had a gradient, on any rank."""
        return any(tensor.is_met for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensors in the parameters' dtypes, which are sent."""
        return sum(
            whole_shape(tensor.p).numel() * tensor.p.dtype.itemsize for tensor in self.tensors
        )

    def make_optimizer(
        self, groups: Sequence[Mapping[str, Any]], factory: Factory
    ) -> torch.optim.Optimizer:
        """Make the optimizer on the owner, if there is none, with the options of ``groups``."""
        if self.optimizer is None:
            own: dict[int, dict[str, Any]] = {}
            for tensor in self.tensors:
                group = groups[tensor.group_index]
                plain = {
                    key: _copied(value) for key, value in group.items() if key not in PARAMETERS
                }
                with explaining_memory([tensor]):
                    made = tensor.make_whole()
                own.setdefault(tensor.group_index, {**plain, "params": []})["params"].append(made)
            optimizer = factory(list(own.values()))
            used = zip(own, optimizer.param_groups, strict=True)
            self.links = {index: OptionLink(group) for index, group in used}
            self.optimizer = optimizer
        return self.optimizer

    def step(self, groups: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
        """Take a step with the options of ``groups``; return those that the class has changed."""
        assert self.optimizer is not None
        for index, link in self.links.items():
            link.push(groups[index])
        self.optimizer.step()
        for tensor in self.tensors:
            assert tensor.whole is not None
            tensor.whole.grad = None
        return {index: changed for index, link in self.links.items() if (changed := link.changed())}


@contextmanager
def explaining_memory(tensors: Sequence[WholeTensor]) -> Iterator[None]:
    """Raise :class:`ConfigError` if there is too little memory for what is done inside with the
    wholes of ``tensors``.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and not any(
            text in str(error) for text in _NO_MEMORY
        ):
            raise
        size = sum(whole_shape(t.p).numel() * t.dtype.itemsize for t in tensors)
        shape = tuple(whole_shape(tensors[0].p))
        what = (
            f"A whole tensor of shape {shape} takes"
            if len(tensors) == 1
            else f"{len(tensors)} whole tensors take"
        )
        raise ConfigError(
            f"{what} {size} bytes in {tensors[0].dtype} on the rank that owns them, as many for"
            f" gradients, and more for states, and {_free(tensors[0].p.device)} ({error}). Use an"
            " elementwise optimizer for large parameters, or make them smaller."
        ) from error


_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")  # torch's, on hosts


def _free(device: torch.device) -> str:
    if device.type != "cuda":
        return "the host could not provide them"
    return f"{torch.cuda.mem_get_info(device)[0]} bytes are free on {device}"


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
