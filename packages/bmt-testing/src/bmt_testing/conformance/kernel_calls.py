"""Calls of each operation that kernels may have, with their arguments laid out in memory in
several ways.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bmt_core.ops import KernelProvider, read_master, reference, split_master

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, torch.float64, *HALVES)
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (7,), (16,), (33,), (5, 7), (1001,))
FORMS = ("float32", "float64", "float16", "bfloat16", "two parts")
"""Of a parameter in ``adam_step``: half types have a float32 master, a bfloat16 parameter perhaps
one in two parts.
"""
POWERS = (1.0, 2.0, 3.0, 0.5, math.inf)
ADAM: dict[str, Any] = {
    "step": 3,
    "lr": 0.01,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "decoupled": False,
}

Layout = Callable[[torch.Tensor], torch.Tensor]
"""Copies a tensor to memory of some layout."""


class ReferenceKernels(KernelProvider):
    """The references in plain torch as a provider, so that a kit tests them like kernels."""

    name = "reference"
    device_type = "cpu"
    adam_step = staticmethod(reference.adam_step)
    cross_entropy_backward = staticmethod(reference.cross_entropy_backward)
    cross_entropy_forward = staticmethod(reference.cross_entropy_forward)
    has_non_finite = staticmethod(reference.has_non_finite)
    powers_sum = staticmethod(reference.powers_sum)
    scale_ = staticmethod(reference.scale_)
    zero_if_ = staticmethod(reference.zero_if_)

    def available(self) -> str | None:
        return None


class ReferenceOnCuda(ReferenceKernels):
    """The references on a GPU."""

    name = "reference-cuda"
    device_type = "cuda"

    def available(self) -> str | None:
        return None if torch.cuda.is_available() else "torch finds no usable GPU"


REFERENCES: dict[str, type[ReferenceKernels]] = {
    kind.name: kind for kind in (ReferenceKernels, ReferenceOnCuda)
}


class Rooms:
    """Places tensors inside bigger ones, ``before`` elements from their beginning, and fills the
    rest with ``filler``.
    """

    def __init__(self, before: int, filler: float = 7.0) -> None:
        self.before, self.filler = before, filler
        self._rooms: list[tuple[torch.Tensor, int]] = []

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``tensor`` in a room of its own."""
        is_number = tensor.is_floating_point() or tensor.is_complex()
        filler = self.filler if is_number or math.isfinite(self.filler) else 0.0
        room = torch.full(
            (self.before + tensor.numel() + 5,), filler, dtype=tensor.dtype, device=tensor.device
        )
        self._rooms.append((room, tensor.numel()))
        inside = room[self.before :][: tensor.numel()].view(tensor.shape)
        return inside.copy_(tensor)

    def are_as_they_were(self) -> bool:
        """Whether everything around the tensors has its first value."""
        around = [
            part
            for room, numel in self._rooms
            for part in (room[: self.before], room[self.before + numel :])
        ]
        return all(bool((part == torch.full_like(part, self.filler)).all()) for part in around)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy without gaps that begins its memory."""
    return tensor.contiguous().clone()


def gapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with a gap behind each element."""
    return torch.stack([tensor, tensor], dim=tensor.dim())[..., 0]


