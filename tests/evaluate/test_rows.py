# SPDX-License-Identifier: Apache-2.0
"""A run on the user's own rows evaluates those, and scripts/evaluate.py --data any others.

Run: python -m pytest tests/evaluate/test_rows.py
"""

import dataclasses
import itertools
import json
import shutil
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import ask
import evaluate as ev
import pytest
from helpers import ROOT, read_csv, run_script, write_csv
from machines import H100
from stub_vllm import stub_engine

from grpo.common import InputError, Problems
from grpo.data import files
from grpo.data.files import data_fingerprint
from grpo.data.heldout import date_of, hold_out
from grpo.evaluate import evaluate_adapter
from grpo.evaluate.heldout_reward import HeldoutEvaluation, are_figures
from grpo.figures.statistics import paired_difference
from grpo.model.load import load_tokenizer
from grpo.output.durable import read_json, read_sealed
from grpo.plan.hub import TINY_PATH
from grpo.preflight.choices import Choice
from grpo.reward.calling import RewardError
from grpo.reward.episode import Episode
from grpo.rollout.sampler import Sample
from grpo.settings.table import Settings

HEADER = ["date", "question", "reward_action_0", "reward_action_1"]
DAYS = 2  # of the thirty, by the hash of each
SETTINGS = {
    "MODEL_ID": "tiny", "TOTAL_STEPS": 3, "SAVE_STEPS": 3, "EVAL_STEPS": 2, "PROMPTS_PER_STEP": 4, "NUM_GENERATIONS": 4,
    "SEED": 5, "LEARNING_RATE": "1e-2", "PROMPT_TEMPLATE": "Tell me. {}", "ZIP": "no_completions",
}  # fmt: skip


@pytest.fixture(scope="module")
def weather(tiny, tmp_path_factory):
    """Three steps on thirty days of a weather CSV, four hours a day; nothing else is set that is about data."""
    place, rows = tmp_path_factory.mktemp("weather"), []
    for day, hour in itertools.product(range(30), (6, 10, 14, 18)):
        wind = (7 * day + 5 * hour) % 40
        date = f"2025-{1 + day // 28:02}-{1 + day % 28:02}"
        rows.append([date, f"Day {day}, {hour}:00, wind {wind} m/s. Will it rain?", 1 - wind / 40, wind / 40])
    data = write_csv(place / "weather.csv", HEADER, rows)
    done = run_script(**SETTINGS | {"DATA": data, "OUTPUT_DIR": place / "run"})
    split = hold_out(files.read_file(data, Problems()), 0.1)
    split = dataclasses.replace(split, heldout=files.in_template(split.heldout, SETTINGS["PROMPT_TEMPLATE"]))
    held = write_csv(place / "held.csv", HEADER, [[row.columns[name] for name in HEADER] for row in split.heldout])
    return SimpleNamespace(folder=place / "run", data=data, held=held, split=split, output=done.stdout)


def test_a_run_on_other_data_is_judged_by_its_own_held_out_days(weather):
    folder, split = weather.folder, weather.split
    assert len({date_of(row) for row in split.heldout}) == DAYS and len(split.heldout) == 4 * DAYS
    result, best = read_sealed(folder / "evaluation.json"), read_sealed(folder / "best/best.json")
    assert result["data_sha256"] == data_fingerprint(split.heldout) and result["exact"]
    assert len(result["after"]["reward_by_prompt"]) == 4 * DAYS and "reward" in result["difference"]
    assert best["by"] == "reward" and "plant_regret" not in best["evaluated"][0]
    trained = {row["prompt_id"] for row in read_csv(folder / "completions.csv")}
    assert trained <= {row.id for row in split.train}
    assert read_sealed(folder / "settings.json")["choices"]["heldout"] == [4 * DAYS, split.reason]


