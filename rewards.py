# SPDX-License-Identifier: Apache-2.0
"""Reward functions, and what an own one can use: pure, typed, without I/O. `REWARDS` names them, each with an optional
weight:

    REWARDS=regret                          # minus the cost of the answered action, on a logarithmic scale
    REWARDS=cost                            # the same, not on a logarithmic scale
    REWARDS=action                          # the CSV's reward_action_k of the action that was answered
    REWARDS=action,format=0.1               # plus a tenth of a point for an answer that is exactly `[k]`
    REWARDS=regret,overlong=0.5             # minus up to half a point for a completion near MAX_COMPLETION_LEN
    REWARDS=gsm8k                           # 1 where the number behind #### is that of the column `answer`
    REWARDS=gsm8k_strict                    # the same, only where the answer says `#### 42`
    REWARDS=environment                     # what the ENVIRONMENT of an episode gives
    REWARDS=my_rewards:near                 # my_rewards.py in the current folder, function `near`

A reward function takes lists with one entry per completion, by keyword, and returns a number for each. Every column of
the file is such a list. `raw_completions` are the texts with Harmony's tokens, of which `final_channel` takes the
answer; `truncated` says which of them reached `MAX_COMPLETION_LEN`. my_rewards.py for a file with a column `target`:

>>> from grpo.numerals import number_of
>>> from rewards import final_channel
>>> def near(raw_completions, *, target, truncated, **columns):
...     rewards = []
...     for text, expected, cut in zip(raw_completions, target, truncated):
...         number = None if cut else number_of(final_channel(text) or "")
...         rewards.append(0.0 if number is None else 1 / (1 + abs(float(number) - float(expected))))
...     return rewards
>>> near(["<|channel|>final<|message|>So it is 41.<|return|>", "assistantfinal42"], target=[42, 42], truncated=[0, 1])
[0.5, 0.0]

`None` or NaN from all functions leaves a completion out of its group's mean and gives it no advantage (docs/data.md
says what that teaches, and which further arguments there are); beside a number it counts as 0, as in TRL. The functions
below get their `completions` with Harmony tokens. Run the examples: `python -m doctest rewards.py`.
"""

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from grpo.harmony import final_channel, parse_action
from grpo.numerals import MOST_CHARACTERS, gold_number, number_of

Column = Sequence[Any]  # The cells of a column: numbers, text, or any other JSON value.


def reward_rows(columns: Mapping[str, Column], prefix: str = "reward_action") -> list[list[float]]:
    """Rewards by completion and action, shape (B, K), from the columns `prefix_0` .. `prefix_{K-1}`. A row whose file
    has fewer actions holds None in the other columns and gets a shorter list.

    >>> reward_rows({"reward_action_0": [0.1, 0.5], "reward_action_1": [0.9, 0.5], "day": [1, 2]})
    [[0.1, 0.9], [0.5, 0.5]]
    """
    names = itertools.takewhile(columns.__contains__, (f"{prefix}_{k}" for k in itertools.count()))
    rows = zip(*(columns[name] for name in names), strict=True)
    return [[float(value) for value in row if value is not None] for row in rows]


# The unit of `regret`, and the temperature of make_dataset.py's softmax over q_action_k: 0.3 kg CO2 in the TES plant.
TEMPERATURE = 0.05
SMALLEST_REWARD = 5e-9  # A smaller reward_action_k is rounded to 0 in a file with eight decimals.


def regret_rows(columns: Mapping[str, Column]) -> list[list[float]]:
    """Regret of each action in units of TEMPERATURE, (B, K): (q_best - q_k) / TEMPERATURE. In a row without q_action_k
    the rewards must be the softmax of q / TEMPERATURE: ln(r_best / r_k), with r_k >= SMALLEST_REWARD, is the same.

    >>> [[round(x, 6) for x in row] for row in regret_rows({"reward_action_0": [math.e], "reward_action_1": [1.0]})]
    [[0.0, 1.0]]
    """
    rows = reward_rows(columns)
    values = reward_rows(columns, "q_action") or [[]] * len(rows)
    logs = ([math.log(max(value, SMALLEST_REWARD)) for value in row] for row in rows)
    return [
        [(max(q) - value) / TEMPERATURE for value in q] if q else [max(log) - value for value in log]
        for q, log in zip(values, logs, strict=True)
    ]


def _scores(
    completions: Sequence[str], rows: Sequence[Sequence[float]], invalid: float | None, columns: Mapping[str, Column]
) -> list[float]:
    """The reward of each completion's action in its row, or `invalid` if it names no action. With `invalid` None this
    is the worst action's reward minus a tenth of the row's range (0.1 if all are equal): not answering never pays.

    A `truncated` completion names no action: a policy would learn to write on after it if that cost nothing."""
    scores = []
    truncated = columns.get("truncated", [False] * len(completions))
    for text, row, cut in zip(completions, rows, truncated, strict=True):
        worst = min(row)
        below = worst - (max(row) - worst) / 10
        invalid_score = (below if below < worst else worst - 0.1) if invalid is None else invalid
        answered = None if cut else parse_action(text, len(row))
        scores.append(invalid_score if answered is None else row[answered])
    return scores


