"""``tile=...``: submodules that compute each token by itself are computed some tokens at a time.

Forward computes the tiles without a graph, and only the submodule's input is kept. Backward
computes one tile again, differentiates it, and goes on to the next. So the activations inside the
submodule exist for one tile. Gradients of parameters are summed over the tiles, in float32 if they
are of half types, and rounded once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from bmt_core.errors import ConfigError
from bmt_core.torch_internals import (
    has_gradient_hooks,
    never_compiled,
    version_of,
    without_script_optimization,
)
from bmt_params.guards.first_derivatives import first_derivatives_only
from bmt_params.modules.outermost_call import module_call
from bmt_params.nested import map_tensors, tensors_in
from bmt_params.shard import summation_dtype
from bmt_zero.direct_linear import DeferredGradient, GradientCall, ParameterIndex, RunningCall
from bmt_zero.forward_state import Modes, RandomNumbers


def check_tile(tile: int | None, layers: Sequence[nn.Module], *, is_compiled: bool = False) -> None:
    """Raise :class:`ConfigError` if ``tile`` is no number of tokens, or no module in ``layers``
    can be tiled.
    """
    if tile is None:
        return
    if type(tile) is not int or tile < 1:
        raise ConfigError(f"tile must be a number of tokens, such as 4096, and not {tile!r}.")
    if is_compiled:
        raise ConfigError(
            f"tile={tile} computes parts of a Block in tiles, which compiled code cannot. Leave out"
            " one of tile=... and compile=True."
        )
    if not any(True for layer in layers for _ in token_wise_modules(layer)):
        kinds = " or ".join(sorted({type(layer).__name__ for layer in layers})) or "the model"
        raise ConfigError(
            f"tile={tile} computes submodules in tiles that say they compute each token by itself,"
            f" and none in {kinds} says so. Before the Block is made, declare them, as with"
            " layer.mlp.token_wise = True; or leave out tile=..."
        )


def token_wise_modules(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules in ``module`` that say ``token_wise = True``, by name, except
    those in other Blocks.
    """
    if getattr(module, "token_wise", False) is True:
        yield name, module
        return
    for key, child in module.named_children():
        if "_bmt_block" not in child.__dict__:
            yield from token_wise_modules(child, f"{name}.{key}" if name else key)


def tiled_modules(
    running: RunningCall, block: nn.Module, tile: int, indices: Mapping[int, ParameterIndex]
) -> list[tuple[dict[str, Any], str, TiledModule]]:
    """Return ``(module.__dict__, "forward", TiledModule)`` for each module in ``block`` to compute
    in tiles. ``indices`` gives the :class:`ParameterIndex` by the parameter's id.
    """
    return [
        (module.__dict__, "forward", TiledModule(running, module, name, tile, indices))
        for name, module in token_wise_modules(block)
    ]


