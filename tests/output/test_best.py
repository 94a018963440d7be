# SPDX-License-Identifier: Apache-2.0
"""The best adapter of the evaluated steps."""

from __future__ import annotations

import math

import pytest
from damage import KINDS

from grpo.figures.verdict import loading_advice
from grpo.output.best import adapter_fault, is_better, keep_best, read_best, recover_best, replace_best
from grpo.output.durable import write_sealed
from grpo.output.layout import ADAPTER, BEST


def kept(folder, step, regret, by="plant", measured=None, reward=0.5):
    values = {"step": step, "heldout_reward": reward, "plant_regret": regret}
    base = {"heldout_reward": 0.4, "plant_regret": 20.0}

    def save(new, record):
        (new / ADAPTER).write_text(f"step {step}")
        assert record["step"] == step

    return keep_best(folder, by, base, measured or {"samples": 4}, values, save)


def test_the_best_step_is_kept_and_a_step_measured_again_changes_nothing(tmp_path):
    for step, regret, best in ((25, 12.0, 25), (50, 9.0, 50), (75, 9.0, 50), (50, 9.0, 50), (100, 11.0, 50)):
        assert kept(tmp_path, step, regret)["step"] == best
        assert (tmp_path / BEST / ADAPTER).read_text() == f"step {best}"
    record = read_best(tmp_path)
    assert [row["step"] for row in record["evaluated"]] == [25, 50, 75, 100] and record["better_than_base"]
    assert (record["value"], record["base_value"], record["by"]) == (9.0, 20.0, "plant")
    advice = loading_advice(record, 100)
    assert "Load the adapter in `best/`" in advice and "The one in this folder is of step 100, the last" in advice
    assert kept(tmp_path, 125, None) == {} and read_best(tmp_path) == record, "a figure without a value chooses nothing"
    assert keep_best(tmp_path, "reward", {}, {}, {"step": 5, "heldout_reward": 0.5}, None) == {}, "nor does one alone"
    again = kept(tmp_path, 125, 15.0, measured={"samples": 8})
    assert again["step"] == 125 and len(again["evaluated"]) == 1, "figures that were measured otherwise do not compare"
    worse = kept(tmp_path, 150, 99.0, by="reward", measured={"samples": 8}, reward=0.3)
    assert worse["better_than_base"] is False and len(worse["evaluated"]) == 1, "another figure decides"
    assert "No adapter beats the base model" in loading_advice(worse, 150)
    assert "NOT BETTER than the base model" in read_best(tmp_path)["in_words"] and is_better("reward", 2, 1)


@pytest.mark.parametrize(
    "changes",
    [
        *({"evaluated": [{}]}, {"value": math.nan}, {"value": None}, {"evaluated": None}),
        *({"comparisons": [{"other": "a"} | ends]} for ends in ({}, {"low": "0.1", "high": 0.2}, {"low": 0, "hi": 1})),
        {"comparisons": [{"other": 5, "low": 0.1, "high": 0.2}]},
    ],
)
def test_a_record_with_a_valid_seal_that_no_run_wrote_begins_again(tmp_path, changes):
    record = kept(tmp_path, 25, 12.0) | changes
    write_sealed(tmp_path / BEST / "best.json", {name: value for name, value in record.items() if value is not None})
    assert kept(tmp_path, 50, 15.0)["step"] == 50
    assert "nothing was measured" in loading_advice({"step": 5}, 5)


@pytest.mark.parametrize(
    ("by", "value", "is_better_than_base"),
    [
        *(("reward", 0.41, True), ("reward", 0.4, False), ("plant", 19.9, True), ("plant", 20.0, False)),
        # The same figure out of other probabilities differs by rounding.
        *(("reward", 0.4 + 1e-16, False), ("plant", 20.0 - 1e-14, False)),
    ],
)
def test_a_step_that_only_equals_the_base_model_is_not_better(tmp_path, by, value, is_better_than_base):
    figures = {"reward": value} if by == "reward" else {}
    record = kept(tmp_path, 25, value if by == "plant" else 99.0, by=by, **figures)
    assert record["better_than_base"] is is_better_than_base
    assert ("No adapter beats the base model" in loading_advice(record, 25)) is not is_better_than_base


@pytest.mark.parametrize("at", ["save", "write", "first rename", "second rename"])
def test_a_kill_while_the_best_is_replaced_loses_nothing(tmp_path, at, monkeypatch):
    kept(tmp_path, 25, 12.0)

    def killed(*arguments):
        raise KeyboardInterrupt

    renames = iter([None, killed] if at == "second rename" else [killed])
    rename = type(tmp_path).rename
    if at == "write":
        monkeypatch.setattr("grpo.output.best.write_sealed", killed)
    elif "rename" in at:
        monkeypatch.setattr(type(tmp_path), "rename", lambda *arguments: (next(renames) or rename)(*arguments))
    with pytest.raises(KeyboardInterrupt):
        save = killed if at == "save" else lambda new: (new / ADAPTER).write_text("step 50")
        replace_best(tmp_path, save, {"step": 50})
    monkeypatch.undo()
    recover_best(tmp_path)
    step = 50 if at == "second rename" else 25
    assert read_best(tmp_path)["step"] == step and (tmp_path / BEST / ADAPTER).read_text() == f"step {step}"
    assert [path.name for path in tmp_path.iterdir()] == [BEST]


@pytest.mark.parametrize("name", ["best.json", ADAPTER])
def test_a_damaged_best_adapter_is_not_offered(tmp_path, name):
    kept(tmp_path, 25, 12.0)
    recover_best(tmp_path)
    assert read_best(tmp_path)["step"] == 25 and adapter_fault(tmp_path / BEST) is None
    KINDS["one bit"](tmp_path / BEST / name)
    assert read_best(tmp_path) == {} and adapter_fault(tmp_path / BEST).startswith(name)
    recover_best(tmp_path)
    assert kept(tmp_path, 50, 14.0)["step"] == 50, "the choice begins again"
    assert (tmp_path / f"superseded-{BEST}" / name).exists()
