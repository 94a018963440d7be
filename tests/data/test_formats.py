# SPDX-License-Identifier: Apache-2.0
"""JSON lines, Parquet and conversations beside CSV: the same rows, and problems that say where."""

import json
import math
from unittest import mock

import datasets
import pandas
import pytest
from helpers import RENDERED
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machines import only

from grpo.common import Problems
from grpo.data.files import label, read_file, read_rows
from grpo.data.formats import is_dataset

ROWS = [
    {"user": "Go", "reward_action_0": 0, "reward_action_1": 0.5, "note": "a,b", "q_action_0": -1, "q_action_1": -0.5},
    {"user": "Stop\nnow", "reward_action_0": 1.5, "reward_action_1": 0, "note": "", "q_action_0": 0, "q_action_1": -2},
]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go"}]


def load(path, system=""):
    problems = Problems()
    return read_file(path, problems, system), problems


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_the_same_rows_in_every_format(tmp_path):
    table = pandas.DataFrame(ROWS)
    table.to_csv(tmp_path / "d.csv", index=False)
    table.to_parquet(tmp_path / "d.parquet")
    write(tmp_path / "d.jsonl", "".join(json.dumps(row) + "\n\n" for row in ROWS))
    write(tmp_path / "d.json", json.dumps(ROWS))
    loaded = [load(tmp_path / f"d.{ending}") for ending in ("csv", "parquet", "jsonl", "json")]
    assert not any(problems for _, problems in loaded)
    seen = [[(row.id, row.messages, row.rewards, row.q, row.columns["note"]) for row in rows] for rows, _ in loaded]
    assert seen[0] == seen[1] == seen[2] == seen[3] and seen[0][1][0] == "d:2"
    assert seen[0][0][1:] == ((("user", "Go"),), (0.0, 0.5), (-1.0, -0.5), "a,b")
    # With a user column functions get TRL's conversational form.
    assert all(isinstance(row.trl_prompt, list) for rows, _ in loaded for row in rows)


OURS, BRIEF, GO = ("system", "Ours"), ("system", "Be brief."), ("user", "Go")
PROMPTS = [  # row, its messages where the system prompt is "Ours"
    ({"question": "6 * 7?", "answer": "#### 42"}, (OURS, ("user", "6 * 7?"))),
    ({"prompt": CHAT, "system": "Mine"}, (BRIEF, GO)),
    ({"prompt": CHAT[1:], "answer": {"a": [1]}}, (OURS, GO)),
    ({"prompt": CHAT[1:], "system": " Mine "}, (("system", "Mine"), GO)),
    ({"prompt": [{"role": "developer", "content": "Mine"}, *CHAT[1:]]}, (("developer", "Mine"), GO)),
    ({"prompt": RENDERED.format("x")}, (("rendered", RENDERED.format("x")),)),
    ({"user": " Go", "system": "Mine"}, (("system", "Mine"), GO)),
    ({"user": "Go", "system": None}, (OURS, GO)),
]


def test_what_a_prompt_may_be(tmp_path):
    """A question, a list of messages, rendered text; a system prompt where the row has none."""
    path = write(tmp_path / "d.jsonl", "\n".join(json.dumps(row) for row, _ in PROMPTS))
    rows, problems = load(path, "Ours")
    assert not problems and [row.messages for row in rows] == [messages for _, messages in PROMPTS]
    assert [isinstance(row.trl_prompt, str) for row in rows].index(True) == 5, "the file has a user column"
    as_written = [message["content"] for row in rows[-2:] for message in row.trl_prompt]
    assert as_written == ["Mine", " Go", "Go"]
    assert rows[2].columns["answer"] == {"a": [1]}, "columns keep their type"


