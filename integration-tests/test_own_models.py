"""``assert_matches_single`` passes models and loops as users write them, and finds one mistake of
each kind.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from own_models import RIGHT, WRONG

from bmt_testing import TrainingSettings, assert_matches_single

TWO = TrainingSettings(ranks=2, levels=(3, 1), recompute=(False, True), micro_batches=2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", RIGHT.values(), ids=RIGHT)
def test_what_is_right_passes(case: dict[str, Any]) -> None:
    assert_matches_single(**case, steps=2, settings=TWO)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("case", "said"), WRONG.values(), ids=WRONG)
def test_a_mistake_is_found_and_named(case: dict[str, Any], said: str) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_matches_single(**case, steps=2, settings=TWO)
    message = str(caught.value)
    assert re.search(said, message), message
