# SPDX-License-Identifier: Apache-2.0
"""SFT, then GRPO, as a user starts them. Run: python -m pytest tests/learn/test_sft.py"""

import hashlib
import json
import re
import shutil
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import sft
import torch
from helpers import CLEAN, RENDERED, ROOT, read_csv, write_csv
from machines import only
from runs import only_settings, run_here
from safetensors.torch import load_file

from grpo.common import InputError
from grpo.learn.finite import NotFinite
from grpo.learn.sft import learn_answers, sft_options, shown_pairs, tokenize_pairs
from grpo.model.load import load_tokenizer
from grpo.output.layout import ADAPTER
from grpo.preflight.checks import preflight
from grpo.preflight.sft import sft_preflight
from grpo.settings.table import Settings

COMPACT = ROOT / "data" / "tes_heldout_compact.csv"
ENVIRON = CLEAN | {"MODEL_ID": "tiny", "DATA": str(COMPACT), "SEED": "5", "TEMPERATURE": "1"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Twelve steps of SFT, one of GRPO that hardly moves, with the KL penalty."""
    folder = tmp_path_factory.mktemp("runs")
    learn, held_out = folder / "sft", folder / "held_out.csv"
    held_out.write_text("".join(COMPACT.read_text().splitlines(True)[:13]))
    environ = ENVIRON | {"TOTAL_STEPS": "12"}
    with only_settings(**environ):
        assert sft.main(["--out", str(learn)]) == 0
    settings = ENVIRON | {"INIT_ADAPTER": learn, "OUTPUT_DIR": folder / "grpo", "TOTAL_STEPS": 1, "LEARNING_RATE": 1e-9}
    settings |= {"EVAL_DATA": held_out, "EVAL_PROFILE": "", "BETA": 0.1, "PROMPTS_PER_STEP": 2, "NUM_GENERATIONS": 4}
    settings = {name: str(value) for name, value in settings.items()}
    run_here(**settings)
    return SimpleNamespace(sft=learn, grpo=folder / "grpo", settings=settings, environ=environ)


def test_sft_teaches_the_answers_and_grpo_starts_there(runs):
    result, best = (json.loads((runs.grpo / name).read_text()) for name in ("evaluation.json", "best/best.json"))
    before, start, after = result["before"]["reward"], best["evaluated"][0], result["after"]["reward"]
    assert start["step"] == 0 and start["heldout_reward"] > before + 0.05, "`before` is the base model's"
    assert after == pytest.approx(start["heldout_reward"], abs=1e-3)
    assert best["base"]["heldout_reward"] == before
    assert result["start"]["reward"] == start["heldout_reward"] and result["start_greedy"]["reward"] > before
    gain = result["after"]["reward"] - result["start"]["reward"]
    assert result["difference_start"]["reward"] == pytest.approx(gain, abs=1e-6) and "difference" in result
    text = re.sub(r"<[^>]+>", "|", (runs.grpo / "report.html").read_text())
    assert "|start adapter|" in text and f"|Starts from||{runs.sft.parent.name}/sft|" in text
    assert "the adapter it started from" in best["in_words"] or best["step"] == 0
    (row,) = read_csv(runs.grpo / "metrics.csv")
    assert float(row["kl"]) > 0.02, "the reference is the base model, not the start adapter"
    learned, trained = (load_file(folder / ADAPTER) for folder in (runs.sft, runs.grpo))
    assert learned.keys() == trained.keys()
    assert max((learned[name] - trained[name]).abs().max() for name in learned) < 1e-6


def test_both_say_what_they_are(runs):
    record = json.loads((runs.grpo / "settings.json").read_text())
    assert record["choices"]["init_adapter"] == hashlib.sha256((runs.sft / ADAPTER).read_bytes()).hexdigest()
    assert record["sources"]["LORA_R"] == "INIT_ADAPTER"
    assert "It started from the adapter in `" in (runs.grpo / "README.md").read_text()
    card = (runs.sft / "README.md").read_text()
    assert "12 steps with supervised fine-tuning" in card and f'from_pretrained(model, "{runs.sft}")' in card
    settings = json.loads((runs.sft / "settings.json").read_text())["settings"]
    assert settings["MAX_COMPLETION_LEN"] == 12 and settings["EVAL_SAMPLES"] == 8, "the user's, for scripts/ask.py"


def test_a_resumed_run_keeps_its_start(runs):
    more = runs.settings | {"TOTAL_STEPS": "2"}
    assert not preflight(more).problems
    problems = preflight(more | {"INIT_ADAPTER": ""}).problems
    assert problems[0].startswith("INIT_ADAPTER: ") and f"Set INIT_ADAPTER={runs.sft} to continue" in problems[0]


def test_only_the_answer_has_labels(tiny):
    tokenizer, answer = load_tokenizer(str(tiny)), "<|channel|>final<|message|>[2]<|return|>"
    prompts = [RENDERED.format(f"hour {8 + n} store 50") for n in range(3)]
    rows = tokenize_pairs(tokenizer, prompts, [[answer], [], [answer]])
    assert len(rows["input_ids"]) == 2
    for ids, labels, prompt in zip(rows["input_ids"], rows["labels"], prompts[::2], strict=True):
        assert tokenizer.decode(ids) == prompt + answer and len(ids) == len(labels)
        assert tokenizer.decode([label for label in labels if label != -100]) == answer


def test_sft_loads_the_model_as_planned(tmp_path, monkeypatch):
    resolved, answers = sft_preflight(ENVIRON, tmp_path / "out")
    load = Mock(side_effect=ValueError)
    monkeypatch.setattr("grpo.learn.sft.load_base", load)
    with pytest.raises(ValueError):
        learn_answers(resolved, answers)
    assert load.call_args.args[-1] is resolved.plan


@pytest.mark.parametrize(("rows", "micro", "times"), [(1, 1, 12), (5, 4, 3), (64, 12, 1)])
def test_a_step_is_prompts_per_step_rows(rows, micro, times):
    options = sft_options(Settings(), True, rows)
    assert (options["per_device_train_batch_size"], options["gradient_accumulation_steps"]) == (micro, times)
    assert options["router_aux_loss_coef"] == 0, "TRL would add gpt-oss's own load balancing to the loss"


def test_what_sft_refuses(runs, tmp_path, monkeypatch):
    before = sorted(runs.grpo.iterdir())
    monkeypatch.setattr("os.environ", dict(ENVIRON))
    with pytest.raises(InputError, match="it is not empty. Name another folder, or set OVERWRITE=1"):
        sft.main(["--out", str(runs.grpo)])
    assert sorted(runs.grpo.iterdir()) == before
    assert "it is not empty" in only(sft_preflight(runs.environ, runs.sft)[0].problems)
    opened = RENDERED.format("which?") + "<|channel|>analysis<|message|>"
    faults = {"no row has an answer, or an action": ["which?", 1, 1], "the prompt opens": [opened, 0, 1]}
    for problem, row in faults.items():
        data = write_csv(tmp_path / "own.csv", ["prompt", "reward_action_0", "reward_action_1"], [row])
        assert problem in only(sft_preflight(ENVIRON | {"DATA": str(data)}, tmp_path / "out")[0].problems)
    whole = "<|start|>assistant<|channel|>final<|message|>north"
    data = write_csv(tmp_path / "own.csv", ["prompt", "answer"], [["which?", whole], ["why?", "so"]])
    problem = only(sft_preflight(ENVIRON | {"DATA": str(data)}, tmp_path / "out")[0].problems)
    assert "row 1, answer: it holds <|start|>: the model reads" in problem and "first <|channel|> on" in problem
    texts = write_csv(tmp_path / "texts.csv", ["prompt", "answer"], [["which?", "north"], ["why?", "so"]])
    rollouts = {
        "USE_VLLM": "1",
        "ATTN_IMPL": "torch_flash",
        "TEMPERATURE": "9",
        "REWARDS": "none",
        "EVAL_DATA": "none.csv",
    }
    for unused in ({}, rollouts):
        resolved, _ = sft_preflight(ENVIRON | {"DATA": str(texts)} | unused, tmp_path / "out")
        assert not resolved.problems, "it needs no rewards, rollouts and evaluations"
        s = resolved.settings
        assert (s.ATTN_IMPL, s.PACKING, s.USE_VLLM) == ("eager", "none", False)
        assert unused.get("ATTN_IMPL", "auto") == resolved.recorded.ATTN_IMPL and "REWARDS" not in resolved.choices


def test_sft_writes_no_weights_that_are_not_finite(tmp_path, monkeypatch):
    monkeypatch.setattr("os.environ", ENVIRON | {"TOTAL_STEPS": "2"})
    monkeypatch.setattr("accelerate.Accelerator.clip_grad_norm_", lambda self, parameters, *limit: spoil(parameters))
    with pytest.raises(NotFinite, match="the gradient of step 1 is not finite"):
        sft.main(["--out", str(tmp_path / "out")])
    assert not list(tmp_path.rglob("*.*"))


def spoil(parameters):
    """Makes a gradient NaN where it would be clipped."""
    gradient = next(parameter.grad for parameter in parameters if parameter.grad is not None)
    gradient.view(-1)[0] = torch.nan
    return torch.tensor(1.0)


def test_sft_goes_on_where_it_was_killed_while_it_wrote(runs, tmp_path):
    out = tmp_path / "sft"
    shutil.copytree(runs.sft, out)
    assert {path.name for path in out.iterdir()} >= {"settings.json", "README.md", "tokenizer.json"}
    (out / ADAPTER).rename(out / f"{ADAPTER}.tmp")
    assert not sft_preflight(runs.environ, out)[0].problems
    (out / "training.log").touch()
    assert "it is not empty" in only(sft_preflight(runs.environ, out)[0].problems), "that is a run of train_grpo.py"


def test_sft_leaves_out_what_a_run_on_these_rows_would_hold_out(tmp_path):
    rows = [["x" * n, 0, 1] for n in range(1, 41)]
    data = write_csv(tmp_path / "own.csv", ["question", "reward_action_0", "reward_action_1"], rows)
    environ = ENVIRON | {"DATA": str(data), "NUM_TRAIN_EPOCHS": "2", "PROMPTS_PER_STEP": "4"}
    resolved, answers = sft_preflight(environ | {"NUM_ITERATIONS": "2"}, tmp_path / "out")
    run = preflight(environ | {"OUTPUT_DIR": str(tmp_path / "run")})
    assert [row.id for row in resolved.rows] == [row.id for row in run.rows] and len(answers) == len(run.rows) == 34
    assert resolved.settings.TOTAL_STEPS == 17, "2 x 34 rows by 4: there is no rollout to learn from twice"
    resolved, answers = sft_preflight(environ | {"EVAL_SAMPLES": "0"}, tmp_path / "out")
    assert len(answers) == len(resolved.rows) == 40


SHOWN = [{"name": "add", "arguments": {"number": 3}}, {"name": "add", "arguments": {"number": -1}}]


@pytest.fixture
def episodes(tmp_path, monkeypatch, forked_description):
    """The environment and the settings of SFT on rows with these columns."""
    monkeypatch.syspath_prepend(ROOT / "tests")

    def settings(*rows):
        data = tmp_path / "shown.jsonl"
        data.write_text("".join(json.dumps({"prompt": "Add numbers."} | row) + "\n" for row in rows))
        changes = {"DATA": data, "ENVIRONMENT": "worlds:Sum", "MAX_COMPLETION_LEN": 400, "EVAL_SAMPLES": 0}
        changes |= {"MAX_PROMPT_LEN": 600, "TOTAL_STEPS": 1, "PYTHONPATH": ROOT / "tests"}
        return ENVIRON | {name: str(value) for name, value in changes.items()}

    return settings


def test_sft_learns_what_an_episode_shows(episodes, tmp_path, tiny):
    """Calls have labels, and an answer where the environment is not done; results and the reset's text have none."""
    rows = {"target": 2, "calls": SHOWN}, {"target": 5, "calls": json.dumps(SHOWN), "answer": "two"}, {"target": 1}
    environ = episodes(*rows)
    resolved, turns = sft_preflight(environ, tmp_path / "out")
    assert not resolved.problems and list(map(len, turns)) == [2, 3, 0]
    pairs, tokenizer = shown_pairs(resolved, load_tokenizer(str(tiny)), turns), load_tokenizer(str(tiny))
    call = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{{"number": {}}}<|call|>'
    calls = call.format(3) + call.format(-1)
    learned = [tokenizer.decode([label for label in labels if label != -100]) for labels in pairs["labels"]]
    assert learned == [calls, calls + "<|channel|>final<|message|>two<|return|>"]
    result = "<|start|>functions.add to=assistant<|channel|>commentary<|message|>total {}<|end|><|start|>assistant"
    text = tokenizer.decode(pairs["input_ids"][1])
    assert text.endswith(f"Reach 5.<|end|><|start|>assistant{call.format(3)}{result.format(3)}{call.format(-1)}"
                         f"{result.format(2)}<|channel|>final<|message|>two<|return|>")  # fmt: skip
    with only_settings(**environ):
        assert sft.main(["--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / ADAPTER).is_file()


def test_calls_are_read_as_pandas_writes_them(episodes, tmp_path):
    """Parquet gives every object of a column the keys of all others."""
    padded = [{"name": "add", "arguments": {"number": 3, "seconds": None}}, {"name": "wait", "arguments": None}]
    rows = [{"target": 2, "calls": cell} for cell in (padded, repr(padded), json.dumps(padded))]
    resolved, turns = sft_preflight(episodes(*rows), tmp_path / "out")
    add = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"number": 3}<|call|>'
    wait = "<|channel|>commentary to=functions.wait <|constrain|>json<|message|>{}<|call|>"
    assert not resolved.problems and turns == 3 * [[add, wait]]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (
            {"calls": [{"name": "sub", "arguments": {}}]},
            "shown.jsonl, row 1, calls: call 1 names no tool: 'sub'; there",
        ),
        ({"calls": "[3"}, "calls: it is no JSON"),
        ({"calls": {"name": "add"}}, "calls: it is dict, not a list"),
        ({"calls": [{"name": "add", "arguments": "2"}]}, "calls: call 1 is {'name': 'add', 'arguments': '2'}, not an"),
        ({"answer": "two"}, "DATA: no row has a column `calls`"),
    ],
)
def test_calls_that_cannot_be_shown_are_named(episodes, tmp_path, row, problem):
    assert problem in only(sft_preflight(episodes({"target": 2} | row), tmp_path / "out")[0].problems)


