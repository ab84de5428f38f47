#!/usr/bin/env python3
"""Train a GPT on real text, sharded by ZeRO: ``python train.py``, or
``torchrun --nproc_per_node=N train.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import bmtrain as bmt
from bmt_pipeline import train_step
from callbacks import CALLBACKS, Callback
from evaluation import Evaluation
from generation import generate, printable
from meter import Meter
from models import GPT
from optimizers import build_optimizers
from options import CHECKPOINTS, DTYPES, Options, differences
from report import Report
from text import VOCABULARY, Text, read_text
from windows import Shard, Windows


def main(arguments: Sequence[str] | None = None, *, callbacks: Sequence[Callback] = ()) -> None:
    """Train as the command line asks.

    On rank 0 every one of ``callbacks`` is called with the step and the metrics of each record
    in ``metrics.jsonl``.
    """
    options = Options.parse(arguments)
    bmt.init_distributed(
        seed=options.seed,
        pipe_size=options.pipe,
        tp_size=options.tp,
        sequence_dim=0,  # hidden states are (length / tp, batch, features)
        zero_level=options.zero_level,
        device=options.device,
        reduce_dtype=options.reduce_dtype,
        timeout=options.timeout,
    )
    try:
        train(options, callbacks)
    finally:
        bmt.shutdown()


def train(options: Options, callbacks: Sequence[Callback] = ()) -> None:
    """Train, evaluate, save and sample. Collective."""
    check_sizes(options)
    text = read_text(options.data, options.max_bytes)
    bmt.lock_checkpoints(options.out / CHECKPOINTS)
    windows = Windows(text.training_bytes(), options.seq_len)
    topology = bmt.current().topology  # ranks along pp and tp train on one batch together
    shard = Shard(
        len(windows),
        batch_size=options.batch_size,
        seed=options.seed,
        rank=topology.axis_rank("dp"),
        world_size=topology.axis_size("dp"),
    )
    evaluate = Evaluation(Windows(text.held_out_bytes(), options.seq_len), options.eval_windows)

    model = build_model(options)
    loss_func = bmt.loss.FusedCrossEntropy(parallel=True)
    optim_manager = bmt.optim.OptimManager(loss_scale=2.0**15 if options.dtype == "fp16" else None)
    for optimizer in build_optimizers(options, model):
        # The schedule counts the step under way, from 1: at 0 the learning rate is 0.
        lr_scheduler = bmt.lr_scheduler.Cosine(
            optimizer,
            start_lr=options.lr,
            warmup_iter=options.warmup,
            end_iter=options.steps + 1,
            num_iter=1,
        )
        optim_manager.add_optimizer(optimizer, lr_scheduler)

    # All that a run must have in common with the one that it goes on from.
    identity = {**options.fixed(), "text": common_fingerprint(text)}
    source = options.resume or own_checkpoints(options.out, identity)
    done, first_loss = 0, None
    if source is not None:
        done, first_loss = resume(source, model, optim_manager, identity)
        if options.steps < done:
            raise ValueError(
                f"{source} has {done} steps behind it, more than --steps {options.steps}."
            )
        # The schedule may have become longer.
        for lr_scheduler in optim_manager.lr_schedulers:
            lr_scheduler.end_iter = options.steps + 1
            lr_scheduler.step(lr_scheduler.num_iter)

    def save(step: int) -> Any:
        extra = {"identity": identity, "first_loss": first_loss}
        return bmt.save_checkpoint(
            options.out / CHECKPOINTS, model, optim_manager, step=step, extra=extra
        )

    if bmt.rank() == 0:
        callbacks = [*callbacks, *(CALLBACKS[name](options.out, done) for name in options.log_to)]
    with Report(
        options.out,
        first_step=done,
        steps=options.steps,
        active=bmt.rank() == 0,
        callbacks=callbacks,
    ) as report:
        report.say(
            f"{count_parameters(model):,} parameters, {windows.length * len(windows):,} bytes to"
            f" train on from {len(text.training)} documents, {len(text.held_out)} documents"
            " held out"
        )
        if first_loss is None:
            first_loss = evaluate(model)
            report.held_out(0, first_loss)
        else:
            report.say(f"going on after step {done}, from {source}")

        meter = Meter()
        for step in range(done + 1, options.steps + 1):
            inputs, targets = windows.take(shard.indices(step - 1))
            if options.pipe > 1:
                loss = pipeline_gradients(model, loss_func, optim_manager, inputs, targets, options)
            else:
                loss = accumulate_gradients(
                    model, loss_func, optim_manager, inputs, targets, options.accumulate
                )
            grad_norm = optim_manager.clip_grad_norm(model.parameters(), max_norm=options.clip)
            lr = optim_manager.lr_schedulers[0].current_lr
            optim_manager.step()
            # Here, so that evaluation and the next forward have the gradients' memory.
            optim_manager.zero_grad()

            meter.add(loss, inputs.numel())
            report.advance(step)
            if step % options.log_every == 0:
                report.training(step, meter.read(), lr=lr, grad_norm=grad_norm.item())
            if step == options.steps:
                break
            with meter.paused():
                if step % options.eval_every == 0:
                    report.held_out(step, evaluate(model))
                if step % options.checkpoint_every == 0:
                    save(step)

        last_loss = evaluate(model)
        report.held_out(options.steps, last_loss)
        checkpoint = save(options.steps)
        bmt.save(model, options.out / "model.pt")
        if options.sample_bytes > 0:
            write_sample(options, model, report)
    bmt.print_rank(
        f"trained {options.steps} steps: held-out loss {first_loss:.3f} -> {last_loss:.3f},"
        f" checkpoint {checkpoint}"
    )


def build_model(options: Options) -> GPT:
    """Return the model with its first weights."""
    model = GPT(
        num_layers=options.layers,
        vocab_size=VOCABULARY,
        dim_model=options.dim,
        dim_head=options.dim // options.heads,
        num_heads=options.heads,
        dim_ff=4 * options.dim,
        max_distance=options.seq_len,
        bias=True,
        dtype=DTYPES[options.dtype],
        use_checkpoint=options.checkpoint,
        compile=options.compile,
        float8=options.float8,
        chunks=2 if options.schedule == "interleaved" else 1,
    )
    bmt.init_parameters(model)
    if options.init is not None:
        bmt.load(model, options.init)
    return model


def accumulate_gradients(
    model: torch.nn.Module,
    loss_func: torch.nn.Module,
    optim_manager: Any,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    num_micro_batches: int,
) -> torch.Tensor:
    """Run forward and backward over the rank's part of the batch, in micro-batches, and return its
    mean loss.
    """
    device = next(model.parameters()).device
    total = torch.zeros((), device=device)
    micro_batches = zip(
        inputs.chunk(num_micro_batches), targets.chunk(num_micro_batches), strict=True
    )
    for number, (x, y) in enumerate(micro_batches, start=1):
        positions = torch.arange(x.shape[1], device=device).expand_as(x)
        # Gradients travel once, with the last micro-batch.
        with contextlib.nullcontext() if number == num_micro_batches else bmt.no_sync(model):
            logits = model(x.to(device), positions)
            loss = loss_func(logits.flatten(0, 1), y.to(device).flatten()) / num_micro_batches
            optim_manager.backward(loss)
        total += loss.detach()
    return total


def pipeline_gradients(
    model: GPT,
    loss_func: torch.nn.Module,
    optim_manager: Any,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    options: Options,
) -> torch.Tensor:
    """Run forward and backward of the pipeline's batch, by the schedule of ``options``, and return
    its mean loss.
    """
    device = next(model.parameters()).device
    positions = torch.arange(inputs.shape[1], device=device).expand_as(inputs)
    return train_step(
        model,
        lambda logits, y: loss_func(logits.flatten(0, 1), y.flatten()),
        ((inputs.to(device), positions), targets.to(device)),
        options.schedule,
        options.micro_batches,
        manager=optim_manager,
    )


def own_checkpoints(out: Path, identity: dict[str, Any]) -> Path | None:
    """Return the directory of this run's checkpoints in ``out``, if there are any; note in ``out``
    whose it is. Collective.

    So a run that was killed goes on when it is started again, as ``torchrun --max-restarts`` does.
    Raises a ``ValueError`` if ``out`` belongs to another run.
    """
    note, found = out / "run.json", None
    if bmt.rank() == 0:
        found = (
            json.loads(note.read_text()) if note.exists() else None,
            bmt.latest(out / CHECKPOINTS) is not None,
        )
    owner, has_checkpoints = bmt.store.allgather_objects(found)[0]
    changed = differences(owner, identity) if owner is not None else []
    if changed or (has_checkpoints and owner is None):
        raise ValueError(
            f"{out} belongs to another run:"
            f" {'; '.join(changed) or 'it has checkpoints, and no run.json'}. Choose another --out,"
            " or give the options and the data of that run to go on with it."
        )
    if bmt.rank() == 0:
        out.mkdir(parents=True, exist_ok=True)
        note.write_text(json.dumps(identity))
    return out / CHECKPOINTS if has_checkpoints else None


def resume(
    path: Path, model: torch.nn.Module, optim_manager: Any, identity: dict[str, Any]
) -> tuple[int, float]:
    """Load the checkpoint at ``path``; return the number of steps that it has behind it and the
    held-out loss before the first.
    """
    restored = bmt.load_checkpoint(path, model, optim_manager)
    changed = differences(restored["extra"]["identity"], identity)
    if changed:
        raise ValueError(
            f"{path} is of another run: {'; '.join(changed)}. Give the options and the data of that"
            " run, or begin anew from its weights with --init."
        )
    return restored["step"], restored["extra"]["first_loss"]


def check_sizes(options: Options) -> None:
    """Raise a ``ValueError`` unless the batch, the sequences and the model can be divided evenly
    among the ranks, and have sizes that float8 products have, where there are any.
    """
    sizes = {
        "--heads": options.heads,
        "--seq-len": options.seq_len,
        "the vocabulary of": VOCABULARY,
    }
    uneven = [f"{name} {size}" for name, size in sizes.items() if size % options.tp != 0]
    if uneven:
        raise ValueError(f"--tp {options.tp} must divide {' and '.join(uneven)}.")
    data_size = bmt.current().topology.axis_size("dp")
    micro_batches = (
        (options.micro_batches or options.pipe) if options.pipe > 1 else options.accumulate
    )
    parts = data_size * micro_batches
    if options.batch_size % parts != 0:
        grid = " ".join(
            f"--{name} {getattr(options, name)}"
            for name in ("pipe", "tp")
            if getattr(options, name) > 1
        )
        ranks = f"{data_size} groups of {grid} ranks" if grid else f"{data_size} ranks"
        divider = "--micro-batches" if options.pipe > 1 else "--accumulate"
        raise ValueError(
            f"--batch-size {options.batch_size} is not a multiple of {ranks} x {divider}"
            f" {micro_batches}. Try {max(1, options.batch_size // parts) * parts}."
        )
    if options.float8 is not None:
        check_float8(options, options.batch_size // parts)


def check_float8(options: Options, sequences: int) -> None:
    """Raise a ``ValueError`` unless the device multiplies float8 numbers and the sizes are
    multiples of 16, with ``sequences`` in a micro-batch.
    """
    if options.dim % 16 != 0 or sequences * options.seq_len % 16 != 0:
        raise ValueError(
            f"--float8 needs multiples of 16: --dim is {options.dim}, and a rank's micro-batch has"
            f" {sequences} x --seq-len {options.seq_len} bytes. Change them, or leave out --float8."
        )
    device = bmt.current().device
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):
            raise ValueError(
                "--float8 needs a GPU of compute capability 8.9 or later, and this one has"
                f" {capability[0]}.{capability[1]}. Leave out --float8."
            )


def common_fingerprint(text: Text) -> int:
    """Return the fingerprint of ``text``; ranks that read different ones raise a ``ValueError``.
    Collective.
    """
    fingerprints = bmt.gather_result(torch.tensor([text.fingerprint])).tolist()
    if len(set(fingerprints)) > 1:
        others = [
            rank for rank, fingerprint in enumerate(fingerprints) if fingerprint != fingerprints[0]
        ]
        raise ValueError(
            f"Ranks {others} read another text than rank 0. Give all of them the same files, with"
            " --data: hosts with different versions of Python have different standard libraries."
        )
    return text.fingerprint


def count_parameters(model: torch.nn.Module) -> int:
    """Return the number of elements of all parameters, whole. Collective, because stages have
    different ones.
    """
    own = {
        name: p.full_shape.numel()
        for name, p in model.named_parameters()
        if isinstance(p, bmt.DistributedParameter)
    }
    return sum(
        {
            name: size for sizes in bmt.store.allgather_objects(own) for name, size in sizes.items()
        }.values()
    )


def write_sample(options: Options, model: torch.nn.Module, report: Report) -> None:
    """Let the model continue the prompt; show the text and keep it in ``sample.txt``.
    Collective.
    """
    prompt = options.prompt.encode()
    sample = printable(
        generate(
            model, prompt, length=options.sample_bytes, context=options.seq_len, seed=options.seed
        )
    )
    report.say(f"\nThe model continues {options.prompt!r}:\n\n{sample}\n")
    if bmt.rank() == 0:
        (options.out / "sample.txt").write_text(sample, encoding="utf-8")


def run() -> None:
    """Run :func:`main`, and end with one line where the user, a file or the installation has to
    be mended.
    """
    try:
        main()
    except (bmt.BmtError, ValueError, OSError) as error:
        if "--traceback" in sys.argv:
            raise
        sys.exit(f"train.py, rank {os.environ.get('RANK', 0)}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    run()
