# SPDX-License-Identifier: Apache-2.0
"""The loader: what it takes, and how it refuses."""

import json

import numpy as np
import pytest
from helpers import RENDERED, write_csv
from machines import only
from test_formats import load

from grpo.common import Problems
from grpo.data import files
from grpo.data.files import MOST_PROBLEMS, read_rows, reward_columns

HEADER = ["prompt", "reward_action_0", "reward_action_1"]
GOOD = [RENDERED.format("a"), "0.25", "0.75"]


def load_table(path, header, *rows):
    return load(write_csv(path, header, rows))


def load_json(path, **columns):
    path.write_text(json.dumps(columns))
    return load(path)


TALK = [{"role": "system", "content": "s"}, {"role": "user", "content": "it's 7"}]
ANSWERED = [*TALK, {"role": "assistant", "content": "yes"}]
MESSAGES = (("system", "s"), ("user", "it's 7"))


def as_numpy(talk):
    """As pandas writes what it read from Parquet: no comma between objects, each on a line of its own."""
    return str(np.array(talk, dtype=object))


@pytest.mark.parametrize("write", [json.dumps, repr, as_numpy, lambda talk: json.dumps(json.dumps(talk))])
def test_messages_may_be_text(tmp_path, write):
    """As pandas writes a data set of conversations to a CSV, and who encodes JSON twice to JSON lines."""
    header = ["prompt", "system", "reward_action_0", "reward_action_1"]
    rows, problems = load_table(tmp_path / "d.csv", header, [write(TALK), "", 1, 2], ["[{in braces}]", "", 1, 2])
    assert not problems and rows[0].messages == MESSAGES and rows[0].trl_prompt == TALK
    assert rows[1].messages == (("user", "[{in braces}]"),) and rows[1].trl_prompt == "[{in braces}]"


UNREADABLE = [  # text of a cell, part of the problem, and why it can be no prompt
    (f"{TALK}".replace("}, {", "}; {"), "it begins as messages do, and it is neither JSON nor", "another separator"),
    (json.dumps(TALK)[:-9], "it begins as messages do, and it is neither JSON nor", "cut off"),
    (json.dumps(json.dumps(TALK)[:-9]), "it begins as messages do", "cut off, then encoded again"),
    (repr([{"from": "human", "value": "7?"}]), "it is no list of messages with text", "ShareGPT's form"),
    (repr(TALK[1]), "it is no list of messages with text", "a single message"),
    (repr([TALK[1], {"text": "x"}]), "it is no list of messages with text", "one message without a role"),
]


@pytest.mark.parametrize(("text", "words", "reason"), UNREADABLE)
@pytest.mark.parametrize("column", ["prompt", "question", "user"])
def test_messages_that_cannot_be_read_are_no_prompt(tmp_path, column, text, words, reason):
    problem = only(load_json(tmp_path / "d.jsonl", **{column: text})[1])
    assert f"row 1 (line 1), column {column}: {words}" in problem, reason


