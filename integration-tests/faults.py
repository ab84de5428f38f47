"""Let one rank of trainings drawn at random fail in one of many ways: do all others end, and do
their errors name that rank?

    python integration-tests/faults.py --faults 200

prints a line for each fault that was not named, and at the end a table, in which each kind of fault
has what an error of another rank says of that rank, and the whole of these errors. The exit status
is 1 if a rank hung, trained on, or ended with an error that does not name the rank that failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "packages" / "bmt-zero" / "tests"))

import torch
from random_differences import settings_of
from random_pipelines import PipelinedTraining
from random_plans import STEPS, Plan, StepPlan, draw
from random_trainings import ShardedTraining
from torch import nn
from torch.utils._pytree import tree_leaves

from bmt_core.comm import Group
from bmt_core.run import runtime
from bmt_core.run.topology import Topology
from bmt_testing import rank_pool
from bmt_testing.outcome import Outcome
from bmt_watch.call_log import RankCalls
from bmt_watch.observer import CallObserver
from bmt_watch.rank_states import Call

KINDS = ("skips", "adds", "shape", "dtype", "raises", "killed", "stopped")
"""The rank leaves a call out, makes one more, makes one of another shape or dtype, raises an error,
or its process is killed or stopped.
"""
CALLS, ENDS = KINDS[:4], KINDS[4:]
# How errors name the rank.
NAMES = {
    **dict.fromkeys(
        CALLS,
        r"rank {rank} is in|call of rank {rank} is|waits for[^.]*rank {rank},|Rank {rank} has",
    ),
    "raises": r"(?s:[Rr]ank {rank}\b.*planted)",
    "killed": r"process of (?:rank \d, .*, and )?rank {rank},|heard of rank {rank} ",
    "stopped": r"waits for .*rank {rank},|heard of rank {rank} ",
}
ERRORS = ("CallError", "RemoteError")
TIMEOUT = 15.0  # seconds, for ranks that wait for one that is stopped
_STARTED = "started"  # a file: when and where the fault happened
# Where in the model errors say that a rank is or was; a part of a pipeline may have several layers.
# Gradients are those of the backward, where nothing else is said.
PLACES = re.compile(
    r"(?P<phase>forward|backward) of (?:layers\.(?P<layer>\d+)"
    r"|layers? (?P<first>\d+)(?: to (?P<last>\d+))?)"
    r"|for gradients of layers\.(?P<reduced>\d+)[\w.]*(?: and \d+ others)?(?![\w.]|, made| and)"
)
VERDICTS = {
    "right": "right layer",
    "near": "that of its last or next call",
    "wrong": "wrong layer",
    "none": "no layer",
}


kept: list[Any] = []
"""The last training, whose model lives until the process ends, as that of a script does."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What ``rank`` does in the forward or the backward of a layer of step ``step``."""

    kind: str
    rank: int
    step: int
    layer: int
    in_backward: bool


def act(fault: Fault, folder: str, place: str = "", *, is_last_part: bool = False) -> None:
    """Do on this rank what the fault is. ``place`` is where in the model that is; ``is_last_part``
    says whether in the last part of a pipeline.
    """
    run = runtime.current()
    is_wrong = run.rank == fault.rank
    if is_wrong:
        observer = run.observer
        last = isinstance(observer, CallObserver) and observer.log.last
        about = time.time(), place, is_last_part, last and vars(last)
        Path(folder, _STARTED).write_text(json.dumps(about))
    if is_wrong and fault.kind == "raises":
        raise RuntimeError("planted")
    if is_wrong and fault.kind in ("killed", "stopped"):
        os.kill(os.getpid(), signal.SIGKILL if fault.kind == "killed" else signal.SIGSTOP)
    makes_the_call = not is_wrong if fault.kind == "skips" else is_wrong or fault.kind != "adds"
    if fault.kind in CALLS and makes_the_call:
        size = 5 if is_wrong and fault.kind == "shape" else 4
        dtype = torch.int32 if is_wrong and fault.kind == "dtype" else torch.float32
        group_of(run.topology).all_reduce(torch.zeros(size, dtype=dtype)).wait()


def group_of(topology: Topology) -> Group:
    """Return the ranks that have the layers of this one: all but those of other stages."""
    return topology.group(axis for axis in topology.sizes if axis != "pp")


