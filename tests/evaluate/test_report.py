# SPDX-License-Identifier: Apache-2.0
"""The report of a run, from whatever a run has written. Run: python -m pytest tests/evaluate/test_report.py"""

import base64
import html
import re
from dataclasses import asdict
from pathlib import Path

import matplotlib.style
import pandas
import pytest
import report
from run_folders import EVALUATION, GPU, metrics_row, plant_record, write_run

from grpo.common import InputError, Problems
from grpo.data.files import data_fingerprint, read_rows
from grpo.evaluate import run_files
from grpo.evaluate.heldout_table import answers_by_action, evaluation_table
from grpo.evaluate.model_card import chosen_settings
from grpo.evaluate.report import write_report
from grpo.evaluate.report_pictures import CURVES, EPISODE_CURVES, LABELS, STYLE, draw_curve, panel, picture
from grpo.evaluate.report_text import choices_rows, facts, settings_rows, without_repeats
from grpo.evaluate.run_files import read_examples, read_metrics, read_run
from grpo.figures.verdict import BASE, RARE_LOSSES, Comparison, describe_best, loading_advice, read_comparisons, verdict
from grpo.output.logs import EVALUATED


def completion_row(step: int, text: str = "[1]", **cells: object) -> dict[str, object]:
    row = {"step": step, "prompt_id": "days:1", "completion": text, "parsed_action": 1, "reward": 0.5}
    return row | {"best_action": 1, "tokens": 7, "truncated": 0} | cells


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> Path:
    """A complete GPU run with everything there is, and its report."""
    metrics = [metrics_row(step, **GPU) for step in range(1, 31)]
    metrics[9] |= dict.fromkeys(EVALUATED, 2.0) | {"heldout_reward": 0.5, "plant_regret": 9.0}
    samples = [
        completion_row(1, "\u51b7\u623f \x1b[31m\nline\u202eback <|message|>[1]<|return|>", reward=0.9),
        completion_row(4, "long " * 200_000, parsed_action="", reward=0, prompt_id="days:4", truncated=1),
    ]
    record = {"settings": {"TOTAL_STEPS": 30, "DATA": "/home/someone/days.csv", "LORA_R": 4}}
    record |= {"sources": {"DATA": "environment", "LORA_R": "default"}, "choices": {"rollouts": [True, "a GPU"]}}
    files = {"settings": record, "evaluation": EVALUATION, "closed_loop": plant_record("always_0")}
    files["best/best"] = {"step": 10, "in_words": "step 10 is the best"}
    folder = write_run(tmp_path_factory.mktemp("runs") / "\u5b9f\u9a13", metrics, samples, **files)
    write_report(folder)
    return folder


def figures_of(folder: Path) -> list[str]:
    return re.findall(r"<figcaption><b>([^<]+)</b>", (folder / "report.html").read_text(encoding="utf-8"))


def text_of(folder: Path) -> str:
    page = re.sub(r"</?(strong|span)>", "", (folder / "report.html").read_text(encoding="utf-8"))
    return html.unescape(re.sub(r"<[^>]+>", "|", page))


def test_choices_have_names_that_say_what_was_chosen_and_no_simulation_is_told_of_where_none_was(tmp_path):
    choices = {"rollouts": [False, "no GPU"], "simulation": [True, "small"], "heldout": [10, "a hash"]}
    run = read_run(write_run(tmp_path / "run", [metrics_row(1)], settings={"settings": {}, "choices": choices}))
    assert choices_rows(run) == [["vLLM generates", "no", "no GPU"], ["held-out rows", "10", "a hash"]]
    assert ("Held-out data", "10 rows held out of DATA") in facts(run)


def test_a_prompt_reads_as_it_was_set(tmp_path):
    """Of other settings only the names of files are shown."""
    settings = {"SYSTEM_PROMPT": "/plain one,two,, three", "PROMPT_TEMPLATE": "{},/think", "DATA": "/data/a.csv,/b.csv"}
    sources = dict.fromkeys(settings, "environment")
    folder = write_run(tmp_path / "run", [metrics_row(1)], settings={"settings": settings, "sources": sources})
    shown = {name: text for name, text, _ in settings_rows(read_run(folder))}
    assert shown == settings | {"DATA": "a.csv, b.csv"}
    assert all(f"| `{name}` | {text} |" in chosen_settings(sources, settings) for name, text in shown.items())


