"""The parts of the current run that optimizers use; before ``init_distributed()`` one process and
plain torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from bmt_core.comm.protocols import Group
from bmt_core.comm.torch_backend import SingleGroup
from bmt_core.ops import REFERENCE, Kernels, choose_host_kernels
from bmt_core.run.runtime import current, is_initialized
from bmt_params.parameter import DistributedParameter


def world() -> Group:
    """Return the group of all ranks."""
    return current().world if is_initialized() else SingleGroup(0)


def sum_group() -> Group:
    """Return the ranks whose losses are parts of one sum."""
    return current().topology.sum_group if is_initialized() else SingleGroup(0)


def gradient_divisor() -> int:
    """Return the number by which the run divides gradients that it has summed over ranks: 1 unless
    they are means.
    """
    return current().gradient_divisor if is_initialized() else 1


def with_a_group(params: Any) -> Any:
    """Return what an optimizer is made of: ``params``, or one empty group where a rank may have
    nothing to train.

    torch refuses an empty list, and takes an empty group. Where all ranks have parts of all
    parameters an empty list is a mistake, but a stage of a pipeline may have frozen layers only.
    """
    if isinstance(params, (torch.Tensor, dict)) or not is_initialized():
        return params
    listed = list(params)
    return listed if listed or not current().topology.other_axes else [{"params": []}]


def replicas(parameter: torch.nn.Parameter) -> int:
    """Return how many ranks hold the same elements of ``parameter``; ordinary parameters are whole
    on every rank.
    """
    return parameter.replicas if isinstance(parameter, DistributedParameter) else world().size


def device_of(parameters: Iterable[torch.nn.Parameter]) -> torch.device:
    """Return the device of the run; without a run, that of the first of ``parameters``, or
    the CPU.
    """
    if is_initialized():
        return current().device
    return next((p.device for p in parameters), torch.device("cpu"))


def kernels_on(device: torch.device) -> Kernels:
    """Return the run's kernels if they serve ``device``, otherwise (or without a run) the
    plain-torch reference.
    """
    return current().kernels.on(device) if is_initialized() else REFERENCE


def kernels_for(tensors: Iterable[torch.Tensor], device: torch.device) -> Kernels:
    """Return the kernels for ``tensors`` if all are on ``device``; the reference takes
    any mixture.
    """
    return kernels_on(device) if all(tensor.device == device for tensor in tensors) else REFERENCE


def host_kernels() -> Kernels:
    """Return kernels for work on the host, whatever the run's device: compiled ones, if any, that
    ``BMT_KERNELS`` allows.
    """
    host = torch.device("cpu")
    if not is_initialized() or current().device.type == "cpu":
        return kernels_on(host)
    return choose_host_kernels(current().registry.kernel_providers)