def plant(training: Any, fault: Fault, folder: str) -> None:
    """Let the layer of the fault, or the one that this stage has in its place, act once."""
    layers = list(training.layers())
    if not layers:
        return
    index, layer = layers[fault.layer % len(layers)]
    place = f"{'backward' if fault.in_backward else 'forward'} of layers.{index}"
    split = getattr(training.model.layers, "split", None)
    is_last_part = bool(split) and index in split[-1]
    acted: list[None] = []

    def once(*_: Any) -> None:
        if not acted:
            acted.append(None)
            act(fault, folder, place, is_last_part=is_last_part)

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        tensors = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
        differentiable = [t for t in tensors if t.requires_grad]
        if fault.in_backward and differentiable:
            differentiable[0].register_hook(once)
        elif not fault.in_backward:
            once()

    layer.register_forward_hook(after)


def train(plan: Plan, folder: str, fault: Fault) -> None:
    """Train on this rank until something raises."""
    kind = ShardedTraining if plan.pipeline is None else PipelinedTraining

    class Faulty(kind):  # type: ignore[misc, valid-type]
        def step(self, number: int, step: StepPlan) -> None:
            if number == fault.step:
                plant(self, fault, folder)
            super().step(number, step)

    try:
        kept[:] = [training := Faulty(plan, folder)]
        training.run()
    finally:
        Path(folder, f"ended-{runtime.rank()}").write_text(repr(time.time()))
        observer = runtime.current().observer
        if isinstance(observer, CallObserver):
            Path(folder, f"calls-{runtime.rank()}").write_bytes(observer.log.to_bytes())


def draw_fault(seed: int) -> tuple[Plan, int, Fault]:
    """Return a training, on how many ranks it runs, and what goes wrong in it."""
    r = random.Random(f"fault {seed}")
    plan, world_size = draw(seed), r.choice([2, 3, 4, 4])
    steps = tuple(replace(step, fails=None, overflows=False) for step in plan.steps)
    has_one_rank_per_stage = plan.pipe_size(world_size) == world_size
    fault = Fault(
        kind=r.choice(ENDS if has_one_rank_per_stage else KINDS),
        rank=r.randrange(world_size),
        step=r.randrange(STEPS),
        layer=r.randrange(4),
        in_backward=r.random() < 0.5,
    )
    return replace(plan, steps=steps), world_size, fault


def what_is_wrong(fault: Fault, outcomes: Sequence[Outcome]) -> str:
    """Return how an outcome is not what the fault should lead to; empty if all are."""
    for outcome in outcomes:
        rank = outcome.rank
        if rank == fault.rank and fault.kind in ENDS:
            continue
        if not outcome.failed:
            return f"rank {rank} trained to the end"
        named = re.search(NAMES[fault.kind].format(rank=fault.rank), outcome.error_message)
        if outcome.error_type not in ERRORS or not named:
            return (
                f"rank {rank}: {outcome.error_type}: {outcome.error_message}\n{outcome.traceback}"
            )
    return ""


def places_in(message: str, fault: Fault) -> set[str]:
    """Return where in the model ``message``, an error of another rank, says that the fault is.

    That is where it says that the rank is or was; of a call that the rank left out, where the
    others make it.
    """
    parts = re.split(r"(?i)\brank (?=\d)", message)
    is_asked = {part: part.startswith(f"{fault.rank}") for part in parts[1:]}
    if fault.kind == "skips":
        is_asked = {part: not asked for part, asked in is_asked.items()}
    asked = [part for part, asked in is_asked.items() if asked]
    return {place for part in asked for place in named_in(part)}


def named_in(text: str) -> set[str]:
    """Return the places that ``text`` names, as "forward of layers.3".

    >>> sorted(named_in("after the forward of layers 2 to 3"))
    ['forward of layers.2', 'forward of layers.3']
    """
    found = set()
    for match in PLACES.finditer(text):
        first = match["layer"] or match["first"] or match["reduced"]
        layers = range(int(first), int(match["last"] or first) + 1)
        found |= {f"{match['phase'] or 'backward'} of layers.{layer}" for layer in layers}
    return found


def places_of_calls(fault: Fault, folder: str) -> set[str]:
    """Return where in the model the rank that failed has made its last call, and where the first is
    that it has not made.
    """
    _, place, is_last_part, last = json.loads(Path(folder, _STARTED).read_text())
    # The last part of a pipeline sends nothing between its forward and its backward.
    found = {place.replace("forward", "backward")} if is_last_part else set()
    if last is None:
        return found
    call = Call.of(last)
    found |= named_in(str(call) if call.number else call.place)
    for path in Path(folder).glob("calls-*"):
        calls = RankCalls(path.read_bytes()).calls
        common = [call for call, *_, made_by in calls if made_by and fault.rank in call.ranks]
        if Call.of(last) in common:
            following = common[common.index(Call.of(last)) + 1 :]
            found |= {each for call in following[:1] for each in named_in(str(call))}
    return found


