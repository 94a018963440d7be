# SPDX-License-Identifier: Apache-2.0
"""scripts/prove.py: layers and rows of the warm-up, collected figures, a small proof."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import prove
import pytest
import torch
from conftest import CLEAN, ROOT

from grpo.measure.proof import run_settings
from grpo.measure.proof_data import SCALES, write_data
from grpo.model.checkpoint import check_checkpoint
from grpo.model.fast_layers import forward
from grpo.model.gptoss_format import SPECIAL_TOKENS, TINY, Shape, quantize_experts
from grpo.model.tiny import make_tokenizer
from grpo.model.warmup import WarmUp, at_answer, figures, log_probs, new_model
from grpo.model.warmup_rows import PROBE_SEED, WARMUP_SEED, Answer, Rows, readings, warmup_rows
from grpo.settings import load_settings
from grpo.tasks.tes.dataset import synthetic_windows, trajectory
from grpo.tasks.tes.plant import Plant, step
from grpo.tasks.tes.profiles import TRAIN_START

pytestmark = pytest.mark.numeric

SHAPE = Shape(
    layers=4, hidden=64, intermediate=64, experts=4, experts_per_token=2, heads=4, kv_heads=2, head_dim=32, vocab=592,
    sliding_window=12,
)  # fmt: skip
RECIPE = dataclasses.replace(SCALES["small"].recipe, shape=SHAPE, batch=8, steps=40)


@pytest.fixture(scope="module")
def tokenizer():
    """The tiny model's: a full prompt takes more of its tokens than o200k's, but only numbers differ between prompts."""
    return make_tokenizer(TINY.vocab)


@pytest.fixture(scope="module")
def rows(tokenizer) -> Rows:
    return Rows(warmup_rows((7, 2, "compact")), tokenizer, Answer.of(tokenizer), "cpu")


@pytest.fixture
def model(tokenizer):
    torch.manual_seed(0)
    return new_model(RECIPE, tokenizer, {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS})


def test_fast_layers_equal_transformers_in_values_and_gradients(model):
    """Sinks, sliding window, grouped heads and experts against transformers' eager path, float32."""
    ids = torch.randint(SHAPE.vocab, (2, 40), generator=torch.Generator().manual_seed(1))
    direction = torch.randn(SHAPE.hidden, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.uniform_(-3, 3)
            layer.mlp.router.weight.mul_(20)
    results = []
    for fast in (True, False):
        model.zero_grad()
        if not fast:
            model.set_attn_implementation("eager")
            model.set_experts_implementation("eager")
        hidden = forward(model, ids)
        (hidden * direction).sum().backward()
        results.append(
            (hidden.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        )
    (fast, fast_gradients), (slow, slow_gradients) = results
    torch.testing.assert_close(fast, slow, atol=2e-5, rtol=1e-4)
    assert slow_gradients.keys() == fast_gradients.keys()
    for name, gradient in slow_gradients.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(fast_gradients[name], gradient, atol=1e-4 * scale + 1e-6, rtol=1e-3, msg=name)


def test_initial_heads_look_back_by_their_distance(model):
    ids = torch.randint(SHAPE.vocab, (1, 30), generator=torch.Generator().manual_seed(2))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(input_ids=ids, output_attentions=True, use_cache=False).attentions[0]
    for head in range(SHAPE.heads):
        distance = RECIPE.distances[0][head]
        looked = attentions[0, head, 20:].argmax(-1)
        assert (torch.arange(20, 30) - looked == distance).float().mean() >= 0.8  # content has a say too


def test_rows_end_in_their_answer(rows, tokenizer):
    answer = Answer.of(tokenizer)
    ids, lengths = rows.batch(torch.arange(len(rows)))
    assert ids.shape[1] % 8 == 0 and lengths.max() <= ids.shape[1]
    assert all(row[n - len(answer.ids) : n].tolist() == answer.ids for row, n in zip(ids, lengths, strict=True))
    assert rows.readings.mean(0).abs().max() < 1e-4
    # What predicts a token stands before it.
    before = at_answer(torch.arange(ids.shape[1]).expand(len(ids), -1)[..., None], lengths, len(answer.ids))[..., 0]
    assert (ids.gather(1, before + 1) == torch.tensor(answer.ids)).all()


def test_readings_are_what_the_hour_would_do():
    """Against the plant itself; nothing in them ranks the actions."""
    ((window, rng),) = synthetic_windows(3, 2, 1, TRAIN_START)
    for _, state in trajectory(window, rng, "full", None):
        now, plant = state.stamp.hour - 8, Plant()
        done = step(plant, state.energy_kwh, [0, 1, 2, 3], state.load_kw[now], state.co2[now])
        found = readings(state)
        assert found[:4] == pytest.approx(done.energy_kwh) and found[8:10] == pytest.approx(done.unserved_kwh[:2])
        assert found[10] == (done.unserved_kwh[0] > 0) and found[-1] == state.energy_kwh


def test_figures_are_what_sampling_earns(model, rows, tokenizer, monkeypatch):
    """A model that always ends its answer right and gives the actions 1/4 each earns what random actions do; one with half of
    its probability elsewhere earns half."""
    answer = Answer.of(tokenizer)
    even = torch.zeros(len(answer.ids), SHAPE.vocab)
    even[answer.action_at] = -math.inf
    for share in (1.0, 0.5):
        even[answer.action_at, answer.actions] = math.log(0.25 * share)
        monkeypatch.setattr("grpo.model.warmup.log_probs", lambda model, hidden: even.expand(len(hidden), -1, -1))
        found = figures(model, rows, answer, 40)
        assert found["parse_rate"] == pytest.approx(share) and found["reward"] == pytest.approx(share / 4, rel=1e-3)


def test_the_warm_up_learns_format_text_and_readings(model, rows, tokenizer):
    """Few steps on few rows: each part of the loss falls, experts are then what MXFP4 can say, and stay so."""
    answer, lines = Answer.of(tokenizer), []
    training = WarmUp(model, rows, answer, RECIPE, 0)
    before, explained = figures(model, rows, answer), training.explained()
    ids, lengths = rows.batch(torch.arange(8))

    def text() -> float:
        with torch.no_grad():
            logp = log_probs(model, forward(model, ids)[:, :-1]).gather(-1, ids[:, 1:, None])[..., 0]
        return -logp[:, : int(lengths.min()) - len(answer.ids) - 1].mean().item()

    first = text()
    training.phase(0.9, RECIPE.lr, lines.append)
    after = figures(model, rows, answer)
    assert after["parse_rate"] > 10 * before["parse_rate"] and text() < first - 0.3
    assert training.explained() > explained + 0.1 and training.step == 36
    stored = quantize_experts(model)
    kept = model.model.layers[1].mlp.experts.down_proj.clone()
    training.phase(1.0, RECIPE.lr / 4, lines.append)
    assert torch.equal(model.model.layers[1].mlp.experts.down_proj, kept) and len(stored) == 16


def test_warm_up_rows_differ_from_all_others():
    """Neither warm-up nor probe rows share a prompt with each other or with the data of the run."""
    recipe = SCALES["mid"].recipe
    warm = {row.prompt for row in warmup_rows((WARMUP_SEED, 3, "full"))}
    probe = {row.prompt for row in warmup_rows((PROBE_SEED, 3, "full"))}
    assert len(warm) == 120 and not warm & probe
    assert recipe.windows + WARMUP_SEED < 2**32 and PROBE_SEED + recipe.probe_windows < WARMUP_SEED


def test_training_rows_hold_short_hours_and_held_out_rows_are_as_they_come(tmp_path):
    write_data(tmp_path, dataclasses.replace(SCALES["mid"], train_windows=2, heldout_windows=2))

    def short(name: str) -> list[bool]:
        with (tmp_path / name).open(newline="", encoding="utf-8") as file:
            prompts = [row["prompt"] for row in csv.DictReader(file)]
        found = [re.search(r"energy \[kWh\]: (\d+).*?load=([\d.]+) kW", prompt, re.DOTALL) for prompt in prompts]
        return [float(match[2]) > float(match[1]) - 0.5 for match in found]  # the prompt rounds what is stored

    train, heldout = short("tes_train.csv"), short("tes_heldout.csv")
    assert len(heldout) == 60 and sum(heldout) < 12
    assert len(train) > 65 and all(train[60:]) and 0.28 < sum(train) / len(train) < 0.36


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


@pytest.mark.parametrize("name", SCALES)
def test_a_scale_can_be_named_and_its_settings_are_read(name, tmp_path):
    options = prove.parse_args(["--out", str(tmp_path), "--scale", name, "--warmup-steps", "5"])
    assert options.steps == 5 and not load_settings(run_settings(options, SCALES[name]))[2]


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
    kept = json.loads((ROOT / "docs" / "results" / "proof-h200-seed1.json").read_text())["figures"]
    assert {one["name"] for one in kept} <= named.keys(), "names in docs/results are an interface"
    assert named["steps"] == 4
    assert str(tmp_path) not in results.read_text() and "MODEL_ID=OUT/model" in results.read_text()
    # What is complete is not repeated.
    before = (out / "model" / "warmup.json").stat().st_mtime_ns
    again = subprocess.run(
        [*command, "--stage", "make"], env=CLEAN, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert again.returncode == 0 and (out / "model" / "warmup.json").stat().st_mtime_ns == before