def test_the_same_day_or_prompt_in_two_files_is_one_cluster():
    """Twice the files would halve the variance without a further observation (coverage 0.84 instead of 0.95)."""
    rows = [
        files.Row(file, n, (("user", f"{file} {n}"),), (0.0, 1.0), {"date": f"2025-06-0{n}"})
        for file in ("a.csv", "b.csv")
        for n in range(1, 7)
    ]
    undated = [dataclasses.replace(row, messages=(("user", str(row.number)),), columns={}) for row in rows]
    for cluster_rows in (rows, undated):
        evaluation = HeldoutEvaluation(SimpleNamespace(settings=Settings()), cluster_rows, True, [], None)
        assert evaluation.clusters[:6] == evaluation.clusters[6:] and len(set(evaluation.clusters)) == 6
        results = {"before": {"reward_by_prompt": [0.0] * 12}, "after": {"reward_by_prompt": [*range(6)] * 2}}
        evaluation.add_differences(results)
        once = paired_difference([0.0] * 6, list(range(6)))
        assert results["difference"] == pytest.approx(once) and results["difference"]["clusters"] == 6
    resets = [dataclasses.replace(row, messages=(("user", "Go."),), columns={"target": row.number}) for row in rows]
    for environment, count in (("", 1), ("worlds:Sum", 6)):  # What an environment is reset with is part of a prompt.
        model = SimpleNamespace(settings=Settings(ENVIRONMENT=environment))
        assert len(set(HeldoutEvaluation(model, resets, True, [], None).clusters)) == count


def test_an_evaluation_tells_of_episodes_that_failed(caplog):
    """Its figures are means over the others, and no log has a row of them."""
    rows = [files.Row("a.csv", n, (("user", "Go."),), (), {"target": n}) for n in (1, 2)]
    played = [Sample([1], None, episode=Episode("Go.", [], [1], [0], None, 1.0, "answer"))]
    played += [Sample([1], None, episode=Episode("Go.", [], [1], [0], None, None, "reset", "reset: no file"))]
    settings, tokenizer = Settings(ENVIRONMENT="shop:Shop", EVAL_SAMPLES=1), load_tokenizer(str(TINY_PATH))
    model = SimpleNamespace(
        settings=settings, player=True, tokenizer=tokenizer, stops=[2], play=lambda *_, **__: played
    )
    HeldoutEvaluation(model, rows, False, [], None).measure()
    assert caplog.messages == ["ENVIRONMENT: 1 of 2 episodes failed, such as by reset: no file"]


def test_a_run_without_a_plant_does_not_mention_one(weather):
    folder = weather.folder
    cards = [(folder / name).read_text(encoding="utf-8") for name in ("README.md", "best/README.md", "training.log")]
    report = (folder / "report.html").read_text(encoding="utf-8").partition("Glossary")[0]
    for text in (weather.output, *cards, report):
        assert text and not [word for word in ("plant", "closed loop", "unserved") if word in text.lower()]
    assert not (folder / "closed_loop.json").exists()
    assert weather.split.reason.partition("(")[0] in report and "Tell me. Day" in report and "Will it rain?" in report
    assert "run/completions.csv" not in zipfile.ZipFile(folder.with_name("run.zip")).namelist()


