"""``bmt pipeline-plan`` and the pictures."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from bmt_core.errors import ConfigError
from bmt_pipeline.cli import pipeline_plan
from bmt_pipeline.schedules import SCHEDULES, make_schedule, make_timeline
from bmt_pipeline.schedules.drawing import draw_svg, draw_text

SVG = "{http://www.w3.org/2000/svg}"


def test_plan_shows_order_bubble_memory_and_time(tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    sizes = ["--stages", "2", "--micro-batches", "3", "--forward-ms", "1", "--backward-ms", "2"]
    result = CliRunner().invoke(pipeline_plan, [*sizes, "--svg", str(picture)])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == "stage 0 F0--F1--········B0------F2--B1------····B2------"
    assert lines[1] == "stage 1 ····F0--B0------F1--B1------F2--B2------········"
    cells = [
        [cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")
    ]
    assert cells == [["0", "0", "25.0%", "3", "2"], ["1", "1", "25.0%", "0", "1"]]
    assert (
        "A step of 1f1b takes 12 ms. The formula of its paper, without transfers, gives 12 ms."
        in result.output
    )
    assert picture.read_text() == draw_svg(make_timeline(make_schedule("1f1b", 2, 3)))


def test_plan_of_a_schedule_that_nobody_has_names_those_there_are() -> None:
    result = CliRunner().invoke(
        pipeline_plan, ["--stages", "2", "--micro-batches", "3", "--schedule", "zerobubble"]
    )
    assert isinstance(result.exception, ConfigError)
    assert "Did you mean 'zero-bubble'" in str(result.exception)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_svg_has_a_box_per_action_and_labels_per_stage(name: str) -> None:
    schedule = make_schedule(name, 3, 5, 2 if name in ("interleaved", "zero-bubble") else 1)
    timeline = make_timeline(schedule)
    root = ElementTree.fromstring(draw_svg(timeline))
    boxes = [box for box in root.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
    assert len(boxes) == sum(map(len, schedule.orders))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    for stage in range(3):
        assert (
            f"stage {stage}: bubble {timeline.bubble(stage):.1%}, {schedule.peak_live(stage)} live"
            in texts
        )


@pytest.mark.parametrize("width", [20, 80, 400])
def test_text_fits_the_terminal(width: int) -> None:
    lines = draw_text(
        make_timeline(make_schedule("interleaved", 4, 8, 2)), width=width
    ).plain.split("\n")
    assert len({len(line) for line in lines}) == 1
    assert len(lines) == 4 and len(lines[0]) <= width
