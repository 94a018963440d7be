# SPDX-License-Identifier: Apache-2.0
"""Another task by one setting: GSM8K from the Hub to accuracy before and after, with a reward of one's own beside."""

from __future__ import annotations

import json
import re

import pytest
from helpers import ROOT, read_csv, run_script
from hub_server import HubServer

from grpo.output.logs import COMPLETIONS, METRICS
from grpo.settings.environment import load_settings
from grpo.settings.parsing import accepted_words
from grpo.settings.table import FIELDS, TASK_FIGURES, TASKS

SHORT = "def short(completions, **columns): return [-len(text) / 1000 for text in completions]\n"


def test_gsm8k_from_a_data_set_of_the_hub(tmp_path):
    """Held-out rows have no actions: the run's own rewards score them. Each reward is a column, and in the figures."""
    (tmp_path / "mine.py").write_text(SHORT)
    names = ("gsm8k_train.jsonl", "gsm8k_heldout.jsonl")
    lines = {name: (ROOT / "data" / name).read_text(encoding="utf-8").splitlines(True) for name in names}
    with HubServer() as hub:
        splits = {"train.jsonl": lines["gsm8k_train.jsonl"], "test.jsonl": lines["gsm8k_heldout.jsonl"]}
        files = {name: "".join(rows[:6]).encode() for name, rows in splits.items()}
        hub.add("org/maths", files, kind="datasets")
        run_script(
            MODEL_ID="tiny", TASK="gsm8k", DATA="org/maths", EVAL_DATA="org/maths", REWARDS="gsm8k,mine:short=0.5",
            TOTAL_STEPS=2, PROMPTS_PER_STEP=2, NUM_GENERATIONS=2, EVAL_SAMPLES=2, EVAL_STEPS=1, LOG_PROMPTS=1,
            OUTPUT_DIR=tmp_path / "run", PYTHONPATH=tmp_path, **hub.environ(tmp_path / "home"),
        )  # fmt: skip
    metrics, completions = (read_csv(tmp_path / "run" / f"{name}.csv") for name in ("metrics", "completions"))
    own = ["reward/gsm8k", "reward/short"]
    assert list(metrics[0]) == [*(name for name in METRICS if name not in TASK_FIGURES), *own, "log_metric"]
    assert list(completions[0]) == [*COMPLETIONS, "prompt", *own, "log_extra"]
    questions = [json.loads(line)["question"] for line in lines["gsm8k_train.jsonl"][:6]]
    for row in completions:
        assert any(question in row["prompt"] for question in questions) and "#### and the number" in row["prompt"]
        parts = [float(row[name]) for name in own]
        assert float(row["reward"]) == pytest.approx(parts[0] + 0.5 * parts[1], abs=1e-5) and parts[1] < 0
    first = [float(row["reward/short"]) for row in completions if row["step"] == "1"]
    assert float(metrics[0]["reward/short"]) == pytest.approx(sum(first) / 4, abs=1e-5)
    assert metrics[0]["heldout_reward"] and not metrics[0]["best_action_rate"]
    result = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    for when in ("before", "before_greedy", "after", "after_greedy"):
        figures, (correct, short) = result[when], (result[when]["functions"].pop(name) for name in ("gsm8k", "short"))
        assert not figures["functions"] and 0 <= correct["reward"] <= 1 and "regret" not in figures
        assert figures["reward"] == pytest.approx(correct["reward"] + 0.5 * short["reward"], abs=1e-6)
    assert "oracle" not in result and "reward" in result["difference"]
    report = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "best constant" not in report and not re.search(r"\bnan\b", report)


def test_a_task_is_a_set_of_defaults():
    """Over those of tiny and of the table, under the environment's; every one is a value that its setting takes."""
    assert set(TASKS) == set(accepted_words("TASK"))
    for task, values in TASKS.items():
        settings, sources, problems = load_settings({"MODEL_ID": "tiny", "TASK": task, "SEED": "3"})
        assert not problems and task == settings.TASK and settings.SEED == 3 and values.keys() <= FIELDS.keys()
        for name, value in values.items():
            assert (getattr(settings, name), sources[name]) == (value, task)