def test_every_row_that_cannot_be_shown_is_counted(episodes, tmp_path):
    rows = [{"target": 2, "calls": "[3"}] * 25
    problem = only(sft_preflight(episodes(*rows), tmp_path / "out")[0].problems)
    assert "row 1, calls: it is no JSON" in problem and problem.endswith(". Further rows like it: 24")
    rows = [{"target": 2, "calls": [{"name": f"sub{n}", "arguments": {}}]} for n in range(25)]
    assert sft_preflight(episodes(*rows), tmp_path / "out")[0].problems[-1] == "DATA: and 5 more problems like these"


def test_a_shown_call_whose_tool_raises_is_told(episodes, tmp_path, tiny, caplog):
    """It may be meant: what to do after an error can be learned."""
    shown = [{"name": "add", "arguments": {"count": 3}}, {"name": "add", "arguments": {"number": 2}}]
    resolved, turns = sft_preflight(episodes({"target": 2, "calls": shown}), tmp_path / "out")
    assert shown_pairs(resolved, load_tokenizer(str(tiny)), turns)["labels"]
    (message,) = caplog.messages
    assert "row 1: the episode shows 1 calls whose tool raised" in message
    caplog.clear()
    shown = [{"name": "fetch", "arguments": {"method": '{"error":', "name": '"none"}'}}]
    environ = episodes({"calls": shown, "answer": "none"}) | {"ENVIRONMENT": "worlds:Fetch"}
    resolved, turns = sft_preflight(environ, tmp_path / "out")
    assert shown_pairs(resolved, load_tokenizer(str(tiny)), turns)["labels"]
    assert not caplog.messages, "it returned this text"


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (
            {"target": 9, "calls": SHOWN},
            "row 1: the episode goes on behind its 2 turns, the last of which got `total 2`. Correct that call, add",
        ),
        (
            {"target": 9, "calls": [{"name": "add", "arguments": {"count": 9}}]},
            "unexpected keyword argument 'count'",
        ),
        ({"target": 2, "calls": 2 * SHOWN}, "by `done` in turn 2 of 4"),
        ({"target": 9, "calls": 5 * SHOWN}, "by `turns` in turn 3 of 10. Raise MAX_TURNS, or show less"),
    ],
)
def test_an_episode_that_does_not_go_as_shown_ends_sft(episodes, tmp_path, tiny, row, problem):
    resolved, turns = sft_preflight(episodes(row) | {"MAX_TURNS": "3"}, tmp_path / "out")
    assert not resolved.problems
    with pytest.raises(InputError, match=re.escape(problem)):
        shown_pairs(resolved, load_tokenizer(str(tiny)), turns)
