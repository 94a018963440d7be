# SPDX-License-Identifier: Apache-2.0
"""evaluation.json as tables."""

from __future__ import annotations

from run_folders import EVALUATION

from grpo.evaluate.tables import heldout_rows, table


def test_the_table_of_the_terminal_names_models_references_and_functions():
    """A function or a whole model without a reward has a dash, and then there is no difference."""
    figures = {"reward": 0.5, "reward_low": 0.4, "reward_high": 0.6, "parse_rate": 1.0}
    none = dict.fromkeys(("reward", "reward_low", "reward_high"))
    results = {"exact": False, "samples": 2, "temperature": 0.5, "by_day": True, "before_greedy": none}
    results |= {"before": figures, "after_greedy": figures, "after": figures | {"functions": {"a": figures, "b": none}}}
    lines = [line.split() for line in table(results).splitlines()]
    assert " ".join(lines[0]).endswith("0.5, 2 completions a prompt, 95% interval over prompts, of a day together")
    spread = ["0.500", "(0.400", "to", "0.600)"]
    assert ["base", "model", *spread, "-", "1.00", "-", "-"] in lines
    assert ["base", "model,", "greedy", "-", "-", "-", "-", "-"] in lines
    assert lines[lines.index(["a:"]) + 2] == ["trained", *spread]


def test_a_run_s_table_has_references_and_the_difference():
    shown = table(EVALUATION | {"by_day": False, "exact": True})
    assert shown.partition("\n")[0].endswith("exact, 95% interval over prompts")
    for words in ("always [0]", "oracle", "trained - base model", "+0.200 (+0.150 to +0.250)"):
        assert words in shown


def test_the_rows_of_the_report_keep_all_intervals():
    rows = heldout_rows(EVALUATION)
    cells = ["0.400 (0.370 to 0.430)", "0.300 (0.270 to 0.330)", "0.99 (0.98 to 1.00)", "0.50", "0.01"]
    assert rows[2] == ["base model", *cells]
    names = ["random action", "always [0]", "base model", "trained", "base model, greedy", "oracle"]
    assert [row[0] for row in rows] == names
