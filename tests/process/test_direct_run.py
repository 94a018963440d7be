# SPDX-License-Identifier: Apache-2.0
"""Runs that learn from direct answers, as a user starts them: logs, evaluation, report, resume, SFT."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import ask
import evaluate as ev
import pytest
import watch
from helpers import QUESTION, SYSTEM, read_csv, run_python, run_script
from runs import assert_same_run, plant_inputs, run_here

from grpo.harmony import ANSWER_BEFORE
from grpo.output.layout import ADAPTER, COMPLETE

SETTINGS = {
    "MODEL_ID": "tiny", "DIRECT_ANSWERS": 1, "TOTAL_STEPS": 4, "SAVE_STEPS": 2, "PROMPTS_PER_STEP": 6, "SEED": 5,
    "DATA": "data/tes_heldout_compact.csv", "LR_SCHEDULER": "constant",
}  # fmt: skip


@pytest.fixture(scope="session")
def direct_run(tmp_path_factory):
    """Four steps with all evaluations, on one window and 12 held-out rows."""
    folder = tmp_path_factory.mktemp("direct")
    settings = SETTINGS | plant_inputs(folder) | {"EVAL_STEPS": 2}
    run_script(**settings, OUTPUT_DIR=folder / "run")
    return SimpleNamespace(folder=folder / "run", settings=settings)


def test_logs_say_nothing_of_what_was_not_sampled(direct_run):
    metrics, completions = (read_csv(direct_run.folder / f"{name}.csv") for name in ("metrics", "completions"))
    assert len(metrics) == 4 and len(completions) == 24
    for row in metrics:
        sampled = "parse_rate", "clipped_ratio", "tokens_mean", "tokens_max", "rollout_tokens_per_s", "logp_diff_mean"
        assert not any(row[name] for name in sampled)
        assert all(row[name] for name in ("reward", "entropy", "grad_norm", "rollout_s", "learn_s", "step_s"))
        assert float(row["expected_share"]) == 1
    for row in completions:
        assert row["completion"].endswith("]<|return|>") and not row["tokens"] and not row["truncated"]
        assert row["completion"].startswith(f"{row['parsed_action']}]") or not row["parsed_action"]
    log = (direct_run.folder / "training.log").read_text()
    steps = [line for line in log.splitlines() if " step " in line and "/4: reward" in line]
    assert len(steps) == 4 and all("(choose " in line for line in steps)
    assert not [line for line in steps if any(word in line for word in ("parse", "clipped", "tokens", "rollout"))]


def test_report_and_watching_leave_these_out(direct_run, capsys):
    page = (direct_run.folder / "report.html").read_text()
    titles = ("Parse rate</b>", "Length of answers", "Cut-off answers", " tokens</div>")
    assert "Entropy" in page and not [title for title in titles if title in page]
    assert watch.main([str(direct_run.folder)]) == 0
    picture = capsys.readouterr().out
    assert "reward" in picture and "nan" not in picture and "parse rate" not in picture and "length" not in picture


def test_the_adapter_is_evaluated_as_in_its_run(direct_run, tmp_path):
    """scripts/evaluate.py follows settings.json: the same figures to float32's last digits, on rows and plant."""
    out = tmp_path / "rows.json"
    assert ev.main([str(direct_run.folder), "--data", str(direct_run.settings["EVAL_DATA"]), "--out", str(out)]) == 0
    of_run, alone = (json.loads(path.read_text()) for path in (direct_run.folder / "evaluation.json", out))
    assert alone["exact"] and alone["after"]["reward"] == pytest.approx(of_run["after"]["reward"], abs=1e-5)
    options = ["--profile", str(direct_run.settings["EVAL_PROFILE"]), "--out", str(tmp_path / "plant.json")]
    assert ev.main([str(direct_run.folder), *options]) == 0
    files = direct_run.folder / "closed_loop.json", tmp_path / "plant.json"
    of_run, alone = (json.loads(path.read_text()) for path in files)
    regrets = [record["totals"]["trained"]["regret_percent"] for record in (of_run, alone)]
    assert alone["exact"] and regrets[1] == pytest.approx(regrets[0], rel=1e-4)


def test_the_adapter_is_asked_as_in_its_run(direct_run, capsys):
    assert ask.main([str(direct_run.folder), QUESTION, *SYSTEM]) == 0
    completion, action, *_ = capsys.readouterr().out.splitlines()
    assert completion == f"{action.removeprefix('action: ')}]<|return|>"
    assert ask.main([str(direct_run.folder), QUESTION, *SYSTEM, "--serve"]) == 0
    served = capsys.readouterr().out
    assert json.dumps(ANSWER_BEFORE)[1:-1] + '", "max_tokens": 1,' in served


def test_a_resumed_run_is_exact(direct_run, tmp_path):
    """A run that was killed after its checkpoint of step 2 is the whole one, bit by bit: adapter, metrics, answers."""
    folder = tmp_path / "run"
    shutil.copytree(direct_run.folder, folder)
    shutil.rmtree(folder / "checkpoint-4")
    for name in (COMPLETE, ADAPTER):
        (folder / name).unlink()
    done = run_script(**direct_run.settings | {"OUTPUT_DIR": folder})
    assert "continuing from step 2" in done.stdout
    assert_same_run(folder, direct_run.folder)


def test_sft_opens_the_answer_too_and_a_run_starts_from_it(tmp_path):
    """The loss is on `k]<|return|>`: a few steps leave no doubt about `]`, and settings.json says how prompts end."""
    run_python("scripts/sft.py", "--out", tmp_path / "sft", **SETTINGS | {"TOTAL_STEPS": 2})
    assert json.loads((tmp_path / "sft" / "settings.json").read_text())["settings"]["DIRECT_ANSWERS"] is True
    assert f"Its prompts end in `{ANSWER_BEFORE}`" in (tmp_path / "sft" / "README.md").read_text()
    settings = SETTINGS | {"INIT_ADAPTER": tmp_path / "sft", "OUTPUT_DIR": tmp_path / "run", "TOTAL_STEPS": 1}
    run_here(**settings, EVAL_SAMPLES=0)
