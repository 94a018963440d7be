# SPDX-License-Identifier: Apache-2.0
"""Evaluations while a run trains, and its best adapter. Run: python -m pytest tests/evaluate/test_progress.py"""

import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import runs
from expert_models import load
from helpers import read_csv, run_script
from peft import PeftModel
from trainers import make
from transformers.trainer_callback import TrainerCallback

from grpo.data.files import Row
from grpo.evaluate.heldout_reward import HeldoutEvaluation, new_results
from grpo.evaluate.progress import Progress
from grpo.figures.verdict import loading_advice
from grpo.output.durable import read_json
from grpo.output.folder import RunState
from grpo.output.layout import ADAPTER, BEST
from grpo.settings.table import Settings
from grpo.tasks.simulator import SimulationPlan


def test_what_is_measured_reaches_logs_and_trackers(tiny, tmp_path):
    """After every EVAL_STEPS steps but for the last; the model is left in training."""
    trainer, seen, logged = make(tiny, tmp_path, TOTAL_STEPS=4, EVAL_STEPS=2), [], []
    trainer.measure = lambda trainer: seen.append(trainer.model.training) or {"heldout_reward": 0.25}
    tracker = TrainerCallback()
    tracker.on_log = lambda args, state, control, logs, **rest: logged.append("heldout_reward" in logs)
    trainer.add_callback(tracker)
    trainer.train()
    measured = [row["heldout_reward"] for row in read_csv(tmp_path / "metrics.csv")]
    assert seen == [True] and measured == ["", "0.25", "", ""]
    assert logged == [False, True, False, False, False], "the run's end is last"


