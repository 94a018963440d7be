# SPDX-License-Identifier: Apache-2.0
"""evaluation.json as tables."""

from __future__ import annotations

from grpo.evaluate.tables import table


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
