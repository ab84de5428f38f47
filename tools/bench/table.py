"""``table``: records as markdown, with the ratio of bmt to each peer beside its figures. Those of
real models say what share of the GPU's operations they use.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Figures = Sequence[Record]
OURS = "bmt"
OK, SKIPPED = "ok", "skipped"
_HEADER = (
    "batch",
    "toolkit",
    "step, s",
    "tokens/s per rank",
    "bmt to this",
    "peak GiB (reserved)",
    "bmt to this",
    "loss, first → last measured",
    "differs from bmt by",
)
_HEADER_OF_REAL_MODELS = (
    "batch",
    "toolkit",
    "recomputation keeps",
    "tokens/s per rank",
    "MFU",
    "fastest bmt to this",
    "peak GiB (reserved)",
    "loss, first → last",
    "differs from bmt by",
)
OPERATIONS_PER_SECOND = {"H100": 989e12, "H200": 989e12}
"""Of dense bfloat16 products, by NVIDIA's data sheets."""
# What the cases of one table have in common.
_COMMON = ("run", "size", "level", "recompute", "compile", "dtype", "ranks", "float8")


def main(arguments: Sequence[str]) -> int:
    """Print the tables of the records in a file."""
    parser = argparse.ArgumentParser(
        prog="bench table", description="Print the tables of the records in FILE."
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="what `measure --output` wrote")
    path: Path = parser.parse_args(arguments).file
    print(
        format_tables([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()])
    )
    return 0


def format_tables(records: Figures) -> str:
    """Return one table for each run and setting, with a line above that says what was measured."""

    def common(record: Record) -> tuple[Any, ...]:
        # Records of earlier versions have no "float8".
        return *(record.get(name) for name in _COMMON), _name(record)

    return "\n\n".join(
        _format_table(list(rows)) for _, rows in groupby(sorted(records, key=common), common)
    )


def loss_difference(record: Record, other: Record) -> float:
    """Return the largest relative difference between the losses of two cases, over all steps,
    warm-up included.

    >>> loss_difference({"losses": [4.0, 2.0]}, {"losses": [4.0, 2.5]})
    0.25
    """
    pairs: Iterator[tuple[float, float]] = zip(record["losses"], other["losses"], strict=True)
    return max(abs(loss - expected) / abs(loss) for loss, expected in pairs)


def utilization(record: Record) -> float | None:
    """Return which share of the device's operations a real model's training uses, recomputation not
    counted; None if those of the device are not known.

    >>> record = {"device": "NVIDIA H200", "tokens_per_second": 1e4, "flops_per_token": 5e10}
    >>> round(utilization(record), 3)
    0.506
    """
    for name, most in OPERATIONS_PER_SECOND.items():
        if name in record["device"]:
            return float(record["tokens_per_second"] * record["flops_per_token"] / most)
    return None


def _format_table(records: Figures) -> str:
    if records[0].get("model") is not None:
        return _format_real_models(records)
    rows = [_HEADER, tuple("---" for _ in _HEADER)]
    rows += [_row(record, ours) for record, ours in _beside_ours(records)]
    return "\n".join([_title(records), "", *(f"| {' | '.join(row)} |" for row in rows)])


def _format_real_models(records: Figures) -> str:
    rows = [_HEADER_OF_REAL_MODELS, tuple("---" for _ in _HEADER_OF_REAL_MODELS)]
    for record in sorted(records, key=lambda record: int(record["batch"])):
        ours = [
            each
            for each in records
            if (each["batch"], each["toolkit"], each["status"]) == (record["batch"], OURS, OK)
        ]
        start = (str(record["batch"]), record["toolkit"], record["keep"] or "nothing")
        if record["status"] != OK:
            rows.append((*start, _cell(_outcome(record)), *[""] * 5))
            continue
        share, peak = utilization(record), record["peak_allocated"]
        fastest = max((each["tokens_per_second"] for each in ours), default=None)
        rows.append(
            (
                *start,
                f"{record['tokens_per_second']:.0f}",
                "–" if share is None else f"{100 * share:.1f} %",
                "" if fastest is None else f"{fastest / record['tokens_per_second']:.3f}",
                "–" if peak is None else f"{peak:.1f} ({record['peak_reserved']:.1f})",
                f"{record['losses'][0]:.4f} → {record['losses'][-1]:.4f}",
                f"{loss_difference(ours[0], record):.1e}" if ours else "",
            )
        )
    return "\n".join([_title(records), "", *(f"| {' | '.join(row)} |" for row in rows)])


