# SPDX-License-Identifier: Apache-2.0
"""scripts/ask.py on an adapter of the tiny model. Run: python -m pytest tests/evaluate/test_ask.py"""

import csv
import io
import json
import re
import shlex
import shutil

import ask
import export
import pytest
import torch
from helpers import QUESTION, ROOT, SYSTEM, read_csv, write_csv
from safetensors.torch import load_file, save_file

from grpo.common import InputError
from grpo.evaluate.ask import prepare
from grpo.evaluate.saved_adapter import note_best
from grpo.output.durable import file_sha256, write_sealed
from grpo.output.layout import ADAPTER


@pytest.fixture
def adapter(saved_adapter, tmp_path):
    """One that is not zero, in a run's folder that says what its base model is."""
    folder = tmp_path / "run"
    shutil.copytree(saved_adapter, folder)
    torch.manual_seed(0)
    weights = load_file(folder / ADAPTER)
    save_file({name: torch.randn(value.shape) for name, value in weights.items()}, folder / ADAPTER)
    write_record(folder)
    return folder


def write_record(adapter, **settings):
    """settings.json of the adapter's run."""
    settings = {"MODEL_ID": "tiny", "MAX_COMPLETION_LEN": 8} | settings
    (adapter / "settings.json").write_text(json.dumps({"settings": settings}))


def answers_of(capsys, adapter, questions, *options):
    """The rows of the CSV that is printed for a file of questions."""
    capsys.readouterr()
    assert ask.main([str(adapter), "--csv", str(questions), *options]) == 0
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


def test_a_failed_environment_is_explained(adapter, capsys, forked_description):
    """A `reset` that needs a column of the rows cannot be called for a prompt alone."""
    write_record(adapter, ENVIRONMENT="worlds:Tally", MAX_PROMPT_LEN=900)
    assert ask.main([str(adapter), "Add."]) == 0
    end, fault = capsys.readouterr().out.splitlines()[-2:]
    assert end == "end: reset, reward: None"
    assert fault.startswith("fault: reset: reset raised TypeError: Tally.reset() missing 1 required positional")


def test_one_prompt(adapter, capsys, monkeypatch):
    """Where the run kept a better adapter, it is named beside the answer."""
    monkeypatch.setattr("grpo.evaluate.saved_adapter.read_best", lambda folder: {"in_words": "step 5 is the best"})
    questions = [str(adapter), QUESTION, *SYSTEM]
    assert ask.main([*questions, "--base"]) == 0
    completion, action = capsys.readouterr().out.splitlines()
    assert completion == f"<|channel|>final<|message|>[{action.removeprefix('action: ')}]<|return|>"
    assert ask.main(questions) == 0
    printed = capsys.readouterr()
    assert completion not in printed.out, "random weights answer otherwise"
    assert printed.err.endswith(f"({adapter} holds the last step's adapter; step 5 is the best: {adapter / 'best'})\n")


def test_a_question_is_asked_as_the_run_asked(adapter):
    """Inside its PROMPT_TEMPLATE."""
    write_record(adapter, PROMPT_TEMPLATE="Before. {} After.")
    _, _, (row,), _ = prepare(ask.parse_args([str(adapter), "How much?"]))
    assert row.messages[-1] == ("user", "Before. How much? After.") and "Before. How much? After." in row.prompt


STRANGE = "\x1b]0;owned\x07\x9b31m\u202e[0]\n\tso"


def test_a_strangers_answers_do_not_reach_the_terminal_as_commands(adapter, capsys, monkeypatch):
    """Neither as an answer, nor in a table on a terminal, nor in the note on best/; a file gets what was answered."""
    monkeypatch.setattr(ask, "ask", lambda options: [{"completion": STRANGE}])
    monkeypatch.setattr("grpo.evaluate.saved_adapter.read_best", lambda folder: {"in_words": STRANGE})
    assert ask.main([str(adapter), QUESTION]) == 0
    printed = capsys.readouterr()
    assert printed.out == "\ufffd]0;owned\ufffd\ufffd31m\ufffd[0]\n\tso\n" and "\x1b" not in printed.err
    assert ask.main([str(adapter), "--csv", "questions.csv"]) == 0 and STRANGE in capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert ask.main([str(adapter), "--csv", "questions.csv"]) == 0
    assert not {"\x1b", "\x9b", "\u202e"} & set(capsys.readouterr().out)
    assert ask.main([str(adapter), f"\x9b{QUESTION}\u202e", "--serve"]) == 0
    served = capsys.readouterr().out
    assert "\\u009bhour 8" in served and "\\u202e" in served and not {"\x9b", "\u202e"} & set(served)


