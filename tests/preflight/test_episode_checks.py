# SPDX-License-Identifier: Apache-2.0
"""ENVIRONMENT before a run: an episode with made-up calls is played, and each fault is named before anything loads."""

import functools
import json

import pytest
from helpers import ROOT, run_script
from machines import CPU, only, resolved_run

from grpo.preflight.episodes import made_up_arguments
from grpo.preflight.preview import preview


@pytest.fixture
def episode_run(tmp_path, forked_description):
    """Resolves a run with an environment of worlds.py on two rows."""
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": "Add.", "target": n}) + "\n" for n in range(2)))
    settings = {"DATA": data, "EVAL_SAMPLES": 0, "MAX_PROMPT_LEN": 900, "MAX_COMPLETION_LEN": 300}
    return functools.partial(resolved_run, tmp_path / "run", CPU, **settings)


def test_a_run_is_resolved(episode_run):
    resolved = episode_run(ENVIRONMENT="worlds:Sum")
    assert not resolved.problems
    assert resolved.reward_specs == [("environment", 1.0)] and resolved.environment.name == "Sum"
    assert not resolved.settings.EXPECTED_REWARD and not resolved.exact
    assert resolved.longest_prompt == 900 and "// Adds a number.\ntype add = (" in resolved.rows[0].prompt


def test_its_reward_comes_beside_others_as_in_trl(episode_run):
    assert episode_run(ENVIRONMENT="worlds:Tally", REWARDS="worlds:few_digits=0.5").reward_specs == [
        ("worlds:few_digits", 0.5),
        ("environment", 1.0),
    ]
    named = episode_run(ENVIRONMENT="worlds:Tally", REWARDS="worlds:few_digits,environment=0").reward_specs
    assert named == [("worlds:few_digits", 1.0), ("environment", 0.0)]


def test_functions_get_a_conversation_where_the_prompt_is_one(episode_run, tmp_path):
    """As in training, and in TRL."""
    row = {"prompt": [{"role": "user", "content": "Add."}], "target": 1}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert not episode_run(ENVIRONMENT="worlds:Tally", REWARDS="worlds:polite").problems


