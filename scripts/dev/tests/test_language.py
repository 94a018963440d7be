# SPDX-License-Identifier: Apache-2.0
"""scripts/dev/language.py: its three tasks, and its stages on the tiny model."""

import json
import random
import re

import language
import pandas
import pytest
from runs import child_here

from grpo.common import InputError
from grpo.output.layout import LOGS
from rewards import gsm8k
from scripts.dev import language_tables, record
from scripts.dev.language_days import decide, rule_rewards
from scripts.dev.language_reward import obeys
from scripts.dev.language_rows import TASKS, TEXTS, half, write_rows

DRAWS = 400


def draws(task, part):
    rng = random.Random(7)
    return [TASKS[task].draw(rng, part) for _ in range(DRAWS)]


def mean(values):
    return sum(values) / len(values)


@pytest.mark.parametrize("part", ["train", "heldout", "warmup"])
def test_right_completions_earn_everything_and_those_of_the_warm_up_what_chance_earns(part):
    stories = draws("stories", part)
    rewards = [[gsm8k([text], answer=[row["answer"]])[0] for text in texts] for row, *texts in stories]
    assert mean([right for right, _ in rewards]) == 1.0 and 0.15 < mean([warmup for _, warmup in rewards]) < 0.4
    sentences = draws("sentences", part)
    columns = ("topic", "word", "banned", "low", "high")
    rewards = [[obeys([t], **{name: [row[name]] for name in columns})[0] for t in texts] for row, *texts in sentences]
    assert mean([right for right, _ in rewards]) == 1.0 and 0.3 < mean([warmup for _, warmup in rewards]) < 0.6
    for row, right, _ in draws("tickets", part):
        action = int(re.search(r"\[(\d)\]<\|return\|>$", right)[1])
        assert sorted(row[f"reward_action_{k}"] for k in range(4)) == [0.0, 0.0, 0.4, 1.0]
        assert row[f"reward_action_{action}"] == 1.0


def test_the_warm_up_does_not_tell_which_answer_is_right():
    """Its operations and desks have nothing to do with the rows."""
    same = [right.rpartition("[")[2] == warmup.rpartition("[")[2] for _, right, warmup in draws("tickets", "warmup")]
    assert 0.18 < mean(same) < 0.32
    signs = [[re.search(r"\d ([-+*]) \d", text)[1] for text in texts] for _, *texts in draws("stories", "warmup")]
    assert 0.26 < mean([right == warmup for right, warmup in signs]) < 0.4


def test_best_days_cost_nothing_and_those_of_the_warm_up_much_more_than_the_best_rule():
    drawn = [TASKS["days"].draw(random.Random(n), "heldout") for n in range(20)]

    def earned(row, calls):
        levels = iter([call["arguments"]["level"] for call in calls])
        return sum(decide(row, lambda day: next(levels)).step_rewards)

    rows = [row for row, _, _ in drawn]
    best, warmup = ([earned(row, calls) for row, *shown in drawn for calls in [shown[n]]] for n in (0, 1))
    name, by_rule = rule_rewards(rows)
    assert max(map(abs, best)) < 1e-6 and name == "charge_when_clean"
    assert mean(warmup) < 3 * mean(by_rule) < 0
    assert len({row["date"] for row in rows}) > 0.8 * len(rows), "intervals are over days"
    assert rows[0] == TASKS["days"].draw(random.Random(0), "heldout")[0]


def test_held_out_rows_have_words_and_numbers_of_their_own():
    for kind in ("frames", "topics", "words"):
        assert not set(TEXTS[kind]["train"]) & set(TEXTS[kind]["heldout"])
    assert half("warmup") == half("train") == "train"
    pairs = {
        part: {tuple(re.findall(r"\d+", right)[:2]) for _, right, _ in draws("stories", part)}
        for part in ("train", "heldout")
    }
    assert pairs["train"] and pairs["heldout"] and not pairs["train"] & pairs["heldout"]


def test_rows_differ_by_seed_alone(tmp_path):
    for folder, seed in (("one", 1), ("again", 1), ("two", 2)):
        write_rows(TASKS["tickets"], tmp_path / folder, seed)
    texts = [(tmp_path / folder / "train.jsonl").read_bytes() for folder in ("one", "again", "two")]
    assert texts[0] == texts[1] != texts[2]