def test_the_command_scores_any_rows_as_the_run_does(weather, capsys, monkeypatch):
    """On the run's own held-out rows: its own figures, those of its REWARDS too."""
    monkeypatch.chdir(ROOT)
    arguments = [str(weather.folder), "--data", str(weather.held)]
    assert ev.main([*arguments, "--base-too"]) == 0
    shown = capsys.readouterr().out
    assert f"{4 * DAYS} rows, rewards action x 1" in shown and "is not taken for the day" not in shown
    result = json.loads((weather.folder / "evaluation-held.json").read_text())
    own = read_sealed(weather.folder / "evaluation.json")
    for part in ("before", "before_greedy", "after", "after_greedy"):
        assert result[part]["reward"] == pytest.approx(own[part]["reward"], abs=1e-5), part
        assert result[part]["functions"]["action"] == pytest.approx(own[part]["functions"]["action"], abs=1e-5)
    assert result["difference"] == pytest.approx(own["difference"], abs=1e-5) and result["rewards"] == [["action", 1.0]]
    assert "trained on" not in shown and "trained_on" not in result
    out = weather.held.with_name("other.json")
    assert ev.main([*arguments, "--rewards", "best,format=0.5", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert set(result["after"]["functions"]) == {"best", "format"} and "before" not in result
    assert ev.main([str(weather.folder), "--data", str(weather.data), "--out", str(out)]) == 0
    words = f"{120 - 4 * DAYS} of 120 rows have prompts that {weather.folder} was trained on"
    assert words in capsys.readouterr().out and json.loads(out.read_text())["trained_on"] == 120 - 4 * DAYS


def test_without_data_the_held_out_rows_of_the_run_are_scored(weather, capsys, monkeypatch):
    """Not the demo's plant, of which the run knows nothing; the environment does not choose other rows."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("EVAL_SHARE", "0.4")
    assert ev.main([str(weather.folder)]) == 0
    assert f"{4 * DAYS} held-out rows, rewards action x 1" in capsys.readouterr().out
    result, own = (read_json(weather.folder / name) for name in ("evaluation-heldout.json", "evaluation.json"))
    assert result["data_sha256"] == own["data_sha256"]
    assert result["after"]["reward"] == pytest.approx(own["after"]["reward"], abs=1e-5)


def test_held_out_rows_that_the_run_may_have_seen_are_not_scored(weather, tmp_path, monkeypatch):
    """DATA is another one since, or the run began with a version that held other rows out."""
    folder = tmp_path / "run"
    shutil.copytree(weather.folder, folder, ignore=shutil.ignore_patterns("checkpoint-*"))
    record = read_json(folder / "settings.json")
    (folder / "settings.json").write_text(json.dumps(record | {"data_sha256": "of other rows"}))
    monkeypatch.chdir(ROOT)
    for adapter in (folder, folder / "best"):
        with pytest.raises(InputError, match="was not trained on the rows that DATA leaves .*--data FILE"):
            ev.main([str(adapter)])


def test_a_run_that_held_no_rows_out_asks_for_rows(tmp_path, monkeypatch):
    """All were trained on, however many a hash would choose."""
    data = write_csv(tmp_path / "own.csv", ["prompt", "answer"], [[f"question {n}", n] for n in range(30)])
    monkeypatch.setenv("EVAL_SAMPLES", "0")
    monkeypatch.setenv("DATA", str(data))
    with pytest.raises(InputError, match="EVAL_SAMPLES=0: all rows of DATA are training rows.* --data FILE"):
        ev.main(["--model", "tiny", "--samples", "2"])
    data.write_text(data.read_text() + ",,,\n")
    with pytest.raises(InputError, match="own.csv, row 31"):
        ev.main(["--model", "tiny"])


SHORT = """
def short(completions, note, **columns):
    return [-len(text) / 100 - float(n) for text, n in zip(completions, note)]
def needs_epoch(completions, trainer_state, prompts, **columns):
    if "question 5" in prompts and trainer_state.epoch is None or len(completions) > 30:
        raise ValueError("no such row")
    return [trainer_state.epoch] * len(completions)
"""


@pytest.mark.parametrize("engine", ["transformers", "vLLM"])
def test_rows_without_actions_are_sampled_and_scored_by_a_function(
    engine, saved_adapter, tmp_path, capsys, monkeypatch
):
    """The engine's part against the stub; the base model and the adapter answer with the same seeds."""
    (tmp_path / "short_answers.py").write_text(SHORT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "short_answers", raising=False)
    if engine == "vLLM":
        monkeypatch.setattr("grpo.evaluate.models.start_engine", stub_engine)
        monkeypatch.setattr(evaluate_adapter, "read_machine", lambda: H100)
        monkeypatch.setattr(evaluate_adapter, "choose_use_vllm", lambda *arguments: Choice(True, "a stub"))
    write_csv(tmp_path / "a.csv", ["prompt", "note", "day"], [[f"question {n}", n / 10, "Monday"] for n in range(6)])
    monkeypatch.setenv("MAX_COMPLETION_LEN", "12")
    arguments = [str(saved_adapter), "--model", "tiny", "--data", "a.csv", "--rewards", "short_answers:short=2"]
    assert ev.main([*arguments, "--samples", "3", "--base-too", "--out", "x.json"]) == 0
    shown = capsys.readouterr().out
    assert f"{engine}: " in shown and "sampled at temperature 0.5, 3 answers a prompt" in shown
    result = json.loads((tmp_path / "x.json").read_text())
    assert result["samples"] == 3 and result["data"] == ["a"] and "oracle" not in result
    for part in ("before", "before_greedy", "after", "after_greedy"):
        scores = result[part]["reward_by_prompt"]
        assert "the column `day` is not taken for the day, 'Monday' is no date" in shown
        assert len(scores) == 6 and all(score < -n / 10 for n, score in enumerate(scores))
        assert 2 * result[part]["functions"]["short"]["reward"] == pytest.approx(result[part]["reward"]), "its weight"
        assert result[part]["reward_low"] <= result[part]["reward"] <= result[part]["reward_high"]
        assert result[part]["tokens_max"] <= 12
    arguments[-1] = "short_answers:needs_epoch"
    assert ev.main([*arguments, "--samples", "1", "--out", "y.json"]) == 0, "the state that the check gave"
    with pytest.raises(RewardError, match="short_answers:needs_epoch raised ValueError: no such row"):
        ev.main([*arguments, "--samples", "6", "--out", "z.json"])


def test_direct_answers_to_rows_without_actions_are_sampled(tmp_path, capsys, monkeypatch):
    """There are no actions whose probabilities could be weighed."""
    write_csv(tmp_path / "a.csv", ["prompt"], [[f"question {n}"] for n in range(3)])
    monkeypatch.setenv("DIRECT_ANSWERS", "1")
    arguments = ["--model", "tiny", "--data", str(tmp_path / "a.csv"), "--out", str(tmp_path / "x.json")]
    assert ev.main([*arguments, "--rewards", "format", "--samples", "2"]) == 0
    assert "2 answers a prompt: rows without reward_action_k have no actions" in capsys.readouterr().out
    assert 0 <= json.loads((tmp_path / "x.json").read_text())["before"]["reward"] <= 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--rewards", "action"), "--rewards: only with --data"),
        (("--data", "x.csv", "--profile", "y.csv"), "--profile: only without --data"),
        (("--data", "x.csv", "--base-too"), "only with RUN"),
        (("--model", "tiny", "--data", "nowhere.csv"), "--data: no file matches 'nowhere.csv'"),
        (("--model", "tiny", "--data", "bare.csv", "--rewards", "action"), "Add them, or name other REWARDS"),
        (("docs", "--data", "bare.csv"), "docs: there is no such folder"),
        (("docs", "--profile", "bare.csv"), "docs: there is no such folder|bare.csv, header"),
        (("--model", "tiny", "--out", "nowhere/x.json"), "nowhere/x.json: cannot be written"),
    ],
)  # fmt: skip
def test_wrong_input_is_named(arguments, words, tmp_path, capsys, monkeypatch):
    write_csv(tmp_path / "bare.csv", ["prompt"], [["question"]])
    monkeypatch.chdir(tmp_path)
    with pytest.raises((InputError, SystemExit)) as caught:
        ev.main(arguments)
    shown = f"{capsys.readouterr().err} {caught.value}"
    assert all(part in shown for part in words.split("|")), shown
    assert [path.name for path in tmp_path.iterdir()] == ["bare.csv"]


