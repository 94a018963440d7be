# SPDX-License-Identifier: Apache-2.0
"""The preview of `--check`: rows, made-up answers, time and money."""

import dataclasses

import pytest
from helpers import run_script, write_csv
from machines import CPU, resolved_run

from grpo.data.files import Row
from grpo.plan.cards import rented_machine
from grpo.plan.hub import REAL_CONFIG
from grpo.preflight.banner import banner
from grpo.preflight.preview import MOST_LISTED, group_lines, preview

HEADER = ["prompt", "date", "reward_action_0", "reward_action_1"]


def routing(tmp_path):
    """Two tickets a day; [0] is the best action of every second one."""
    rows = [(f"Ticket {n}. Answer [0] or [1].", f"2026-09-{n // 2 + 1:02}", n % 2, 0.25) for n in range(40)]
    return write_csv(tmp_path / "tickets.csv", HEADER, rows)


def lines_of(text):
    return [" ".join(line.split()) for line in text.splitlines()]


def test_rows_are_shown_as_the_run_takes_them(tmp_path):
    resolved = resolved_run(tmp_path / "run", DATA=routing(tmp_path))
    text = preview(resolved)
    lines = lines_of(text)
    assert "| Reasoning: low<|end|><|start|>user<|message|>Ticket 0. Answer [0] or [1]." in text
    tokens = resolved.longest_prompt
    assert any(line.startswith("a prompt tickets:1, ") and f"the longest {tokens} of" in text for line in lines)
    assert "[0] 0.5 0 1 50% of 36 rows" in lines and "[1] 0.25 0.25 0.25 50% of 36 rows" in lines
    assert "trained on 18 days with 2 rows each" in lines
    held = [line for line in lines if line.startswith("evaluated ")]
    assert len(held) == 1 and held[0].count("2026-09-") == 2 and held[0].count("(2)") == 2
    longest = "longest answer 7 tokens without reasoning (tickets:1); MAX_COMPLETION_LEN=12 has room for 5 of reasoning"
    assert longest in lines
    assert {"[1], its best action: action 0.25", "[0], its worst action: action 0"} <= set(lines)
    assert any(line.startswith("reasoning without an answer: action -") for line in lines)
    assert "TASK" not in banner(resolved, every_setting=True), "the rows are none of the plant's"
    assert "TASK" in banner(resolved_run(tmp_path / "run"), every_setting=True)


def test_costs_in_money_are_shown_to_the_unit(tmp_path):
    rows = [(f"Call {n}. Answer [0] or [1].", f"2026-09-{n + 1:02}", -19998.7, -1850) for n in range(20)]
    lines = lines_of(preview(resolved_run(tmp_path / "run", DATA=write_csv(tmp_path / "calls.csv", HEADER, rows))))
    assert "[0] -19998.7 -19998.7 -19998.7 0% of 18 rows" in lines
    assert "[0], its worst action: action -19998.7" in lines