def test_a_best_adapter_that_is_the_last_step_s_is_not_named(saved_adapter, tmp_path, capsys):
    folder = shutil.copytree(saved_adapter, tmp_path / "run")
    record = {"in_words": "step 30 is the best", "adapter_sha256": file_sha256(folder / ADAPTER)}
    write_sealed(shutil.copytree(saved_adapter, folder / "best") / "best.json", record)
    note_best(folder)
    assert not capsys.readouterr().err
    (folder / ADAPTER).write_bytes(b"a later step")
    note_best(folder)
    assert "step 30 is the best" in capsys.readouterr().err


def test_a_completion_is_printed_to_its_last_token(adapter, capsys, monkeypatch):
    """gpt-oss also stops at its padding token, which belongs to the answer where the model wrote it."""
    text = "<|channel|>final<|message|>[1]<|endoftext|>"
    written = lambda model, prompts, **options: model.tokenizer(text=[text] * len(prompts))["input_ids"]  # noqa: E731
    monkeypatch.setattr("grpo.evaluate.models.EvaluatedModel.complete", written)
    assert ask.main([str(adapter), QUESTION]) == 0
    assert capsys.readouterr().out.splitlines() == [text, "action: 1"]


def test_a_csv(adapter, tmp_path, capsys):
    questions = tmp_path / "asked.csv"
    questions.write_text("".join((ROOT / "data" / "tes_heldout_compact.csv").read_text().splitlines(True)[:4]))
    rows, answers = read_csv(questions), answers_of(capsys, adapter, questions, "--base")
    assert [row["user"] for row in answers] == [row["user"] for row in rows] and len(rows) == 3
    assert all(f"[{row['action']}]" in row["completion"] for row in answers)
    assert list(answers[0])[-2:] == ["action", "completion"]
    assert len(answers_of(capsys, adapter, questions, "--temperature", "5")) == 3


def test_actions_are_shown_only_where_the_run_or_the_row_has_some(adapter, tmp_path, capsys):
    """A run on free text writes numbers in brackets too, which name no action."""
    write_record(adapter, REWARDS="mine:score,format=0.5")
    assert ask.main([str(adapter), QUESTION, "--base"]) == 0
    assert "action:" not in capsys.readouterr().out
    questions = write_csv(tmp_path / "asked.csv", ["prompt", "note"], [[QUESTION, "x"]])
    assert list(answers_of(capsys, adapter, questions)[0]) == ["prompt", "note", "completion"]
    header = ["prompt", "reward_action_0", "reward_action_1"]
    assert "action" in answers_of(capsys, adapter, write_csv(questions, header, [[QUESTION, 0, 1]]))[0]
    write_record(adapter, REWARDS="mine:score, best=2")
    assert "action" in answers_of(capsys, adapter, write_csv(questions, ["prompt"], [[QUESTION]]))[0]


def test_rewards_are_not_needed(adapter, tmp_path, capsys):
    """Cells of theirs pass through as they are."""
    header = ["prompt", "reward_action_0", "reward_action_1", "q_action_0", "q_action_1"]
    questions = write_csv(tmp_path / "asked.csv", header, [["hi", "", "", "", ""], ["ho", "0.50", "", "n/a", ""]])
    answered = [[row[name] for name in header] for row in answers_of(capsys, adapter, questions)]
    assert answered == [list(row.values()) for row in read_csv(questions)]


def test_messages_are_written_so_that_they_can_be_read(adapter, tmp_path, capsys):
    talk = [{"role": "user", "content": "Wie kühl's?"}]
    questions = tmp_path / "asked.jsonl"
    questions.write_text(json.dumps({"prompt": talk, "half": "\ud800"}))
    (row,) = answers_of(capsys, adapter, questions)
    assert row["prompt"] == str(talk) and row["half"] == "\\ud800"


def test_rows_may_have_different_columns(adapter, tmp_path, capsys):
    """The answer that verl keeps in `extra_info` becomes a column of the rows that have one."""
    questions = tmp_path / "asked.jsonl"
    questions.write_text('{"prompt": "hi"}\n{"prompt": "ho", "extra_info": {"answer": "3"}}\n')
    assert [row["answer"] for row in answers_of(capsys, adapter, questions)] == ["", "3"]


def test_columns_of_the_file_are_not_overwritten(adapter, tmp_path, capsys):
    """An `action` of the file keeps its name where the answers have none."""
    header = ["prompt", "completion", "action"]
    questions = write_csv(tmp_path / "asked.csv", header, [[QUESTION, "mine", "7"]])
    (row,) = answers_of(capsys, adapter, questions)
    assert (row["csv_completion"], row["csv_action"]) == ("mine", "7") and "mine" not in row["completion"]
    write_record(adapter, REWARDS="mine:score")
    (row,) = answers_of(capsys, adapter, questions)
    assert list(row) == ["prompt", "csv_completion", "action", "completion"] and row["action"] == "7"


