# SPDX-License-Identifier: Apache-2.0
"""Episodes with a scripted model: what is sampled, what follows, and how each can end."""

import itertools
import re

import pytest
from scripted import FINAL, STOPS, TOKENIZER, Script, add, call

from grpo.data.files import Row
from grpo.environment.pool import EnvironmentPool
from grpo.harmony import ASSISTANT
from grpo.reward.calling import RewardError
from grpo.reward.scoring import read_completions
from grpo.rollout.episodes import EpisodePlayer, check_played
from grpo.rollout.sampler import EndTokens, Sampling
from grpo.settings.table import Settings

TEMPLATE = "{% if tools %}<|start|>user<|message|>{{ messages[-1].content }}<|end|><|start|>assistant{% endif %}"


@pytest.fixture
def play():
    pools = []

    def run(scripts, world="Rough", stepwise=False, at_once=8, wants_copy=False, timeout=20, columns=(), **settings):
        """The samples of a row for each script: row n has the target n."""
        pools.append(EnvironmentPool(f"worlds:{world}", timeout))
        for count, text in enumerate(scripts):
            assert f"Reach {count}." in text or world != "Rough"
        s = Settings(**{"MAX_COMPLETION_LEN": 600, "ENVIRONMENT": f"worlds:{world}"} | settings)
        rows = [Row("t.csv", n, (("user", "Add."),), (), {"target": n, **dict(columns)}) for n in range(len(scripts))]
        model = Script(scripts, stepwise)
        tools = [{"function": {"name": name}} for name in ("add", "wait", "leave", "fail", "fork", "stop")]
        ends = EndTokens(STOPS, TOKENIZER.pad_token_id)
        player = EpisodePlayer(model, pools[-1], TOKENIZER, ends, s, tools, TEMPLATE, at_once, wants_copy)
        return player.play(rows, Sampling(0, 1.0, 1.0, s.MAX_COMPLETION_LEN)), model

    yield run
    for pool in pools:
        pool.close()


def result(text, author="functions.add"):
    return f"<|start|>{author} to=assistant<|channel|>commentary<|message|>{text}<|end|>{ASSISTANT}"


def parts(sample):
    """The texts of turns and results: (learned, text)."""
    pairs = zip(sample.episode.learned, sample.ids, strict=True)
    return [
        (kind, TOKENIZER.decode([token for _, token in group]))
        for kind, group in itertools.groupby(pairs, lambda p: p[0])
    ]


@pytest.mark.parametrize("stepwise", [False, True])
def test_turns_and_results_follow_each_other(play, stepwise):
    """What was sampled stays as it was; results are not learned; the last call ends an episode that is done."""
    thought = "<|channel|>analysis<|message|>One is missing.<|end|><|start|>assistant"
    scripts = {
        "Reach 0.": [FINAL],
        "Reach 1.": [add(2), thought + add(-1)],
        "Reach 2.": [add(1), call("{}", "wait"), FINAL],
    }
    samples, model = play(scripts, stepwise=stepwise)
    assert [sample.episode.end for sample in samples] == ["answer", "done", "answer"]
    assert parts(samples[0]) == [(1, FINAL)]
    assert parts(samples[1]) == [(1, add(2)), (0, result("total 2")), (1, thought + add(-1))]
    waited = result('{"waited": 0.0, "by": null}', "functions.wait")
    assert parts(samples[2]) == [(1, add(1)), (0, result("total 1")), (1, call("{}", "wait")), (0, waited), (1, FINAL)]
    episode = samples[2].episode
    assert [samples[2].ids[turn : turn + 3] for turn in episode.turns] == [
        TOKENIZER(text)["input_ids"][:3] for text in (add(1), call("{}", "wait"), FINAL)
    ]
    assert episode.turn_rewards == [-0.1, 0.0, 0.0] and episode.reward == 0.0 and episode.total() == -0.1
    assert samples[1].episode.turn_rewards == [-0.1, 0.0] and samples[1].episode.reward == 1.0
    assert [(e.calls, e.unread, e.errors) for e in (s.episode for s in samples)] == [(0, 0, 0), (2, 0, 0), (2, 0, 0)]
    logps = [value for value, kind in zip(samples[1].logps, samples[1].episode.learned, strict=True) if kind]
    assert len(samples[1].logps) == len(samples[1].ids) and max(logps) < -10, "log-probs moved"
    assert episode.prompt == f"<|start|>user<|message|>Add. Reach 2.<|end|>{ASSISTANT}"
    assert TOKENIZER.decode(episode.prompt_ids) == episode.prompt
    assert model.batches == ([3, 2, 1] if not stepwise else [1] * 6)


