# SPDX-License-Identifier: Apache-2.0
"""A task with a simulator of its own is one new folder, and nothing else changes."""

from __future__ import annotations

import json
import shutil

import pytest
from helpers import ROOT, read_csv, run_python, write_csv

FIGURE = {"title": "Distance", "unit": "steps", "meaning": "How far from ten.", "words": "distance of {:.1f}"}
TASK = {
    "defaults": {"DATA": "rows.csv", "EVAL_DATA": "rows.csv", "EVAL_PROFILE": "starts.txt"},
    "best_by": "counter",
    "figures": {"counter_distance": FIGURE},
}
SIMULATOR = """
import dataclasses
from grpo.harmony import assistant_turn, parse_action
from grpo.data.files import find_files
from grpo.data.prompts import render
from grpo.tasks.simulator import GREEDY, ReportSection, SimulationPlan, Simulator

@dataclasses.dataclass(frozen=True)
class Plan(SimulationPlan):
    starts: tuple = ()
    render: object = None

class Counter(Simulator):
    def plan(self, settings, rows, template, use_vllm, is_chosen, problems):
        (file,) = find_files("EVAL_PROFILE", settings.EVAL_PROFILE, problems)
        starts = tuple(map(int, file.read_text().split()))
        effort, date = settings.REASONING_EFFORT, settings.PROMPT_DATE
        shown = lambda n: render(template, [("user", f"counter {n}")], effort, date)
        return Plan("2 counters", True, True, "counters sample", tuple(map(str, starts)), starts, shown)

    def new_record(self, plan, settings, samples, exact):
        return {"starts": list(plan.starts), "totals": {"stay": {"distance": 5.0}}}

    def run(self, plan, record, name, responder, greedy=True):
        for policy, is_greedy in ((name, False), (name + GREEDY, True))[: 1 + greedy]:
            counters = list(plan.starts)
            for moment in range(3):
                prompts = [plan.render(n) for n in counters]
                texts = responder.texts(prompts, moment, is_greedy)
                turns = [assistant_turn(prompt, text) for prompt, text in zip(prompts, texts)]
                counters = [n + (parse_action(turn, 2) or 0) for n, turn in zip(counters, turns)]
            record["totals"][policy] = {"distance": sum(10 - n for n in counters) / len(counters)}

    def figures(self, record, name):
        return {"counter_distance": record["totals"][name]["distance"]}

    def table(self, record):
        return f"Counters end at {record['totals']['trained']}"

    def report(self, record):
        rows = [[name, str(total["distance"])] for name, total in record.get("totals", {}).items()]
        return ReportSection("Counters were counted.", "Counters", ["", "Distance"], rows)

SIMULATOR = Counter()
"""


@pytest.fixture(scope="module")
def counters(tmp_path_factory):
    """A copy of the project with the task `counter`, and its run of two steps."""
    project = tmp_path_factory.mktemp("project")
    for name in ("grpo", "scripts", "data/tiny"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("train_grpo.py", "rewards.py"):
        shutil.copy(ROOT / name, project / name)
    task = project / "grpo" / "tasks" / "counter"
    task.mkdir()
    (task / "task.json").write_text(json.dumps(TASK))
    (task / "simulator.py").write_text(SIMULATOR)
    rows = [[f"counter {n}", 0.2, 0.8] for n in range(4)]
    write_csv(project / "rows.csv", ["user", "reward_action_0", "reward_action_1"], rows)
    (project / "starts.txt").write_text("3\n5\n")
    settings = {
        "MODEL_ID": "tiny", "TASK": "counter", "OUTPUT_DIR": "run", "TOTAL_STEPS": 2, "PROMPTS_PER_STEP": 2,
        "NUM_GENERATIONS": 2, "EVAL_STEPS": 1, "EVAL_SAMPLES": 1,
    }  # fmt: skip
    return project, run_python("train_grpo.py", cwd=project, **settings).stdout


def test_a_run_of_a_new_task_is_simulated_measured_and_reported(counters):
    project, output = counters
    run = project / "run"
    assert "closed loop      on: 2 counters" in output
    assert "counters sample" in output and "by counter: the closed loop runs" in output
    assert "closed loop, base model: counter distance" in output
    record, best = (json.loads((run / name).read_text()) for name in ("closed_loop.json", "best/best.json"))
    assert {"stay", "base", "trained", "base_greedy", "trained_greedy"} == set(record["totals"])
    assert f"Counters end at {record['totals']['trained']}" in output
    first, last = read_csv(run / "metrics.csv")
    assert first["counter_distance"] and not last["counter_distance"] and "plant_regret" not in first
    assert best["by"] == "counter" and best["measured"]["windows"] == ["3", "5"]
    assert best["value"] == min(figures["counter_distance"] for figures in best["evaluated"])
    assert f"with a distance of {best['value']:.1f}" in best["in_words"]
    page = (run / "report.html").read_text(encoding="utf-8")
    for words in ("Counters were counted.", "<h2>Counters</h2>", "trained_greedy", "<b>Distance</b>"):
        assert words in page
    assert "plant" not in output.lower() and "plant" not in (run / "README.md").read_text().lower()


def test_the_command_asks_the_run_s_own_simulator(counters):
    project, _ = counters
    done = run_python("scripts/evaluate.py", "run", "--out", "by_hand.json", cwd=project)
    assert "2 counters" in done.stdout and "Counters end at" in done.stdout
    totals = json.loads((project / "by_hand.json").read_text())["totals"]
    assert totals["trained"] == json.loads((project / "run/closed_loop.json").read_text())["totals"]["trained"]