def spaced(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with a gap between the rows of the last dimension."""
    if tensor.dim() == 0:
        return plain(tensor)
    *others, length = tensor.shape
    return tensor.new_zeros((*others, length + 3))[..., :length].copy_(tensor)


def crossed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy whose first dimension is the innermost in memory."""
    turned = list(reversed(range(tensor.dim())))
    return tensor.permute(turned).contiguous().permute(turned)


def alternating() -> Layout:
    """Return a layout that is another one from tensor to tensor."""
    layouts = (crossed, plain, gapped, spaced)
    count = 0

    def lay_out(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return layouts[count % len(layouts)](tensor)

    return lay_out


@dataclass
class Call:
    """A call of ``operation``: arguments, the tensors among them that are only read and those
    that are written, and what to compare afterwards.
    """

    operation: str
    title: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    read: list[torch.Tensor]
    written: list[torch.Tensor] = field(default_factory=list)
    results: Callable[[], list[torch.Tensor]] | None = None

    def run(self, kernels: KernelProvider) -> list[torch.Tensor]:
        """Make the call, and return what it has written or returned."""
        returned = getattr(kernels, self.operation)(*self.arguments, **self.options)
        if self.results is not None:
            return [tensor.clone() for tensor in self.results()]
        if returned is None:
            return [tensor.clone() for tensor in self.written]
        items = returned if isinstance(returned, tuple) else (returned,)
        return [tensor for tensor in items if tensor is not None]


class AdamRows:
    """Parameters, gradients and state of several shapes: the lists of ``adam_step``."""

    def __init__(
        self,
        form: str,
        shapes: Sequence[tuple[int, ...]],
        *,
        device: torch.device,
        grad: torch.dtype | None = None,
        layout: Layout = plain,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        dtype = torch.bfloat16 if form == "two parts" else getattr(torch, form)
        wide = torch.promote_types(dtype, torch.float32)
        self.params: list[torch.Tensor] = []
        self.grads: list[torch.Tensor] = []
        self.exp_avgs: list[torch.Tensor] = []
        self.exp_avg_sqs: list[torch.Tensor] = []
        self.masters: list[Any] = []
        for shape in shapes:
            weight, gradient, mean, square = (
                torch.randn(shape, generator=generator, dtype=torch.float64).to(wide)
                for _ in range(4)
            )
            param, master = weight.to(dtype), None if dtype == wide else weight
            if form == "two parts":
                param, master = split_master(weight)
            row = [param, gradient.to(grad or dtype), mean, square.abs(), master]
            for column, tensor in zip(self.columns, row, strict=True):
                column.append(None if tensor is None else layout(tensor.to(device)))

    @property
    def columns(self) -> tuple[list[Any], ...]:
        """The lists, in the order of the operation's parameters."""
        return self.params, self.grads, self.exp_avgs, self.exp_avg_sqs, self.masters

    @property
    def written(self) -> list[torch.Tensor]:
        """The tensors that a step changes."""
        masters = [master for master in self.masters if master is not None]
        return [*self.params, *self.exp_avgs, *self.exp_avg_sqs, *masters]

    def weights(self) -> list[torch.Tensor]:
        """Return the numbers that are updated, whatever their form."""
        found = []
        for param, master in zip(self.params, self.masters, strict=True):
            if master is None:
                found.append(param)
            else:
                in_parts = master.dtype == torch.int16
                found.append(read_master(param, master) if in_parts else master)
        return found

    def numbers(self) -> list[torch.Tensor]:
        """Return means, squares and weights."""
        return [*self.exp_avgs, *self.exp_avg_sqs, *self.weights()]

    def by_formula(
        self, *, clip: float = 1.0, scale: float = 1.0, **options: Any
    ) -> list[torch.Tensor]:
        """Return the :meth:`numbers` after a step, in double precision."""
        o = {**ADAM, **options}
        means, squares, weights = [], [], []
        for weight, grad, mean, square in zip(
            self.weights(), self.grads, self.exp_avgs, self.exp_avg_sqs, strict=True
        ):
            p, g, m, v = (tensor.double() for tensor in (weight, grad, mean, square))
            g = g * clip / scale
            if not o["decoupled"]:
                g = g + o["weight_decay"] * p
            m = o["beta1"] * m + (1 - o["beta1"]) * g
            v = o["beta2"] * v + (1 - o["beta2"]) * g * g
            if o["decoupled"]:
                p = p - o["lr"] * o["weight_decay"] * p
            root = (v / (1 - o["beta2"] ** o["step"])).sqrt()
            p = p - o["lr"] * (m / (1 - o["beta1"] ** o["step"])) / (root + o["eps"])
            means.append(m)
            squares.append(v)
            weights.append(p)
        return [*means, *squares, *weights]


@dataclass
class Logits:
    """Logits with targets, class weights and the factors of the backward pass, laid out in memory
    by ``layout``.
    """

    rows: int
    classes: int
    dtype: torch.dtype
    device: torch.device
    layout: Layout = plain

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.rows * 100_000 + self.classes)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        wide = torch.promote_types(self.dtype, torch.float32)
        self.logits = self._placed((drawn(self.rows, self.classes) * 4).to(self.dtype))
        target = torch.randint(self.classes, (self.rows,), generator=generator)
        self.target = self._placed(target)
        self.weight = self._placed(drawn(self.classes).abs())
        self.total, self.hit = (self._placed(drawn(self.rows).to(wide)) for _ in range(2))
        self.spread = self._placed((drawn(self.rows) / self.classes).to(wide))
        exact = self.logits.double()
        largest = exact.amax(1) if self.rows else exact.new_empty(0)
        self.row_max = self._placed(largest.to(wide))
        self.log_sum = self._placed((exact.logsumexp(1) - largest).to(wide))

    @property
    def factors(self) -> tuple[torch.Tensor, ...]:
        """The arguments of the backward pass behind logits and target."""
        return self.row_max, self.log_sum, self.total, self.hit, self.spread

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.layout(tensor.to(self.device))


def calls(kernels: KernelProvider, make_layout: Callable[[], Layout]) -> Iterator[Call]:
    """Yield calls of every operation that ``kernels`` has, in each type; each lays out its
    tensors by a new layout.
    """
    device = device_of(kernels)
    makers = {
        "adam_step": _adam_calls,
        "cross_entropy_backward": _backward_calls,
        "cross_entropy_forward": _forward_calls,
        "has_non_finite": _check_calls,
        "powers_sum": _norm_calls,
        "scale_": _scale_calls,
        "zero_if_": _clear_calls,
    }
    for operation in kernels.operations():
        yield from makers[operation](device, make_layout)


def device_of(kernels: KernelProvider) -> torch.device:
    """Return the device on which ``kernels`` run."""
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu(kernels) else CPU


def on_gpu(kernels: KernelProvider) -> bool:
    """Whether ``kernels`` are for GPUs."""
    return kernels.device_type == "cuda"


CPU = torch.device("cpu")


def numbers_of(
    dtype: torch.dtype,
    device: torch.device,
    *,
    layout: Layout = plain,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
) -> list[torch.Tensor]:
    """Return tensors of ``shapes`` with random numbers."""
    generator = torch.Generator().manual_seed(1)
    wide = torch.promote_types(dtype, torch.float64)
    return [
        layout(torch.randn(shape, generator=generator, dtype=wide).to(dtype).to(device))
        for shape in shapes
    ]


def _adam_calls(device: torch.device, make_layout: Callable[[], Layout]) -> Iterator[Call]:
    for form in FORMS:
        layout = make_layout()
        rows = AdamRows(form, SHAPES, device=device, layout=layout)
        scale, clip, skip = (
            layout(torch.full((1,), value, device=device)) for value in (2.0, 0.5, 0.0)
        )
        yield Call(
            operation="adam_step",
            title=f"adam_step of {form}",
            arguments=rows.columns,
            options={**ADAM, "scale": scale, "clip": clip, "skip": skip},
            read=[*rows.grads, scale, clip, skip],
            written=rows.written,
            results=rows.numbers,
        )


def _forward_calls(device: torch.device, make_layout: Callable[[], Layout]) -> Iterator[Call]:
    for data in _logits(device, make_layout):
        yield Call(
            operation="cross_entropy_forward",
            title=f"cross_entropy_forward of {data.rows} x {data.classes} {data.dtype}",
            arguments=(data.logits, data.target),
            options={"weight": data.weight, "with_sum": True},
            read=[data.logits, data.target, data.weight],
        )


def _backward_calls(device: torch.device, make_layout: Callable[[], Layout]) -> Iterator[Call]:
    for data in _logits(device, make_layout):
        yield Call(
            operation="cross_entropy_backward",
            title=f"cross_entropy_backward of {data.rows} x {data.classes} {data.dtype}",
            arguments=(data.logits, data.target, *data.factors),
            options={"weight": data.weight},
            read=[data.logits, data.target, *data.factors, data.weight],
        )


def _logits(device: torch.device, make_layout: Callable[[], Layout]) -> Iterator[Logits]:
    for dtype in FLOATS:
        for rows, classes in ((0, 5), (1, 1), (5, 17), (4, 40), (3, 2049)):
            yield Logits(rows, classes, dtype, device, make_layout())


def _check_calls(device: torch.device, make_layout: Callable[[], Layout]) -> Iterator[Call]:
    for dtype in (*FLOATS, torch.complex64):
        for spoiled in (None, 0, -1):
            layout = make_layout()
            tensors = numbers_of(dtype, device, layout=layout)
            if spoiled is not None:
                tensors[5][spoiled] = math.nan
            flag = layout(torch.zeros(1, dtype=torch.uint8, device=device))
            yield Call(
                operation="has_non_finite",
                title=f"has_non_finite of {dtype} (NaN at {spoiled})",
                arguments=(tensors, flag),
                options={},
                read=tensors,
                # Not written where all is finite.
                written=[] if spoiled is None else [flag],
                results=lambda flag=flag: [flag],  # type: ignore[misc]
            )


def _norm_calls(device: torch.device, make_layout: Callable[[], Layout]) -> Iterator[Call]:
    for dtype in (*FLOATS, torch.complex64):
        for p in POWERS:
            tensors = numbers_of(dtype, device, layout=make_layout())
            yield Call(
                operation="powers_sum",
                title=f"powers_sum of {dtype} (p = {p})",
                arguments=(tensors, p, [1.0] * len(tensors), device),
                options={},
                read=tensors,
            )


def _scale_calls(device: torch.device, make_layout: Callable[[], Layout]) -> Iterator[Call]:
    for dtype in (*FLOATS, torch.complex64):
        layout = make_layout()
        tensors = numbers_of(dtype, device, layout=layout)
        factor = layout(torch.full((1,), 1 / 3, device=device))
        yield Call(
            operation="scale_",
            title=f"scale_ of {dtype}",
            arguments=(tensors, factor),
            options={},
            read=[factor],
            written=tensors,
        )


def _clear_calls(device: torch.device, make_layout: Callable[[], Layout]) -> Iterator[Call]:
    for dtype in (*FLOATS, torch.complex64):
        layout = make_layout()
        tensors = numbers_of(dtype, device, layout=layout)
        flag = layout(torch.ones(1, dtype=torch.uint8, device=device))
        yield Call(
            operation="zero_if_",
            title=f"zero_if_ of {dtype}",
            arguments=(tensors, flag),
            options={},
            read=[flag],
            written=tensors,
        )


def _spoil(columns: tuple[list[Any], ...], column: int, value: Any) -> tuple[list[Any], ...]:
    """Return ``columns`` with another tensor in the first row."""
    return tuple([value, *each[1:]] if i == column else each for i, each in enumerate(columns))


WRONG_ROWS: dict[str, Callable[[tuple[list[Any], ...]], tuple[list[Any], ...]]] = {
    "fewer gradients": lambda c: (c[0], c[1][:-1], *c[2:]),
    "a gradient of another size": lambda c: _spoil(c, 1, c[1][0][:4]),
    "a gradient of one element": lambda c: _spoil(c, 1, c[1][0][:1]),
    "a mean of another size": lambda c: _spoil(c, 2, c[2][0][:4]),
    "a mean of another type": lambda c: _spoil(c, 2, c[2][0].half()),
    "a master of another size": lambda c: _spoil(c, 4, c[4][0][:1]),
}


def masters_of_any_bits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the parts of masters of any bits, halves and the largest numbers among them."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (40000,), generator=generator).int()
    edges = [0x8000, 0x3F80_8000, 0x3F80_7FFF, 0x3F7F_FFFF, 0x7F7F_FFFF, 0x007F_FFFF, 1, 0x80_0000]
    bits[: len(edges)] = torch.tensor(edges).int()
    numbers = bits.view(torch.float32)
    return split_master(torch.where(numbers.isfinite(), numbers, 1.0))


def masters_of_written_parameters() -> tuple[torch.Tensor, torch.Tensor]:
    """Return every parameter beside remainders that another value may have left."""
    left = torch.tensor([0, 1, -1, 2**15 - 1, -(2**15), 77, -77], dtype=torch.int16)
    params = torch.arange(-(2**15), 2**15).short().view(torch.bfloat16)
    return params.repeat_interleave(len(left)), left.repeat(len(params))


def numbers_of_all_kinds(dtype: torch.dtype) -> torch.Tensor:
    """Return every number of a half type, or many small ones of another."""
    if dtype in HALVES:
        return torch.arange(-(2**15), 2**15).short().view(dtype)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(65536, generator=generator).to(dtype) * torch.finfo(dtype).smallest_normal