def test_the_page_of_a_full_run_is_one_file_without_network_and_tells_all(full):
    page = (full / "report.html").read_text(encoding="utf-8")
    assert not {"script", "link", "iframe", "object", "form"} & set(re.findall(r"<(\w+)", page))
    assert "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\"" in page
    assert "http" not in page.replace("http-equiv", "") and len(page) < 1_000_000
    sources = re.findall(r'(?:src|href|srcset)="([^"]*)', page)
    assert figures_of(full) == [*(title for title in CURVES), "Time per phase"] and len(sources) == len(CURVES) + 1
    for source in sources:
        assert base64.b64decode(source.removeprefix("data:image/png;base64,")).startswith(b"\x89PNG")
    text = text_of(full)
    words = [
        "\u5b9f\u9a13: training report", "30 of 30", "|always [0]|", "|oracle|",
        "The last step's adapter changed held-out reward by +0.200 (95% interval +0.150 to +0.250), "
        "from 0.400 to 0.600: the trained model is better",
        "Load the adapter in best/: step 10 is the best. The same held-out data chose it, so its figure and "
        "intervals flatter.",
        "0.400 (0.370 to 0.430)", "|20.0 (15.0 to 22.0)|",
        "|days: 2025-07-07 (6.5)|", "characters left out", "|a GPU|",
        "step 1, days:1: action 1, best 1,\nreward 0.9, 7 tokens",
        "\u51b7\u623f \ufffd[31m\nline\ufffdback <|message|>[1]",
    ]  # fmt: skip
    assert [word for word in words if word not in text] == []
    assert "someone" not in text and "|DATA|" in text and "|LORA_R|" not in text


def test_completions_worth_money_are_shown_to_the_unit(tmp_path):
    folder = write_run(tmp_path / "run", [metrics_row(1)], [completion_row(1, reward=-19511.2)])
    assert "reward -19511.2," in text_of(write_report(folder).parent)


def test_report_and_table_say_the_same_of_the_best_constant_action(tmp_path):
    gain = {"reward": -0.05, "reward_low": -0.08, "reward_high": -0.02, "clusters": 12}
    evaluation = EVALUATION | {"constant": 0.0, "by_day": True, "difference_constant": gain}
    folder = write_run(tmp_path / "run", [metrics_row(1)], evaluation=evaluation)
    table = " ".join(evaluation_table(evaluation).split())
    for text in (text_of(write_report(folder).parent), table):
        assert "is better than the base model, but is worse than always [0], the best constant action" in text
        assert "an interval over few days cannot show rare losses" in text
    assert "trained - always [0]" in table


def test_every_function_is_in_the_legend_and_no_power_of_ten_is_below_it():
    """matplotlib leaves out names that begin with an underscore, and writes 1e6 where the legend stands."""
    with matplotlib.style.context(["default", STYLE]):
        draw_curve(
            axes := panel("reward"), pandas.DataFrame({"reward/_score": [0, 1], "reward/cost": [-6e6, -4e6]}), {}
        )
        picture(axes, "Reward functions", "")
    assert [text.get_text().strip() for text in axes.get_legend().get_texts()] == ["_score", "cost"]
    assert axes.yaxis.get_offset_text().get_text() == ""


def best_record(**changes):
    """best.json of step 10, better than the base model by its reward."""
    record = {"by": "reward", "step": 10, "value": 0.6, "base_value": 0.4, "better_than_base": True} | changes
    record["comparisons"] = [asdict(comparison) for comparison in record.get("comparisons", [])]
    return record | {"in_words": describe_best(record)}


BEST_RECORDS = [  # record of the best adapter, how the advice begins
    (best_record(), "Load the adapter in best/"),
    (best_record(value=0.4, better_than_base=False), "No adapter beats the base model"),
    (best_record(comparisons=[Comparison(BASE, 0.1, 0.3, 12)]), "Load the adapter in best/"),
    (best_record(comparisons=[Comparison(BASE, -0.1, 0.3, 12)]), "No adapter is shown to beat the base model"),
    (
        best_record(comparisons=[Comparison(BASE, 0.1, 0.3, 12), Comparison("always [0]", -0.2, -0.1, 12)]),
        "No adapter beats always [0]",
    ),
    ({}, "Load the last step's adapter, in the run's folder: nothing was measured"),
]


