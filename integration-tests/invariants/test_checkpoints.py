"""What one grid saves, every other loads: the files of N ranks, loaded by M, saved and loaded by N,
have the same values in every bit.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import bmt_checkpoint
from bmt_testing import run_ranks
from bmt_zero import Block

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Values:
    """What is drawn: the shapes and dtypes of parameters and buffers; some are in a Block."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    in_block: int
    buffer: tuple[int, ...]


SHAPES = st.lists(st.integers(1, 17), max_size=3).map(tuple)


@st.composite
def values(draw: st.DrawFn) -> Values:
    shapes = tuple(draw(st.lists(SHAPES, min_size=1, max_size=5)))
    return Values(
        shapes=shapes,
        dtypes=tuple(draw(st.sampled_from(DTYPES)) for _ in shapes),
        in_block=draw(st.integers(0, len(shapes))),
        buffer=tuple(draw(st.lists(st.integers(0, 5), max_size=2))),
    )


class Holder(nn.Module):
    """Holds parameters and a buffer, filled with numbers that ``seed`` gives."""

    def __init__(self, case: Values, seed: int | None) -> None:
        super().__init__()
        self.inside, self.outside = nn.ParameterList(), nn.ParameterList()
        generator = torch.Generator().manual_seed(0 if seed is None else seed)
        for number, (shape, dtype) in enumerate(zip(case.shapes, case.dtypes, strict=True)):
            value = torch.randn(shape, generator=generator).to(dtype)
            home = self.inside if number < case.in_block else self.outside
            home.append(torch.zeros_like(value) if seed is None else value)
        self.register_buffer("counts", torch.full(case.buffer, 0 if seed is None else seed))


def pass_on(case: Values, level: int, source: str | None, destination: str) -> None:
    """Load ``source``, or begin with new values, and save them at ``destination``."""
    model = Holder(case, None if source else 7)
    if case.in_block:
        Block(model.inside, zero_level=level)
    if source is not None:
        bmt_checkpoint.load(model, source)
    bmt_checkpoint.save(model, destination)


@settings(max_examples=10)
@given(
    values(),
    st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
    st.sampled_from(["/", ".pt", ".safetensors"]),
)
def test_files_of_n_ranks_are_those_of_m_ranks_in_every_bit(
    case: Values, ranks: tuple[int, int], levels: tuple[int, int], form: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"{folder}/{name}{form}" for name in "abc"]
        run_ranks(pass_on, ranks[0], case, levels[0], None, paths[0])
        run_ranks(pass_on, ranks[1], case, levels[1], paths[0], paths[1])
        run_ranks(pass_on, ranks[0], case, levels[0], paths[1], paths[2])
        plain = Holder(case, 7).state_dict()
        found = Holder(case, None)
        for path in paths:
            bmt_checkpoint.load(found, path)
            for name, value in found.state_dict().items():
                assert value.dtype == plain[name].dtype and torch.equal(value, plain[name])
        assert {path.suffix for path in Path(folder).iterdir()} == {Path(paths[0]).suffix}