@pytest.mark.parametrize("named", [".", "adapter", "best"])
def test_a_strangers_module_is_not_imported(saved_adapter, tmp_path, monkeypatch, named):
    """`cd STRANGER; evaluate.py .`, its best/, and from the folder above, where it is a namespace package. With
    --rewards the user asks for it."""
    folder = shutil.copytree(saved_adapter, tmp_path / "adapter")
    shutil.copytree(saved_adapter, folder / "best")
    (folder / "stranger.py").write_text("print('imported', flush=True)\ndef score(completions, **columns): return [1]")
    name = "adapter.stranger:score" if named == "adapter" else "stranger:score"
    recorded = {"MODEL_ID": "tiny", "REWARDS": f"action,{name}=0.5"}
    (folder / "settings.json").write_text(json.dumps({"settings": recorded}))
    data = write_csv(tmp_path / "d.csv", HEADER, [["2025-01-01", "Rain?", 0, 1]])
    monkeypatch.chdir(tmp_path if named == "adapter" else folder)
    before = set(sys.modules)
    with pytest.raises(InputError, match="is a module in the adapter's own folder. If you trust that code, give --rew"):
        ev.main([named, "--data", str(data)])
    assert not {"stranger", "adapter", "adapter.stranger"} & (set(sys.modules) - before)
    options = ev.parse_args([named, "--data", str(data), "--rewards", name])
    assert evaluate_adapter.strange_rewards(options, name) is None