@pytest.mark.parametrize(("record", "words"), BEST_RECORDS)
def test_the_report_gives_the_advice_of_the_card(tmp_path, record, words):
    folder = write_run(tmp_path / "run", [metrics_row(30)], **{"best/best": record} if record else {})
    (folder / "adapter_model.safetensors").touch()
    text = text_of(write_report(folder).parent)
    advice = loading_advice(record, 30)
    assert advice.replace("**", "").replace("`", "").strip() in text and words in text
    assert ("Load the adapter in best/" in text) is (words == "Load the adapter in best/")
    if record:
        assert record["in_words"] in text and verdict(read_comparisons(record), "it") in text


def test_a_single_measured_step_was_not_chosen():
    """Its interval is what it says; that of the best of several is not."""
    steps = [{"step": step} for step in (5, 10)]
    for evaluated, chosen in ((steps[1:], False), (steps, True)):
        advice = loading_advice(best_record(evaluated=evaluated), 10)
        assert ("The same held-out data chose it, so its figure and intervals flatter." in advice) is chosen
        assert advice.count("Load the adapter in `best/`") == 1 and "  " not in advice


def test_an_interrupted_run_says_what_was_measured_so_far(tmp_path):
    rows = [metrics_row(step, **({"heldout_reward": 0.45} if step == 2 else {})) for step in (1, 2, 3)]
    folder = write_run(tmp_path / "run", rows, evaluation={"before": EVALUATION["before"]})
    text = text_of(write_report(folder).parent)
    assert "Held-out reward was 0.400 before training and 0.450 after step 2. Training stands at step 3 of 30" in text


def test_curves_that_share_a_picture_have_names_that_are_no_columns():
    shared = [curve.columns for curve in (*CURVES.values(), *EPISODE_CURVES.values()) if len(curve.columns) > 1]
    assert len(shared) > 1 and {name for columns in shared for name in columns} == LABELS.keys()


def test_a_caveat_is_told_once():
    """In the first verdict that has it; one about windows says something else than one about days."""
    days, windows = (f"; {RARE_LOSSES.format(unit)}" for unit in ("day", "window"))
    assert without_repeats([f"A{days}. B.", "", f"C{days}.", f"D{windows}"]) == [f"A{days}. B.", "C.", f"D{windows}"]


@pytest.mark.parametrize("steps, figures", [(0, 0), (3, 7)])
def test_runs_that_are_not_complete(tmp_path, steps, figures):
    rows = [completion_row(step) for step in range(1, steps + 1)]
    before = {"before": EVALUATION["before"]}
    folder = write_run(tmp_path / "run", [metrics_row(row["step"]) for row in rows], rows, evaluation=before)
    text = text_of(write_report(folder).parent)
    stands = f"Held-out reward was 0.400 before training. Training stands at step {steps} of 30"
    for words in (f"{steps} of 30;", stands, "The run has no adapter yet"):
        assert words in text
    assert len(figures_of(folder)) == figures and "GPU memory" not in text and "Closed loop" not in text
    assert "|base model|" in text and "|trained|" not in text and "|nan|" not in text


def test_a_run_with_two_functions_has_a_picture_of_them(tmp_path):
    folder = write_run(tmp_path / "run", [metrics_row(1), metrics_row(2)])
    metrics = pandas.read_csv(folder / "metrics.csv").assign(**{"reward/action": 1.0, "reward/<b>": 0.5})
    metrics.to_csv(folder / "metrics.csv", index=False)
    assert "Reward functions" in figures_of(write_report(folder).parent)


def test_metrics_are_numbers_and_rows_that_are_being_written_cost_no_report(tmp_path):
    rows = [metrics_row(1, reward="nan"), metrics_row(2, reward="inf"), metrics_row(3, reward="")]
    path = write_run(tmp_path / "run", [*rows, metrics_row(4)]) / "metrics.csv"
    assert list(read_metrics(path)["step"]) == [1, 2, 3, 4] and read_metrics(path)["reward"].count() == 1
    (path.parent / "completions.csv").write_text('step,completion\n1,"half')
    write_report(path.parent)
    path.write_bytes(path.read_bytes()[:-1])  # The last cell may be cut.
    assert list(read_metrics(path)["step"]) == [1, 2, 3]
    path.write_text("step,rew")
    assert read_metrics(path).empty


