# SPDX-License-Identifier: Apache-2.0
"""How the demo's seeds are judged, without training any."""

import hashlib
import json
import sys
from pathlib import Path

import bench
import pytest
from run_folders import EVALUATION, metrics_row, write_run

from grpo.tasks.tes.closed_loop import RULES
from scripts.dev import demo
from scripts.dev.demo import REPORTED, RULE, profile_text
from scripts.dev.record import read_json

OPTIMUM, RULE_KG = 100.0, 108.0  # priced kg of the optimum and of the rule to beat, in each of four windows
LAST, BEST = 104.0, 103.0  # and of the adapters, where a test says nothing else


def closed_loop(profiles: list[Path], models: dict[str, float], unserved: dict[str, float]) -> dict:
    """closed_loop.json of four windows in each profile: priced kg by model and, of the last window, unserved kWh."""
    priced = {"optimum": OPTIMUM} | dict.fromkeys(RULES, 500.0) | {RULE: RULE_KG}
    windows = []
    for path in profiles:
        for number in range(4):
            policies = {}
            for name, kg in (priced | models | {f"{name}_greedy": kg - 1 for name, kg in models.items()}).items():
                mean = {"co2_kg": kg, "priced_kg": kg + number - 1.5}
                mean["unserved_kwh"] = unserved.get(path.stem, 0.0) if number == 3 and name == "trained" else 0.0
                policies[name] = {"mean": mean, "unparsed": 0, "answers": 30}
            windows.append({"name": f"{path.stem}: 2025-09-0{number + 1}", "policies": policies})
    return {"windows": windows}


@pytest.fixture
def judge(tmp_path, monkeypatch):
    """A function that runs `bench.py demo` on two seeds whose adapters have this priced kg by (seed, adapter); returns
    exit code, figures by name, and the commands and environments that were started."""

    def run_demo(kg: dict[tuple[int, str], float], unserved: dict[str, float]) -> tuple[int, dict, list]:
        started = []

        def start(command, env, log):
            started.append((command, env))
            if command[1] == demo.TRAIN_SCRIPT:
                write_run(Path(env["OUTPUT_DIR"]), [metrics_row(step) for step in (1, 2)], evaluation=EVALUATION)
                return 0
            path, profiles = command[command.index("--out") + 1], command[command.index("--profile") + 1 :]
            profiles = [word for word in profiles if isinstance(word, Path)]
            assert not path.exists() and all(profile.is_file() for profile in profiles)
            adapter = "best" if command[2].name == "best" else "last"
            seed = int(path.name.split("-")[1])
            models = {"trained": kg.get((seed, adapter), {"last": LAST, "best": BEST}[adapter])}
            models |= {"base": 300.0} if "--base-too" in command else {}
            path.write_text(json.dumps(closed_loop(profiles, models, unserved)))
            return 0

        words = f"demo --out {tmp_path}/o.json --figure {tmp_path}/f.png --run {tmp_path}/run --seeds 2"
        monkeypatch.setattr(sys, "argv", ["bench.py", *words.split(), "--set", "TOTAL_STEPS=2"])
        monkeypatch.setenv("BENCH_COMMIT", "c1")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / "seed-1-last.json").write_text("of an earlier measurement")
        monkeypatch.setattr(demo, "run_child", start)
        code = bench.main()
        return code, {row["name"]: row for row in read_json(tmp_path / "o.json")["figures"]}, started

    return run_demo


def test_adapters_are_judged_by_set_on_windows_that_did_not_choose_them(judge, tmp_path):
    code, figures, started = judge({(2, "last"): 110.0}, {"others": 2.5})
    value = {name: row["value"] for name, row in figures.items()}
    assert code == 0 and (tmp_path / "f.png").is_file()
    trained = [env["EVAL_PROFILE"] for command, env in started if command[1] == demo.TRAIN_SCRIPT]
    assert trained == [str(tmp_path / "run/profiles/selection.csv")] * 2
    judged = [command for command, _ in started if command[1] == demo.EVALUATE]
    profiles = [[word.stem for word in command if str(word).endswith(".csv")] for command in judged]
    assert profiles == [list(REPORTED)] * 4 and sum("--base-too" in command for command in judged) == 1
    counts = [value[f"{policy}_below_rule"] for policy in ("last", "last_greedy", "best", "best_greedy")]
    assert counts == [3, 3, 6, 6] and figures["last_below_rule"]["note"].startswith("of 6 seeds x sets")
    for name in REPORTED:
        assert value[f"{RULE}_{name}_regret"] == pytest.approx(8) and value[f"base_{name}_regret"] == pytest.approx(200)
        assert value[f"seed1_best_{name}_regret"] == pytest.approx(3)
        assert value[f"seed1_best_greedy_{name}_regret"] == pytest.approx(2)
        assert value[f"seed2_last_{name}_regret"] == pytest.approx(10)
    row = figures["seed1_last_others_unserved_kwh"]
    assert (row["value"], row["note"]) == (2.5, "in 1 of 4 windows, worst others: 2025-09-04 with 2.5 kWh")
    assert figures["seed1_last_shown_unserved_kwh"]["note"] == "in none of 4 windows"
    assert value["seed1_reward_after"] == value["seed2_reward_after"] == EVALUATION["after"]["reward"]
    assert "seed1_heldout_oracle" in value and "seed2_heldout_oracle" not in value
    assert not [name for name in figures if "selection" in name]


def test_the_exit_code_is_that_of_the_best_adapters_on_every_seed_and_set(judge):
    assert judge({(1, "last"): 110.0, (2, "last"): 110.0}, {})[0] == 0
    assert judge({(2, "best"): RULE_KG}, {})[0] == 1, "equal is not below"


HASHES = {
    "selection": "0eb6ff7d9f92c1122fc269d1f855015d7720ae3e4916dc3d7a38d28f8688a88b",
    "shown": "684a5459a174c1a958473574e942a53e1be55106bca67f1c6f91bc9fb8eee7ca",
    "others": "cd2820f3674e66f88931063f534e2a3dab3f9de82182315e366f6f714b96c9be",
    "varied": "5fd0498e600ae87d65d961c2c4f00ec6798b98030f2e71d5f088817875ff7c62",
}


def test_the_profiles_are_the_ones_that_were_committed_before_tuning():
    """The windows on which the demo is judged were fixed before its settings were chosen."""
    assert {name: hashlib.sha256(profile_text(name).encode()).hexdigest() for name in HASHES} == HASHES