def test_collecting_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(InputError, match="holds no runs of `learn`"):
        language.main(["collect", str(tmp_path), "--results", str(tmp_path / "x.json")])
    with pytest.raises(InputError, match="run `warm` first"):
        language.main(["learn", str(tmp_path), "--name", "grpo"])


FEW = ["--set", "PROMPTS_PER_STEP=2", "--set", "TOTAL_STEPS=1", "--set", "MAX_PROMPT_LEN=1000"]
LIGHT = [*FEW, "--set", "EVAL_SAMPLES=1", "--set", "MAX_COMPLETION_LEN=4", "--set", "USE_VLLM=0"]


def test_all_stages_on_the_tiny_model(tmp_path, monkeypatch):
    monkeypatch.setattr("language.run_child", child_here)
    monkeypatch.setattr("scripts.dev.language_rows.HELDOUT_ROWS", 3)
    monkeypatch.setattr("scripts.dev.language_rows.ROWS", 4)
    monkeypatch.setattr("scripts.dev.language_rows.WARMUP_ROWS", 4)
    out = str(tmp_path / "tickets-5")
    arguments = ["--seed", "5", "--model", "tiny", "--out", out, *FEW, "--set", "WARMUP_STEPS=0"]
    assert language.main(["warm", "tickets", *arguments]) == 0
    assert language.main(["learn", out, "--name", "grpo", "--set", "NUM_GENERATIONS=2", *LIGHT]) == 0
    assert language.main(["imitate", out, "--name", "sft", *LIGHT]) == 0
    results = tmp_path / "results.json"
    assert language.main(["collect", str(tmp_path), "--results", str(results)]) == 0
    written = json.loads(results.read_text(encoding="utf-8"))
    values = {figure["name"]: figure["value"] for figure in written["figures"]}
    name = "tickets.5"
    for run in ("grpo", "sft"):
        assert values[f"{name}.{run}.gain"] == pytest.approx(values[f"{name}.{run}"] - values[f"{name}.start"])
    over = values[f"{name}.sft"] - values[f"{name}.grpo"]
    assert values[f"{name}.sft_over_grpo"] == pytest.approx(over)
    rows = [json.loads(line) for line in results.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["when"] for row in rows] == ["before"] * 2 + ["after"] * 2
    (tmp_path / "tickets-5/grpo/run.json").unlink()  # as if it had been stopped
    assert language.main(["collect", str(tmp_path), "--results", str(results)]) == 0
    stopped = {figure["name"] for figure in json.loads(results.read_text(encoding="utf-8"))["figures"]}
    assert f"{name}.grpo.reward_last_5" in stopped and f"{name}.grpo.gain" not in stopped
    assert all(row["prompt"].endswith("[3] accounts?") for row in rows)


def test_a_run_of_episodes_has_the_share_that_was_played_to_its_end(tmp_path):
    ends = [{"done": 3, "turn_len": 1}, {"done": 3, "turns": 5}, *[{"turns": 4}] * 5]
    steps = [{"step": n, "reward": -n, "step_s": 2.0, "ends": json.dumps(counts)} for n, counts in enumerate(ends)]
    pandas.DataFrame(steps).to_csv(tmp_path / LOGS[0], index=False)
    values = {figure["name"]: figure["value"] for figure in language.learning_figures("days.1.grpo", tmp_path)}
    assert values["days.1.grpo.done_first_5"] == 6 / 24 and values["days.1.grpo.done_last_5"] == 0
    assert values["days.1.grpo.learning_s"] == 14 and values["days.1.grpo.reward_first_5"] == -2


def test_tables_show_recorded_figures():
    values = record.recorded_values(language_tables.RESULTS.name)
    assert language_tables.seeds(values, "stories", "grpo") == [1, 2, 3]
    assert f"{values['stories.1.grpo.gain']:+.2f}" in language_tables.gains_table()
    days = record.recorded_values(language_tables.DAYS)
    assert (
        f"| {days['days.2.grpo']:.2f} |" in language_tables.days_table() and "(-1.87 to" in language_tables.days_table()
    )
    assert language_tables.completions_table().count("| before |") == 3 * language_tables.SHOWN
