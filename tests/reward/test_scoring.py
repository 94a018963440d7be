# SPDX-License-Identifier: Apache-2.0
"""Figures of completions, and what reward functions get where no trainer is."""

import dataclasses
import math

from transformers import TrainerState

from grpo.data.files import Row
from grpo.reward.scoring import completion_rates, initial_trainer_state, partial_none_text, read_completion


def test_rates_of_completions():
    """Two of four answer, one of them the best action; one was cut off. Without actions, text is an answer."""
    row = Row("d.csv", 1, (("user", "x"),), (0.95, 1.0), {})
    answers = [("[1]", 10, False), ("[0]", 20, False), (" \n", 30, True), ("so", 40, False)]

    def rates(row):
        texts = [(f"<|channel|>final<|message|>{text}<|return|>", tokens, cut) for text, tokens, cut in answers]
        return completion_rates([read_completion(row, text, "", tokens, cut) for text, tokens, cut in texts])

    lengths = {"clipped_ratio": 0.25, "tokens_mean": 25, "tokens_max": 40}
    assert rates(row) == lengths | {"parse_rate": 0.5, "best_action_rate": 0.25}
    assert rates(dataclasses.replace(row, rewards=())) == lengths | {"parse_rate": 0.75, "best_action_rate": None}


def test_the_state_before_training_has_all_that_training_has():
    state, ours = vars(TrainerState()), vars(initial_trainer_state(5))
    assert ours.keys() == state.keys() and ours["max_steps"] == 5
    counts = {"max_steps", "logging_steps", "eval_steps", "save_steps", "train_batch_size", "num_train_epochs"}
    assert {name: ours[name] for name in state.keys() - counts} == {name: state[name] for name in state.keys() - counts}
    assert all(ours[name] for name in counts), "a function may divide by it"


def test_a_none_beside_a_number_is_said():
    text = partial_none_text(["judge", "length"], [[math.nan, 0.5], [1.0, 0.5], [math.nan, math.nan]])
    assert text.startswith("REWARDS: judge for 1 of 3 completions returned None, and other functions a number")
    assert partial_none_text(["judge", "length"], [[1.0, 0.5], [math.nan, math.nan]]) is None
