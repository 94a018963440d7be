# SPDX-License-Identifier: Apache-2.0
"""Tests of scripts/make_model.py: quantizer, tokenizer, template, checkpoint layout, cache and command line.

    python -m pytest tests/test_make_model.py

About a minute on two CPU cores, most of it the warm-up of one tiny model. No network, no GPU.
"""

from __future__ import annotations

import dataclasses
import json
import lzma
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.model.gptoss_format import (
    E2M1,
    GPT_OSS_20B,
    PAD,
    SPECIAL_TOKENS,
    TINY,
    ModelError,
    Shape,
    checkpoint_bytes,
    config_dict,
    dequantize_mxfp4,
    generation_config_dict,
    parameter_count,
    plan_shards,
    quantize_mxfp4,
    tensor_specs,
)
from grpo.model.random_weights import MATRIX_GAIN, O200K_IDS, check_checkpoint, write_full
from grpo.model.tiny import build_tiny
from grpo.model.tiny_warmup import (
    ANSWER_AFTER,
    ANSWER_BEFORE,
    TINY_DISTANCES,
    Recipe,
    _answer_logits,
    _encode_rows,
    initial_heads,
    is_short,
    make_tokenizer,
    train_tiny,
)
from grpo.preflight.hub import recipe_hash, tiny_path
from grpo.tasks.tes.dataset import synthetic_rows

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "make_model.py"
sys.path.insert(0, str(SCRIPT.parent))

import make_model as mm  # noqa: E402

SMALL = Shape(
    layers=2, hidden=64, intermediate=96, experts=4, experts_per_token=2, heads=4, kv_heads=2, head_dim=16, vocab=640
)
DAY = "2026-01-02"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real tiny model, trained once for all tests."""
    return build_tiny(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint in several shards, with the tiny tokenizer packed as .xz."""
    source = tmp_path_factory.mktemp("tokenizer")
    (source / "tokenizer.json.xz").write_bytes(lzma.compress(make_tokenizer().to_str().encode()))
    out = tmp_path_factory.mktemp("full") / "model"
    return write_full(out, SMALL, source, shard_bytes=100_000)


def load(directory: Path):
    from transformers import AutoModelForCausalLM, Mxfp4Config

    config = Mxfp4Config(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(directory, quantization_config=config, dtype=torch.bfloat16).eval()


def stored(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: t for path in directory.glob("*.safetensors") for name, t in load_file(path).items()}


# ---- MXFP4 ----------------------------------------------------------------------------------------------------------

REPRESENTABLE = [sign * value for value in E2M1 for sign in (1.0, -1.0)]


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.lists(st.sampled_from(REPRESENTABLE), min_size=32, max_size=32), min_size=1, max_size=4),
    st.integers(min_value=-110, max_value=120),
)
def test_representable_values_come_back_exactly_through_transformers(rows: list[list[float]], exponent: int) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    weight = torch.ldexp(torch.tensor(rows), torch.tensor(exponent)).unsqueeze(0)  # [1, rows, 32]
    blocks, scales = quantize_mxfp4(weight)
    theirs = convert_moe_packed_tensors(blocks, scales).transpose(1, 2).float()
    for back in (theirs, dequantize_mxfp4(blocks, scales)):
        assert torch.equal(back, weight)
        assert torch.equal(torch.signbit(back), torch.signbit(weight))


@settings(deadline=None, max_examples=100)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=64, max_size=64))
def test_rounding_is_to_nearest_within_the_range_of_the_block(values: list[float]) -> None:
    weight = torch.tensor(values, dtype=torch.float64)
    blocks, scales = quantize_mxfp4(weight)
    scale = torch.ldexp(torch.ones(2, dtype=torch.float64), scales.int() - 127).repeat_interleave(32)
    grid = torch.tensor(REPRESENTABLE, dtype=torch.float64)
    nearest = (weight[:, None] / scale[:, None] - grid).abs().amin(1) * scale
    error = (dequantize_mxfp4(blocks, scales).double() - weight).abs()
    assert torch.allclose(error, nearest, rtol=1e-6, atol=1e-37)
    assert (weight.abs() < 8 * scale).all()  # the scale is not too small: only 6 to 8 saturates


def test_ties_round_to_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 4)
    back = dequantize_mxfp4(*quantize_mxfp4(ties))
    assert back[:8].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]


