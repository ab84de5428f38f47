"""The pictures of docs/concepts.md are those that the script draws, and show what the levels do."""

from __future__ import annotations

from collections import Counter
from xml.etree import ElementTree

import pytest

from concept_pictures import IMAGES, LAYERS, PICTURES, step_events, whole_layers


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_what_the_script_draws(name: str) -> None:
    drawn = PICTURES[name]().svg()
    ElementTree.fromstring(drawn)
    assert (IMAGES / name).read_text() == drawn, "Run tools/concept_pictures.py"


@pytest.mark.parametrize(
    ("level", "gathers", "most"),
    [(3, 2 * LAYERS - 2, 2), (2, LAYERS, LAYERS), (1, LAYERS, LAYERS), (0, 0, LAYERS)],
)
def test_a_drawn_step_has_the_collectives_of_its_level(level: int, gathers: int, most: int) -> None:
    lanes = Counter(event.lane for event in step_events(level))
    assert lanes == Counter(gather=gathers, compute=2 * LAYERS, reduce=LAYERS)
    assert max(count for _, count in whole_layers(level)) == most