def verdict(fault: Fault, folder: str, outcomes: Sequence[Outcome]) -> str:
    """Return one of :data:`VERDICTS`, that of the rank that says least.

    Of a rank that was killed or stopped nobody knows more than its last call and the first that it
    did not make. So the places of these two calls are right, too.
    """
    _, place, *_ = json.loads(Path(folder, _STARTED).read_text())
    others = [each for each in outcomes if each.rank != fault.rank]
    messages = [each.error_message for each in others]
    named = [places_in(message, fault) for message in messages]
    if all(place in places for places in named):
        return "right"
    near = {place}
    if fault.kind in ("killed", "stopped"):
        near |= places_of_calls(fault, folder)
    if all(places & near for places in named):
        return "near"
    return "none" if any(not places for places in named) else "wrong"


def sentence_about(rank: int, message: str) -> str:
    """Return the first sentence of ``message`` that names ``rank``, else the first, as a cell of a
    table. Lines of tracebacks are left out.
    """
    text = re.sub(r"Traceback \(most recent call last\):\n(?: .*\n)*", "", message)
    sentences = re.split(r"(?<=[.!?])\s+(?=[A-Z])", text)
    about = [each for each in sentences if re.search(rf"[Rr]ank {rank}\b", each)]
    return " ".join((about or sentences)[0].split()).replace("|", r"\|")


def main(arguments: Sequence[str] | None = None) -> int:
    """Let ranks fail, print what came of it, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args(arguments)
    seconds, wrong = defaultdict[str, list[float]](list), defaultdict[str, int](int)
    layers, missed = defaultdict[str, Counter[str]](Counter), 0
    examples, printed = dict[str, str](), dict[str, str]()
    for seed in range(options.first, options.first + options.faults):
        plan, world_size, fault = draw_fault(seed)
        init = {**settings_of(plan, world_size, "cpu"), "timeout": TIMEOUT}
        with tempfile.TemporaryDirectory() as folder:
            outcomes = rank_pool(world_size).outcomes(
                train, plan, folder, fault, init=init, timeout=3 * TIMEOUT, grace=3 * TIMEOUT
            )
            started = Path(folder, _STARTED)
            if not started.exists():  # no rank's gradients come there, for example
                missed += 1
                continue
            happened, place, *_ = json.loads(started.read_text())
            seen = verdict(fault, folder, outcomes)
            ended = [float(path.read_text()) for path in Path(folder).glob("ended-*")]
        found = what_is_wrong(fault, outcomes)
        if found:
            wrong[fault.kind] += 1
            print(f"seed {seed} on {world_size} ranks, {fault}: {found}", flush=True)
        else:
            seconds[fault.kind].append(max(ended) - happened)
            layers[fault.kind][seen] += 1
            others = [o for o in outcomes if o.rank != fault.rank]
            if seen in ("wrong", "none"):
                print(f"seed {seed} on {world_size} ranks, {fault}, in the {place}: {seen}")
                for each in others:
                    print(f"    rank {each.rank}: {each.error_message}", flush=True)
            elif fault.kind not in examples:
                examples[fault.kind] = f"rank {others[0].rank}: {others[0].error_message}"
                printed[fault.kind] = sentence_about(fault.rank, others[0].error_message)
    heads = ["fault", "trainings", "not named", *VERDICTS.values(), "seconds", "what was printed"]
    print(f"| {' | '.join(heads)} |")
    print(f"|{'---|' * len(heads)}")
    for kind in KINDS:
        times = seconds[kind]
        shown = f"{statistics.median(times):.1f}, {max(times):.1f}" if times else ""
        placed = " | ".join(str(layers[kind][each]) for each in VERDICTS)
        count = len(times) + wrong[kind]
        cells = [kind, count, wrong[kind], placed, shown, printed.get(kind, "")]
        print(f"| {' | '.join(map(str, cells))} |")
    print(f"in {missed} trainings it did not happen, since no rank came to the place")
    for kind, example in examples.items():
        print(f"\n{kind}, {example}")
    return 1 if sum(wrong.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