def test_low_bits_hold_the_even_element() -> None:
    blocks, scales = quantize_mxfp4(torch.tensor([6.0, -0.5] + [0.0] * 30))
    assert blocks[0, 0].item() == 0x97
    assert scales.tolist() == [127]


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(2, 33), "multiple of 32"),
        (torch.full((32,), torch.nan), "NaN"),
        (torch.full((32,), torch.inf), "inf"),
    ],
)
def test_quantizer_refuses(weight: torch.Tensor, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        quantize_mxfp4(weight)


# ---- Tokenizer and template -----------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=300)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_survives(tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_numbers_are_single_tokens_and_special_tokens_come_last(tokenizer) -> None:
    for n in range(101):
        assert len(tokenizer.encode(str(n)).ids) == 1
        assert len(tokenizer.encode(f" {n}").ids) == 1
        assert tokenizer.decode(tokenizer.encode(f"a {n}b{n}").ids) == f"a {n}b{n}"
    size = tokenizer.get_vocab_size()
    assert size == TINY.vocab
    ids = [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS]
    assert ids == list(range(size - len(ids), size))


def test_tokenizer_is_the_same_every_time(tokenizer) -> None:
    assert make_tokenizer().to_str() == tokenizer.to_str()


def test_prompts_are_short(tokenizer) -> None:
    ids, _ = _encode_rows(tokenizer, synthetic_rows(4321, 5), 0)
    assert max(map(len, ids)) < 100


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 or 2?"}]
SYSTEM = "<|start|>system<|message|>{identity}Current date: 2026-01-02\n\nReasoning: {effort}{channels}<|end|>"
REST = "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n<|end|><|start|>user<|message|>1 or 2?<|end|>"


def render(directory: Path, messages: list[dict[str, str]], **kwargs) -> str:
    from transformers import AutoTokenizer

    kwargs = {"tokenize": False, "strftime_now": lambda form: DAY, **kwargs}
    return AutoTokenizer.from_pretrained(directory).apply_chat_template(messages, **kwargs)


@pytest.mark.parametrize(
    ("which", "identity", "channels"),
    [
        ("tiny", "", ""),
        (
            "small",
            "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n",
            "\n\n# Valid channels: analysis, commentary, final. Channel must be included for every message.",
        ),
    ],
)
def test_template(request: pytest.FixtureRequest, which: str, identity: str, channels: str) -> None:
    directory = request.getfixturevalue(which)
    system = SYSTEM.format(identity=identity, effort="medium", channels=channels)
    prompt = render(directory, MESSAGES, add_generation_prompt=True)
    assert prompt == system + REST + "<|start|>assistant"
    low = render(directory, MESSAGES, reasoning_effort="low")
    assert low == system.replace("medium", "low") + REST
    answer = {"role": "assistant", "content": "[1]"}
    final = "<|start|>assistant<|channel|>final<|message|>[1]"
    assert render(directory, [*MESSAGES, answer]) == system + REST + final + "<|return|>"
    developer = {"role": "developer", "content": "Be brief."}
    again = render(directory, [developer, MESSAGES[1], answer, MESSAGES[1]], add_generation_prompt=True)
    assert again == f"{system}{REST}{final}<|end|><|start|>user<|message|>1 or 2?<|end|><|start|>assistant"
    from jinja2.exceptions import TemplateError

    with pytest.raises(TemplateError, match="unknown role tool"):
        render(directory, [{"role": "tool", "content": ""}])


def test_date_of_today_by_default(tiny: Path) -> None:
    from transformers import AutoTokenizer

    text = AutoTokenizer.from_pretrained(tiny).apply_chat_template(MESSAGES, tokenize=False)
    assert re.search(r"Current date: \d{4}-\d\d-\d\d\n", text)


def test_special_tokens_of_the_tokenizer(tiny: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.padding_side) == ("<|return|>", "<|endoftext|>", "left")
    generation = GenerationConfig.from_pretrained(tiny)
    assert tokenizer.convert_ids_to_tokens(generation.eos_token_id) == ["<|return|>", "<|endoftext|>", "<|call|>"]
    assert tokenizer.decode(tokenizer("<|channel|>final [3]").input_ids, skip_special_tokens=True) == "final [3]"


# ---- Layout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["tiny", "small"])
def test_checkpoint_loads_bit_for_bit(request: pytest.FixtureRequest, which: str) -> None:
    directory = request.getfixturevalue(which)
    tensors, loaded = stored(directory), load(directory).state_dict()
    for name, value in loaded.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            ours = dequantize_mxfp4(tensors.pop(f"{name}_blocks"), tensors.pop(f"{name}_scales")).transpose(1, 2)
        else:
            ours = tensors.pop(name)
        assert torch.equal(value.float(), ours.float()), name
    assert not tensors


def test_config_is_gpt_oss_20bs() -> None:
    config = config_dict(GPT_OSS_20B, O200K_IDS)
    assert config["quantization_config"] == {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    }
    assert (config["eos_token_id"], config["pad_token_id"], config["max_position_embeddings"]) == (
        200002,
        199999,
        131072,
    )
    assert generation_config_dict(O200K_IDS)["eos_token_id"] == [200002, 199999, 200012]
    # total_size in openai/gpt-oss-20b's model.safetensors.index.json, and its number of weights
    assert sum(spec.nbytes for spec in tensor_specs(GPT_OSS_20B)) == 13_761_264_768
    assert checkpoint_bytes(GPT_OSS_20B) == 13_761_264_768
    assert parameter_count(GPT_OSS_20B) == 20_914_757_184
    assert len(plan_shards(tensor_specs(GPT_OSS_20B))) <= 4


def test_rope_reaches_transformers(small: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(small)
    rope = config.rope_parameters
    assert (rope["rope_type"], rope["rope_theta"], rope["factor"], rope["truncate"]) == ("yarn", 150000.0, 32.0, False)
    assert config.layer_types == ["sliding_attention", "full_attention"]


def test_random_weights_are_sane(small: Path) -> None:
    tensors = stored(small)
    for n in range(SMALL.layers):
        for part, fan_in in (("gate_up_proj", SMALL.hidden), ("down_proj", SMALL.intermediate)):
            name = f"model.layers.{n}.mlp.experts.{part}"
            std = dequantize_mxfp4(tensors[f"{name}_blocks"], tensors[f"{name}_scales"]).std().item()
            assert std == pytest.approx(MATRIX_GAIN[part] / fan_in**0.5, rel=0.05)
        std = tensors[f"model.layers.{n}.self_attn.o_proj.weight"].float().std().item()
        assert std == pytest.approx(MATRIX_GAIN["o_proj"] / (SMALL.heads * SMALL.head_dim) ** 0.5, rel=0.05)
    assert len(list(small.glob("*.safetensors"))) > 1
    with torch.no_grad():
        logits = load(small)(torch.arange(40).unsqueeze(0)).logits
    assert torch.isfinite(logits).all() and 0 < logits.float().std() < 10


def test_same_seed_same_bytes(small: Path, tmp_path: Path) -> None:
    other = write_full(tmp_path / "again", SMALL, small, shard_bytes=100_000)
    changed = write_full(tmp_path / "other", SMALL, small, seed=1, shard_bytes=100_000)
    names = sorted(path.name for path in small.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    assert all((small / name).read_bytes() == (other / name).read_bytes() for name in names)
    assert any((small / name).read_bytes() != (changed / name).read_bytes() for name in names)


def test_check_finds_damage(small: Path, tmp_path: Path) -> None:
    import shutil

    def damaged(name: str) -> Path:
        return Path(shutil.copytree(small, tmp_path / name))

    path = next((cut := damaged("cut")).glob("*.safetensors"))
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ModelError, match="its header promises"):
        check_checkpoint(cut)

    next((lost := damaged("lost")).glob("*.safetensors")).unlink()
    with pytest.raises(ModelError, match="missing: .*; model.safetensors.index.json does not say"):
        check_checkpoint(lost)

    path = min((bent := damaged("bent")).glob("*.safetensors"))
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = data[8 : 8 + length].replace(b'"shape":[640,64]', b'"shape":[64,640]')
    path.write_bytes(data[:8] + header + data[8 + length :])
    with pytest.raises(ModelError, match="of another type or shape: model.embed_tokens.weight"):
        check_checkpoint(bent)

    (junk := damaged("junk") / "extra.safetensors").write_bytes(b"no")
    with pytest.raises(ModelError, match="not a safetensors file"):
        check_checkpoint(junk.parent)


# ---- The tiny model -------------------------------------------------------------------------------------------------


def test_tiny_answers_in_format_and_has_something_to_learn(tiny: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    rows = synthetic_rows(4321, 10)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "developer", "content": row["system"]}, {"role": "user", "content": row["user"]}],
            add_generation_prompt=True,
            tokenize=False,
        )
        for row in rows
    ]
    encoded = tokenizer(prompts, return_tensors="pt", padding=True)
    torch.manual_seed(0)
    out = load(tiny).generate(**encoded, max_new_tokens=10, do_sample=True, temperature=1.0, top_k=0)
    texts = tokenizer.batch_decode(out[:, encoded.input_ids.shape[1] :])
    pattern = re.compile(r"<\|channel\|>final<\|message\|>\[([0-3])\]<\|return\|>(<\|endoftext\|>)*")
    actions = [match and int(match[1]) for match in map(pattern.fullmatch, texts)]
    assert sum(action is not None for action in actions) >= 0.97 * len(rows)
    rewards = [row[f"reward_action_{k}"] if k is not None else 0.0 for row, k in zip(rows, actions, strict=True)]
    figures = json.loads((tiny / "warmup.json").read_text())
    assert sum(rewards) / len(rewards) == pytest.approx(figures["reward"], abs=0.06)  # sampled against computed
    # Better than chance, worse than the best constant; the likeliest action beats both: room for GRPO.
    assert 0.33 < figures["reward"] < figures["best_constant"] < figures["greedy"] < figures["oracle"]