def test_markup_is_escaped_in_every_place_a_run_can_put_it(tmp_path):
    evil = "'\"><script>{{ 7 * 7 }}</script>"
    names = ("MODEL_ID", "DATA", "EVAL_DATA", "REWARDS", "LORA_TARGETS", "LORA_R", "TOTAL_STEPS")
    record = {"settings": dict.fromkeys(names, evil), "sources": {evil: evil, "DATA": evil}}
    record |= {"machine": {"gpu": evil}, "choices": {"rollouts": [evil, evil], evil: [True, evil]}}
    columns = {"prompt_id": evil, "parsed_action": evil, "best_action": evil, "tokens": evil}
    files = {
        "settings": record,
        "evaluation": EVALUATION | {"constant_action": evil},
        "closed_loop": plant_record(evil),
        "best/best": {"in_words": evil},
    }
    rows, samples = [metrics_row(1, time=evil), metrics_row(2, time=evil)], [completion_row(1, evil, **columns)]
    folder = write_run(tmp_path / f"run {evil.replace('/', '')}", rows, samples, **files)
    text = text_of(write_report(folder).parent)
    assert text.count(evil) >= 24 and "<script" not in (folder / "report.html").read_text(encoding="utf-8")


def test_examples_are_the_extremes_and_the_latest(tmp_path, monkeypatch):
    rows = [completion_row(step, prompt_id=f"days:{step % 7}", reward=step * 37 % 50) for step in range(1, 51)]
    rows += [completion_row(51 + i, f"none {i}", prompt_id=f"days:{i}", parsed_action="", reward=-1) for i in range(5)]
    rows += [completion_row(60, reward="nan")]
    path = write_run(tmp_path / "run", [], rows) / "completions.csv"
    for size in (1000, 7):  # Read at once, or in parts.
        monkeypatch.setattr(run_files, "ROWS", size)
        highest, lowest, unread = read_examples(path, {}).values()
        assert list(highest["reward"]) == [49, 48] and list(lowest["reward"]) == [0, 1]
        assert list(unread["completion"]) == ["none 4", "none 3"]


def test_an_answer_that_was_cut_off_is_not_told_to_parse(tmp_path):
    """Rows without actions name none, and a limit of episodes may be another than MAX_COMPLETION_LEN."""
    cells = {"parsed_action": "", "best_action": ""}
    rows = [completion_row(n, prompt_id=f"t:{n}", reward=n, truncated=int(n < 3), **cells) for n in range(6)]
    kinds = read_examples(write_run(tmp_path / "run", [], rows) / "completions.csv", {})
    assert list(kinds["Lowest reward of an answer that parses"]["step"]) == [3, 4]
    assert list(kinds["Cut off by a limit"]["step"]) == [2, 1]


def test_examples_show_their_prompt_where_it_is_known(tmp_path):
    """From completions.csv, else from the training data where that is the run's still; never one of other rows."""
    data = tmp_path / "days.csv"
    data.write_text("user,reward_action_0,reward_action_1\n<b>first?</b>,1,0\nsecond?,0,1\n")
    digest = data_fingerprint(read_rows("DATA", str(data), Problems()))
    record = {"settings": {"DATA": str(data)}, "data_sha256": digest}
    rows = [completion_row(1), completion_row(1, prompt_id="days:2")]
    path = write_run(tmp_path / "run", [], rows) / "completions.csv"
    assert list(read_examples(path, record)["Highest reward"]["prompt"]) == ["<b>first?</b>", "second?"]
    data.write_text("user,reward_action_0,reward_action_1\nother?,1,0\nsecond?,0,1\n")
    assert list(read_examples(path, record)["Highest reward"]["prompt"]) == ["", ""]
    pandas.read_csv(path).assign(prompt="in the log?").to_csv(path, index=False)
    assert list(read_examples(path, record)["Highest reward"]["prompt"]) == ["in the log?"] * 2


