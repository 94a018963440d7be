# SPDX-License-Identifier: Apache-2.0
"""Tests of scripts/prove.py: kernels of the warm-up, shortened rows, small vocabulary, collected figures, a small proof.

    python -m pytest tests/test_prove.py

Under two minutes on one CPU core, most of it the small proof. No network, no GPU.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import prove
import pytest
import torch
from conftest import CLEAN, ROOT

from grpo.measure import proof_model
from grpo.measure.proof import run_settings
from grpo.measure.proof_data import (
    KEPT_TAIL,
    NEAR_KWH,
    PROBE_SEED,
    QUANTITIES,
    SCALES,
    WARMUP_SEED,
    Rows,
    Vocabulary,
    encode,
    place,
    readings,
    shared_ends,
    warmup_rows,
    write_data,
)
from grpo.measure.proof_model import (
    HEAD_DISTANCES,
    checkpoint_tensors,
    draw_weights,
    fast_kernels,
    figures,
    load_tokenizer,
    log_probs,
    masks,
    new_model,
)
from grpo.model.checkpoint import check_checkpoint
from grpo.model.gptoss_format import Shape, config_dict
from grpo.preflight.hub import count_parameters
from grpo.settings import load_settings

SHAPE = Shape(
    layers=4, hidden=64, intermediate=64, experts=4, experts_per_token=2, heads=4, kv_heads=2, head_dim=32, vocab=592,
    sliding_window=12,
)  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> list[tuple]:
    return warmup_rows((7, 2, "full"))


@pytest.fixture(scope="module")
def tokenizer():
    """The tiny model's: a full prompt takes more of its tokens than o200k's, but only numbers differ between prompts."""
    return load_tokenizer(None)


@pytest.fixture(scope="module")
def vocabulary(tokenizer, rows) -> Vocabulary:
    return Vocabulary(tokenizer, {int(i) for row in encode(tokenizer, rows) for i in row}, 592)


@pytest.fixture(scope="module")
def placed(tokenizer, rows, vocabulary) -> Rows:
    encoded = encode(tokenizer, rows)
    made = place(encoded, rows, vocabulary, "cpu")
    made.head, made.tail = shared_ends([row[: -len(vocabulary.answer)] for row in encoded])
    return made


@pytest.fixture
def model(vocabulary):
    torch.manual_seed(0)
    return new_model(SHAPE, vocabulary)


def test_kernels_equal_transformers_in_values_and_gradients(model, vocabulary):
    """Sinks, sliding window, grouped heads and experts against transformers' eager path, float32."""
    ids = torch.randint(vocabulary.rest, (2, 40), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(40).expand(2, -1)
    direction = torch.randn(SHAPE.hidden, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.uniform_(-3, 3)
            layer.mlp.router.weight.mul_(20)
    results = []
    for fast in (False, True):
        model.zero_grad()
        if fast:
            with fast_kernels(model):
                hidden = proof_model.forward(model, ids, positions)
                (hidden * direction).sum().backward()
        else:
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            (hidden * direction).sum().backward()
        results.append(
            (hidden.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        )
    (slow, slow_gradients), (fast, fast_gradients) = results
    torch.testing.assert_close(fast, slow, atol=2e-5, rtol=1e-4)
    assert slow_gradients.keys() == fast_gradients.keys()
    for name, gradient in slow_gradients.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(fast_gradients[name], gradient, atol=1e-4 * scale + 1e-6, rtol=1e-3, msg=name)


def test_kernels_are_given_back(model):
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    forward = GptOssExperts.forward
    with pytest.raises(RuntimeError), fast_kernels(model):
        raise RuntimeError
    assert model.config._attn_implementation == "eager"
    assert GptOssExperts.forward is forward


def test_initial_heads_look_back_by_their_distance(model, vocabulary):
    ids = torch.randint(vocabulary.rest, (1, 30), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        attentions = model(input_ids=ids, output_attentions=True, use_cache=False).attentions[0]
    for head in range(SHAPE.heads):
        distance = HEAD_DISTANCES[0][head]
        looked = attentions[0, head, 20:].argmax(-1)
        assert (torch.arange(20, 30) - looked == distance).float().mean() >= 0.8  # content has a say too


def test_a_focused_row_keeps_numbers_answer_and_positions(placed, vocabulary):
    answer = len(vocabulary.answer)
    picked = torch.arange(len(placed))
    ids, positions, valid = placed.batch(picked, answer, True)
    whole, _, lengths = placed.batch(picked, answer, False)
    assert valid.max() == lengths.max() - placed.head - placed.tail + 3 * KEPT_TAIL
    for n in range(len(placed)):
        kept = int(valid[n])
        assert positions[n, 0] == placed.head - KEPT_TAIL
        assert (positions[n, 1:kept] > positions[n, : kept - 1]).all()
        assert (ids[n, :kept] == whole[n, positions[n, :kept]]).all()
        assert ids[n, kept - answer : kept].tolist() == vocabulary.answer
        end = int(lengths[n]) - answer - placed.tail
        assert set(range(placed.head, end)) <= set(positions[n, :kept].tolist())


def test_a_focused_row_hides_what_the_window_hides(placed, vocabulary):
    """The sliding window counts positions of the whole prompt: tokens behind the gap do not see those before it."""
    _, positions, valid = placed.batch(torch.arange(1), len(vocabulary.answer), True)
    made = masks(positions, 12, torch.float32)
    last = int(valid[0]) - 1
    behind = last + 1 - len(vocabulary.answer) - KEPT_TAIL
    assert positions[0, behind] > positions[0, behind - 1] + 12
    assert (made["sliding_attention"][0, 0, last, : positions.shape[1]] == 0).sum() == 12
    assert (made["sliding_attention"][0, 0, behind, : positions.shape[1]] == 0).sum() == 1
    assert (made["full_attention"][0, 0, last, : positions.shape[1]] == 0).sum() == last + 1
    assert (made["sliding_attention"][0, 0, :, positions.shape[1]] == 0).all()  # the sink


def test_the_checkpoint_answers_as_the_small_vocabulary_does(tokenizer, rows, model):
    """Tokens that stand for themselves get the same probability from all 592 rows; the rest share theirs."""
    seen = {int(i) for row in encode(tokenizer, rows[:1]) for i in row}
    few = Vocabulary(tokenizer, seen, 592)
    assert 100 < few.others < 592
    torch.manual_seed(3)
    model = new_model(SHAPE, few)
    tensors = checkpoint_tensors(model, {}, few, 592, 0)
    assert tensors["lm_head.weight"].shape == (592, 64) and tensors["lm_head.weight"].dtype == torch.bfloat16
    hidden = torch.randn(5, 64)
    small = log_probs(model, hidden, few.others)
    full = (hidden @ tensors["lm_head.weight"].float().T).log_softmax(-1)
    torch.testing.assert_close(full[:, few.ids], small[:, :-1], atol=0.02, rtol=0)
    torch.testing.assert_close(small.exp().sum(-1), torch.ones(5))


def test_readings_of_a_committed_row():
    with (ROOT / "data" / "tes_train.csv").open(newline="", encoding="utf-8") as file:
        prompt = next(csv.DictReader(file))["prompt"]
    found = dict(zip(QUANTITIES, readings(prompt), strict=True))
    assert found["hour"] == 0 and found["stored"] == 48 and found["load"] == 44.6 and found["co2"] == 0.358
    assert found["next_low"] == 0.412 and found["later_low"] == 0.173 and found["rank"] == 8
    assert math.isclose(found["later_load"], 48.8 + 50.4 + 51.0 + 49.7 + 55.2 + 57.3 + 55.8 + 51.7 + 59.4)
    assert readings("hour 8 store 16") is None


def test_warm_up_rows_differ_from_all_others():
    """Neither warm-up nor probe rows share a prompt with each other or with the data of the run."""
    scale = dataclasses.replace(SCALES["mid"], train_windows=2, heldout_windows=2)
    warm = {prompt for prompt, _, _ in warmup_rows((WARMUP_SEED, 3, "full"))}
    probe = {prompt for prompt, _, _ in warmup_rows((PROBE_SEED, 3, "full"))}
    assert len(warm) == 120 and not warm & probe
    assert scale.windows + WARMUP_SEED < 2**32 and PROBE_SEED + scale.probe_windows < WARMUP_SEED


def test_training_rows_hold_short_hours_and_held_out_rows_are_as_they_come(tmp_path):
    scale = dataclasses.replace(SCALES["mid"], train_windows=2, heldout_windows=2)
    write_data(tmp_path, scale)
    stored, load = (QUANTITIES.index(name) for name in ("stored", "load"))

    def short(name: str) -> list[bool]:
        with (tmp_path / name).open(newline="", encoding="utf-8") as file:
            found = [readings(row["prompt"]) for row in csv.DictReader(file)]
        return [row[load] > row[stored] - 0.5 for row in found]  # the prompt rounds what is stored

    train, heldout = short("tes_train.csv"), short("tes_heldout.csv")
    assert len(heldout) == 60 and sum(heldout) < 12
    assert len(train) > 65 and all(train[60:]) and 0.28 < sum(train) / len(train) < 0.36


def test_rows_near_the_boundary_are_drawn_more_often():
    scale = dataclasses.replace(SCALES["mid"], near_weight=3.0)
    deficit = torch.tensor([-math.inf, -100.0, -NEAR_KWH, -1.0, 0.0, 0.1, 90.0])
    assert draw_weights(deficit, scale).tolist() == [1, 1, 1, 3, 3, 1, 1]


def test_figures_count_what_leaves_load_unserved(placed, vocabulary, model, monkeypatch):
    """A model that answers each action alike: in hours that actions leave load unserved, those have 1/4 each."""
    count = len(placed)
    even = torch.full((count, len(vocabulary.answer), vocabulary.rest + 1), 0.0)
    even[:, vocabulary.place, vocabulary.actions] = math.log(0.25)
    monkeypatch.setattr("grpo.measure.proof_model.forward", lambda model, ids, positions: ids)
    monkeypatch.setattr("grpo.measure.proof_model.at_answer", lambda hidden, valid, answer: hidden)
    monkeypatch.setattr("grpo.measure.proof_model.log_probs", lambda model, hidden, others: even[: len(hidden)])
    found = figures(model, placed, vocabulary)
    lacking = [[output < d for output in (0, 100 / 3, 200 / 3, 100)] for d in placed.deficit.tolist()]
    hours = [sum(row) / 4 for row in lacking if any(row)]
    assert len(hours) > 1 and math.isclose(found["unserved"], sum(hours) / len(hours), rel_tol=1e-5)
    assert "unserved" not in figures(model, dataclasses.replace(placed, readings=None), vocabulary)


def policies(base: float, trained: float, unserved: float = 0.0) -> dict:
    """A closed_loop.json of three windows in which the two models emit so many kg, and the trained one leaves load."""
    windows = []
    for n in range(3):
        after = {"co2_kg": trained, "priced_kg": trained + n + 10 * unserved}
        windows.append(
            {"policies": {"base": {"mean": {"co2_kg": base, "priced_kg": base + 2 * n}}, "trained": {"mean": after}}}
        )
    totals = {
        name: {"co2_kg": 3 * kg, "unserved_kwh": 0.0, "regret_percent": kg}
        for name, kg in (("base", base), ("trained", trained))
    }
    return {"windows": windows, "totals": totals}


def finished(out: Path, gain: tuple[float, float, float], plant: dict) -> Path:
    run = out / "run"
    run.mkdir(parents=True)
    reward, low, high = gain
    evaluation = {
        "random": 0.25, "constant": 0.5, "oracle": 0.7, "before": {"reward": 0.4, "parse_rate": 0.9},
        "after": {"reward": 0.4 + reward, "parse_rate": 1.0},
        "difference": {"reward": reward, "reward_low": low, "reward_high": high},
    }  # fmt: skip
    (run / "evaluation.json").write_text(json.dumps(evaluation))
    (run / "closed_loop.json").write_text(json.dumps(plant))
    (run / "report.html").write_text("<html>")
    (out / "command.txt").write_text(f"MODEL_ID={out}/model python train_grpo.py\n")
    return out


@pytest.mark.parametrize(
    ("gain", "plant", "code"),
    [
        ((0.1, 0.05, 0.15), policies(10, 8), 0),
        ((0.1, -0.01, 0.21), policies(10, 8), 1),  # within its interval
        ((0.1, 0.05, 0.15), policies(10, 10.5), 1),  # better on average, within its interval
        ((0.1, 0.05, 0.15), policies(10, 8, unserved=5.0), 1),  # saved by leaving load unserved
    ],
)
def test_collect_judges_by_intervals(tmp_path, monkeypatch, gain, plant, code):
    monkeypatch.setenv("BENCH_COMMIT", "abc")
    out = finished(tmp_path / "proof", gain, plant)
    results = tmp_path / "results" / "proof.json"
    assert prove.main(["--out", str(out), "--stage", "collect", "--results", str(results)]) == code
    record = json.loads(results.read_text())
    assert record["commit"] == "abc"
    assert "--scale mid --out OUT" in record["command"]
    assert "MODEL_ID=OUT/model python train_grpo.py" in record["command"]
    named = {one["name"]: one["value"] for one in record["figures"]}
    assert named["reward_gain"] == gain[0] and named["co2_kg_trained"] == plant["totals"]["trained"]["co2_kg"]
    assert (results.parent / "proof-report.html").is_file()


def test_collect_without_a_run_says_what_to_do(tmp_path, capsys):
    assert prove.main(["--out", str(tmp_path), "--stage", "collect"]) == 2
    assert "--stage train" in capsys.readouterr().err


def test_full_prompts_need_a_tokenizer(tmp_path, capsys):
    assert prove.main(["--out", str(tmp_path), "--stage", "make"]) == 2
    assert "--tokenizer" in capsys.readouterr().err


def test_settings_on_the_command_line_win(tmp_path):
    options = prove.parse_args(["--out", str(tmp_path), "--set", "LEARNING_RATE=1e-3", "--set", "TOTAL_STEPS=7"])
    settings = run_settings(options, SCALES["mid"])
    assert settings["LEARNING_RATE"] == "1e-3" and settings["TOTAL_STEPS"] == "7" and settings["USE_VLLM"] == "1"

    _, _, problems = load_settings(settings)
    assert not problems
    with pytest.raises(SystemExit):
        prove.parse_args(["--out", "x", "--set", "nonsense"])


def test_the_mid_shape_suits_the_kernels():
    shape = SCALES["mid"].shape
    assert shape.hidden % 256 == 0 and shape.intermediate % 128 == 0 and shape.head_dim == 64
    assert shape.vocab == 201088 and shape.sliding_window == 128
    assert 3e7 < count_parameters(config_dict(shape))["total"] - 2 * shape.vocab * shape.hidden < 9e7


@pytest.mark.slow
def test_a_small_proof_from_model_to_figures(tmp_path):
    """All stages on a CPU. Four steps need not improve anything: the exit code may be 0 or 1, the files must be there."""
    out, results = tmp_path / "proof", tmp_path / "proof.json"  # given relative to the current folder
    command = [sys.executable, str(ROOT / "scripts" / "prove.py"), "--out", "proof", "--scale", "small"]
    done = subprocess.run(
        [*command, "--results", "proof.json"], env=CLEAN, cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    check_checkpoint(out / "model")
    warmup = json.loads((out / "model" / "warmup.json").read_text())
    stages = warmup["stages"]
    assert stages["stored"]["parse_rate"] > 0.5
    assert abs(warmup["loaded"]["reward"] - stages["stored"]["reward"]) < 0.05  # some of the rows, BF16 throughout
    named = {one["name"]: one["value"] for one in json.loads(results.read_text())["figures"]}
    assert {"reward_before", "reward_after", "parse_rate_after", "warmup_reward_rounded", "train_s"} <= named.keys()
    assert named["steps"] == 4
    assert str(tmp_path) not in results.read_text() and "MODEL_ID=proof/model" in results.read_text()
    # What is complete is not repeated.
    before = (out / "model" / "warmup.json").stat().st_mtime_ns
    again = subprocess.run(
        [*command, "--stage", "make"], env=CLEAN, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert again.returncode == 0 and (out / "model" / "warmup.json").stat().st_mtime_ns == before
