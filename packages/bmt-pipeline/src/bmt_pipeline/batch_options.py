"""``check_batch_options``: the form of the arguments that say which dim of which tensors is
the batch.
"""

from __future__ import annotations

from bmt_core.errors import ConfigError


def check_batch_options(batch_dim: object, batch_related: object) -> None:
    """Raise :class:`ConfigError` unless these are a ``batch_dim`` and a ``batch_related`` in the
    form that :class:`PipelineTransformerBlockList` and :func:`train_step` take.

    >>> check_batch_options((0, 1), [0, "mask"])
    >>> check_batch_options(None, "mask")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    bmt_core.errors.ConfigError: batch_related must be a list of numbers and names of ...
    """
    dims = batch_dim if isinstance(batch_dim, tuple) else (batch_dim, batch_dim)
    if batch_dim is not None and not (
        len(dims) == 2 and all(type(dim) is int and dim >= 0 for dim in dims)
    ):
        raise ConfigError(
            "batch_dim must be the number of a dim, 0 or more, or a pair of these for what goes in"
            f" and what comes out, not {batch_dim!r}."
        )
    if batch_related is not None and not isinstance(
        batch_related, (list, tuple, set, frozenset, range)
    ):
        raise ConfigError(
            "batch_related must be a list of numbers and names of arguments, [] for none, not"
            f" {batch_related!r}."
        )