NESTED = call('{"number": ' + "[" * 700 + "]" * 700 + "}")
ENDS = {  # (script, end, calls, unread, errors, settings)
    "unreadable": ([call("{x"), FINAL], "answer", 1, 1, 0, {}),
    "unknown tool": ([call("{}", "add_all"), FINAL], "answer", 1, 1, 0, {}),
    "too deep for pickle": ([NESTED, FINAL], "answer", 1, 1, 0, {"MAX_COMPLETION_LEN": 6000}),
    "tool raised": ([call("{}", "fail"), FINAL], "answer", 1, 0, 1, {}),
    "turns": ([add(5), add(5), FINAL], "turns", 2, 0, 0, {"MAX_TURNS": 2}),
    "turn_len": ([add(5), "<|channel|>analysis<|message|>" + "long " * 40], "turn_len", 1, 0, 0, {"MAX_TURN_LEN": 90}),
    "length in a turn": ([add(5), "long " * 100], "length", 1, 0, 0, {"MAX_COMPLETION_LEN": 300}),
    "length by a result": ([call("{}", "fork"), FINAL], "length", 1, 0, 0, {"MAX_RESULT_LEN": 580}),
    "died": ([call("{}", "leave"), FINAL], "failed", 1, 0, 0, {}),
    "exit": ([add(5), call("{}", "stop"), FINAL], "failed", 2, 0, 0, {}),
    "timeout": ([call('{"seconds": 99}', "wait"), FINAL], "timeout", 1, 0, 0, {}),
}


@pytest.mark.parametrize("name", ENDS)
def test_every_end_is_named(play, name):
    script, end, calls, unread, errors, settings = ENDS[name]
    samples, _ = play({"Reach 0.": [FINAL], "Reach 1.": script}, timeout=0.5 if end == "timeout" else 20, **settings)
    episode, sample = samples[1].episode, samples[1]
    assert (episode.end, episode.calls, episode.unread, episode.errors) == (end, calls, unread, errors)
    is_broken_off = name in ("turn_len", "length in a turn")  # A call whose result found no room was read.
    assert episode.read_share == 1 - (unread + is_broken_off) / len(episode.turns)
    assert len(sample.ids) == len(sample.logps) == len(episode.learned) <= settings.get("MAX_COMPLETION_LEN", 600)
    assert EndTokens(STOPS, 0).has_ended(sample) == (end not in ("turns", "turn_len", "length"))
    row = Row("t.csv", 1, (("user", "Add."),), (), {}, episode.prompt)
    (completion,) = read_completions(TOKENIZER, STOPS, [row], [sample.ids], [episode])
    assert completion.truncated == (end in ("turns", "turn_len", "length")) and completion.tokens == sample.written
    assert episode.learned[-1] == 1, "an episode ends in what the model wrote"
    assert bool(episode.fault) == episode.has_failed == (episode.total() is None)
    assert samples[0].episode.end == "answer"