def _name(record: Record) -> str:
    model = record.get("model")
    if model is None:
        return str(record["size"])
    parts = [model["name"]]
    parts += [] if model["layers"] is None else [f"{model['layers']} layers"]
    parts += [] if model["lora"] is None else [f"LoRA of rank {model['lora']}"]
    return ", ".join([*parts, *(["loss without logits"] if record["fused_loss"] else [])])


def _beside_ours(records: Figures) -> list[tuple[Record, Record | None]]:
    """Return the records by batch, each with ours at that batch: with the n-th of ours if it is its
    toolkit's n-th.
    """
    counts: Counter[tuple[Any, ...]] = Counter()
    turns = []
    for record in records:
        kind = (record["batch"], record["toolkit"])
        turns.append(counts[kind])
        counts[kind] += 1
    ours = {
        (record["batch"], turn): record
        for record, turn in zip(records, turns, strict=True)
        if record["toolkit"] == OURS and record["status"] == OK
    }
    pairs = [
        (record, ours.get((record["batch"], turn)))
        for record, turn in zip(records, turns, strict=True)
    ]
    # Stable: inside a batch, the order in which the cases ran.
    return sorted(pairs, key=lambda pair: int(pair[0]["batch"]))


def _title(records: Figures) -> str:
    first = records[0]
    toolkits = {record["toolkit"]: record for record in records if record["status"] != SKIPPED}
    settings = [
        (
            f"{name} {record['toolkit_version']} ({record['optimizer']}, reduces in"
            f" {record['reduce_dtype'] or 'its default'})"
        )
        for name, record in toolkits.items()
    ]
    software = [f"torch {first['torch']}"]
    software += [
        f"{name} {first[name.lower()]}" for name in ("CUDA", "NCCL") if first[name.lower()]
    ]
    arithmetic = first["dtype"]
    if first.get("float8") is not None:
        arithmetic += f", layers in float8 ({first['float8']}, torchao {first['torchao']})"
    return (
        f"**{_name(first)}**: {first['parameters'] / 1e6:,.1f} M parameters, sequence"
        f" {first['shape']['sequence']}, level {first['level']},"
        f" {'recompute' if first['recompute'] else 'no recompute'},"
        f" {'compiled' if first['compile'] else 'eager'}, {arithmetic}. {first['ranks']} ×"
        f" {first['device']}, {', '.join(software)}, {first['date']}. {'; '.join(settings)}. Median"
        f" of {first['steps']} steps after {first['warmup']}."
    )


def _row(record: Record, ours: Record | None) -> tuple[str, ...]:
    start = (str(record["batch"]), record["toolkit"])
    if record["status"] != OK:
        return *start, _cell(_outcome(record)), *[""] * 6
    speed, memory, difference = "", "", ""
    if ours is not None and ours is not record:
        speed = f"{ours['tokens_per_second'] / record['tokens_per_second']:.3f}"
        difference = f"{loss_difference(ours, record):.1e}"
        if record["peak_allocated"] is not None:
            memory = f"{ours['peak_allocated'] / record['peak_allocated']:.3f}"
    peak = "–"
    if record["peak_allocated"] is not None:
        peak = f"{record['peak_allocated']:.1f} ({record['peak_reserved']:.1f})"
    measured = record["losses"][-record["steps"] :]
    return (
        *start,
        f"{record['step_seconds']:.4f}",
        f"{record['tokens_per_second']:.0f}",
        speed,
        peak,
        memory,
        f"{measured[0]:.4f} → {measured[-1]:.4f}",
        difference,
    )


def _outcome(record: Record) -> str:
    """Return why there are no figures; the reason of an exception stands in the record."""
    return str(record["reason"] if record["status"] == SKIPPED else record["status"])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
