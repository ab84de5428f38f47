"""The states of the random generators of torch, its CUDA device, ``random`` and numpy."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from bmt_core.errors import CheckpointError
from bmt_core.run.runtime import current, is_initialized


class _Generator(NamedTuple):
    """How to read a generator's state as tensors and plain values, how to restore it, how to seed
    it, and how to check a state.
    """

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    seed: Callable[[int], Any]
    check: Callable[[Any], Any]  # sets the state of another generator of this kind


def random_states() -> dict[str, Any]:
    """Return the states of this rank's generators by kind: ``torch``, ``cuda`` (the run's device),
    ``python``, ``numpy``.
    """
    return {kind: generator.get() for kind, generator in _generators().items()}


def data_rank_and_grid() -> dict[str, Any]:
    """Return this rank's data rank and the grid's axes, which :func:`restore_random_states` needs
    of each rank.
    """
    if not is_initialized():
        return {"data_rank": 0, "grid": []}
    topology = current().topology
    return {
        "data_rank": topology.data_rank,
        "grid": [list(axis) for axis in topology.sizes.items() if axis[1] > 1],
    }


def check_random_states(saved: Any, grids: Any, world_size: int) -> None:
    """Raise :class:`CheckpointError` unless each rank's :func:`random_states` and
    :func:`data_rank_and_grid` returned these.
    """
    are_grids = isinstance(grids, list) and all(isinstance(own, dict) for own in grids)
    if (
        not are_grids
        or len(grids) != world_size
        or not all(own.keys() == data_rank_and_grid().keys() for own in grids)
    ):
        raise CheckpointError(f"The data ranks and grids are not those of {world_size} rank(s).")
    if (
        not isinstance(saved, list)
        or len(saved) != world_size
        or not all(isinstance(states, dict) for states in saved)
    ):
        raise CheckpointError(
            f"The states of random generators are not those of {world_size} rank(s)."
        )
    for rank, states in enumerate(saved):
        for kind, generator in _generators().items():
            if states.get(kind) is None:
                continue
            try:
                generator.check(states[kind])
            except Exception as error:  # whatever the libraries raise for arbitrary values
                raise CheckpointError(
                    f"The state of rank {rank}'s random generator {kind!r} is damaged"
                    f" ({type(error).__name__}: {error})."
                ) from error


def restore_random_states(
    saved: Sequence[dict[str, Any]],
    grids: Sequence[dict[str, Any]],
    rank: int,
    here: Sequence[dict[str, Any]],
) -> list[str]:
    """Restore ``saved``, the states of every rank of the saved run; return the kinds that were
    seeded instead.

    ``grids`` are those of the saved run, ``here`` those of this one. On the same grid each
    rank gets its own states. On another grid with as many data ranks, a rank gets the states of its
    data rank, if all ranks with this data rank had the same. Otherwise a kind whose state was the
    same on all ranks is restored on all; a kind whose states differed is seeded from rank 0's state
    and this rank's data rank.
    """
    seeded = []
    own_data, data_ranks = here[rank]["data_rank"], {own["data_rank"] for own in here}
    for kind, generator in _generators().items():
        states = [states.get(kind) for states in saved]
        if any(state is None for state in states):
            continue
        digests = [_digest(state) for state in states]
        of_data: dict[int, set[str]] = {}
        for own, digest in zip(grids, digests, strict=True):
            of_data.setdefault(own["data_rank"], set()).add(digest)
        if list(grids) == list(here):
            generator.set(states[rank])
        elif of_data.keys() == data_ranks and all(len(found) == 1 for found in of_data.values()):
            generator.set(states[digests.index(next(iter(of_data[own_data])))])
        elif len(set(digests)) == 1:
            generator.set(states[0])
        else:
            generator.seed(int(_hash(f"{digests[0]} {own_data}")[:8], 16))
            seeded.append(kind)
    return seeded


def _generators() -> dict[str, _Generator]:
    found = {
        "torch": _Generator(
            torch.get_rng_state,
            torch.set_rng_state,
            torch.default_generator.manual_seed,
            lambda state: torch.Generator().set_state(state),
        ),
        "python": _Generator(
            _get_python,
            _set_python,
            random.seed,
            lambda state: _set_python(state, random.Random().setstate),
        ),
    }
    if is_initialized() and current().device.type == "cuda":
        index = current().device.index
        cuda = torch.cuda.default_generators[index]
        found["cuda"] = _Generator(
            cuda.get_state,
            cuda.set_state,
            cuda.manual_seed,
            lambda state: torch.Generator(cuda.device).set_state(state),
        )
    try:
        import numpy
    except ModuleNotFoundError:
        return found
    found["numpy"] = _Generator(
        _get_numpy,
        _set_numpy,
        numpy.random.seed,
        lambda state: _set_numpy(state, numpy.random.RandomState().set_state),
    )
    return found


def _get_python() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    return {
        "version": version,
        "words": torch.tensor(words, dtype=torch.int64, device="cpu"),
        "gauss": gauss,
    }


def _set_python(state: dict[str, Any], setstate: Callable[[Any], Any] = random.setstate) -> None:
    setstate((state["version"], tuple(state["words"].tolist()), state["gauss"]))


def _get_numpy() -> dict[str, Any]:
    import numpy

    state: Any = numpy.random.get_state()
    name, words, position, has_gauss, gauss = state
    words = torch.from_numpy(words.astype("int64"))
    return {
        "name": name,
        "words": words,
        "position": position,
        "has_gauss": has_gauss,
        "gauss": gauss,
    }


def _set_numpy(state: dict[str, Any], set_state: Callable[[Any], Any] | None = None) -> None:
    import numpy

    words = state["words"].numpy().astype("uint32")
    values = (state["name"], words, state["position"], state["has_gauss"], state["gauss"])
    (set_state or numpy.random.set_state)(values)


def _digest(state: Any) -> str:
    if isinstance(state, torch.Tensor):
        return _hash(str(state.tolist()))
    return _hash(
        str(
            {
                key: _digest(part) if isinstance(part, torch.Tensor) else part
                for key, part in state.items()
            }
        )
    )


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