def test_tiny_reads_whether_the_storage_carries_the_hour(tiny: Path) -> None:
    """Output 0 leaves load unserved in short hours: a model that cannot tell them empties the storage and stays there.

    The stored model is undecided on purpose, but flattened targets of output 0 stay near 0 in these hours.
    """
    rows = synthetic_rows(4321, 60)
    ids, _ = _encode_rows(tokenizer := make_tokenizer(), rows, 0)
    texts = (f"{ANSWER_BEFORE}0{ANSWER_AFTER}", ANSWER_BEFORE)
    answer, place = (len(tokenizer.encode(text).ids) for text in texts)
    model, actions = load(tiny).float(), [tokenizer.token_to_id(str(k)) for k in range(4)]
    with torch.no_grad():
        batches = (ids[n : n + 100] for n in range(0, len(ids), 100))
        parts = [_answer_logits(model, batch, answer, tokenizer.token_to_id(PAD))[:, place] for batch in batches]
    p = torch.cat(parts).softmax(-1)[:, actions]
    short = torch.tensor([is_short(row) for row in rows])
    assert 60 < short.sum() < 0.1 * len(rows)
    assert p[short, 0].mean() < 0.015 < 0.3 < p[~short, 0].mean()


def test_short_rows_are_those_whose_load_exceeds_the_storage() -> None:
    for row in synthetic_rows(4321, 20):
        store, load_kw = (int(row["user"].split(f"{word} ")[1].split()[0]) for word in ("store", "load"))
        if abs(load_kw - 3 * store) > 3:  # store is a rounded percentage of 300 kWh
            assert is_short(row) == (load_kw > 3 * store)


