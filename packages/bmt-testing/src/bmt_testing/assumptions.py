"""``why_parts_differ``: why a model computes something else on the ranks' parts of a batch than on
the whole batch, in plain torch.

Data parallelism assumes that a batch's loss is the mean of those of its parts, and that no row
depends on another one. Where ranks compute what one process computes that takes their parts one by
one, sharding is right, and one of these does not hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten_with_path

from bmt_testing.user_model import Batch, UserModel


def why_parts_differ(user: UserModel, seed: int, batch_seeds: Iterable[int], parts: int) -> str:
    """Return a sentence that says which assumption does not hold for ``user``'s model and the first
    of these batches for which one does not, divided into ``parts``; "" if all hold.
    """
    for batch_seed in batch_seeds:
        if why := _why_parts_differ(user, seed, batch_seed, parts):
            return why
    return ""


def _why_parts_differ(user: UserModel, seed: int, batch_seed: int, parts: int) -> str:
    batch = user.batch(batch_seed, torch.float64, torch.device("cpu"))
    whole = _Call(user, seed, batch)
    of_parts = [_Call(user, seed, part) for part in user.parts(batch, parts)]
    buffers = [
        name
        for name, value in whole.buffers.items()
        if not _equal(value, of_parts[0].buffers[name])
    ]
    if buffers:
        return (
            f"{_listed('Buffer', buffers)} computed from a rank's own data: the statistics of its"
            " rows are not those of the whole batch. nn.SyncBatchNorm has those of all ranks;"
            " reduce other statistics over all ranks before they go into a buffer."
        )
    if name := _mixing(whole, of_parts):
        return (
            f"The output of {name} for a row depends on other rows of the batch, of which a rank"
            " has only its own. If another dim than these has the rows, say which: batch_dim=1."
        )
    if counted := _counted(whole, of_parts, user, batch, parts):
        return (
            f"The loss is a mean over {counted}, and the mean of the ranks' means is another one."
            " Return the sum and the number, (loss_sum, count), and train with"
            " manager.backward(loss_sum, count=count)."
        )
    if name := _not_a_mean(whole, of_parts):
        return (
            f"{name} of the whole batch is not the mean of those of the ranks' rows, as of a loss"
            " that balances or contrasts rows. Compute it from the rows of all ranks:"
            " bmt.distributed.all_gather(x, sum_gradients=True)."
        )
    losses = torch.stack([part.loss for part in of_parts])
    if _equal(losses.sum(), whole.loss) and not _equal(losses.mean(), whole.loss):
        return (
            "The loss is a sum over rows, and ranks train with the mean of their losses. Divide it"
            " by the number of rows, or return the sum and the number, (loss_sum, count)."
        )
    if not _equal(losses.mean(), whole.loss):
        return (
            "The loss of the whole batch is not the mean of the losses of the ranks' rows. If it"
            " balances or contrasts rows, compute it from those of all ranks:"
            " bmt.distributed.all_gather(x, sum_gradients=True). If it divides by something that"
            " ranks have different amounts of, return the sum and the number."
        )
    return ""


class _Call:
    """One call of the model for a batch: the loss, and what each module returned."""

    def __init__(self, user: UserModel, seed: int, batch: Batch) -> None:
        model = user.model(seed, torch.float64).train()
        self.outputs: dict[tuple[str, int, str], torch.Tensor] = {}
        for name, module in model.named_modules():
            module.register_forward_hook(
                lambda module, _, output, name=name: self._note(name, module, output)
            )
        self._calls: dict[str, int] = {}
        self.loss = user.loss(model, batch).mean.detach()
        self.buffers = dict(model.named_buffers())

    def _note(self, name: str, module: nn.Module, output: Any) -> None:
        number = self._calls[name] = self._calls.get(name, 0) + 1
        label = f"{name or 'the model'} ({type(module).__name__})"
        for path, leaf in tree_flatten_with_path(output)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                self.outputs[label, number, str(path)] = leaf.detach()


def _mixing(whole: _Call, of_parts: list[_Call]) -> str:
    """Return the first module whose output for the whole batch is not that for its parts,
    joined.
    """
    for key, value in whole.outputs.items():
        outputs = [part.outputs.get(key) for part in of_parts]
        found = [output for output in outputs if output is not None]
        if len(found) < len(outputs):
            continue
        for dim in range(value.dim()):
            is_joined = value.shape[dim] == sum(out.shape[dim] for out in found if out.dim() > dim)
            if is_joined and all(out.dim() == value.dim() for out in found):
                joined = torch.cat(found, dim) if _fit(found, value, dim) else None
                if joined is not None and joined.shape == value.shape:
                    if not _equal(joined, value):
                        return key[0]
                    break
    return ""


def _counted(whole: _Call, of_parts: list[_Call], user: UserModel, batch: Batch, parts: int) -> str:
    """Return which elements of the batch weigh the parts' losses, so that their mean is that of the
    whole batch.
    """
    losses = torch.stack([part.loss for part in of_parts])
    divided = [_named_tensors(part) for part in user.parts(batch, parts)]
    for name in divided[0]:
        for words, chosen in _CHOICES.items():
            counts = torch.stack([chosen(part[name]).sum() for part in divided]).double()
            is_unequal = counts.min() != counts.max()
            if is_unequal and _equal((losses * counts).sum() / counts.sum(), whole.loss):
                numbers = ", ".join(f"{int(count)}" for count in counts)
                return f"the elements of {name} that are {words}, of which ranks have {numbers}"
    return ""


_CHOICES: dict[str, Any] = {
    "not -100": lambda tensor: tensor[..., :] != -100,
    "not -100 after the first": lambda tensor: tensor[..., 1:] != -100,
    "not 0": lambda tensor: tensor != 0,
    "not 0 after the first": lambda tensor: tensor[..., 1:] != 0,
}


def _not_a_mean(whole: _Call, of_parts: list[_Call]) -> str:
    """Return the first number that a module returns which is not the mean of those of the parts."""
    for key, value in whole.outputs.items():
        found = [part.outputs[key] for part in of_parts if key in part.outputs]
        is_inner = value.dim() == 0 and not key[0].startswith("the model ")
        if (
            is_inner
            and len(found) == len(of_parts)
            and not _equal(torch.stack(found).mean(), value)
        ):
            return f"The number that {key[0]} returns"
    return ""


def _fit(found: list[torch.Tensor], value: torch.Tensor, dim: int) -> bool:
    others = [d for d in range(value.dim()) if d != dim]
    return all(out.shape[d] == value.shape[d] for out in found for d in others)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two results differ by no more than sums in another order explain: some models compute
    their loss in float32, whatever dtype they have.
    """
    if one.shape != other.shape:
        return False
    dtype = one.dtype if one.is_floating_point() else torch.float64
    one, other = one.double(), other.double()
    scale = max(1.0, float(other.abs().max())) if other.numel() else 1.0
    return torch.allclose(one, other, rtol=0, atol=_ROUNDINGS * torch.finfo(dtype).eps * scale)


_ROUNDINGS = 64


def _named_tensors(batch: Batch, name: str = "the batch") -> dict[str, torch.Tensor]:
    return dict(_walk(batch, name))


def _walk(batch: Batch, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(batch, torch.Tensor):
        if batch.dim() and not batch.is_complex():
            yield name, batch
    elif isinstance(batch, dict):
        for key, value in batch.items():
            yield from _walk(value, repr(key))
    elif isinstance(batch, tuple | list):
        for index, value in enumerate(batch):
            yield from _walk(value, f"tensor {index} of {name}")


def _listed(what: str, names: list[str]) -> str:
    if len(names) == 1:
        return f"{what} {names[0]} is"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{what}s {', '.join(names[:3])}{more} are"