def action(completions: Sequence[str], *, invalid_reward: float | None = None, **columns: Column) -> list[float]:
    """The file's reward_action_k for the action that each completion names, else `invalid_reward`.

    >>> table = {"reward_action_0": [0.1, 0.1, 0.1], "reward_action_1": [0.9, 0.9, 0.9]}
    >>> [round(x, 6) for x in action(["assistantfinal[1]", "analysis[1] it is", "assistantfinal[0]"], **table)]
    [0.9, 0.02, 0.1]
    >>> [round(x, 6) for x in action(["assistantfinal[1] and"] * 3, truncated=[True] * 3, **table)]
    [0.02, 0.02, 0.02]
    """
    return _scores(completions, reward_rows(columns), invalid_reward, columns)


def best(completions: Sequence[str], *, invalid_reward: float | None = None, **columns: Column) -> list[float]:
    """1.0 for an action with the row's highest reward, 0.0 for any other, `invalid_reward` if no action is named."""
    best_or_not = [[float(value == max(row)) for value in row] for row in reward_rows(columns)]
    return _scores(completions, best_or_not, invalid_reward, columns)


def regret(completions: Sequence[str], *, invalid_reward: float | None = None, **columns: Column) -> list[float]:
    """-ln(1 + regret) of the answered action, with the regret of `regret_rows`: 0 for the best one.

    The regret of a closed loop is the expected sum of these regrets along the policy's own path (the performance
    difference lemma: S. Kakade, J. Langford, Approximately Optimal Approximate Reinforcement Learning, ICML 2002). The
    logarithm keeps small and large regrets distinguishable.

    >>> table = {"q_action_0": [-1.0] * 3, "q_action_1": [-1.05] * 3, "q_action_2": [-51.0] * 3}
    >>> table |= {f"reward_action_{k}": [0.0] * 3 for k in range(3)}
    >>> [round(x, 2) for x in regret([f"assistantfinal[{k}]" for k in range(3)], **table)]
    [0.0, -0.69, -6.91]
    """
    rows = [[0.0 - math.log1p(value) for value in row] for row in regret_rows(columns)]
    return _scores(completions, rows, invalid_reward, columns)


def cost(completions: Sequence[str], *, invalid_reward: float | None = None, **columns: Column) -> list[float]:
    """Minus the regret of `regret_rows` itself. With `SCALE_REWARDS=batch` a policy that is unsure then prefers many
    small losses to a rare larger one, because losses add up as in the plant's closed loop. It is meant for a second
    run, which starts at the adapter of a run with `regret`.

    >>> table = {"q_action_0": [-1.0] * 3, "q_action_1": [-1.05] * 3, "q_action_2": [-51.0] * 3}
    >>> table |= {f"reward_action_{k}": [0.0] * 3 for k in range(3)}
    >>> [round(x, 6) for x in cost([f"assistantfinal[{k}]" for k in range(3)], **table)]
    [0.0, -1.0, -1000.0]
    """
    rows = [[0.0 - value for value in row] for row in regret_rows(columns)]
    return _scores(completions, rows, invalid_reward, columns)


def format(completions: Sequence[str], *, truncated: Sequence[bool] | None = None, **columns: Column) -> list[float]:
    """1.0 if the final channel is exactly one `[k]`, else 0.0, whichever action that is. A completion that reached
    MAX_COMPLETION_LEN earns 0.0: more may have followed.

    >>> format(["assistantfinal[1]", "assistantfinalI take [1].", "analysis[1]"])
    [1.0, 0.0, 0.0]
    >>> format(["assistantfinal[1]"] * 2, truncated=[False, True])
    [1.0, 0.0]
    """
    pairs = zip(completions, truncated or [False] * len(completions), strict=True)
    answers = ["" if cut else final_channel(text) or "" for text, cut in pairs]
    return [float(bool(re.fullmatch(r"\s*\[[0-9]+\]\s*", answer))) for answer in answers]


def gsm8k(
    completions: Sequence[str], *, answer: Sequence[str], truncated: Sequence[bool] | None = None, **columns: Column
) -> list[float]:
    """1.0 if the final channel's number equals that of the column `answer` (`... #### 42`), else 0.0. A completion that
    reached MAX_COMPLETION_LEN earns 0.0: its number may be cut. Raises ValueError if `answer` is not one number.

    Source: K. Cobbe et al., Training Verifiers to Solve Math Word Problems, 2021 (2110.14168).

    >>> gsm8k(["assistantfinalIt is 1,050.", "assistantfinal#### 42", "analysis42"], answer=["#### 1050"] * 3)
    [1.0, 0.0, 0.0]
    >>> gsm8k(["assistantfinal#### 42"] * 2, answer=["#### 42"] * 2, truncated=[False, True])
    [1.0, 0.0]
    """
    return _number_scores(number_of, completions, answer, truncated)


