# SPDX-License-Identifier: Apache-2.0
"""scripts/dev/prove.py: rows, collected figures, a small proof."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import prove
import pytest
from helpers import ROOT
from runs import child_here, coarsen

from grpo.common import InputError
from grpo.settings.environment import load_settings
from scripts.dev import proof
from scripts.dev.proof import run_settings
from scripts.dev.proof_data import OTHER_PROFILE, SCALES, reasoning, write_data
from scripts.dev.warmup_rows import CHAIN


def plant_of(base: float, trained: float, unserved: float = 0.0) -> dict:
    """A closed_loop.json of three windows in which the two models emit so many kg, and the trained one leaves load."""
    windows = []
    for n in range(3):
        kg = {"base": (base, base + 2 * n), "trained": (trained, trained + n + 10 * unserved)}
        kg |= {"optimum": (5.0, 5.0), "always_2": (9.0, 9.0)}
        means = {
            name: {"mean": {"co2_kg": co2, "priced_kg": priced, "unserved_kwh": 0.0}, "unparsed": 0, "answers": 1}
            for name, (co2, priced) in kg.items()
        }
        windows.append({"name": f"days: 2025-07-{n + 1:02d}", "policies": means})
    totals = {name: {"co2_kg": 3 * kg, "regret_percent": kg} for name, kg in (("base", base), ("trained", trained))}
    gap = {"regret_percent": trained - 9, "regret_percent_high": trained - 8}
    return {
        "windows": windows,
        "totals": totals | {"rule": {"co2_kg": 1, "regret_percent": None}},
        "difference_rule": gap,
    }


@pytest.mark.parametrize(
    ("low", "plant", "code"),
    [
        (0.05, plant_of(10, 8), 0),
        (-0.01, plant_of(10, 8), 1),  # The reward is within its interval.
        (0.05, plant_of(10, 10.5), 1),  # The plant is better on average, within its interval.
        (0.05, plant_of(10, 8, unserved=5.0), 1),  # CO2 was saved by leaving load unserved.
        (0.05, {}, 1),  # The plant was not simulated.
    ],
)
def test_collect_judges_by_intervals(tmp_path, monkeypatch, low, plant, code):
    monkeypatch.setenv("BENCH_COMMIT", "abc")
    out, results = tmp_path / "proof", tmp_path / "results" / "proof.json"
    run = out / "run"
    run.mkdir(parents=True)
    evaluation = {"random": 0.25, "constant": 0.5, "oracle": 0.7, "before": {"reward": 0.4}, "after": {"reward": 0.5}}
    evaluation["difference"] = {"reward": 0.1, "reward_low": low, "reward_high": 0.2}
    (run / "evaluation.json").write_text(json.dumps(evaluation))
    (run / "closed_loop.json").write_text(json.dumps(plant))
    other = plant_of(10, 6)
    (out / proof.OTHER).write_text(json.dumps(other))
    (run / "report.html").write_text("<html>")
    facts = {"gpu": "H9", "gpus": 1, "gpu_total": 9.0, "cores": 7, "arch": "x"}
    (run / "settings.json").write_text(json.dumps({"machine": facts}))
    (run / "versions.json").write_text('{"torch": "9"}')
    assert prove.main(["--out", str(out), "--stage", "collect", "--results", str(results)]) == code
    record = json.loads(results.read_text())
    assert (record["commit"], record["machine"], record["versions"]) == ("abc", "H9, 9 GiB; 7 cores x", {"torch": "9"})
    named = {row["name"]: row["value"] for row in record["figures"]}
    assert "regret_percent_rule" not in named and named["reward_gain"] == 0.1
    assert not plant or named["co2_kg_trained"] == plant["totals"]["trained"]["co2_kg"]
    assert not plant or named["regret_over_rule_high"] == named["regret_percent_trained"] - 8
    assert named["co2_kg_trained_other"] == 18
    # 5 kg is the optimum of each of six windows, and the rule takes 9: on other days 6, 7 and 8 kg are 6 less.
    mine = [window["policies"]["trained"]["mean"]["priced_kg"] for window in plant.get("windows", ())]
    assert not plant or named["regret_over_rule_all"] == pytest.approx(100 * (sum(mine) + 21 - 6 * 9) / 30)
    assert (results.parent / "proof-report.html").is_file()


@pytest.mark.parametrize(
    "stage, words", [("collect", "--stage train"), ("train", "--stage make"), ("make", "--tokenizer")]
)
def test_a_stage_says_what_it_needs(tmp_path, stage, words):
    with pytest.raises(InputError, match=words):
        prove.main(["--out", str(tmp_path), "--stage", stage])


@pytest.mark.parametrize("name", SCALES)
def test_the_settings_of_a_scale_are_read_and_those_of_the_command_line_win(name, tmp_path):
    words = ["--scale", name, "--warmup-steps", "5", "--set", "LEARNING_RATE=1e-3", "--set", "TOTAL_STEPS=7"]
    options = prove.parse_args(["--out", str(tmp_path), *words])
    settings = run_settings(options, SCALES[name])
    assert options.steps == 5 and not load_settings(settings)[2] and "OVERWRITE" not in settings
    assert settings["LEARNING_RATE"] == "1e-3" and settings["TOTAL_STEPS"] == "7"
    assert settings["USE_VLLM"] == ("1" if name == "mid" else "0")
    direct = run_settings(prove.parse_args(["--out", str(tmp_path), "--set", "DIRECT_ANSWERS=1"]), SCALES[name])
    assert direct["USE_VLLM"] == "auto", "nothing is generated, and setting it is refused"


def test_a_scale_that_reasons_has_a_chain_and_learns_more_slowly():
    plain = SCALES["mid"]
    scale = reasoning(plain)
    settings, _, problems = load_settings(run_settings(prove.parse_args(["--out", "x", "--reason"]), scale))
    assert not problems and settings.MAX_COMPLETION_LEN > 29 and not settings.EVAL_EXACT
    assert dataclasses.replace(scale.recipe, follow=None) == plain.recipe
    assert reasoning(SCALES["small"]).recipe.distances == ((1, 2, 3, 7), (0,))
    changed = {name for name, value in scale.settings.items() if plain.settings.get(name) != value}
    slower = settings.PROMPTS_PER_STEP, settings.LEARNING_RATE, settings.WARMUP_STEPS
    assert slower == (64, 3.5e-4, 10) and scale.train_windows == plain.train_windows
    assert changed == {"MAX_COMPLETION_LEN", "EVAL_EXACT", "PROMPTS_PER_STEP", "LEARNING_RATE", "WARMUP_STEPS"}


PROMPT = "hour 8 store 16 load 45 co2 36 next 41"
ROWS = [
    SimpleNamespace(prompt=f"{letter} {PROMPT}", columns={f"reward_action_{k}": reward for k, reward in enumerate(row)})
    for letter, row in (("a", (0.1, 0.6, 0.2, 0.1)), ("b", (0.7, 0.1, 0.1, 0.1)))
]


class KnownModel:
    """Trained, it plans action 1 and does what the chain says; its base plans action 0, says something else to the
    second prompt, and answers evenly."""

    tokenizer = SimpleNamespace(batch_decode=lambda completions: completions)

    def complete(self, prompts: list[str], base: bool) -> list[str]:
        plan = 0 if base else 1
        chain = CHAIN.format(16, 45, 36, 41, plan)
        chain = chain if base else chain.replace("action", "a 3")  # Training may change the words around the plan.
        texts = [f"{chain}<|channel|>final<|message|>[{plan}]<|return|>" for _ in prompts]
        return [texts[0], "<|channel|>final<|message|>[3]<|return|>"] if base else texts

    def probabilities(self, prompts: list[str], actions: int, greedy: bool, base: bool) -> np.ndarray:
        assert all(prompt.startswith(row.prompt) for prompt, row in zip(prompts, ROWS, strict=True))
        assert not any("final" in prompt for prompt in prompts), "the answer is asked for"
        obeyed = [[float(f" {k}<|end|>" in prompt) for k in range(actions)] for prompt in prompts]
        return np.full((len(prompts), actions), 0.25) if base else np.array(obeyed)


def test_chains_are_counted_and_every_answer_is_asked_behind_every_chain(monkeypatch):
    rows = [row for row in ROWS for _ in range(4)]  # Every fourth is asked.
    monkeypatch.setattr(proof, "prepare", lambda options: (None, None, rows, ()))
    monkeypatch.setattr(proof, "start_model", lambda *arguments, **named: KnownModel())
    figures = proof.chain_figures(Path("run"), Path("heldout.csv"))
    assert (figures["plan_best_base"], figures["plan_best_trained"]) == (0, 0.5)
    for answer, expected in (("base", [0.25, 0.25]), ("trained", [0.05, 0.35])):
        # Trained: action 0 of the first row, and nothing where no chain says it; action 1 of both rows.
        rewards = [figures[f"reward_chain_{chain}_answer_{answer}"] for chain in ("base", "trained")]
        assert rewards == pytest.approx(expected)


def test_chains_are_measured_in_a_stage_of_their_own(tmp_path, monkeypatch):
    def play(stage: str) -> int:
        return proof.prove(prove.parse_args(["--out", str(tmp_path), "--stage", stage]), reasoning(SCALES["small"]))

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    monkeypatch.setattr(proof, "run_child", lambda *arguments: 0)
    monkeypatch.setattr(proof, "chain_figures", lambda run, heldout: {"plan_best_base": heldout.name})
    assert play("train") == 0 and not (tmp_path / proof.CHAINS).exists()
    assert "LORA_R=8" in json.loads((tmp_path / proof.TRAIN).read_text())["command"]
    monkeypatch.setattr(proof, "run_child", None)
    assert play("chains") == 0
    assert json.loads((tmp_path / proof.CHAINS).read_text()) == {"plan_best_base": "tes_heldout_compact.csv"}


def test_best_is_played_on_days_that_did_not_choose_it(tmp_path, monkeypatch):
    data, commands = tmp_path / "data", []
    write_data(data, SCALES["small"])
    days = [(data / name).read_text().splitlines() for name in ("profile_heldout.csv", OTHER_PROFILE)]
    assert len(days[0]) == len(days[1]) and not set(days[0][1:]) & set(days[1][1:])
    monkeypatch.setattr(proof, "run_child", lambda command: commands.append(command) or 5)
    options = prove.parse_args(["--out", str(tmp_path), "--stage", "other"])
    assert proof.prove(options, SCALES["small"]) == 5
    assert {tmp_path / "run/best", data / OTHER_PROFILE} < set(commands[0])
    (tmp_path / proof.OTHER).touch()
    assert proof.prove(options, SCALES["small"]) == 0, "it is complete"


def coarse_data(folder, scale):
    write_data(folder, scale)
    for profile in folder.glob("profile_*.csv"):
        coarsen(profile)


@pytest.mark.slow
def test_a_small_proof_from_model_to_figures(tmp_path, monkeypatch):
    """All stages on a CPU. Four steps need not improve anything: the exit code may be 0 or 1, the files must be
    there."""
    out, results = tmp_path / "proof", tmp_path / "proof.json"
    words = ["--out", "proof", "--scale", "small", "--results", str(results)]
    monkeypatch.setattr(proof, "run_child", child_here)
    monkeypatch.setattr(proof, "write_data", coarse_data)
    monkeypatch.chdir(tmp_path)
    code = prove.main(words)
    assert code in (0, 1)
    warmup = json.loads((out / "model" / "warmup.json").read_text())
    stored = warmup["stages"]["stored"]
    assert stored["parse_rate"] > 0.5
    assert abs(warmup["loaded"]["reward"] - stored["reward"]) < 0.05  # some of the rows, BF16 throughout
    named = {row["name"]: row["value"] for row in json.loads(results.read_text())["figures"]}
    kept = json.loads((ROOT / "docs" / "results" / "proof-h200-seed1.json").read_text())["figures"]
    assert {row["name"] for row in kept} <= named.keys(), "names in docs/results are an interface"
    assert named["steps"] == 4 and named["train_s"] > 1 and named["regret_percent_trained_other"] > 0
    assert str(tmp_path) not in results.read_text() and "MODEL_ID=OUT/model" in results.read_text()
    # What is complete is not repeated.
    before = [path.stat().st_mtime_ns for path in (out / "model" / "warmup.json", out / "run" / "evaluation.json")]
    monkeypatch.setattr(proof, "run_child", None)
    assert prove.main(words) == code
    after = [path.stat().st_mtime_ns for path in (out / "model" / "warmup.json", out / "run" / "evaluation.json")]
    assert after == before
    chains = proof.chain_figures(out / "run", out / "data" / "tes_heldout_compact.csv")
    assert 0 <= chains["plan_best_trained"] <= 1 and 0 < chains["reward_chain_trained_answer_base"] < 1
