# SPDX-License-Identifier: Apache-2.0
"""The warm-up that teaches a small model to play days of the plant: its rows are episodes as a run plays them."""

import contextlib
import re
from dataclasses import replace
from datetime import timedelta

import pytest
import torch

from grpo.data.files import Row
from grpo.environment.calls import read_call, special_ids
from grpo.environment.pool import EnvironmentPool, describe_environment
from grpo.model.load import load_tokenizer
from grpo.plan.hub import TINY_PATH
from grpo.rollout.demonstrations import Recital
from grpo.rollout.episodes import EpisodePlayer
from grpo.rollout.sampler import EndTokens, rollout_sampling
from grpo.settings.environment import load_settings
from grpo.tasks.tes import dataset
from grpo.tasks.tes.plant import HOURS
from grpo.tasks.tes_day.environment import TRAIN_START, day_rows
from scripts.dev import warmup
from scripts.dev.gptoss_format import read_tokenizer
from scripts.dev.warmup import TINY_RECIPE, DayWarmUp, answer_log_probs, forward, new_model, read_rows
from scripts.dev.warmup_days import CALL_ENDS, SYSTEM_PROMPT, DayTensors, warmup_day_rows
from scripts.dev.warmup_rows import ACTIONS, TEMPLATE, WarmupTensors

SEED = 40_003


def test_rows_are_the_beginnings_of_an_episode_as_a_run_plays_it():
    rows = warmup_day_rows(SEED, 1, 2.0)
    assert len(rows) == 3 * len(HOURS) and all(0 < sum(row.rewards) < 3 for row in rows)
    shown = rows[len(HOURS) - 1].prompt  # all of the first day but its last call
    assert all(shown.startswith(row.prompt) for row in rows[: len(HOURS)])
    levels = re.findall(r'{"level": (\d)}<\|call', shown)
    ((plain, rng),) = dataset.synthetic_windows(SEED, dataset.ROWS_STREAM, 1, TRAIN_START + timedelta(weeks=SEED % 52))
    columns = next(day_rows(dataset.vary_loads(plain, rng, 2.0), rng))
    settings, _, problems = load_settings(
        {"TASK": "tes_day", "REASONING_EFFORT": "low", "PROMPT_DATE": columns["date"], "MODEL_ID": str(TINY_PATH)}
    )
    assert not problems and len(levels) == len(HOURS) - 1
    recital, tokenizer = Recital(), load_tokenizer(str(TINY_PATH))
    turns = [f"{CALL_ENDS[0]}{level}{CALL_ENDS[1]}" for level in [*levels, "0"]]
    recital.turns = iter([tokenizer(turn, add_special_tokens=False)["input_ids"] for turn in turns])
    row = Row("days", 1, (("system", SYSTEM_PROMPT), ("user", columns["prompt"])), (), columns)
    ends = EndTokens([tokenizer.convert_tokens_to_ids("<|call|>")], tokenizer.pad_token_id)
    tools = describe_environment(settings.ENVIRONMENT, 30).tools
    with contextlib.closing(EnvironmentPool(settings.ENVIRONMENT, 30)) as pool:
        player = EpisodePlayer(recital, pool, tokenizer, ends, settings, tools, TEMPLATE, at_once=1, wants_copy=False)
        (sample,) = player.play([row], rollout_sampling(settings, 0))
    assert sample.episode.end == "done"
    played = tokenizer.decode([*sample.episode.prompt_ids, *sample.ids])
    assert played.startswith(shown + turns[-1])


def test_rows_end_in_a_call_of_each_level():
    tokenizer = load_tokenizer(str(TINY_PATH))
    rows = read_rows(replace(TINY_RECIPE, prompt="day"), SEED, 1, read_tokenizer(TINY_PATH), "cpu")
    ids, lengths = rows.batch(torch.arange(ACTIONS))
    rows.write_actions(ids, lengths, 0, torch.arange(ACTIONS))
    special = special_ids(tokenizer.added_tokens_encoder.get)
    for level, (row, length) in enumerate(zip(ids.tolist(), lengths.tolist(), strict=True)):
        call = read_call(row[length - len(rows.answer) : length], special, tokenizer.decode)
        assert call.name == "run" and call.arguments == {"level": level} and not call.fault


def test_whole_days_have_a_reading_for_every_call_of_any_level():
    tokenizer = read_tokenizer(TINY_PATH)
    single = warmup_day_rows(SEED, 1, 1.0)
    days = DayTensors(single, tokenizer, "cpu")
    assert len(days) == 3 and days.levels.shape == (3, len(HOURS)) and days.readings.shape[:2] == days.levels.shape
    ids, lengths = days.batch(torch.tensor([1]))
    levels = days.levels[torch.tensor([1])]
    hours = single[len(HOURS) : 2 * len(HOURS)]
    for row, level in zip(hours, levels[0].tolist(), strict=True):
        shown = tokenizer.decode(ids[0, :level].tolist(), skip_special_tokens=False)
        assert shown == row.prompt + CALL_ENDS[0].rstrip(" "), "the level's token begins with the space before it"
    assert ids[0, levels[0, -1] - days.choices[0] : lengths[0]].tolist() == days.answer
    assert days.readings.mean((0, 1)).abs().max() < 1e-5


@pytest.mark.numeric
@pytest.mark.slow
def test_a_whole_day_teaches_what_its_turns_do(monkeypatch):
    """The levels of all turns, and the form of one."""
    tokenizer, every = read_tokenizer(TINY_PATH), warmup_day_rows(SEED, 1, 1.0)
    single = every[: len(HOURS)]
    torch.manual_seed(0)
    training = DayWarmUp(new_model(TINY_RECIPE, tokenizer), DayTensors(every, tokenizer, "cpu"), TINY_RECIPE, 0)
    monkeypatch.setattr(warmup, "TEXT_WEIGHT", 0.0)
    turns = WarmupTensors(single, tokenizer, "cpu", ends=CALL_ENDS)
    with torch.no_grad():
        ids, lengths = turns.batch(torch.arange(len(HOURS)))
        shown = training.rows.ids[0, training.rows.levels[0]].tolist()
        turns.write_actions(ids, lengths, 0, torch.tensor([training.rows.actions[0].index(token) for token in shown]))
        choices, form, _ = answer_log_probs(training.model, forward(training.model, ids), ids, lengths, turns)
        for weight in (0.0, 1.0):
            monkeypatch.setattr(warmup, "FORMAT_WEIGHT", weight)
            loss, readings = training.losses(torch.tensor([0]))
            assert readings.shape == training.rows.readings[:1].shape
            assert (loss + choices.mean() + weight * form).abs().min() < 1e-4
    assert form.std() > 1e-3, "turns differ"