def test_a_strangers_environment_is_not_imported(saved_adapter, tmp_path, monkeypatch):
    """Neither to evaluate nor to ask, unless the user sets the same ENVIRONMENT. It runs in a process of its own."""
    folder = shutil.copytree(saved_adapter, tmp_path / "adapter")
    (folder / "stranger.py").write_text("open('imported', 'w').close()\n")
    recorded = {"MODEL_ID": "tiny", "ENVIRONMENT": "stranger:World"}
    (folder / "settings.json").write_text(json.dumps({"settings": recorded}))
    data = write_csv(tmp_path / "d.csv", ["prompt"], [["Rain?"]])
    monkeypatch.chdir(folder)
    for program, arguments in ((ev, [".", "--data", str(data)]), (ask, [".", "Rain?"])):
        words = (
            "ENVIRONMENT: stranger:World of its settings.json is a module in .* code, set ENVIRONMENT=stranger:World"
        )
        with monkeypatch.context() as patch, pytest.raises(InputError, match=words):
            patch.setenv("ENVIRONMENT", "other:World")
            program.main(arguments)
        assert not (folder / "imported").exists()
        with monkeypatch.context() as patch, pytest.raises(InputError, match="has no attribute 'World'"):
            patch.setenv("ENVIRONMENT", "stranger:World")
            program.main(arguments)
        (folder / "imported").unlink()


def test_figures_that_a_full_disk_does_not_take_are_printed(capsys):
    with pytest.raises(OSError) as error:
        evaluate_adapter.write_results(Path("/dev/full"), {"reward": 1.0}, "the table")
    assert error.value.filename == "/dev/full" and capsys.readouterr().out == "the table\n"


@pytest.mark.parametrize(
    "value", [{}, None, {"reward": "x"}, {"reward": 1.0, "reward_by_prompt": [1.0], "functions": {}}]
)
def test_figures_that_no_run_wrote_are_measured_again(value):
    whole = {"reward": 1.0, "reward_by_prompt": [1.0, None], "functions": {}}
    assert are_figures(whole, 2) and not are_figures(value, 2)


def test_a_day_that_was_not_trained_on_is_not_taken_for_one_with_the_same_prompt(tmp_path):
    """Rows of episodes may differ in what their environment is reset with alone."""
    data = tmp_path / "days.jsonl"
    data.write_text("".join(json.dumps({"prompt": "Plan.", "load": load}) + "\n" for load in range(3)))
    rows = files.read_rows("DATA", str(data), Problems())
    new = [dataclasses.replace(row, columns={"load": 9}) for row in rows[:1]]
    settings, options = Settings(DATA=str(data), EVAL_SAMPLES=0, ENVIRONMENT="shop:Shop"), SimpleNamespace(run=tmp_path)
    record = {"settings": {}, "data_sha256": data_fingerprint(rows)}
    (tmp_path / "settings.json").write_text(json.dumps(record))
    assert evaluate_adapter.trained_rows(options, settings, [*rows, *new]) == 3
    plain = dataclasses.replace(settings, ENVIRONMENT="")
    assert evaluate_adapter.trained_rows(options, plain, [*rows, *new]) == 4
    for elsewhere in (str(data.with_name("none.jsonl")), "org/name"):
        assert evaluate_adapter.trained_rows(options, dataclasses.replace(plain, DATA=elsewhere), rows) is None
    data.write_text(data.read_text().replace("Plan.", "Other."))
    assert evaluate_adapter.trained_rows(options, plain, rows) is None, "nobody knows on which rows it was trained"
    assert evaluate_adapter.trained_rows(SimpleNamespace(run=None), plain, rows) == 0, "a base model"