HASHED_NUMBER = re.compile(r"####\s*(-?\d[\d,]*(?:\.\d+)?)(?!\S)")


def hashed_number(text: str) -> Fraction | None:
    """The number of the last `#### <num>`, which begins with a digit or a minus sign and ends with a space or the text.

    >>> [str(hashed_number(text)) for text in ("#### 1,050", "####-3.5 m", "#### 42.", "#### $42", "42")]
    ['1050', '-7/2', 'None', 'None', 'None']
    """
    numbers: list[str] = HASHED_NUMBER.findall(text)
    if not numbers or len(numbers[-1]) > MOST_CHARACTERS:
        return None
    return Fraction(numbers[-1].replace(",", ""))


def gsm8k_strict(
    completions: Sequence[str], *, answer: Sequence[str], truncated: Sequence[bool] | None = None, **columns: Column
) -> list[float]:
    """As `gsm8k`, but the final channel must state its number as `#### <num>` (`hashed_number`).

    >>> gsm8k_strict(["assistantfinalIt is 42.", "assistantfinalIt is\\n#### 42"], answer=["#### 42"] * 2)
    [0.0, 1.0]
    """
    return _number_scores(hashed_number, completions, answer, truncated)


def _number_scores(
    read: Callable[[str], Fraction | None],
    completions: Sequence[str],
    answer: Sequence[str],
    truncated: Sequence[bool] | None,
) -> list[float]:
    """1.0 for each completion in whose final channel `read` finds the number of the row's `answer`, else 0.0."""
    scores = []
    for text, expected, cut in zip(completions, answer, truncated or [False] * len(completions), strict=True):
        if (value := gold_number(str(expected))) is None:
            raise ValueError(f"the column `answer` is not one number: {expected!r}")
        scores.append(float(not cut and read(final_channel(text) or "") == value))
    return scores


def environment(
    completions: Sequence[str],
    *,
    episodes: Sequence[Any] | None = None,
    prompts: Sequence[Any] = (),
    invalid_reward: float | None = None,
    **columns: Column,
) -> list[float | None]:
    """What the environment of each episode gave: its `get_reward` and the sum of its `step_rewards`.

    An environment that hangs or crashes gives nothing. A call of the model may have done that, so it earns what the
    worst episode of the same prompt earned, or `invalid_reward`; None where no episode of the prompt has a reward. It
    is also None where the environment could not be reset, to which the model contributed nothing, and where its
    `get_reward` returned None.

    >>> from grpo.reward.episode import Episode
    >>> ends = {"done": 1.0, "answer": 0.2, "timeout": None, "reset": None, "turns": None}
    >>> episodes = [Episode("", [], [1], [0], None, reward, end) for end, reward in ends.items()]
    >>> environment([""] * 5, episodes=episodes, prompts=["one"] * 5)
    [1.0, 0.2, 0.2, None, None]
    >>> environment([""] * 5, episodes=episodes, prompts=["one"] * 5, invalid_reward=-1.0)
    [1.0, 0.2, -1.0, None, None]
    """
    if episodes is None:
        raise ValueError("there is no episode: set ENVIRONMENT")
    totals = [episode.total() for episode in episodes]
    rewards: list[float | None] = []
    for episode, prompt, earned in zip(episodes, prompts, totals, strict=True):
        if episode.has_failed and episode.end != "reset":
            peers = [
                total for total, other in zip(totals, prompts, strict=True) if other == prompt and total is not None
            ]
            earned = min(peers, default=None) if invalid_reward is None else invalid_reward
        rewards.append(earned)
    return rewards


def overlong(
    completions: Sequence[str], *, completion_ids: Sequence[Sequence[int]], longest: int, span: float, **columns: Column
) -> list[float]:
    """0.0 for a completion whose last `span` of `longest` tokens are unused, then falling to -1.0 at `longest`: a
    policy that writes ever longer feels it before its answers are cut.

    Source: DAPO's soft overlong punishment (2503.14476, equation 13, with `longest` = L_max and `span` = L_cache).

    >>> overlong([""] * 4, completion_ids=[[0] * n for n in (5, 80, 90, 100)], longest=100, span=20)
    [0.0, 0.0, -0.5, -1.0]
    """
    return [0.0 - min(max(len(ids) - (longest - span), 0.0) / span, 1.0) for ids in completion_ids]


# ACTION_REWARDS score the answered action, and take INVALID_REWARD for completions without one.
Reward = Callable[..., list[float] | list[float | None]]
ACTION_REWARDS: dict[str, Reward] = {score.__name__: score for score in (action, best, regret, cost)}
REWARD_FUNCTIONS: dict[str, Reward] = ACTION_REWARDS | {
    score.__name__: score for score in (format, gsm8k, gsm8k_strict, environment, overlong)
}


def best_action(row: Sequence[float]) -> int:
    """The first action with the highest reward."""
    return max(range(len(row)), key=row.__getitem__)
