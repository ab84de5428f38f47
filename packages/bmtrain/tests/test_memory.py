"""``bmt memory``: predicted peaks agree with those that tools/bench has measured on GPUs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from bmt_core.errors import ConfigError
from bmtrain._program import main
from bmtrain._program.memory import USABLE, code_of
from bmtrain._program.model_shape import MODELS, ModelShape, decoder, shape_of, shape_of_module
from bmtrain._program.setting_search import GIB, fastest
from bmtrain._program.step_memory import (
    FLOAT32,
    KEEPS,
    Setting,
    logits,
    memory_of,
    saved_bytes,
    states,
)

RESULTS = Path(__file__).parents[3] / "docs" / "results"


def gpt(layers: int, hidden: int, sequence: int) -> ModelShape:
    """The GPT of ``tools/bench/models.py``: biases everywhere, learned positions."""
    linears = ((hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden))
    return ModelShape(
        name="gpt",
        layers=layers,
        hidden=hidden,
        block=sum((inputs + 1) * outputs for inputs, outputs in linears) + 4 * hidden,
        outside=(2 * 10240 + sequence + 2) * hidden,
        vocabulary=10240,
        attention=hidden,
        linears=linears,
    )


MEASURED_MODELS = {
    "3b": (gpt(16, 4096, 2048), 2048),
    "7b": (gpt(32, 4096, 512), 512),
    "13b": (gpt(40, 5120, 512), 512),
    "qwen3-moe": (  # half of the 30 B model, as tools/bench/real_models.py has it
        decoder(
            "qwen3-moe",
            layers=16,
            hidden=2048,
            feed_forward=768,
            queries=4096,
            key_values=512,
            vocabulary=151_936,
            norms_queries=True,
            experts=64,
            experts_per_token=8,
        ),
        4096,
    ),
    **{name: (model, 4096) for name, model in MODELS.items()},
}


def options_of(command: str) -> dict[str, str]:
    """The options of a line of tools/bench; flags are "on"."""
    words = shlex.split(command)
    return {
        word.removeprefix("--"): "on" if following.startswith("--") else following
        for word, following in zip(words, [*words[1:], "--"], strict=True)
        if word.startswith("--")
    }


def batch_of(record: Mapping[str, Any], options: Mapping[str, str], ranks: int) -> int:
    """Sequences of a rank: the words of the record choose among those of the command."""
    before, found, number = record["setting"].partition("batch ")
    if found:
        batch = int(number.split(",")[0])
        return batch // ranks if before.endswith("global ") else batch
    batches = options["batch"].split(",")
    if "4 × 4,096" in record["toolkit"]:
        return 4
    assert len(batches) == 1, record
    return int(batches[0])


def setting_of(record: Mapping[str, Any], options: Mapping[str, str]) -> Setting:
    ranks = int(record["device"].split(" ")[0])
    of_toolkit = record["toolkit"]
    tp = int(options.get("tp", 1)) if "tp" in of_toolkit else 1
    pp = int(options.get("pp", 1)) if "pp" in of_toolkit else 1
    batch, micro_batches = batch_of(record, options, ranks) * tp, 1
    if pp > 1:  # micro-batches of two sequences
        batch, micro_batches = 2, batch * pp // 2
    keep: str | int = "all" if "no-recompute" in options else "none"
    if options.get("keep", "none") != "none":
        keep = int(float(options["keep"].split(",")[-1]) * GIB)
    _, sequence = MEASURED_MODELS[options.get("model", options.get("size", ""))]
    return Setting(
        gpus=ranks,
        sequence=int(options.get("sequence", sequence)),
        batch=batch,
        micro_batches=micro_batches,
        tp=tp,
        pp=pp,
        level=int(options.get("level", 3)),
        keep=keep,
        offload=options.get("device-memory") == "0",
        shard_size=int(options["shard-size"]) if "shard-size" in options else None,
        lora=int(options["lora"]) if "lora" in options else None,
        fused_loss="fused-loss" in options,
        compiled="compile" in options,
    )


FILES = (
    "real-models fsdp2-two-h100 fsdp2-two-h200 fsdp2-four-h200 grids-four-h200 offload"
    " pipeline-training recipes tensor-parallel-training"
)
PEERS = ("FSDP2", "DTensor", "bmt, half")  # half of the states on the host: no setting of ours


def measured() -> list[tuple[str, ModelShape, Setting, float]]:
    """Every peak of a training by bmt in the records, but for float8 and pipelines that no
    optimizer follows.
    """
    cases = []
    for name in FILES.split():
        for line in (RESULTS / f"{name}.jsonl").read_text().splitlines():
            record = json.loads(line)
            if record["quantity"] == "peak" and not record["toolkit"].startswith(PEERS):
                options = options_of(record["command"])
                model, _ = MEASURED_MODELS[options.get("model", options.get("size", ""))]
                if "layers" in options:
                    model = replace(model, layers=int(options["layers"]))
                title = f"{name}: {record['toolkit']}, {record['setting']}"
                cases.append((title, model, setting_of(record, options), record["value"]))
    return cases


@pytest.mark.parametrize(
    ("model", "setting", "peak"), [pytest.param(*case, id=title) for title, *case in measured()]
)
def test_predicted_peak_is_near_the_measured_one(
    model: ModelShape, setting: Setting, peak: float
) -> None:
    assert memory_of(model, setting).peak / GIB == pytest.approx(peak, rel=0.055)


def test_all_kinds_of_training_were_measured() -> None:
    settings = [setting for _, _, setting, _ in measured()]
    assert len(settings) > 50
    assert {setting.level for setting in settings} == {2, 3}
    for part in ("tp", "pp", "lora", "offload", "fused_loss", "compiled", "shard_size"):
        assert len({getattr(setting, part) for setting in settings}) > 1, part


# --- shapes ---


@pytest.mark.parametrize("name", ["llama3-1b", "llama3-8b", "qwen3-4b", "qwen3-30b-a3b"])
def test_a_configuration_of_transformers_has_the_shape_that_the_name_has(
    name: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    model = MODELS[name]
    features = 64 if name == "llama3-1b" else 128
    key_values = model.linears[1][1]
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    config = transformers.AutoConfig.for_model(
        "llama" if "llama" in name else "qwen3_moe" if "a3b" in name else "qwen3",
        hidden_size=model.hidden,
        intermediate_size=max(width for _, width in model.linears),
        num_hidden_layers=2,
        num_attention_heads=model.attention // features,
        num_key_value_heads=key_values // features,
        head_dim=features,
        vocab_size=model.vocabulary,
        tie_word_embeddings=model.outside < 2 * model.vocabulary * model.hidden,
        **(experts if "a3b" in name else {}),
    )
    config.save_pretrained(tmp_path)
    found, is_half = shape_of(str(tmp_path))
    assert is_half
    assert found.block == pytest.approx(model.block, rel=1e-4)  # norms of queries and keys
    for setting in (
        Setting(gpus=2, sequence=4096),
        Setting(gpus=2, sequence=4096, batch=8, keep="all"),
        Setting(gpus=2, sequence=4096, batch=8, keep="products", fused_loss=True),
        Setting(gpus=2, sequence=4096, lora=16),
    ):
        expected = memory_of(replace(model, layers=2), setting).peak
        assert memory_of(found, setting).peak == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_bytes_that_autograd_saves_of_a_layer_are_predicted(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        kind,
        hidden_size=512,
        intermediate_size=1792,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        vocab_size=64,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    layer, rows = model.model.layers[0], 256
    hidden = torch.randn(1, rows, 512, dtype=torch.bfloat16, requires_grad=True)
    positions = torch.arange(rows)[None]
    angles = model.model.rotary_emb(hidden, positions)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(hidden, position_embeddings=angles, attention_mask=None, position_ids=positions)
    found = sum(storage.nbytes() for storage in saved.values())
    shape = shape_of_module(model, kind)
    predicted = rows * saved_bytes(shape, Setting(gpus=1, sequence=rows))
    assert predicted == pytest.approx(found, rel=0.05)


def test_a_model_file_is_built_on_the_meta_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_model_of_memory.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 256) for _ in range(3))\n"
        "    model = nn.ModuleDict({'e': nn.Embedding(1000, 64), 'layers': layers})\n"
        "    assert all(parameter.is_meta for parameter in model.parameters())\n"
        "    return model\n"
        "def empty():\n"
        "    return nn.Linear(4, 4)\n"
        "def broken():\n"
        "    raise ValueError('no model')\n"
    )
    monkeypatch.chdir(tmp_path)
    shape, is_half = shape_of("my_model_of_memory:make")
    assert (shape.layers, shape.hidden, shape.vocabulary, shape.outside) == (3, 64, 1000, 64_000)
    assert not is_half
    wanted = ["--gpus", "2", "--seq", "8", "--json"]
    result = bmt("--model", "my_model_of_memory:make", *wanted)
    assert json.loads(result.output)["setting"]["each"]["weight"] == FLOAT32.weight
    for name, words in {
        "empty": "has no layers",
        "broken": "ValueError: no model",
        "missing": "has no attribute 'missing'",
    }.items():
        result = bmt("--model", f"my_model_of_memory:{name}", *wanted)
        assert result.exit_code == 2 and words in result.output


# --- parts ---

LLAMA = MODELS["llama3-8b"]


def peak(**options: Any) -> float:
    return memory_of(LLAMA, Setting(**{"gpus": 8, "sequence": 4096, **options})).peak


def test_states_are_divided_by_ranks_but_at_level_0() -> None:
    for level, shares in ((0, 1), (1, 8), (3, 8)):
        memory = memory_of(LLAMA, Setting(gpus=8, sequence=1, level=level))
        total = memory.parameters + memory.masters + memory.moments + memory.gradients
        assert total == pytest.approx(14 * LLAMA.parameters / shares)


def test_offload_moves_masters_and_moments_to_the_host() -> None:
    memory = memory_of(LLAMA, Setting(gpus=8, sequence=1, offload=True))
    assert memory.masters == memory.moments == 0
    assert memory.host == pytest.approx(14 * LLAMA.parameters / 8)
    assert memory.parameters + memory.gradients == pytest.approx(4 * LLAMA.parameters / 8)


def test_what_is_asked_for_takes_more_or_less() -> None:
    peaks = [peak(keep=keep, fused_loss=True, batch=4) for keep in KEEPS]
    assert peaks == sorted(peaks) and len(set(peaks)) == len(peaks)
    levels = [peak(level=level) for level in range(4)]
    assert levels == sorted(levels, reverse=True)
    assert peak(fused_loss=True) < peak()
    assert peak(shard_size=2) > peak(shard_size=4) > peak()
    assert peak(shard_size=2, shards_states_over_all=True) < peak(shard_size=2)
    assert peak(compiled=True, keep="all", batch=4) < peak(keep="all", batch=4)
    assert peak(micro_batches=2) == pytest.approx(peak() + (2 + 4) * LLAMA.parameters / 8)
    assert peak(tp=2, keep="products", batch=4) == peak(tp=2, batch=4)


def test_inputs_on_the_host_leave_those_of_two_layers() -> None:
    of_input = 4 * 4096 * 2 * LLAMA.hidden
    before, after = (
        memory_of(LLAMA, Setting(gpus=8, sequence=4096, batch=4, offload_inputs=offloads))
        for offloads in (False, True)
    )
    assert before.kept - after.kept == after.host == (LLAMA.layers - 2) * of_input
    assert before.layer == after.layer
    with pytest.raises(ConfigError, match="Compiled Blocks keep their inputs"):
        Setting(gpus=8, sequence=4096, offload_inputs=True, compiled=True)


def test_a_budget_takes_no_more_than_there_is_to_keep() -> None:
    assert peak(keep=10**15, batch=4) == peak(keep="attention+products", batch=4)


# --- the search ---


@pytest.mark.parametrize("gpus", [2, 8, 64])
@pytest.mark.parametrize("name", ["llama3-8b", "llama2-70b", "qwen3-30b-a3b"])
def test_found_setting_fits_and_a_smaller_gpu_gets_no_faster_one(name: str, gpus: int) -> None:
    model, wanted = MODELS[name], Setting(gpus=gpus, sequence=4096)
    kept = []
    for gib in (141, 80, 40):
        found = fastest(model, wanted, USABLE * gib * GIB)
        if found is not None:
            assert memory_of(model, found).peak <= USABLE * gib * GIB
            assert found.gpus % (found.tp * found.pp) == 0
        kept.append(found)
    assert None not in kept[: kept.index(None)] if None in kept else True
    offloads = [found.offload for found in kept if found is not None]
    assert offloads == sorted(offloads)


def test_what_is_given_stays() -> None:
    wanted = Setting(gpus=64, sequence=4096, tp=2, pp=4, level=1, keep="none", micro_batches=16)
    fixed = frozenset(("tp", "pp", "level", "keep", "offload"))
    assert fastest(LLAMA, wanted, 10**12, fixed=fixed) == wanted
    assert fastest(LLAMA, wanted, 10**9, fixed=fixed) is None


def test_memory_that_is_left_is_used_to_recompute_less() -> None:
    setting = Setting(gpus=2, sequence=4096, batch=4)
    found = fastest(LLAMA, setting, 100 * GIB)
    assert found is not None and isinstance(found.keep, int)
    assert memory_of(LLAMA, found).peak > 98 * GIB
    roomy = fastest(LLAMA, replace(setting, gpus=64, batch=1), 100 * GIB)
    assert roomy is not None and roomy.keep == "all"


def test_logits_are_whole_unless_only_a_loss_in_chunks_fits() -> None:
    short, long = (
        fastest(LLAMA, Setting(gpus=64, sequence=length), 72 * GIB) for length in (4096, 65536)
    )
    assert short is not None and not short.fused_loss
    assert (
        long is not None and long.fused_loss and (long.tp, long.pp, long.offload) == (1, 1, False)
    )


# --- the command ---


def bmt(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["memory", *arguments])


def test_the_command_prints_parts_a_peak_and_the_code_of_a_setting_that_fits() -> None:
    result = bmt("--model", "llama2-13b", "--gpus", "16", "--seq", "4096", "--gpu-memory", "80GB")
    assert result.exit_code == 0, result.output
    predicted = memory_of(MODELS["llama2-13b"], Setting(gpus=16, sequence=4096)).peak
    rows = [line.split("│")[1:3] for line in result.output.splitlines() if "│" in line]
    assert {name.strip(): size.strip() for name, size in rows}["peak"] == f"{predicted / GIB:.1f}"
    assert "This fits into 72.0 GiB" in result.output
    assert "bmt.init_distributed(zero_level=" in result.output


def test_status_is_1_if_the_setting_does_not_fit() -> None:
    line = ["--model", "llama2-70b", "--seq", "4096", "--gpu-memory", "80GB"]
    result = bmt(*line, "--gpus", "8")
    assert result.exit_code == 1
    assert "This does not fit" in result.output and "AdamOffloadOptimizer" in result.output
    result = bmt(*line, "--gpus", "1")
    assert result.exit_code == 1 and "No setting fits." in result.output


def test_status_is_2_for_what_is_no_setting_or_no_model() -> None:
    line = ["--model", "llama3-8b", "--gpus", "8", "--seq", "4096"]
    result = bmt(*line, "--tp", "3")
    assert result.exit_code == 2 and "8 GPUs are not a multiple of tp=3 x pp=1" in result.output
    result = bmt(*line, "--keep", "much")
    assert result.exit_code == 2 and "much" in result.output
    result = bmt("--model", "lama3-8b", "--gpus", "8", "--seq", "4096")
    assert result.exit_code == 2 and "Did you mean 'llama3-8b'?" in result.output


def test_json_has_all_figures() -> None:
    line = ["--model", "llama3-8b", "--gpus", "8", "--seq", "4096", "--gpu-memory", "80GB"]
    found = json.loads(bmt(*line, "--json").output)
    memory = memory_of(LLAMA, Setting(gpus=8, sequence=4096))
    assert found["memory"]["peak"] == memory.peak == max(found["memory"]["at"].values())
    assert found["fits"] is True and found["usable"] == USABLE * 80 * GIB
    assert found["fastest"]["setting"]["keep"] == "all"


@pytest.mark.parametrize(
    ("setting", "lines"),
    [
        (
            {"keep": "all", "level": 2, "compiled": True},
            [
                "bmt.init_distributed(zero_level=2)",
                "model.layers = torch.nn.ModuleList("
                "bmt.Block(layer, use_checkpoint=False, compile=True) for layer in model.layers)",
                "bmt.BMTrainModelWrapper(model)",
            ],
        ),
        (
            {
                "keep": "attention+products",
                "offload": True,
                "offload_inputs": True,
                "shard_size": 2,
            },
            [
                "bmt.init_distributed(zero_level=3, shard_size=2)",
                "bmt.BMTrainModelWrapper("
                "model, keep=('attention', 'products'), offload_inputs=True)",
                "bmt.optim.AdamOffloadOptimizer(model.parameters())",
            ],
        ),
        (
            {"tp": 2, "pp": 4, "keep": 16 * GIB, "micro_batches": 16, "fused_loss": True},
            [
                "bmt.init_distributed(pipe_size=4, tp_size=2, zero_level=3)",
                "bmt_tp.parallelize(model)",
                "bmt_hf.use_linear_cross_entropy(model)",
                "bmt.PipelineTransformerBlockList("
                "bmt.Block(layer, keep=2048 * 2**20) for layer in model.layers)",
                "bmt_pipeline.train_step(model, loss_fn, batch, num_micro_batches=16)",
            ],
        ),
    ],
)
def test_code_has_the_arguments_of_the_setting(setting: Any, lines: list[str]) -> None:
    assert code_of(LLAMA, Setting(gpus=8, sequence=4096, **setting)) == lines


def test_the_page_shows_what_the_command_prints_and_how_many_peaks_were_compared() -> None:
    page = (RESULTS.parent / "program.md").read_text()
    _, line, _, printed, *_ = page[page.index("## Memory") :].split("```")
    words = shlex.split(line.removeprefix("sh\n"))
    assert words[:2] == ["bmt", "memory"]
    output = [row.rstrip() for row in bmt(*words[2:]).output.splitlines()]
    assert printed.removeprefix("text\n").splitlines() == output
    assert f"A test compares {len(measured())} peaks" in page
    errors = [memory_of(model, each).peak / GIB / peak - 1 for _, model, each, peak in measured()]
    assert max(map(abs, errors)) < 0.06


def test_along_cp_tokens_are_divided_and_states_sharded() -> None:
    alone = Setting(gpus=8, sequence=8192)
    divided = replace(alone, cp=4)
    assert (divided.tokens, divided.loss_tokens, divided.shard) == (2048, 2048, 8)
    assert replace(divided, shard_size=1).shard == 4
    model = MODELS["llama3-8b"]
    assert states(model, divided) == states(model, alone)
    assert logits(model, divided) == logits(model, alone) / 4
    assert code_of(model, divided)[0] == "bmt.init_distributed(cp_size=4, zero_level=3)"