PAID = '{"user": "a", "reward_action_0": 1, "reward_action_1": '
SHORT = PAID + '2}\n{"user": "b", "reward_action_0": 1}'
REFUSED = [
    ("d.jsonl", '{"user": "a"}\n{"user": \n', "d.jsonl, line 2: it is not JSON"),
    ("d.jsonl", '{"user": "a"}\n\n{"user" "b"}', "d.jsonl, line 3: it is not JSON (Expecting ':' delimiter, column 9)"),
    ("d.json", '[{"user": "a"},\n{"user" "b"}]', "d.json, line 2: it is not JSON (Expecting ':' delimiter, column 9)"),
    ("d.jsonl", '[\n{"user": "a"},\n3]', "d.jsonl, row 2: it is no JSON object"),
    ("d.jsonl", '{"user": "a"}\n\n3', "d.jsonl, line 3: it is no JSON object"),
    ("d.jsonl", '{"user": "a"}\n{"user": "a", "user": "b"}', "d.jsonl, line 2: it is not JSON (the key 'user' stands"),
    ("d.json", '[\n{"user": "a", " user": "b"}]', "d.json: it is not JSON (the key 'user' stands there twice"),
    ("d.json", '[{"user": "a"},\n{"user": 3}]', "d.json, row 2, column user: 3 is not text"),
    ("d.jsonl", '{"prompt": "a", "csv_prompt": "b"}', "get the column prompt as csv_prompt, and there is a column"),
    ("d.jsonl", '{"user": ' + "[" * 10_000, "d.jsonl, line 1: it is not JSON"),
    ("d.jsonl", PAID + "1" + "0" * 400 + "}", "0 is not a finite number"),
    ("d.jsonl", PAID + "true}", "column reward_action_1: True is not a finite"),
    ("d.jsonl", SHORT, "row 2 (line 2), column reward_action_1: None is not a finite"),
    ("d.jsonl", '{"user": "a\\ud800"}', "row 1 (line 1): the prompt holds half a character"),
    ("d.parquet", "PAR1", "d.parquet: it is no Parquet file"),
    ("d.jsonl", '{"user": "a"}\n\n{"user": 3}', "d.jsonl, row 2 (line 3), column user: 3 is not text"),
]


@pytest.mark.parametrize(("name", "text", "words"), REFUSED)
def test_what_is_refused(tmp_path, name, text, words):
    rows, problems = load(write(tmp_path / name, text))
    assert not rows and words in only(problems)


KEYS = st.sampled_from(["user", "prompt", "role", "content", "reward_action_0"])
SCALARS = st.none() | st.booleans() | st.floats() | st.text()
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner))
CSV = st.binary(max_size=200).map(lambda content: b"user,reward_action_0,reward_action_1\n" + content)
CONTENTS = st.text().map(str.encode) | JSON.map(lambda value: json.dumps(value).encode()) | CSV


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=CONTENTS, ending=st.sampled_from(["jsonl", "json", "parquet", "csv"]))
def test_any_content_gives_rows_or_problems(tmp_path, content, ending):
    path = tmp_path / f"d.{ending}"
    path.write_bytes(content)
    rows, problems = load(path)
    assert bool(rows) != bool(problems) and all(math.isfinite(value) for row in rows for value in row.rewards)


def test_names_of_data_sets(tmp_path, monkeypatch):
    """`org/name` is one, with configuration and split; a file or folder of that name is not, nor a file's ending."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine/days").mkdir(parents=True)
    names = ["openai/gsm8k", "openai/gsm8k:main:train", "a/b.v2", "a/b:c:train[:9]"]
    others = ["x/y.csv.gz", "mine/days", "mine/d.csv", "d", "a/b/c", "mine/*", "data/tiny"]
    assert [name for name in names + others if is_dataset(name)] == names
    assert [label(name) for name in ("a/b.v2:main", "mine/days", "x/d.csv")] == ["a/b.v2:main", "days", "d"]


def test_a_data_set_is_loaded_or_refused(monkeypatch):
    load_dataset = mock.Mock(return_value=datasets.Dataset.from_list(ROWS))
    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    for setting, name in (("DATA", "a/b"), ("EVAL_DATA", "a/b"), ("EVAL_DATA", "a/b:main:dev")):
        assert [row.id for row in read_rows(setting, name, Problems())] == [f"{name}:1", f"{name}:2"]
    asked_for = [(*call.args, call.kwargs["split"]) for call in load_dataset.call_args_list]
    assert asked_for == [("a/b", None, "train"), ("a/b", None, "test"), ("a/b", "main", "dev")]
    load_dataset.side_effect = ConnectionError("no\nroute")
    assert not read_rows("DATA", "a/b", problems := Problems())
    assert "a/b: no file of that name" in only(problems) and "(ConnectionError: no route)" in problems[0]