def test_lengths_come_from_the_environment_where_they_are_set(adapter, capsys, monkeypatch):
    write_record(adapter, MAX_PROMPT_LEN=20, TOP_P=0.9)
    monkeypatch.setenv("TOP_P", "2")  # the run's is what counts
    with pytest.raises(InputError, match="or set MAX_PROMPT_LEN=") as caught:
        ask.main([str(adapter), QUESTION, "--serve"])
    needed = str(caught.value).rpartition("=")[2]
    monkeypatch.setenv("MAX_PROMPT_LEN", needed)
    monkeypatch.setenv("MAX_COMPLETION_LEN", "30")
    assert ask.main([str(adapter), QUESTION, "--serve"]) == 0
    printed = capsys.readouterr().out
    assert f"--max-model-len {int(needed) + 30}" in printed and '"max_tokens": 30' in printed


def test_an_adapter_that_is_no_runs_names_its_model(saved_adapter, tmp_path, capsys):
    assert ask.main([str(saved_adapter), "--serve"]) == 0
    assert f"vllm serve {ROOT / 'data' / 'tiny'}" in capsys.readouterr().out
    config = json.loads((saved_adapter / "adapter_config.json").read_text())
    config["target_parameters"] = ["experts.down_proj"]
    (shutil.copytree(saved_adapter, tmp_path / "wider") / "adapter_config.json").write_text(json.dumps(config))
    assert ask.main([str(tmp_path / "wider"), "--serve"]) == 0
    assert "--lora-target-modules qkv_proj o_proj experts " in capsys.readouterr().out


def test_an_adapter_that_is_not_whole_is_named(saved_adapter, tmp_path):
    with pytest.raises(InputError, match=r"it lacks adapter_config.json and \S+ Name the folder of a run that has"):
        ask.main([str(tmp_path), "hello", "--model", "tiny"])
    (shutil.copytree(saved_adapter, tmp_path / "best") / "best.json").write_text('{"adapter_sha256": "0"}')
    with pytest.raises(InputError, match="adapter_model.safetensors is damaged"):
        ask.main([str(tmp_path / "best"), "hello", "--model", "tiny"])
    config = json.loads((saved_adapter / "adapter_config.json").read_text())
    for fault, text, message in (
        ("another kind", json.dumps(config | {"peft_type": "IA3"}), "is not that of a LoRA adapter"),
        ("no rank", json.dumps(config | {"r": None}), "is not that of a LoRA adapter"),
        ("another model's", json.dumps(config | {"r": 2}), "it is no adapter for this model .* with --model"),
    ):
        folder = shutil.copytree(saved_adapter, tmp_path / fault)
        (folder / "adapter_config.json").write_text(text)
        with pytest.raises(InputError, match=message):
            ask.main([str(folder), "hello", "--model", "tiny"])
    (folder / ADAPTER).write_bytes(b"cut off")
    with pytest.raises(InputError, match="is damaged or no safetensors file"):
        ask.main([str(folder), "--model", "tiny", "--serve"])


def test_a_command_line_asks_for_one_thing():
    assert ask.parse_args(["run", "--base", "hi"]).prompt == "hi", "it may stand behind options"
    for arguments in ([], ["hello", "--csv", "a.csv"], ["--csv", "a.csv", "--serve"]):
        with pytest.raises(SystemExit, match="2"):
            ask.parse_args(["run", *arguments])
    for prompt in ("Is 7//2 = 3? See https://example.org/", "x" * 5000):
        args = ask.parse_args(["--model", "tiny", prompt])
        assert (args.adapter, args.prompt) == (None, prompt), "no path, which would lose slashes, or be too long"


def test_a_model_without_an_adapter(saved_adapter, capsys, tmp_path, monkeypatch):
    """As scripts/export.py writes it, whose card says how to ask and to serve it."""
    merged, adapter = tmp_path / "merged model", shutil.copytree(saved_adapter, tmp_path / "run")
    write_record(adapter)
    assert export.main([str(adapter), "--out", str(merged)]) == 0
    commands = re.search(r"```bash\n(.*?)```", (merged / "README.md").read_text(), re.DOTALL)[1].splitlines()
    assert commands[0].startswith(f"vllm serve '{merged}' --max-model-len ")
    words = shlex.split(commands[1].partition("#")[0])
    assert words[:3] == ["REASONING_EFFORT=low", "python", "scripts/ask.py"], "the tiny model's own effort"
    monkeypatch.setenv("REASONING_EFFORT", "low")
    capsys.readouterr()
    assert ask.main([*words[3:-1], QUESTION]) == 0
    own = capsys.readouterr().out
    assert ask.main([str(adapter), QUESTION, "--model", "tiny"]) == 0
    assert own == capsys.readouterr().out, "the merged model answers as base and adapter do"
    assert ask.main(["--model", str(merged), "--serve", QUESTION]) == 0
    served = capsys.readouterr().out
    assert served.startswith(f"vllm serve '{merged}' \\\n  --max-model-len") and "lora" not in served
    assert json.dumps(str(merged)) in served, "curl names it as vLLM does"
    with pytest.raises(SystemExit):
        ask.main(["--csv", "questions.csv"])
    assert "or a model with --model" in capsys.readouterr().err
