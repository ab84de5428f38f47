"""``Report``: how a run is going, for people (progress bar, loss curve) and for programs
(``metrics.jsonl``).
"""

from __future__ import annotations

import importlib.util
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from callbacks import Callback
from meter import Reading

SECONDS_BETWEEN_DRAWINGS = 15


class Report:
    """Writes ``metrics.jsonl`` and ``loss.png`` into ``folder`` and shows progress: a bar on a
    terminal, else plain lines.

    The curve is drawn again and again while training goes on.

    Made on every rank, it does something only where ``active``. Records of steps after
    ``first_step``, from a run that got further before it stopped, are dropped. ``callbacks`` are
    called with what each further record of a step holds.
    """

    def __init__(
        self,
        folder: Path,
        *,
        first_step: int,
        steps: int,
        active: bool,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self._folder = folder
        self._steps = steps
        self._active = active
        self._callbacks = callbacks
        self._records: list[dict[str, Any]] = []
        self._drawn_at = time.monotonic()
        self._progress: Progress | None = None
        if not active:
            return
        folder.mkdir(parents=True, exist_ok=True)
        metrics, unfinished = folder / "metrics.jsonl", folder / ".metrics.jsonl"
        if first_step > 0 and metrics.exists():
            self._records = [
                record for record in whole_records(metrics) if record["step"] <= first_step
            ]
        unfinished.write_text("".join(json.dumps(record) + "\n" for record in self._records))
        unfinished.replace(metrics)
        self._file = metrics.open("a")
        console = Console()
        if console.is_terminal:
            columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[metrics]}"))
            self._progress = Progress(*columns, TimeRemainingColumn(), console=console)
            self._task = self._progress.add_task(
                "training", total=steps, completed=first_step, metrics=""
            )

    def __enter__(self) -> Report:
        if self._progress is not None:
            self._progress.start()
        self.say(f"while it trains: {self._files()}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._active:
            return
        if self._progress is not None:
            self._progress.stop()
        self._file.close()
        self._draw()
        self.say(f"written: {self._files()}")

    def advance(self, step: int) -> None:
        """Say that ``step`` is done."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def training(self, step: int, reading: Reading, *, lr: float, grad_norm: float) -> None:
        """Record the mean training loss since the last record, and how training goes."""
        if not self._active:
            return
        self._record(
            step=step,
            loss=reading.loss,
            lr=lr,
            grad_norm=grad_norm,
            tokens_per_second=round(reading.tokens_per_second),
            milliseconds_per_step=round(reading.milliseconds_per_step, 2),
            peak_memory_bytes=reading.peak_memory_bytes,
        )
        speed = (
            f"{reading.tokens_per_second:,.0f} tokens/s  {reading.milliseconds_per_step:,.0f}"
            f" ms/step  {reading.peak_memory_bytes / 2**30:.2f} GiB"
        )
        if self._progress is not None:  # which has room for less
            self._progress.update(self._task, metrics=f"loss {reading.loss:.3f}  {speed}")
        else:
            print(
                f"step {step:>{len(str(self._steps))}}/{self._steps}  loss {reading.loss:.3f}"
                f"  lr {lr:.1e}  grad norm {grad_norm:.2f}  {speed}",
                flush=True,
            )

    def held_out(self, step: int, loss: float) -> None:
        """Record the loss on held-out text."""
        if self._active:
            self._record(step=step, held_out_loss=loss)
            self.say(f"step {step}: held-out loss {loss:.3f} nats per byte")

    def say(self, line: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if self._progress is not None:
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
        elif self._active:
            print(line, flush=True)

    def _files(self) -> str:
        """Say where metrics and picture are."""
        picture = f", loss curve in {self._folder / 'loss.png'}"
        has_picture = importlib.util.find_spec("matplotlib") is not None
        return f"metrics in {self._folder / 'metrics.jsonl'}{picture if has_picture else ''}"

    def _record(self, **values: Any) -> None:
        # JSON has no infinity: the norm of a gradient that overflowed becomes null.
        record = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._records.append(record)
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        step, measured = (
            int(values.pop("step")),
            {name: float(value) for name, value in values.items()},
        )
        for callback in self._callbacks:
            callback(step, measured)
        if (
            time.monotonic() - self._drawn_at > SECONDS_BETWEEN_DRAWINGS
            and importlib.util.find_spec("matplotlib")
        ):
            self._draw()

    def _draw(self) -> None:
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError:
            self.say("No loss curve was drawn: that needs matplotlib (pip install matplotlib).")
            return
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        for name, label, style in (("loss", "training", "-"), ("held_out_loss", "held out", "o-")):
            # Between the untrained model and the next evaluation nothing was measured.
            points = [point for point in self._points(name) if point[0] > 0]
            if points:
                axes.plot(*zip(*points, strict=True), style, label=label)
        held_out = self._points("held_out_loss")
        losses = [f"{loss:.3f} {when(step)}" for step, loss in held_out[:1] + held_out[1:][-1:]]
        axes.set_title(f"{self._folder}: held-out loss {', '.join(losses)}")
        axes.set(xlabel="step", ylabel="loss (nats per byte)")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
        figure.savefig(self._folder / ".loss.png", dpi=120)
        # Whoever looks at it sees a whole picture.
        (self._folder / ".loss.png").replace(self._folder / "loss.png")
        self._drawn_at = time.monotonic()

    def _points(self, name: str) -> list[tuple[int, float]]:
        """Return step and value of each record that has ``name``."""
        return [
            (record["step"], record[name])
            for record in self._records
            if record.get(name) is not None
        ]


def when(step: int) -> str:
    """Return when a loss was measured.

    >>> when(0), when(400)
    ('untrained', 'after 400 steps')
    """
    return f"after {step} steps" if step > 0 else "untrained"


def whole_records(metrics: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a run, which may have been killed while it wrote one."""
    for line in metrics.read_text().splitlines():
        with suppress(json.JSONDecodeError):
            yield json.loads(line)