TEXTS = ['{"load": 7}: what?', '{"role": "chiller", "load": 7}', '"Go."', "[1, 2", '[{"load": 7}]', "{'content': 1}"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_in_brackets_stays_text(tmp_path, text):
    rows, problems = load_json(tmp_path / "d.jsonl", prompt=text)
    assert not problems and rows[0].messages == (("user", text),) and rows[0].trl_prompt == text


PROMPTS_OF_ONE_ROW = [  # columns, the column that is the prompt, or None if that cannot be told
    ({"user": "max", "question": "7?"}, None),
    ({"user": "max", "messages": TALK}, None),
    ({"question": "7?", "messages": TALK}, None),
    ({"user": 12, "question": "7?"}, None),
    ({"user": "", "question": "7?"}, "question"),
    ({"user": "7?", "question": None, "messages": []}, "user"),
    ({"user": "max", "question": "raw", "prompt": "7?"}, "prompt"),
    ({"user": 12, "prompt": "7?"}, "prompt"),
]


@pytest.mark.parametrize(("columns", "column"), PROMPTS_OF_ONE_ROW)
def test_no_column_is_taken_for_the_prompt_in_place_of_another(tmp_path, columns, column):
    """`user` may be a nickname, and `question` what the prompt was made of."""
    rows, problems = load_json(tmp_path / "d.jsonl", **columns)
    if column:
        assert not problems and rows[0].messages == (("user", "7?"),)
        assert (rows[0].trl_prompt == "7?") == (column == "prompt" or "user" not in columns)
    else:
        assert f"{' and '.join(columns)} may each be the prompt" in only(problems)


def test_a_byte_order_mark_windows_line_ends_and_any_order_of_columns_are_fine(tmp_path):
    (tmp_path / "bom.csv").write_bytes("\ufeffuser,reward_action_1,reward_action_0\r\nzähle,2,1\r\n".encode())
    rows, problems = load(tmp_path / "bom.csv")
    assert not problems and rows[0].messages == (("user", "zähle"),) and rows[0].rewards == (1.0, 2.0)


def test_values_are_numbers_for_reward_functions_and_text_for_the_fingerprint(tmp_path):
    """The fingerprint that a run knows its rows by is of the text, as before q_action_k meant anything. Without rewards
    q_action_k is a column like any other."""
    header = [" user ", "q_action_1", "q_action_0", "reward_action_0", "reward_action_1"]
    rows, problems = load_table(tmp_path / "d.csv", header, ["Go", "-2.50", " -1e1", " 5e-1 ", "+.5"])
    assert not problems and rows[0].q == (-10.0, -2.5) and rows[0].columns["q_action_1"] == "-2.50"
    columns = reward_columns(rows[0])
    assert (columns["q_action_0"], columns["q_action_1"]) == (-10.0, -2.5)
    assert files.data_fingerprint(rows) == "7bf070af97604a8119eb742513657fadf57e320f6c110841001d358ecb912ea2"
    rows, problems = load_table(tmp_path / "d.csv", ["user", "q_action_0"], ["Go", "why"])
    assert not problems and rows[0].rewards == rows[0].q == ()


TWO = "user,reward_action_0,reward_action_1"
VALUES = f"{TWO},q_action_0,q_action_1"
FIRST = "row 1 (line 2)"
GAP = "user,reward_action_0,reward_action_2\nx,1,2\n"
REFUSED = {  # content of the file -> part of the problem
    "": "d.csv: it is empty",
    f"{TWO}\n": "no row below the header",
    f"promt,{TWO[5:]}\nx,1,2\n": "a `user` column among promt, reward_action_0, reward_action_1. Add",
    f"Prompt,{TWO[5:]}\nx,1,2\n": "Rename `Prompt` to `prompt`",
    GAP: "reward_action_1 is missing among user, reward_action_0, reward_action_2. Number",
    "user,reward_action_0\nx,1\n": "only one action",
    f"user,{TWO}\nx,y,1,2\n": "'user' stands there twice",
    f'{TWO}\n"two\nlines",1,2\ny,abc,2\n': "row 2 (line 4), column reward_action_0: 'abc'",
    f"{VALUES}\nx,1,2,3,inf\n": f"{FIRST}, column q_action_1: 'inf' is not a finite number",
    f"{TWO},q_action_0\nx,1,2,3\n": "header: there are q_action_0, but 2 columns reward",
    f"{TWO}\nx,1\n": f"{FIRST}: it has 2 cells, the header has 3",
    f"{TWO}\n ,1,2\n": "column user: the prompt is empty",
    f"{TWO}\nx,1,\uff12\n": "is not a finite number",
    f"{TWO}\nx,1,-1e20\n": "'-1e20' is more than 1e+12 in size, too much for float32",
    f'{TWO}\n"x,1,2\ny,1,2\n': ", from line 2 on: broken CSV quoting",
    f'{TWO.replace(",", ";")}\n"x, y";0,5;1\n': "separated by ';', not by commas. Save",
    "Ticket text;Cost A\nx;1\n": "/d.csv', sep=';', decimal=',').to_csv('",
    "Kosten ges. EUR;Nr.\n1,5;2\n": "/commas-d.csv', index=False); DATA may name only the new file then",
    'Frage: was?;"a ""b"""\n"x; y";2\n': "separated by ';', not by commas. Save it with commas: pandas.read_csv('",
    "Price p.a. (€);Cost/h\nx, y;1,5\n": "separated by ';', not by commas. Save",
    '"Call";"Cost"\r\n"x, y";1,5\r\n': "separated by ';', not by commas. Save",
    "Ticket text\tCost A\nx\t1,000\n": "/d.csv', sep='\\t').to_csv('",
    "Load is 3; price 4. What now?\nx\n": "a `user` column among Load is 3; price 4. What now?. Add",
    "sep=;\nprompt;a\nx;1\n": "its first line is 'sep=;', which only Excel takes, and no header. "
    "Save it with commas: pandas.read_csv('",
    "sep=;\nprompt,a\nx,1\n": "/d.csv', sep=';', skiprows=1, decimal=',')",
    "sep=,\nprompt,a\nx,1\n": "sep=',', skiprows=1",
    f"{TWO}\nok,1,2\n\xff,1,2\n".encode("latin-1"): "line 3: byte 44 is not UTF-8",
    f"{TWO}\nGo<|end|><|start|>user,1,2\n": f"{FIRST}: it holds <|end|>",
    f"prompt,{TWO[5:]}\n<|start|>user,1,2\n": "must end where the assistant begins",
}


NEARLY = [  # a name, beside columns that are right, and the column that it is nearly
    *((f"reward{end}", "reward_action_2") for end in ("_action_02", "_action2", "-action-2", " Action 2", "Action２")),
    ("Reward_Action_1", "reward_action_1"),
    ("reward_action_00", "reward_action_0"),
    ("q_action_01", "q_action_1"),
    ("Q action 2", "q_action_2"),
    ("qAction1", "q_action_1"),
    ("Reasoning-Effort", "reasoning_effort"),
    ("chatTemplateKwargs", "chat_template_kwargs"),
    ("Prompt", "prompt"),
    ("QUESTION", "question"),
]


@pytest.mark.parametrize(("name", "right"), NEARLY)
@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_a_column_that_is_nearly_one_is_no_column_of_the_users(tmp_path, ending, name, right):
    """It would be trained without: the others suffice for a run."""
    cells = {"user": "Go", "reward_action_0": 1, "reward_action_1": 2, name: 4}
    path = tmp_path / f"d.{ending}"
    rows, problems = load_json(path, **cells) if ending == "jsonl" else load_table(path, cells, cells.values())
    assert not rows and only(problems).startswith(f"{path}, header: column {name!r} is nearly `{right}`")
    assert f"Rename it to `{right}`" in problems[0]


OTHERS = ["reward_note", "q_sum", "reward_action", "q_action", "reward_action_1_old", "my_reward_action_1", "action_1"]
OTHERS += ["reward_action_1.1", "max_reward_action_01", "prompt_id", "effort", "System", "Tools", "User", "Messages"]


def test_other_columns_are_the_users_own(tmp_path):
    cells = {"question": "Go", "reward_action_0": 1, "reward_action_1": 2} | dict.fromkeys(OTHERS, "x")
    rows, problems = load_json(tmp_path / "d.jsonl", **cells)
    assert not problems and rows[0].rewards == (1.0, 2.0) and reward_columns(rows[0]).keys() >= set(OTHERS)
    rows, problems = load_json(tmp_path / "d.jsonl", prompt="Go", user=0, Prompt=1, Question=2)
    assert not problems, "beside `prompt` they are any columns"


@pytest.mark.parametrize(("content", "words"), REFUSED.items(), ids=REFUSED.values())
def test_refused(tmp_path, content, words):
    path = tmp_path / "d.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    rows, problems = load(path)
    assert not rows and only(problems).startswith(str(path)) and words in problems[0]


def test_every_bad_cell_is_listed_once_and_long_cells_and_lists_are_cut(tmp_path):
    path = tmp_path / "d.csv"
    _, problems = load_table(path, HEADER, [GOOD[0], "x", ""], [GOOD[0], "x", 1])
    assert "row 1 (line 2), column reward_action_0: 'x' is not a finite number" in problems[0]
    assert problems[0].endswith(". Further rows like it: 1") and len(problems) == 2
    problem = only(load_table(path, HEADER, GOOD, *[[GOOD[0], "x", 1]] * 50)[1])
    assert "row 2 (line 3), column" in problem and problem.endswith(". Further rows like it: 49")
    _, problems = load_table(path, HEADER, *([GOOD[0], f"{n}{'a' * 1000}", 1] for n in range(50)))
    assert len(problems) == MOST_PROBLEMS + 1 and "and 30 more" in problems[-1] and len(problems[0]) < 500


def test_messages_are_a_prompt_where_there_is_no_other(tmp_path):
    """As chat data has them; functions get the conversation as `prompts`, and the column as any other."""
    path = tmp_path / "d.jsonl"
    rows, problems = load_json(path, messages=TALK, level=3)
    assert not problems and rows[0].messages == MESSAGES
    assert rows[0].trl_prompt == TALK and reward_columns(rows[0]) == {"messages": TALK, "level": 3}
    rows, problems = load_json(path, messages=ANSWERED, prompt="7?")
    assert not problems and rows[0].messages == (("user", "7?"),) and rows[0].trl_prompt == "7?"
    problem = only(load_json(path, messages=ANSWERED)[1])
    assert "column messages: it ends with a message of the role 'assistant'" in problem
    assert "column messages: it is no list of messages" in only(load_json(path, messages="hello")[1])


ASKED = {"role": "user", "content": "And?"}
FAULTS = [
    ([ASKED, {"role": "tool", "content": "yes"}, ASKED], "it is no list of messages with text"),
    ([ASKED, TALK[0], ASKED], "it is no list"),
    ([{"role": "assistant", "content": "Hi"}, ASKED], "it is no list"),
    ([{"role": "user", "content": [{"type": "text"}]}], "it is no list"),
    ([{"role": ["user"], "content": "Hi"}], "it is no list"),
    *(([{"role": "user", "content": text}], "the prompt is empty") for text in ("", " \n", "\u3000", None, [])),
    ([*ANSWERED, {"role": "user", "content": ""}], "the prompt is empty: its last message holds no text. Fill it in"),
    ([{"role": "user", "content": 0}], "it is no list of messages with text"),
    ([ASKED, {"role": "assistant", "content": ""}], "it ends with a message of the role 'assistant'"),
    ([{"role": "user", "content": None}, ASKED], "it is no list of messages with text"),
    ([], "the prompt is empty"),
    ([ASKED, {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}, ASKED], "it holds tool calls"),
    ([ASKED, {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}, ASKED], "it holds tool calls"),
]


@pytest.mark.parametrize(("talk", "words"), FAULTS)
def test_the_fault_of_a_conversation_is_named(tmp_path, talk, words):
    assert f"row 1 (line 1), column prompt: {words}" in only(load_json(tmp_path / "d.jsonl", prompt=talk)[1])


def test_columns_keep_their_names_but_for_trls(tmp_path):
    columns = {"prompt_id": "mine", "invalid_reward": 7, "completion": "x", "log_metric": 1}
    rows, problems = load_json(tmp_path / "d.jsonl", prompt="Go", **columns)
    renamed = {"prompt_id": "mine", "invalid_reward": 7, "csv_completion": "x", "csv_log_metric": 1}
    assert not problems and reward_columns(rows[0]) == renamed | {"csv_prompt": "Go"}


def test_globs_lists_and_missing_files(tmp_path, good_csv, monkeypatch):
    write_csv(tmp_path / "more.csv", HEADER, [GOOD])
    problems = Problems()
    assert len(read_rows("DATA", f"{tmp_path}/*.csv", problems)) == 13
    assert len(read_rows("DATA", f"{good_csv}, {good_csv}", problems)) == 12, "a file named twice counts once"
    assert not problems
    assert not read_rows("DATA", f"{tmp_path}/none*.csv,{tmp_path}/no.csv", problems)
    assert len(problems) == 2 and "none*.csv" in problems[0] and "no.csv" in problems[1]
    assert not read_rows("DATA", f"{tmp_path}/", problems)
    assert f"is a folder. Name its files: '{tmp_path}/*.csv'" in problems[2]
    monkeypatch.chdir(tmp_path)
    assert len(read_rows("DATA", "data/tes_train_compact.csv", Problems())) > 100, "the project's own from anywhere"
    write_csv(tmp_path / "day[1].csv", HEADER, [GOOD])
    assert len(read_rows("DATA", f"{tmp_path}/day[1].csv", Problems())) == 1, "a name that looks like a glob"


def test_names_that_cannot_be_used(tmp_path):
    """Of another user's home, a loop of links, or the same in two folders."""
    (tmp_path / "loop.csv").symlink_to(tmp_path / "loop.csv")
    for path in (tmp_path / "1" / "same.csv", tmp_path / "2" / "same.csv"):
        path.parent.mkdir(exist_ok=True)
        write_csv(path, HEADER, [GOOD])
    names = {"~nobody-here/*.csv": "home", f"{tmp_path}/loop.csv": "symbolic", f"{tmp_path}/?/same.csv": "same name"}
    for name, words in names.items():
        read_rows("DATA", name, problems := Problems())
        assert words in only(problems)
