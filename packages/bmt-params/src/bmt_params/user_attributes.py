"""Attributes that a program sets on parameters, such as the ``infshape`` of muP.

In forward a tensor that holds the whole values stands in a parameter's place, and code that reads
``self.weight.scale`` must find there what it would find on the parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bmt_params.parameter import DistributedParameter

_OF_BMT = frozenset(DistributedParameter.__annotations__)


def user_attributes(parameter: torch.Tensor) -> dict[str, Any]:
    """Return the attributes of ``parameter`` that bmt has not set itself.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> weight.scale = 3.0
    >>> user_attributes(weight)
    {'scale': 3.0}
    """
    return {
        name: value
        for name, value in vars(parameter).items()
        if name not in _OF_BMT and not name.startswith("_bmt")
    }


class UserAttributes:
    """Copies the attributes that the program has set on ``parameters`` to the tensors that stand in
    their place.

    For each call this compares one number, unless some parameter has such attributes.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._attributes = [vars(parameter) for parameter in parameters]
        # The number of attributes at the last look, and by index all names that were ever copied:
        # some tensors stay from step to step, and an attribute may be deleted.
        self._count = -1
        self._copied: dict[int, set[str]] = {}

    def copy_to(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give each of ``tensors`` the attributes of its parameter."""
        count = sum(map(len, self._attributes))
        if count != self._count:
            self._count = count
            for index, parameter in enumerate(self._parameters):
                if present := user_attributes(parameter):
                    self._copied.setdefault(index, set()).update(present)
        for index in self._copied:
            names = self._copied[index]
            present, target = user_attributes(self._parameters[index]), vars(tensors[index])
            names |= present.keys()
            for name in names - present.keys():
                target.pop(name, None)
            target.update(present)