FAULTS = {
    "worlds:IntReset": "in an episode of {data}, row 1, with made-up calls, reset: reset returned 3 (int)",
    "worlds:TextReward": "get_reward: get_reward returned 'good', neither a finite number",
    "worlds:Late": "get_reward: it gave no answer in ENV_TIMEOUT",
    "worlds:SlowReset": "row 1, with made-up calls, reset: it gave no answer in ENV_TIMEOUT",
    "worlds:LatePaid": "`step_rewards` is there after the call of add, but not after reset",
    "worlds:Unpaid": "no reward arrives: it has neither `get_reward`",
    "worlds:Rough": "the call of leave: its process ended",
    "worlds:NoReset": "NoReset has no method `reset`",
    "worlds:Untyped": "the method multiply needs types",
    "worlds:Umlaut": "Harmony cannot carry the tool name 'grösse'",
    "nowhere:World": "'nowhere:World' cannot be loaded: ModuleNotFoundError",
    "worlds": "'worlds' names a module alone: write worlds:NAME",
    "worlds.Sum": "'worlds.Sum' names a module alone: write worlds:Sum",
    "worlds.py:Sum": "'worlds.py:Sum' names a file, and Python wants its module: write worlds:Sum",
    "worlds:fails": "constructing it raised TypeError: fails() missing 1 required positional argument",
    "worlds:make_nothing": "it makes a NoneType, which has no method `reset`",
    "worlds:BrokenReset": "reset: reset raised AttributeError: 'BrokenReset' object has no attribute 'targets' (",
    "worlds:BrokenReward": "get_reward: get_reward raised ZeroDivisionError: float division by zero (",
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named(episode_run, name):
    timeout = 1 if name in ("worlds:Late", "worlds:SlowReset") else 30  # A busy machine needs longer to end a process.
    problem = only(episode_run(ENVIRONMENT=name, ENV_TIMEOUT=timeout).problems)
    assert problem.startswith(f"ENVIRONMENT={name}: ")
    assert FAULTS[name].replace("{data}", "") in problem.replace(
        problem.partition("episode of ")[2].partition(",")[0], ""
    )


def test_a_fault_in_the_users_code_has_its_line(episode_run):
    line = (ROOT / "tests/worlds.py").read_text().splitlines().index("        return self.targets") + 1
    assert f"worlds.py, line {line})" in only(episode_run(ENVIRONMENT="worlds:BrokenReset").problems)


def test_a_tool_that_raises_is_shown(episode_run):
    """The model reads the error, so that a run with a broken tool would go on, and learn nothing."""
    (warning,) = (text for text in episode_run(ENVIRONMENT="worlds:BrokenTool").warnings if "ENVIRONMENT" in text)
    assert """1 of 2 made-up calls raised, such as add(number=1): {"error": "'BrokenTool' object""" in warning
    assert not [text for text in episode_run(ENVIRONMENT="worlds:Sum").warnings if "ENVIRONMENT" in text]


def test_made_up_calls_need_no_reward(episode_run):
    """None leaves an episode out: it was refused, by the words that there is no `get_reward`."""
    resolved = episode_run(ENVIRONMENT="worlds:Unjudged")
    assert not resolved.problems
    (warning,) = (text for text in resolved.warnings if "ENVIRONMENT" in text)
    assert "get_reward returned None after made-up calls: such episodes are left out" in warning


def test_the_text_of_a_reset_must_fit_behind_the_longest_prompt(episode_run, tmp_path):
    """A run would end at such a row, after the model and vLLM have started."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Add.", "target": 1}\n{"prompt": "Add, please.", "target": 2}\n')
    problem = only(episode_run(ENVIRONMENT="worlds:LongReset").problems)
    assert "rows.jsonl, row 2: the prompt has " in problem and "with the text of its reset" in problem
    enough = problem.partition("or set MAX_PROMPT_LEN=")[2].partition(",")[0]
    fits = {"ENVIRONMENT": "worlds:LongReset", "MAX_COMPLETION_LEN": 9}
    assert not episode_run(**fits, MAX_PROMPT_LEN=enough).problems
    assert only(episode_run(**fits, MAX_PROMPT_LEN=int(enough) - 1).problems)
    alone = episode_run(ENVIRONMENT="worlds:Sum", MAX_PROMPT_LEN=9).problems[0]
    assert alone.endswith(", and more for the text that resets add")


REFUSED = [
    ({"REWARDS": "action"}, "columns: there is no column reward_action_0"),
    ({"DIRECT_ANSWERS": 1}, "DIRECT_ANSWERS: an episode has calls"),
    ({"EXPECTED_REWARD": 1}, "EXPECTED_REWARD: the rewards of calls that were not made are not known"),
    ({"REWARDS": "worlds:fails"}, "REWARDS: worlds:fails raised KeyError"),
    ({"REWARDS": "worlds:none"}, "REWARDS: 'worlds:none' cannot be loaded"),
    ({"REWARDS": "environmental"}, "REWARDS: 'environmental' is unknown"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_what_cannot_go_with_it_is_refused(episode_run, settings, message):
    problems = episode_run(ENVIRONMENT="worlds:Tally", **settings).problems
    assert [problem for problem in problems if message in problem]


def test_vespo_has_no_advantages_by_turn(episode_run):
    """Liger's vespo would multiply each turn's advantage with the weights of all others."""
    for world, refused in (("Sum", True), ("Tally", False)):
        problems = episode_run(ENVIRONMENT=f"worlds:{world}", LOSS_TYPE="vespo").problems
        assert [problem.partition(",")[0] for problem in problems] == (
            ["LOSS_TYPE: vespo weights whole completions"] if refused else []
        )


def test_a_rendered_prompt_lists_no_tools(episode_run, tmp_path):
    rendered = "<|start|>user<|message|>Add.<|end|><|start|>assistant"
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": rendered, "target": 1}) + "\n")
    assert "the template could not list ENVIRONMENT's tools" in only(episode_run(ENVIRONMENT="worlds:Sum").problems)


def test_made_up_arguments_have_their_types():
    properties = {
        "a": {"type": "integer"}, "b": {"type": "string", "enum": ["x", "y"]}, "c": {"type": ["null", "number"]},
        "d": {}, "e": {"type": "boolean"},
    }  # fmt: skip
    tool = {"function": {"parameters": {"properties": properties, "required": ["a", "b", "d"]}}}
    assert made_up_arguments(tool) == {"a": 1, "b": "x", "d": "text"}


def test_the_preview_shows_an_episode(episode_run):
    """The row's prompt alone is not what the model gets: a reset adds to it."""
    lines = [" ".join(line.split()) for line in preview(episode_run(ENVIRONMENT="worlds:Sum")).splitlines()]
    (prompt,) = [line for line in lines if line.startswith("a prompt rows:1, ")]
    assert prompt.endswith("tokens, before the text that its reset adds:")
    assert any(line.endswith("; resets may add text up to MAX_PROMPT_LEN=900") for line in lines)
    first = lines.index("an episode rows:1, with made-up calls:")
    calls = ["add(number=1):", "| total 1", "wait():", '| {"waited": 0.0, "by": null}']
    assert lines[first + 1 :] == ["reset:", "| Reach 0.", *calls, "earned: environment -0.1"]
    for name in ("worlds:NoReset", "worlds:IntReset"):
        assert "with made-up calls:" not in preview(episode_run(ENVIRONMENT=name)), "the checks name the fault"
    assert "Reach 0." in preview(episode_run(ENVIRONMENT="worlds:Sum", REWARDS="worlds:none")), "another fault"


def test_a_check_shows_the_episode_that_it_has_checked(tmp_path):
    """An environment may be slow, and a second episode may go otherwise than the first."""
    data, count = tmp_path / "rows.jsonl", tmp_path / "count"
    data.write_text(json.dumps({"prompt": "Add.", "target": 1, "count": str(count)}) + "\n")
    settings = {"MODEL_ID": "tiny", "MAX_PROMPT_LEN": 900, "MAX_COMPLETION_LEN": 300, "EVAL_SAMPLES": 0}
    settings |= {"ENVIRONMENT": "worlds:Counted", "DATA": data, "OUTPUT_DIR": tmp_path / "run"}
    done = run_script("--check", **settings, PYTHONPATH=ROOT / "tests")
    assert "Episode 1." in done.stdout and count.read_text() == "x"