SETTINGS = {
    "TOTAL_STEPS": 5, "EVAL_STEPS": 2, "SAVE_STEPS": 3, "EVAL_SAMPLES": 2, "LEARNING_RATE": "1e-2",
    "PROMPTS_PER_STEP": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def measured(tiny, tmp_path_factory):
    """Five steps, measured exactly after the second and the fourth; one window, twelve held-out rows."""
    folder = tmp_path_factory.mktemp("measured")
    inputs = runs.plant_inputs(folder)
    run_script(**runs.SETTINGS | SETTINGS | inputs | {"OUTPUT_DIR": folder / "run"})
    return folder / "run", inputs


def test_a_run_measures_itself_and_keeps_its_best_adapter(measured, tiny):
    folder, _ = measured
    names = ("evaluation.json", "closed_loop.json", "best/best.json")
    evaluation, plant, best = (read_json(folder / name) for name in names)
    rows, evaluated = read_csv(folder / "metrics.csv"), best["evaluated"]
    for name in ("plant_regret", "eval_s"):
        assert [bool(row[name]) for row in rows] == [False, True, False, True, False], "not the last"
    assert [figures["step"] for figures in evaluated] == [2, 4, 5]
    for row, figures in zip((rows[1], rows[3]), evaluated, strict=False):
        for name in ("heldout_reward", "plant_regret", "plant_unserved_kwh"):
            assert float(row[name]) == pytest.approx(figures[name], rel=1e-5)
    base, total = (plant["totals"][name]["regret_percent"] for name in ("base", "trained"))
    assert (evaluated[2]["heldout_reward"], evaluated[2]["plant_regret"]) == (evaluation["after"]["reward"], total)
    assert best["base_value"] == base and evaluation["exact"] is plant["exact"] is True
    assert best["value"] == min(figures["plant_regret"] for figures in evaluated)
    policy = PeftModel.from_pretrained(load(tiny), folder / BEST)
    assert any(p.abs().sum() > 0 for name, p in policy.named_parameters() if "lora_B" in name)
    mine, own = ((path / "README.md").read_text(encoding="utf-8") for path in (folder / BEST, folder))
    assert f"trained for {best['step']} steps" in mine and best["in_words"][1:] in mine
    assert best["in_words"] in own
    assert ((folder / BEST / ADAPTER).read_bytes() == (folder / ADAPTER).read_bytes()) == (best["step"] == 5)
    with zipfile.ZipFile(folder.with_name("run.zip")) as archive:
        assert archive.namelist()[0].startswith(f"run/{BEST}/")


class ScriptedEvaluation(HeldoutEvaluation):
    """An evaluation of a model whose rewards are in `rewards`, a list by prompt."""

    rewards = ()

    def measure(self, base=False, greedy=False):
        return {"reward": sum(self.rewards) / len(self.rewards), "reward_by_prompt": list(self.rewards)}


def test_episodes_are_not_compared_with_the_rewards_of_single_actions():
    """Their rows may have reward_action_k, of which they earn nothing: always [1] is no policy for them."""
    rows = [Row("a.csv", 1, (("user", "x"),), (0.0, 0.5), {})]
    assert new_results(Settings(), rows, False)["constant_action"] == 1
    of_episodes = new_results(Settings(ENVIRONMENT="my_env:Env"), rows, False)
    assert not {"random", "constant", "constant_action", "oracle"} & of_episodes.keys()


def test_the_best_adapter_is_compared_with_the_sampled_base_model_and_the_best_constant_action(tmp_path, monkeypatch):
    """The base model's greedy answers are another figure. Six prompts, of which [1] earns 0.5 each."""
    rows = [Row("a.csv", n, (("user", str(n)),), (0.0, 0.5), {}) for n in range(6)]
    evaluation = ScriptedEvaluation(SimpleNamespace(settings=Settings()), rows, True, [], None)
    results = {"before": {"reward": 0.2, "reward_by_prompt": [0.2] * 6}, "before_greedy": {"reward": 0.9}}
    results |= {"constant": 0.5, "constant_action": 1, "by_day": False}
    monkeypatch.setattr("grpo.evaluate.progress.measure_rewards", lambda *arguments, **options: dict(results))
    monkeypatch.setattr(Progress, "evaluation", lambda self, trainer: evaluation)
    resolved = SimpleNamespace(settings=Settings(), eval_rows=rows, best_by="reward", exact=True)
    resolved.state, resolved.closed_loop = RunState(tmp_path), SimulationPlan()
    model = SimpleNamespace(save_pretrained=lambda folder: (Path(folder) / ADAPTER).write_text("weights"))
    trainer = SimpleNamespace(model=model, reward_summary="action x 1", run=SimpleNamespace(folder=tmp_path))
    trainer.state = SimpleNamespace(global_step=1)
    progress = Progress(resolved)
    progress.before(trainer)
    constant = "always [1], the best constant action"
    for step, reward, words in (
        (1, 0.3, f"it is better than the base model, but is worse than {constant}"),
        (2, 0.7, f"it is better than the base model and {constant}"),
    ):
        trainer.state.global_step, evaluation_rewards = step, [reward] * 6
        monkeypatch.setattr(ScriptedEvaluation, "rewards", evaluation_rewards)
        progress.during(trainer)
        best = read_json(tmp_path / BEST / "best.json")
        assert (best["base_value"], best["better_than_base"], best["value"]) == (0.2, True, pytest.approx(reward))
        assert words in best["in_words"] and words in (tmp_path / BEST / "README.md").read_text()
        advice = "**Load the adapter" if step == 2 else f"**No adapter beats {constant}"
        assert loading_advice(best, step).startswith(advice)


def test_evaluations_leave_no_trace_in_what_is_learned(measured, tmp_path):
    folder, inputs = measured
    off = {"EVAL_STEPS": 0, "EVAL_PROFILE": ""}
    run_script(**runs.SETTINGS | SETTINGS | inputs | off | {"OUTPUT_DIR": tmp_path / "run"})
    for name in (ADAPTER, "completions.csv"):
        assert (folder / name).read_bytes() == (tmp_path / "run" / name).read_bytes()
    assert [figures["step"] for figures in read_json(tmp_path / "run" / "best/best.json")["evaluated"]] == [5]


def test_a_killed_run_ends_with_the_same_figures_and_the_same_best(measured, tmp_path):
    """Killed after step 4 was measured, with its last checkpoint at 3: it is measured again."""
    whole, inputs = measured
    folder = tmp_path / "run"
    process = runs.start_held(folder, 4, **SETTINGS | inputs)
    process.kill()
    runs.finish(process)
    assert [figures["step"] for figures in read_json(folder / "best/best.json")["evaluated"]] == [2, 4]
    (folder / BEST).rename(folder / "best.old")  # as if killed between the two renames
    done = run_script(**runs.SETTINGS | SETTINGS | inputs | {"OUTPUT_DIR": folder})
    assert "continuing from step 3" in done.stdout
    runs.assert_same_run(folder, whole)
    for name in (ADAPTER, "best.json", "README.md"):  # adapter_config.json lists modules in any order
        assert (folder / BEST / name).read_bytes() == (whole / BEST / name).read_bytes(), name
    for name in ("evaluation.json", "closed_loop.json"):
        assert read_json(folder / name) == read_json(whole / name)