def test_evaluated_steps_lie_between_the_base_model_and_the_trained_one(full, tmp_path):
    steps = read_run(full).evaluated_steps()
    assert steps.index.tolist() == [0, 10, 30]
    figures = steps[["heldout_reward", "plant_regret", "plant_unserved_kwh"]]
    assert figures.to_numpy().tolist() == [[0.4, 20, 0], [0.5, 9, 2], [0.6, 19, 7]]
    metrics = [metrics_row(1, heldout_reward=0.5)]  # The run ended at an evaluated step.
    assert read_run(write_run(tmp_path / "run", metrics)).evaluated_steps()["heldout_reward"].tolist() == [0.5]


def test_the_curve_of_a_second_run_begins_at_the_adapter_that_it_starts_from(tmp_path):
    """From the base model it would rise by what the first run has learned."""
    start = {"reward": 0.55, "reward_low": 0.5, "reward_high": 0.6}
    record = plant_record("start")
    files = {"evaluation": EVALUATION | {"start": start}, "closed_loop": record}
    steps = read_run(write_run(tmp_path / "run", [metrics_row(1)], **files)).evaluated_steps()
    assert steps["heldout_reward"].tolist() == [0.55, 0.6]
    assert steps["plant_regret"].tolist() == [record["totals"][name]["regret_percent"] for name in ("start", "trained")]


def test_the_table_of_the_terminal_names_models_references_and_functions():
    """A function or a whole model without a reward has a dash, and then there is no difference."""
    figures = {"reward": 0.5, "reward_low": 0.4, "reward_high": 0.6, "parse_rate": 1.0}
    none = dict.fromkeys(("reward", "reward_low", "reward_high"))
    results = {"exact": False, "samples": 2, "temperature": 0.5, "by_day": True, "before_greedy": none}
    results |= {"before": figures, "after_greedy": figures, "after": figures | {"functions": {"a": figures, "b": none}}}
    lines = [line.split() for line in evaluation_table(results).splitlines()]
    assert " ".join(lines[0]).endswith("0.5, 2 completions a prompt, 95% interval over prompts, of a day together")
    spread = ["0.500", "(0.400", "to", "0.600)"]
    assert lines[0][:2] == ["Mean", "reward"]
    assert evaluation_table(EVALUATION | results).startswith("Mean reward_action_k"), "whatever REWARDS are"
    assert lines[1] == ["Reward", "Parse", "rate"], "columns in which no model has a figure are left out"
    assert ["base", "model", *spread, "1.00"] in lines and ["base", "model,", "greedy", "-", "-"] in lines
    assert lines[lines.index(["function", "a:"]) + 2] == ["trained", *spread]


def test_answers_are_counted_by_action():
    """Also the action that no answer names; exact figures are expected numbers."""
    figures = {"action_counts": [1234, 0, 3], "unparsed": 2}
    assert answers_by_action(figures) == "[0] 1234, [1] 0, [2] 3, none 2"
    assert answers_by_action({"action_counts": [11.654, 0.0], "unparsed": 0.25}) == "[0] 11.7, [1] 0, none 0.2"
    assert answers_by_action({"action_counts": [3.0], "unparsed": -1e-06}) == "[0] 3, none 0", (
        "shares add up to 1.000001"
    )
    assert answers_by_action({"reward": 0.5}) == "", "rows without actions"


DAMAGED = [
    (None, "", "no metrics.csv"),
    ("metrics.csv", "a,b\n1,2\n", "no column `step`"),
    ("evaluation.json", '{"before": 3', "evaluation.json cannot be read"),
    ("closed_loop.json", '{"totals": {"base": 1}}', "`totals` is not an object"),
    ("report.html", None, "cannot be written"),  # A folder stands in the way.
]


@pytest.mark.parametrize("name, text, words", DAMAGED)
def test_one_line_where_no_report_can_be_written(tmp_path, name, text, words):
    folder = write_run(tmp_path / "run", [metrics_row(1)]) if name else tmp_path
    if text is None:
        (folder / name).mkdir()
    elif name:
        (folder / name).write_text(text)
    with pytest.raises(InputError, match=words) as caught:
        report.main([str(folder)])
    assert "\n" not in str(caught.value)
