# SPDX-License-Identifier: Apache-2.0
"""The loader: what it takes, and how it refuses; the order of prompts, and their rendering."""

from __future__ import annotations

import dataclasses
import datetime
import gzip
import itertools
import json
import math

import pytest
from conftest import RENDERED, ROOT, write_csv
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machines import only
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from grpo.data.files import (
    FOREIGN_PROMPTS,
    SHOWN,
    Row,
    data_fingerprint,
    data_prompt,
    read_csv,
    read_rows,
    renamed_columns,
    reward_columns,
)
from grpo.data.prompts import AT_ONCE, StepRows, answer_of, compiled, count_tokens, prompt_order, render, render_rows
from grpo.settings import Problems, Settings

HEADER = ["prompt", "reward_action_0", "reward_action_1"]
GOOD = [RENDERED.format("a"), "0.25", "0.75"]


def load(path):
    problems = Problems()
    return read_csv(path, problems), problems


def test_rendered_prompts_numbers_and_other_columns(good_csv):
    rows, problems = load(good_csv)
    assert not problems and len(rows) == 12
    assert rows[3].id == "good:4" and rows[3].rewards == (0.15, 0.85)
    assert rows[3].messages == (("rendered", RENDERED.format("question 3")),)
    assert rows[3].columns["note"] == "note 3" and rows[3].columns["reward_action_0"] == 0.15