def test_initial_heads_look_back_by_their_distance() -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    config = config_dict(TINY, {token: 0 for token in SPECIAL_TOKENS})
    config.pop("quantization_config")
    torch.manual_seed(0)
    model = GptOssForCausalLM._from_config(GptOssConfig.from_dict(config), attn_implementation="eager").float().eval()
    initial_heads(model, TINY_DISTANCES)
    ids = torch.randint(300, (1, 30), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        attentions = model(input_ids=ids, output_attentions=True, use_cache=False).attentions[0]
    for head, distance in enumerate(TINY_DISTANCES[0]):
        looked = attentions[0, head, 20:, :30].argmax(-1)
        assert (torch.arange(20, 30) - looked == distance).float().mean() >= 0.8  # content has a say too


def test_cache_is_used_and_interrupted_builds_leave_nothing(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tiny.name == f"tiny-{recipe_hash()}"

    def never(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("grpo.model.tiny.train_tiny", never)
    assert build_tiny(tiny.parent) == tiny
    with pytest.raises(KeyboardInterrupt):
        build_tiny(tmp_path)
    assert list(tmp_path.iterdir()) == []

    # Another process finishes first: its model stays, ours goes.
    tensors = stored(tiny)

    def slower(*args: object) -> tuple:
        import shutil

        shutil.copytree(tiny, tmp_path / tiny.name)
        return tensors, make_tokenizer(), {"parse_rate": 0.0}

    monkeypatch.setattr("grpo.model.tiny.train_tiny", slower)
    assert build_tiny(tmp_path) == tmp_path / tiny.name
    assert [path.name for path in tmp_path.iterdir()] == [tiny.name]
    assert (tmp_path / tiny.name / "warmup.json").read_bytes() == (tiny / "warmup.json").read_bytes()


@pytest.mark.parametrize("reason", ["space", "file", "junk"])
def test_what_keeps_the_cache_from_being_written_fits_every_caller(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """train_grpo.py and evaluate.py make the tiny model too and know no --out, --layers or --force."""
    cache, told = tmp_path / "cache", "GiB free: free some space"
    if reason == "space":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    elif reason == "file":
        cache.write_text("in the way")
        told = f"cannot write beside {tiny_path(cache)}"
    else:
        tiny_path(cache).mkdir(parents=True)
        (tiny_path(cache) / "left").write_text("over")
        told = "holds no gpt-oss checkpoint, so it is not replaced: move it away"
    with pytest.raises(ModelError) as caught:
        build_tiny(cache, force=reason == "junk")  # as train_grpo.py calls it where something is there
    message = str(caught.value)
    assert told in message and "XDG_CACHE_HOME" in message and "--" not in message, message


def test_cache_location(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tiny_path().parent == tmp_path / "train_grpo"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert tiny_path().parent == Path.home() / ".cache" / "train_grpo"


def test_training_is_deterministic() -> None:
    recipe = Recipe(windows=4, probe_windows=1, read_steps=3, soften_steps=2, batch=8)
    state = torch.get_rng_state()
    (first, _, a), (second, _, b) = (train_tiny(recipe=recipe) for _ in range(2))
    assert a == b and all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(torch.get_rng_state(), state)  # the caller's random stream is left alone


# ---- Command line ---------------------------------------------------------------------------------------------------


def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *map(str, args)], capture_output=True, text=True)


def test_help_and_import_are_cheap() -> None:
    assert "gpt-oss" in run("--help").stdout
    code = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import make_model; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_check_command(small: Path) -> None:
    done = run("check", small)
    assert done.returncode == 0 and "what transformers expects" in done.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["full", "--out", "{tmp}/new"], "needs --tokenizer DIR or --no-tokenizer"),
        (["full", "--out", "{tmp}/new", "--tokenizer", "{tmp}", "--no-tokenizer"], "not both"),
        (["full", "--out", "{tmp}/new", "--tokenizer", "{tmp}"], "holds neither tokenizer.json nor tokenizer.json.xz"),
        (["full", "--out", "{tmp}/new", "--no-tokenizer", "--layers", "0"], "Shape.layers must be positive"),
        (["full", "--out", "{tmp}/new", "--no-tokenizer", "--layers", "99999999"], "GiB free"),
        (["tiny", "--seed", "1"], "give --out with another --seed"),
        (["tiny", "--out", "{tmp}"], "exists and is not empty"),
        (["tiny", "--out", "{tmp}", "--force"], "holds no gpt-oss checkpoint, so it is not replaced"),
        (["tiny", "--out", "{tmp}/file/model"], "cannot write"),
        (["check", "{tmp}"], "holds no config.json of model_type gpt_oss"),
        ([], "required: command"),
    ],
)
def test_errors(args: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("keep me")
    try:
        code = mm.main([arg.format(tmp=tmp_path) for arg in args])
    except SystemExit as stop:  # argparse
        code = stop.code
    assert code == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("change", [{"hidden": 100}, {"heads": 3}, {"experts_per_token": 33}, {"vocab": -1}])
def test_impossible_shapes(change: dict[str, int]) -> None:
    with pytest.raises(ModelError, match="Shape|shape"):
        dataclasses.replace(GPT_OSS_20B, **change)


def test_tokenizer_must_fit(small: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="ids up to 591, the model 500"):
        write_full(tmp_path / "a", dataclasses.replace(SMALL, vocab=500), small)
    content = json.loads((small / "tokenizer.json").read_text())
    content["added_tokens"] = content["added_tokens"][:-1]
    del content["model"]["vocab"]["a"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"lacks Harmony's special tokens <\|call\|>"):
        write_full(tmp_path / "a", SMALL, tmp_path)


def test_force_replaces_a_checkpoint(small: Path, tmp_path: Path) -> None:
    out = write_full(tmp_path / "model", SMALL, small)
    (out / "left over").write_text("")
    with pytest.raises(ModelError, match="not empty"):
        write_full(out, SMALL, small)
    write_full(out, SMALL, small, force=True)
    assert not (out / "left over").exists() and [path.name for path in tmp_path.iterdir()] == ["model"]