class TiledModule:
    """The ``forward`` that a Block sets on a module while its modules hold whole parameters."""

    def __init__(
        self,
        running: RunningCall,
        module: nn.Module,
        name: str,
        size: int,
        indices: Mapping[int, ParameterIndex],
    ) -> None:
        self.running, self.size = running, size
        self._name = f"{name} ({type(module).__name__})" if name else type(module).__name__
        self._module = weakref.ref(module)
        slots: dict[int, tuple[dict[str, Any], str]] = {
            id(parameter): (each._parameters, key)
            for each in module.modules()
            for key, parameter in each._parameters.items()
            if parameter is not None
        }
        self._slots = list(slots.values())
        self.numbers = {indices[key]: n for n, key in enumerate(slots) if key in indices}
        """The number of each parameter among :attr:`parameters`."""
        if "forward" in module.__dict__:
            raise self.refused("has a forward of its own, set on the object: set it on the class")
        if any("_bmt_block" in each.__dict__ for each in module.modules() if each is not module):
            raise self.refused("has a Block in it: make a Block of the layer around it alone")

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Those that the module and modules in it hold now."""
        return [holder[name] for holder, name in self._slots]

    @never_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = tensors_in((args, kwargs))
        if len(tensors) != 1 or not tensors[0].is_floating_point() or tensors[0].dim() < 2:
            shapes = [f"{tuple(t.shape)} of {t.dtype}" for t in tensors]
            raise self.refused(
                "must get one floating tensor (batch, tokens, ...) or (tokens, width), and got"
                f" {' and '.join(shapes) or 'none'}"
            )
        (input,) = tensors
        if input.shape[1 if input.dim() > 2 else 0] <= self.size:
            return self.compute(args, kwargs)
        recomputation, parameters = self.running.recomputation, self.parameters
        before = 0 if recomputation is None else recomputation.before_layer(input)
        call = _TiledCall(self, args, kwargs, [input, *parameters])
        output: torch.Tensor = _Tiles.apply(input, call, *parameters)  # type: ignore[no-untyped-call]
        if recomputation is not None:
            recomputation.after_layer(before)
        return output

    def compute(self, args: Any, kwargs: Any) -> Any:
        """Call the module's own forward."""
        module = self._module()
        assert module is not None
        return type(module).forward(module, *args, **kwargs)

    def tiles(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return views of the tiles of ``tensor``."""
        views: Sequence[torch.Tensor] = torch.split(tensor, self.size, 1 if tensor.dim() > 2 else 0)
        return views

    def state(self, input: torch.Tensor) -> Any:
        """Return what differs after a forward that cannot be repeated for each tile."""
        module = self._module()
        assert module is not None
        buffers = [(id(buffer), version_of(buffer)) for buffer in module.buffers()]
        return buffers, version_of(input), has_gradient_hooks(self.parameters)

    def refused(self, problem: str) -> ConfigError:
        """Return the error for a module that cannot be computed in tiles."""
        return ConfigError(
            f"{self._name} is token_wise, is to be computed in tiles of {self.size} tokens, and"
            f" {problem}. Or leave out tile=..., or set token_wise = True only on modules in it."
        )


class _TiledCall:
    """One call of a module in tiles, and what its backward needs to compute them again."""

    def __init__(
        self, module: TiledModule, args: Any, kwargs: Any, differentiated: list[torch.Tensor]
    ) -> None:
        self._module, self._call = module, module.running.call
        # Without the input, which only autograd keeps.
        self._inputs = map_tensors(lambda tensor: tensor.new_empty(0), (args, kwargs))
        self._device = differentiated[0].device
        self._modes = Modes(self._device)
        self._random: list[RandomNumbers] = []
        self._trains = torch.is_grad_enabled() and True in [t.requires_grad for t in differentiated]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        before, outputs = self._module.state(input), None
        for number, tile in enumerate(self._module.tiles(input)):
            if self._trains:
                self._random.append(RandomNumbers(self._device))
            output, dim = self._compute(tile), 2 if tile.dim() > 2 else 1
            if self._trains:
                self._random[-1].forget_unless_drawn()
            if not isinstance(output, torch.Tensor) or output.shape[:dim] != tile.shape[:dim]:
                shape = getattr(output, "shape", None)
                found = type(output).__name__ if shape is None else tuple(shape)
                raise self._module.refused(
                    f"must return one tensor with the batch and tokens of its input, and returned"
                    f" {found} of {tuple(tile.shape)}"
                )
            # Their width is known from the first one.
            if outputs is None:
                outputs = output.new_empty((*input.shape[:dim], *output.shape[dim:]))
                parts = self._module.tiles(outputs)
            parts[number].copy_(output)
        if self._module.state(input) != before:
            raise self._module.refused(
                "wrote to its input or a buffer or put a hook on a parameter, which backward would"
                " repeat"
            )
        assert outputs is not None
        return outputs

    def backward(
        self, input: torch.Tensor, grad: torch.Tensor, needed: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the input and of the module's parameters."""
        if self._call is not None:
            self._call.begin_backward()
        parameters = self._module.parameters
        trained = [n for n, p in enumerate(parameters) if needed[1 + n] and p.requires_grad]
        sums = _Sums(parameters, self._module.numbers)
        of_input = torch.zeros_like(input) if needed[0] else None
        parts = self._module.tiles(input if of_input is None else of_input)
        tiles = zip(self._module.tiles(input), self._module.tiles(grad), strict=True)
        for number, (tile, grad_of_tile) in enumerate(tiles):
            tile = tile.detach().requires_grad_(needed[0])
            output = self._compute_again(tile, number, sums)
            sources = [tile] * needed[0] + [parameters[n] for n in trained]
            # The graphs of all tiles are alike.
            if number == 0:
                self._check_sources(output, sources)
            if not output.requires_grad:
                continue
            grads = [*torch.autograd.grad(output, sources, grad_of_tile, allow_unused=True)]
            # Before the next tile's is made.
            del output
            if needed[0] and (of_tile := grads.pop(0)) is not None:
                parts[number].copy_(of_tile)
            for n, of_parameter in zip(trained, grads, strict=True):
                if of_parameter is not None:
                    sums.of(n).add_(of_parameter)
        return [of_input, *sums.rounded()]

    def _compute(self, tile: torch.Tensor) -> Any:
        return self._module.compute(*map_tensors(lambda _: tile, self._inputs))

    def _compute_again(self, tile: torch.Tensor, number: int, sums: _Sums) -> torch.Tensor:
        running = self._module.running
        before = running.call, running.recomputation
        running.call, running.recomputation = sums, None
        try:
            with (
                saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
                without_script_optimization(),
                torch.enable_grad(),
                self._modes.restored(),
                self._random[number].repeated(),
                module_call(own_random=False),
            ):
                output: torch.Tensor = self._compute(tile)
                return output
        finally:
            running.call, running.recomputation = before

    def _check_sources(self, output: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
        """Raise if ``output`` depends on a leaf beside ``sources``, which would get no gradient."""
        edges = [get_gradient_edge(source) for source in sources]
        known: set[Any] = {(edge.node, edge.output_nr) for edge in edges}
        pending: list[Any] = [] if output.grad_fn is None else [output.grad_fn]
        seen = set(pending)
        while pending:
            node = pending.pop()
            if hasattr(node, "variable"):
                raise self._module.refused(
                    f"reads a tensor of shape {tuple(node.variable.shape)} that requires a gradient"
                    " and is neither its argument nor a parameter in it"
                )
            following = {
                n for n, at in node.next_functions if n is not None and (n, at) not in known
            }
            pending += following - seen
            seen |= following


class _Sums(GradientCall):
    """Sums of gradients over tiles. Linear layers add theirs without rounding them: see
    :mod:`bmt_zero.direct_linear`.
    """

    takes_small = True

    def __init__(
        self, parameters: Sequence[torch.Tensor], numbers: Mapping[ParameterIndex, int]
    ) -> None:
        self._parameters, self._numbers = parameters, numbers
        self._sums: list[torch.Tensor | None] = [None] * len(parameters)

    def begin_backward(self) -> None:
        """The backward of the Block has begun."""

    def accept(self, index: ParameterIndex, gradient: DeferredGradient) -> bool:
        gradient.add_to(self.of(self._numbers[index]))
        return True

    def of(self, number: int) -> torch.Tensor:
        """Return the sum for a parameter, zero at first."""
        total = self._sums[number]
        if total is None:
            parameter = self._parameters[number]
            dtype = summation_dtype(parameter.dtype)
            total = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
            self._sums[number] = total
        return total

    def rounded(self) -> Iterator[torch.Tensor | None]:
        """Yield the sums in the dtypes of the parameters, and forget them."""
        for number, parameter in enumerate(self._parameters):
            total, self._sums[number] = self._sums[number], None
            yield None if total is None else total.to(parameter.dtype)


class _Tiles(torch.autograd.Function):
    """(input, call, parameters...) -> output."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, call: _TiledCall, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(input)
        ctx.call = call
        return call.forward(input)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, *grads: Any) -> Any:
        (input,), (needs_input, _, *needed) = ctx.saved_tensors, ctx.needs_input_grad
        of_input, *of_parameters = ctx.call.backward(input, grads[0], [needs_input, *needed])
        return of_input, None, *of_parameters