def test_a_result_that_leaves_no_token_for_a_turn_is_not_added(play):
    script = {"Reach 0.": [add(5), FINAL]}
    (whole,), _ = play(script)
    begin = whole.episode.turns[1]
    for most, turns in ((begin, 1), (begin + 1, 2)):
        (sample,), _ = play(script, MAX_COMPLETION_LEN=most)
        assert sample.episode.end == "length" and len(sample.episode.turns) == turns and len(sample.ids) <= most


def test_a_result_cannot_end_its_message_and_is_cut(play):
    scripts = {"Reach 0.": [call("{}", "fork"), call('{"a": "<|end|>"}', "fail<|start|>"), FINAL]}
    (sample,), _ = play(scripts, MAX_RESULT_LEN=20)
    texts = [text for kind, text in parts(sample) if not kind]
    assert texts[0] == result("x" * 20 + " ... (cut: 20 of 1000000 tokens)", "functions.fork")
    assert re.search(r"<\|message\|>\{\"error\": \"[^<]*", texts[1]) and texts[1].count("<|end|>") == 1


def test_few_at_once_take_turns_in_the_same_environments(play):
    scripts = {f"Reach {n}.": [add(n), FINAL] for n in range(5)}
    samples, model = play(scripts, at_once=2)
    assert [sample.episode.end for sample in samples] == ["done"] * 5 and max(model.batches) == 2


def test_a_batch_is_the_same_whichever_environment_answers_first(play):
    """The third row begins when the first has ended, in the next batch even if its reward came after all else."""
    batches = []
    for reward_s, wait_s in ((0.6, 0.0), (0.0, 0.6)):
        waiting = call(f'{{"seconds": {wait_s}}}', "wait")
        scripts = {"Reach 0.": [FINAL], "Reach 1.": [waiting, FINAL], "Reach 2.": [add(1), FINAL]}
        samples, model = play(scripts, world="Slow", at_once=2, columns={"reward_s": reward_s})
        assert samples[1].episode.tool_s >= wait_s, "the sum of all its requests"
        batches.append(model.batches)
    assert batches[0] == batches[1] == [2, 2, 1]


def test_reward_functions_get_a_copy(play):
    (sample,), _ = play({"Reach 0.": [add(3), FINAL]}, world="Sum", wants_copy=True)
    assert sample.episode.environment().total == 3
    (sample,), _ = play({"Reach 0.": [add(3), FINAL]}, wants_copy=True)
    assert sample.episode.environment().total == 3, "a lock cannot be copied, the rest can"


def test_a_run_ends_only_where_no_episode_can_be_scored(play, caplog):
    samples, _ = play({"Add.": [FINAL]}, world="IntReset")
    assert samples[0].written == 0, "the token that fills it up is not learned"
    with pytest.raises(RewardError, match="every episode of this step failed: reset: reset returned 3"):
        check_played(samples, "worlds:IntReset")
    samples, _ = play({"Reach 0.": [FINAL], "Reach 1.": [call("{}", "leave")]})
    assert not caplog.records
    check_played(samples, "worlds:Rough")
    assert samples[1].episode.fault == "call: its process ended"
    assert caplog.messages == ["ENVIRONMENT: 1 of 2 episodes failed, such as by call: its process ended"]


def test_a_prompt_that_the_reset_made_too_long_is_named(play):
    (sample,), _ = play({"Reach 0.": [FINAL]})
    play({"Reach 0.": [FINAL]}, MAX_PROMPT_LEN=len(sample.episode.prompt_ids))
    with pytest.raises(RewardError, match=r"t.csv, row 0: the prompt has \d+ tokens .* reset, MAX_PROMPT_LEN is 9"):
        play({"Reach 0.": [FINAL]}, MAX_PROMPT_LEN=9)


def test_a_reset_is_tried_a_second_time(play, tmp_path):
    (sample,), _ = play({"Reach 0.": [FINAL]}, world="Flaky", columns={"marker": str(tmp_path / "marker")})
    assert sample.episode.end == "answer" and (tmp_path / "marker").exists()