ACCEPTED = [
    (["prompt", "reward_action_0", "reward_action_1"], ["What now?", 0, 1], (("user", "What now?"),), "plain text is the user's message"),
    (["system", "user", "reward_action_0", "reward_action_1"], ["Be brief.", "Go", 0, 1], (("system", "Be brief."), ("user", "Go")), "both columns"),
    (["user", "reward_action_0", "reward_action_1"], ["Go", 0, 1], (("user", "Go"),), "no system column"),
    (["system", "user", "reward_action_0", "reward_action_1"], ["", "Go", 0, 1], (("user", "Go"),), "an empty system cell"),
    (["user", *[f"reward_action_{k}" for k in range(12)]], ["Go", *range(12)], (("user", "Go"),), "twelve actions"),
    (["user", "reward_action_1", "reward_action_0"], ["Go", 0.5, 0.25], (("user", "Go"),), "columns in any order"),
    (["user"], ["Go"], (("user", "Go"),), "no rewards: for functions of one's own"),
    (["user", "q_action_0"], ["Go", "why"], (("user", "Go"),), "no rewards: q_action_k is a column like others"),
    ([" user ", "reward_action_0", "reward_action_1"], ["Go", " 1e-3 ", "-2"], (("user", "Go"),), "spaces, exponents, signs"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("header", "row", "messages", "reason"), ACCEPTED, ids=lambda v: v if isinstance(v, str) else ""
)
def test_accepted(tmp_path, header, row, messages, reason):
    rows, problems = load(write_csv(tmp_path / "d.csv", header, [row]))
    assert not problems and rows[0].messages == messages, reason
    assert len(rows[0].rewards) == sum("reward_action" in name for name in header)


TALK = [{"role": "system", "content": "s"}, {"role": "user", "content": "it's 7"}]


@pytest.mark.parametrize("write", [json.dumps, repr])
def test_messages_may_be_text(tmp_path, write):
    """As pandas writes a data set of conversations to a CSV, and who encodes JSON twice to JSON lines."""
    header = ["prompt", "system", "reward_action_0", "reward_action_1"]
    path = write_csv(tmp_path / "d.csv", header, [[write(TALK), "", 1, 2], ["[{in braces}]", "", 1, 2]])
    rows, problems = load(path)
    assert not problems and rows[0].messages == (("system", "s"), ("user", "it's 7")) and rows[0].conversational
    assert rows[1].messages == (("user", "[{in braces}]"),) and not rows[1].conversational, (
        "anything else is what a user says"
    )


def test_the_system_column_is_that_of_messages_too(tmp_path):
    path = tmp_path / "d.jsonl"
    given = {"reward_action_0": 1, "reward_action_1": 2}

    def read(system, talk):
        path.write_text(json.dumps(given | {"prompt": talk, "system": system}))
        return load(path)

    for system in ("own", " own "):
        rows, problems = read(system, TALK[1:])
        assert not problems and rows[0].messages == (("system", "own"), ("user", "it's 7"))
    assert not read("s", TALK)[1] and not read("", TALK)[1] and not read(None, TALK)[1]
    assert "row 1 (line 1), column system: it holds another message than `prompt`" in read("other", TALK)[1][0]


def test_a_key_may_not_stand_twice_in_an_object(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"user": "x", "reward_action_0": 1, "reward_action_0": 99, "reward_action_1": 2}')
    assert "line 1: it is not JSON ('reward_action_0' stands there twice)" in load(path)[1][0]


def test_a_long_cell_is_cut_in_the_message(tmp_path):
    path = write_csv(tmp_path / "d.csv", ["user", "reward_action_0", "reward_action_1"], [["x", "a" * 100_000, 2]])
    assert "aaa ... aaa" in load(path)[1][0] and len(load(path)[1][0]) < 500


def test_a_byte_order_mark_and_windows_line_ends_are_fine(tmp_path):
    (tmp_path / "bom.csv").write_bytes("\ufeffuser,reward_action_0,reward_action_1\r\nzähle,1,2\r\n".encode())
    rows, problems = load(tmp_path / "bom.csv")
    assert not problems and rows[0].messages == (("user", "zähle"),) and rows[0].rewards == (1.0, 2.0)


def test_values_are_numbers_for_reward_functions_and_text_for_the_fingerprint(tmp_path):
    """The fingerprint that a run knows its rows by is of the text, as before q_action_k meant anything."""
    header = ["user", "q_action_1", "q_action_0", "reward_action_0", "reward_action_1"]
    rows, problems = load(write_csv(tmp_path / "d.csv", header, [["Go", "-2.50", " -1e1", 0.5, 0.5]]))
    assert not problems and rows[0].q == (-10.0, -2.5) and rows[0].columns["q_action_1"] == "-2.50"
    given = reward_columns(rows[0])
    assert (given["q_action_0"], given["q_action_1"]) == (-10.0, -2.5)
    assert data_fingerprint(rows) == "7bf070af97604a8119eb742513657fadf57e320f6c110841001d358ecb912ea2"


REFUSED = [  # (bytes of the file, what the problem must name, reason)
    (b"", ["d.csv: it is empty"], "empty file"),
    (b"prompt,reward_action_0,reward_action_1\n", ["no row below the header"], "header alone"),
    (b"promt,reward_action_0,reward_action_1\nx,1,2\n", ["neither a `prompt` nor a `user`", "should 'promt' be `prompt`"], "mistyped column"),
    (b"PROMPT,reward_action_0,reward_action_1\nx,1,2\n", ["(should 'PROMPT' be `prompt`?)"], "capitals"),
    (b"user,reward_action_0,Reward Action 1\nx,1,2\n", ["(should 'Reward Action 1' be `reward_action_1`?)"], "mistyped action"),
    (b"user,reward_action_0,reward_action_2\nx,1,2\n", ["reward_action_1 is missing beside reward_action_0, reward_action_2. Number"], "gap in the actions"),
    (b"user,reward_action_1,reward_action_2\nx,1,2\n", ["reward_action_0 is missing"], "actions from 1"),
    (b"user;reward_action_0;reward_action_1\nx;1;2\n", ["semicolons"], "a spreadsheet's own CSV"),
    (b"user,reward_action_0\nx,1\n", ["only one action"], "one action"),
    (b"user,user,reward_action_0,reward_action_1\nx,y,1,2\n", ["'user' stands there twice"], "column twice"),
    (b"user,reward_action_0,reward_action_1\n\"two\nlines\",1,2\ny,abc,2\n", ["row 2 (line 4), column reward_action_0: 'abc'"], "word for a number"),
    (b"user,reward_action_0,reward_action_1\nx,1,\n", ["row 1 (line 2), column reward_action_1: the reward is missing"], "missing number"),
    (b"user,reward_action_0,reward_action_1\nx,1,inf\n", ["'inf' is not a finite number"], "infinity"),
    (b"user,reward_action_0,reward_action_1\nx,\"1,5\",2\n", ["'1,5' is not"], "decimal comma"),
    (b"user,reward_action_0,reward_action_1,q_action_0,q_action_1\nx,1,2,3,much\n", ["row 1 (line 2), column q_action_1: 'much' is not a finite number"], "a word for a value"),
    (b"user,reward_action_0,reward_action_1,q_action_0,q_action_1\nx,1,2,,4\n", ["column q_action_0: the value is missing"], "missing value"),
    (b"user,reward_action_0,reward_action_1,q_action_0\nx,1,2,3\n", ["header: there are q_action_0, but 2 columns reward_action_k"], "a value for one action of two"),
    (b"user,reward_action_0,reward_action_1,q_action_1,q_action_2\nx,1,2,3,4\n", ["there are q_action_1, q_action_2, but"], "values from 1"),
    (b"user,reward_action_0,reward_action_1\nx,1\n", ["row 1 (line 2): it has 2 cells, the header has 3"], "short row"),
    (b"user,reward_action_0,reward_action_1\nx,1,2,3\n", ["it has 4 cells"], "long row"),
    (b"user,reward_action_0,reward_action_1\n ,1,2\n", ["column user: the prompt is empty"], "empty prompt"),
    ("user,reward_action_0,reward_action_1\n\u200b\u3000\u2060\ufe0f\u2800,1,2\n".encode(), ["column user: the prompt is empty"], "nothing to see"),
    ("user,reward_action_0,reward_action_\uff11\nx,1,2\n".encode(), ["numbers no action. Write 0, 1, 2, ... in plain digits"], "an action in another script"),
    (f"user,reward_action_0,reward_action_{'1' * 5000}\nx,1,2\n".encode(), ["numbers no action"], "an action of 5,000 digits"),
    ("user,reward_action_0,reward_action_1\nx,1,\uff12\n".encode(), ["is not a finite number"], "a number in another script"),
    (b"user,reward_action_0,reward_action_1\nx,1,1_0\n", ["'1_0' is not a finite number"], "an underscore"),
    (b"user,reward_action_0,reward_action_1\nx,1,-1e20\n", ["'-1e20' is more than 1e+12 in size, and float32 cannot"], "a square that float32 cannot hold"),
    (f"user{''.join(f',c{k}' for k in range(39_999))}\n\"open".encode(), ["header: it has 40,000 columns, and 1,000 are the most"], "too wide: no row is read"),
    (b"user,reward_action_0,reward_action_1\n\"x,1,2\ny,1,2\n", ["broken CSV quoting", "from line 2"], "open quote"),
    (b"user,reward_action_0,reward_action_1\nok,1,2\n\xff,1,2\n", ["line 3: byte 44 is not UTF-8"], "another encoding"),
    ("user,reward_action_0,reward_action_1\nx,1,2\n".encode("utf-16"), ["line 1: it is UTF-16. Save it as UTF-8"], "UTF-16"),
    (b"PK\x03\x04\x14\0\x06\0[Content_Types].xml\xad\x92", ["it is a workbook or a zip. Open it and save"], "an Excel workbook"),
    (gzip.compress(b"user,reward_action_0,reward_action_1\nx,1,2\n"), ["it is compressed with gzip. Unpack it"], "gzip"),
    (b"sep=,\nuser,reward_action_0,reward_action_1\nx,1,2\n", ["line 1: it is a hint for spreadsheets. Delete the line"], "a spreadsheet's first line"),
    (b"user,reward_action_0,reward_action_1,,\nx,1,2,,\n", ["columns have no name", "commas at the end of each line"], "trailing commas"),
    (b"user,reward_action_0,reward_action_1\nGo<|end|><|start|>user,1,2\n", ["row 1 (line 2): it holds <|end|>"], "a token of the template"),
    (b"user,reward_action_0,reward_action_1\nx\0,1,2\n", ["line 2: it holds a NUL"], "NUL byte"),
    (b"prompt,reward_action_0,reward_action_1\n<|start|>user<|message|>x<|end|>,1,2\n", ["must end where the assistant begins"], "rendered, but unfinished"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "messages", "reason"), REFUSED, ids=[case[2] for case in REFUSED])
def test_refused(tmp_path, content, messages, reason):
    path = tmp_path / "d.csv"
    path.write_bytes(content)
    rows, problems = load(path)
    assert not rows and len(problems) == 1, problems
    assert str(path) in problems[0]
    for message in messages:
        assert message in problems[0], reason


def test_every_bad_cell_is_listed_and_long_lists_are_cut(tmp_path):
    _, problems = load(write_csv(tmp_path / "d.csv", HEADER, [GOOD, [GOOD[0], "x", "y"], [GOOD[0], "", 1]]))
    assert [p.split(", ", 1)[1].split(":")[0] for p in problems] == [
        "row 2 (line 3), column reward_action_0",
        "row 2 (line 3), column reward_action_1",
        "row 3 (line 4), column reward_action_0",
    ]
    _, problems = load(write_csv(tmp_path / "d.csv", HEADER, [[GOOD[0], f"x{n}", 1] for n in range(50)]))
    assert len(problems) == SHOWN + 1 and "and 30 more" in problems[-1]


def test_a_problem_of_many_rows_is_told_once(tmp_path):
    path = write_csv(tmp_path / "d.csv", HEADER, [GOOD, *[[GOOD[0], "x", 1]] * 50])
    problem = only(load(path)[1])
    assert problem.startswith(f"{path}, row 2 (line 3), column reward_action_0: 'x' is not a finite number")
    assert problem.endswith(". The same in 49 more rows: 3, 4, 5, 6, 7, ...")
    _, problems = load(write_csv(path, HEADER, [[GOOD[0], "x", ""], [GOOD[0], "x", 1]]))
    assert len(problems) == 2 and problems[0].endswith(". The same in one more row: 2")
    assert "column reward_action_1: the reward is missing" in problems[1] and "same" not in problems[1]


def read_json_rows(path, **columns):
    path.write_text(json.dumps(columns))
    return load(path)


def test_messages_are_a_prompt_where_there_is_no_other(tmp_path):
    """As chat data has them; functions get the conversation as `prompts`, and the column as any other."""
    path = tmp_path / "d.jsonl"
    rows, problems = read_json_rows(path, messages=TALK, level=3)
    assert not problems and rows[0].messages == (("system", "s"), ("user", "it's 7")) and rows[0].conversational
    assert data_prompt(rows[0]) == TALK and reward_columns(rows[0]) == {"messages": TALK, "level": 3}
    answered = [*TALK, {"role": "assistant", "content": "yes"}]
    rows, problems = read_json_rows(path, messages=answered, prompt="7?")
    assert not problems and rows[0].messages == (("user", "7?"),) and data_prompt(rows[0]) == "7?"
    problem = only(read_json_rows(path, messages=answered)[1])
    assert "column messages: it ends with the message of the role 'assistant'" in problem
    assert 'data.map(lambda row: {"prompt": row["messages"][:-1]})' in problem
    assert "column messages: it is neither text" in only(read_json_rows(path, messages="hello")[1])


TOOL = [{"role": "user", "content": "Rain?"}, {"role": "tool", "content": "yes"}, {"role": "user", "content": "And?"}]


def test_what_is_wrong_with_a_conversation_is_said(tmp_path):
    path = tmp_path / "d.jsonl"
    for talk, words in (
        (TOOL, "column prompt: the role 'tool' is not known"),
        ([TALK[1], TALK[0], TALK[1]], "column prompt: message 2 is of the role 'system'"),
        ([{"role": "assistant", "content": "Hi"}, TALK[1]], "column prompt: message 1 is of the role 'assistant'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "column prompt: the content of message 1 is not text"),
        ([*TALK, {"role": "assistant", "content": "x"}], "it ends with the message of the role 'assistant'"),
        ([], "it is neither text nor a list of messages"),
    ):
        assert words in only(read_json_rows(path, prompt=talk)[1])


FOREIGN = {
    "conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "it's 7"}, {"from": "gpt", "value": "a"}],
    "chosen": [*TALK, {"role": "assistant", "content": "a"}],
    "instruction": "Add.",
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_other_formats_are_answered_with_the_line_that_makes_a_prompt(tmp_path, name):
    """And the line does it; docs/data.md has it as well."""
    row = {name: FOREIGN[name], "input": "3 and 4"}
    problem = only(read_json_rows(tmp_path / "d.jsonl", **row)[1])
    line = f'data.map(lambda row: {{"prompt": {FOREIGN_PROMPTS[name]}}})'
    assert f"Make a `prompt` of `{name}`: {line}" in problem and "docs/data.md#prompts-of-other-formats" in problem
    expected = "Add.\n\n3 and 4" if name == "instruction" else TALK
    made = eval(FOREIGN_PROMPTS[name], {"row": row})
    assert made == expected and not read_json_rows(tmp_path / "d.jsonl", prompt=made)[1]
    docs = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    assert "".join(FOREIGN_PROMPTS[name].split()) in "".join(docs.split())


def test_columns_keep_their_names_but_for_trls(tmp_path):
    given = {"prompt_id": "mine", "invalid_reward": 7, "completion": "x", "log_metric": 1}
    rows, problems = read_json_rows(tmp_path / "d.jsonl", prompt="Go", **given)
    renamed = {"prompt_id": "mine", "invalid_reward": 7, "csv_completion": "x", "csv_log_metric": 1}
    assert not problems and reward_columns(rows[0]) == renamed | {"csv_prompt": "Go"}
    assert renamed_columns(rows) == ["completion", "log_metric"], "`prompt` is there as `prompts`"


def test_globs_lists_and_missing_files(tmp_path, good_csv, monkeypatch):
    write_csv(tmp_path / "more.csv", HEADER, [GOOD])
    problems = Problems()
    assert len(read_rows("DATA", f"{tmp_path}/*.csv", problems)) == 13
    assert len(read_rows("DATA", f"{good_csv}, {good_csv}", problems)) == 12, "a file named twice counts once"
    assert not problems
    assert not read_rows("DATA", f"{tmp_path}/none*.csv,{tmp_path}/no.csv", problems)
    assert len(problems) == 2 and "none*.csv" in problems[0] and "no.csv" in problems[1]
    monkeypatch.chdir(tmp_path)
    assert len(read_rows("DATA", "data/tes_train_compact.csv", Problems())) > 100, "the project's own from anywhere"


def test_names_that_no_file_can_have(tmp_path):
    """Of another user's home that is not there, too long, a loop of links; and one that cannot be written down."""
    (tmp_path / "loop.csv").symlink_to(tmp_path / "loop.csv")
    for name, words in (("~nobody-here/*.csv", "home"), ("x" * 256, "255 bytes"), (f"{tmp_path}/loop.csv", "symbolic")):
        problems = Problems()
        assert not read_rows("DATA", name, problems) and words in only(problems)
    write_csv(tmp_path / "b\udcff.csv", HEADER, [GOOD])
    problems = Problems()
    assert not read_rows("DATA", f"{tmp_path}/b*.csv", problems)
    assert "is not UTF-8. Rename the file" in only(problems) and "\udcff" not in problems[0]


def test_files_of_the_same_name_are_refused(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_csv(tmp_path / folder / "same.csv", HEADER, [GOOD])
    problems = Problems()
    read_rows("DATA", f"{tmp_path}/*/same.csv", problems)
    assert len(problems) == 1 and "same name" in problems[0]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_give_rows_or_problems_never_an_exception(tmp_path, content):
    path = tmp_path / "bytes.csv"
    path.write_bytes(b"user,reward_action_0,reward_action_1\n" + content)
    rows, problems = load(path)
    assert bool(rows) != bool(problems)
    assert all(math.isfinite(v) for row in rows for v in row.rewards)


@given(st.integers(1, 40), st.integers(0, 5), st.integers(1, 120))
def test_every_epoch_asks_every_row_once(rows, seed, count):
    order = list(prompt_order(rows, seed, count))
    assert len(order) == count
    for start in range(0, count - rows + 1, rows):
        assert sorted(order[start : start + rows]) == list(range(rows)), "each epoch sees every row once"
    assert order == list(prompt_order(rows, seed, count + 7))[:count], "a longer run begins with the shorter one"
    assert list(prompt_order(5, 42, 12)) == [4, 1, 0, 3, 2, 0, 3, 1, 2, 4, 2, 0], "a resumed run goes on in this order"


def test_the_rows_of_steps_are_made_as_they_are_asked_for():
    for count in (6, 10**18):  # the second: TOTAL_STEPS=10**9, more than any memory holds
        rows = StepRows(5, 42, count, 2)
        assert list(itertools.islice(rows, 12)) == [4, 4, 1, 1, 0, 0, 3, 3, 2, 2, 0, 0] and len(rows) == 2 * count


TEMPLATE = (
    "{%- for message in messages %}<|start|>{{ message['role'] }}<|message|>{{ message['content'] | trim }}"
    "{{ {'é': 1} | tojson }}<|end|>\n{% if loop.last %}{% break %}{% endif %}{% endfor %}"
    "{{ strftime_now('%Y-%m-%d') }} {{ reasoning_effort }}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def test_rendering_is_transformers_own(tiny):
    """Our renderer without torch against apply_chat_template, on a template that uses what templates use."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    messages = [("system", "Be brief.  "), ("user", "ä <b> & 'x'\n\n  y")]
    conversation = [{"role": role, "content": text} for role, text in messages]
    moment = datetime.datetime(2025, 11, 6)
    for template in (TEMPLATE, tokenizer.chat_template):
        theirs = tokenizer.apply_chat_template(
            conversation, chat_template=template, tokenize=False, add_generation_prompt=True,
            reasoning_effort="high", strftime_now=moment.strftime,
        )  # fmt: skip
        assert render(template, messages, "high", "2025-11-06") == theirs
        assert "2025-11-06" in theirs and "high" in theirs


def test_many_rows_cost_one_template_and_a_tokenizer_in_parts(tiny, monkeypatch):
    """What 100,000 rows take grows with them alone: one compilation, one tokenizer, each prompt once, AT_ONCE at most."""
    loaded, sizes = [], []

    class Counted:
        def from_file(path):
            loaded.append(path)
            return Counted()

        def encode_batch_fast(self, prompts):
            sizes.append(len(prompts))
            return prompts

        def get_added_tokens_decoder(self):
            return {}

    monkeypatch.setattr("tokenizers.Tokenizer", Counted)
    compiled.cache_clear()
    rows = 2 * [Row("d.csv", n, (("user", f"{n}"),), (), {}) for n in range(2 * AT_ONCE + 1)]
    rendered, longest = render_rows(Settings(MAX_PROMPT_LEN=999), rows, TEMPLATE, tiny, problems := Problems())
    assert not problems and longest == max(len(row.prompt) for row in rendered) > 20
    assert compiled.cache_info().misses == len(loaded) == 1 and sizes == [AT_ONCE, 1, AT_ONCE, 1, 1, 1]


@pytest.mark.parametrize("added", [False, True])
def test_counting_what_prompts_share_once_is_counting_them(tiny, tmp_path, monkeypatch, added):
    """Also with a tokenizer that puts a token of its own before each text."""
    made, coded = json.loads((tiny / "tokenizer.json").read_text()), []
    if added:
        made["post_processor"]["single"].insert(0, {"SpecialToken": {"id": "<|start|>", "type_id": 0}})
        token = {"id": "<|start|>", "ids": [7], "tokens": ["<|start|>"]}
        made["post_processor"]["special_tokens"] = {"<|start|>": token}
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    loaded = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    prompts = [RENDERED.format(f"hour {n} <|end|><|endoftext|>  CO₂\n{n * n}") for n in range(30)] + ["", "plain"]

    class Watched:
        from_file = staticmethod(lambda path: Watched())
        get_added_tokens_decoder = staticmethod(loaded.get_added_tokens_decoder)

        def encode_batch_fast(self, texts):
            coded.extend(texts)
            return loaded.encode_batch_fast(texts)

    monkeypatch.setattr("tokenizers.Tokenizer", Watched)
    monkeypatch.setattr("grpo.data.prompts.AT_ONCE", 10)
    assert count_tokens(tmp_path / "tokenizer.json", prompts) == {text: len(loaded.encode(text)) for text in prompts}
    assert coded.count("Reasoning: low") == 1


ANSWERS = [
    ({"answer": " [2] "}, "", "<|channel|>final<|message|>[2]<|return|>"),
    ({"answer": "<|channel|>analysis<|message|>So.<|end|>"}, "", "<|channel|>analysis<|message|>So.<|end|><|return|>"),
    ({"answer": "", "rewards": (0.1, 0.7, 0.2)}, "", "<|channel|>final<|message|>[1]<|return|>"),
    ({"rewards": (0.0, 0.0, 1.0), "q": (-1.0, -2.0, -3.0)}, "", "<|channel|>final<|message|>[0]<|return|>"),
    ({"rewards": (0.1, 0.7)}, "<|channel|>final<|message|>", "[1]<|return|>"),
    ({"rewards": (0.5, 0.5)}, "", None),
    ({}, "", None),
]


@pytest.mark.parametrize(("parts", "opened", "wanted"), ANSWERS)
def test_the_answer_of_a_row(parts, opened, wanted):
    prompt = RENDERED.format("which one?") + opened
    columns = {name: text for name, text in parts.items() if name == "answer"}
    row = Row("f.csv", 1, (("rendered", prompt),), parts.get("rewards", ()), columns, q=parts.get("q", ()))
    assert answer_of(row) == wanted
    if wanted:
        other = dataclasses.replace(row, messages=(("rendered", f"{RENDERED}<|channel|>commentary"),))
        with pytest.raises(ValueError, match="opens '<|channel|>commentary'"):
            answer_of(other)