def test_an_own_function_scores_the_expected_answer(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "def exact(raw_completions, answer, **kwargs):\n"
        "    return [float(f'<|message|>{a}<' in text) for text, a in zip(raw_completions, answer)]\n"
        "def length(completions, **kwargs):\n    return [None for text in completions]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    rows = [(f"What is {n} + 1?", n + 1) for n in range(24)]
    data = write_csv(tmp_path / "sums.csv", ["question", "answer"], rows)
    lines = lines_of(preview(resolved_run(tmp_path / "run", DATA=data, REWARDS="mine:exact,mine:length=0.5")))
    assert "the expected answer: mine:exact 1, mine:length nan" in lines
    assert "I do not know.: mine:exact 0, mine:length nan" in lines
    assert not [line for line in lines if line.startswith("rewards")], "rows without actions have none to list"


def test_long_lists_are_cut(tmp_path):
    names = [f"reward_action_{k}" for k in range(MOST_LISTED + 3)]
    rows = [(f"Ticket {n}", *range(n, n + len(names))) for n in range(200)]
    data = write_csv(tmp_path / "many.csv", ["prompt", *names], rows)
    lines = lines_of(preview(resolved_run(tmp_path / "run", DATA=data, MODEL_ID="tiny")))
    assert "and 3 more actions" in lines
    assert [line for line in lines if line.startswith("evaluated ")][0].count(" (1)") == MOST_LISTED


def test_a_damaged_run_is_previewed_as_far_as_it_goes(tmp_path):
    """`--check` prints the preview above the problems, whatever these are."""
    assert lines_of(preview(resolved_run(tmp_path / "run", DATA=tmp_path / "none.csv"))) == ["", "Preview"]
    text = preview(resolved_run(tmp_path / "run", DATA=routing(tmp_path), REWARDS="nothing:here"))
    assert "trained on" in text and "made-up" not in text


def planned(tmp_path, card, **settings):
    """A run of gpt-oss-20b's shapes, without its files, on a card that is not here."""
    resolved = resolved_run(tmp_path / "run", rented_machine(card), DATA=routing(tmp_path), **settings)
    run = dataclasses.replace(resolved.settings, USE_VLLM=True, MAX_COMPLETION_LEN=4000, TOTAL_STEPS=100)
    files = dataclasses.replace(resolved.files, config=REAL_CONFIG)
    return dataclasses.replace(resolved, settings=run, files=files)


@pytest.mark.parametrize(
    ("card", "step", "source"),
    [("H200", "51 s at 4,000", "between steps that were measured"), ("4090", "s at 4,000", "ESTIMATED from an H200's")],
)
def test_time_and_money_on_a_card_that_is_not_here(tmp_path, card, step, source):
    text = preview(planned(tmp_path, card, PRICE_PER_HOUR=4.0))
    (time,) = [line for line in lines_of(text) if line.startswith("step time")]
    assert step in time and f"on the card {card} ({source}" in time
    (hours,) = [line.split() for line in lines_of(text) if line.startswith("hours")]
    (money,) = [line.split() for line in lines_of(text) if line.startswith("money")]
    assert float(hours[3]) > float(hours[1]) > 0
    assert float(money[3]) == pytest.approx(4 * float(hours[3]), rel=0.1), "PRICE_PER_HOUR=4"
    resolved = planned(tmp_path, card)
    assert "set PRICE_PER_HOUR" in preview(resolved)
    shortest = dataclasses.replace(resolved, settings=dataclasses.replace(resolved.settings, MAX_COMPLETION_LEN=1))
    assert "0.4 s if completions have 1 tokens" in preview(shortest) or card != "H200"


def test_times_are_those_of_the_rest_of_the_run_on_all_its_gpus_and_their_free_memory(tmp_path):
    def lines(machine=None, step=0, **changes):
        run = dataclasses.replace(resolved.state, step=step)
        settings = dataclasses.replace(resolved.settings, **changes)
        return lines_of(
            preview(dataclasses.replace(resolved, settings=settings, machine=machine or resolved.machine, state=run))
        )

    resolved = planned(tmp_path, "H200")
    alone, shared = lines(), lines(dataclasses.replace(resolved.machine, ranks=2))
    assert any("37 s at 4,000, on 2 cards H200 (between" in line for line in shared)
    assert any("for 10 steps;" in line for line in lines(step=90))
    assert not any("GiB free, less takes longer" in line for line in alone)
    assert any("with 139.8 GiB free, less takes longer" in line for line in lines(resolved.machine.limited(40.0)))
    assert any("(beyond 4,000 tokens ESTIMATED, between" in line for line in lines(MAX_COMPLETION_LEN=32_768))
    assert any("not known" in line for line in lines(VLLM_EAGER=True))
    assert any("the environment's own time comes besides" in line for line in lines(ENVIRONMENT="plant:Plant"))


def test_a_card_is_planned_for_without_looking_at_this_machine(tmp_path):
    """Its memory is the plan's, vLLM counts as installed, and this machine's disk is not asked."""
    done = run_script("--check", "--card", "h100", MODEL_ID="tiny", OUTPUT_DIR=tmp_path / "run", EVAL_SAMPLES=0)
    text = " ".join(done.stdout.split())
    assert "machine H100, 78.6 of 78.6 GiB are free; 16 cores" in text
    assert "time not known: steps of gpt-oss-20b" in text and "Every check passed" in text
    done = run_script("--check", "--card", "T4", MODEL_ID="tiny", OUTPUT_DIR=tmp_path / "run", code=2)
    assert "--card T4: unknown. Name one of" in done.stderr
    done = run_script("--card", "H100", MODEL_ID="tiny", OUTPUT_DIR=tmp_path / "run", code=2)
    assert "only with --check" in done.stderr


def test_no_card_no_time(tmp_path):
    assert "step time" not in preview(resolved_run(tmp_path / "run", CPU, DATA=routing(tmp_path)))


def test_episodes_of_one_prompt_are_told_apart_by_their_columns():
    rows = [Row("a.jsonl", n, (("user", "Plan."),), (), {"load": n}) for n in range(3)]
    assert dict(group_lines(rows[:2], rows[2:], True))["trained on"] == "2 prompts with 1 row each"
    assert dict(group_lines(rows[:2], rows[2:], False))["trained on"] == "1 prompts with 2 rows each"
