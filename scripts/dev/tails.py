# SPDX-License-Identifier: Apache-2.0
"""Measures what completions of very different lengths cost a rollout in vLLM alone, and what larger rollouts bring.

Ends are forced by each request's own limit. With random weights nothing else would make lengths differ.
"""

import argparse
import math
import random
import time
from collections.abc import Sequence
from statistics import NormalDist

from grpo.rollout.engine import Engine
from scripts.dev.decode import Point, start_alone, write_measured
from scripts.dev.record import Json, command_with_variables, tabled

# Of 160 completions of a GRPO run of gpt-oss-20b that others logged 28% were cut at 3,200 tokens, and the median of the
# others was 1,450. The log-normal with these two has a 95th percentile of 2,930 among those that end (counted: 2,650).
CUT, CUT_SHARE, MEDIAN = 3200, 0.28, 1450
GROUP, PROMPT, STEP = 8, 940, 96  # completions of a prompt, its tokens, completions of a step
SIZES = STEP, 2 * STEP, 4 * STEP  # completions at once
WARMUP = 24  # tokens of each sequence of the trial that does not count
TABLE = """
tokens_mean tokens_median | tokens | of 96 completions: log-normal, cut at {limit}
equal_s | s | 96 completions of equal length, as many tokens in all
tail_s_96 tail_s_192 tail_s_384 | s | so many completions of different lengths
equal_tok_s tail_tok_s_96 tail_tok_s_192 tail_tok_s_384 | tokens/s | of these rollouts, prefill included
below_half_96 below_half_192 below_half_384 | % | of a rollout, in which fewer than half of its completions were running
below_eighth_96 below_eighth_192 below_eighth_384 | % | likewise, fewer than an eighth
step_s_96 step_s_192 step_s_384 | s | rollout and learning for 96 completions, {learn:g} s of learning each
overlap_s_96 overlap_s_192 overlap_s_384 | s | the same at best if each group is learned from once it has ended
gain_192 gain_384 | % | of step_s_96, by twice the prompts and by STEPS_PER_GENERATION=4
gain_overlap_96 gain_overlap_192 gain_overlap_384 | % | of step_s, by learning beside the tail, at best
"""


def fit_lengths(cut: float, cut_share: float, median: float) -> NormalDist:
    """The distribution of the logarithm of a length of which `cut_share` are above `cut`, and half of the others above
    `median`."""
    unit = NormalDist()
    high, middle = unit.inv_cdf(1 - cut_share), unit.inv_cdf((1 - cut_share) / 2)
    deviation = math.log(cut / median) / (high - middle)
    return NormalDist(math.log(median) - middle * deviation, deviation)


def tail_lengths(count: int, limit: int, seed: int) -> list[int]:
    """`count` lengths in random order, evenly spaced quantiles of the fit, cut at `limit`: each rollout has the same
    share of long completions, so that its time does not depend on luck."""
    logarithms = fit_lengths(CUT, CUT_SHARE, MEDIAN)
    quantiles = [math.exp(logarithms.inv_cdf((number + 0.5) / count)) for number in range(count)]
    lengths = [max(1, min(limit, round(length))) for length in quantiles]
    random.Random(seed).shuffle(lengths)
    return lengths


def equal_lengths(lengths: Sequence[int]) -> list[int]:
    """As many lengths with the same sum, equal to a token."""
    least, more = divmod(sum(lengths), len(lengths))
    return [least + 1] * more + [least] * (len(lengths) - more)


def share_below(ends: Sequence[float], part: float) -> float:
    """The share of a rollout in which fewer than `part` of its completions were running, given when each ended."""
    ordered = sorted(ends)
    # The completion with whose end fewer are left: ceil(part * n) - 1 of them.
    left = max(0, math.ceil(part * len(ordered)) - 1)
    return 1 - ordered[len(ordered) - left - 1] / ordered[-1]


def end_of_learning(ends: Sequence[float], learn_s: float, group: int = GROUP) -> float:
    """When learning is over if it takes each group once its last completion has ended, and does not slow down what
    still decodes: the bound of what overlapping them can bring. `learn_s` is the time of a completion."""
    time_s = 0.0
    for end in sorted(max(ends[start : start + group]) for start in range(0, len(ends), group)):
        time_s = max(time_s, end) + group * learn_s
    return time_s


def tail_values(ends: dict[int, list[float]], tokens: dict[int, int], learn_s: float) -> Json:
    """The figures of rollouts of different sizes, from when each of their completions ended."""
    values: Json = {}
    for size, times in ends.items():
        rollout, steps = max(times), size / STEP
        values |= {
            f"tail_s_{size}": rollout,
            f"tail_tok_s_{size}": tokens[size] / rollout,
            f"below_half_{size}": 100 * share_below(times, 1 / 2),
            f"below_eighth_{size}": 100 * share_below(times, 1 / 8),
            f"step_s_{size}": rollout / steps + STEP * learn_s,
            f"overlap_s_{size}": end_of_learning(times, learn_s) / steps,
        }
    for size in ends:
        if size > STEP:
            values[f"gain_{size}"] = 100 * (1 - values[f"step_s_{size}"] / values[f"step_s_{STEP}"])
        values[f"gain_overlap_{size}"] = 100 * (1 - values[f"overlap_s_{size}"] / values[f"step_s_{size}"])
    return values


def play(engine: Engine, lengths: Sequence[int], vocab: int, seed: int) -> list[float]:
    """Lets each completion write as many tokens as `lengths` says, GROUP of them behind each prompt, all at once.
    Returns after how many seconds each had ended."""
    prompts = Point(len(lengths), PROMPT, max(lengths), GROUP).prompts(vocab, seed)
    ends = [0.0] * len(lengths)
    engine.llm.reset_prefix_cache()
    with engine.stepping(seed):
        started = time.perf_counter()
        numbers = {
            engine.add(prompt, length, engine.settings.TOP_P, None): number
            for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        }
        while numbers:
            for request, ids, _ in engine.step():
                number = numbers.pop(request)
                assert len(ids) == lengths[number], (len(ids), lengths[number])
                ends[number] = time.perf_counter() - started
    return ends


def measure(engine: Engine, vocab: int, limit: int, learn_s: float) -> Json:
    """Plays a rollout of equal lengths, then one of each size."""
    for size in SIZES:
        play(engine, [WARMUP] * size, vocab, 0)
    lengths = {size: tail_lengths(size, limit, size) for size in SIZES}
    tokens = {size: sum(own) for size, own in lengths.items()}
    equal_s = max(play(engine, equal_lengths(lengths[STEP]), vocab, 1))
    ends = {size: play(engine, own, vocab, 1 + size) for size, own in lengths.items()}
    ordered = sorted(lengths[STEP])
    return tail_values(ends, tokens, learn_s) | {
        "tokens_mean": tokens[STEP] / STEP,
        "tokens_median": ordered[STEP // 2],
        "equal_s": equal_s,
        "equal_tok_s": tokens[STEP] / equal_s,
    }


def bench_tails(options: argparse.Namespace) -> int:
    """Starts vLLM alone, plays the rollouts, and writes the figures."""
    command = command_with_variables()
    engine, config = start_alone(options, [Point(max(SIZES), PROMPT, options.limit, GROUP)], whole=False)
    values = measure(engine, config["vocab_size"], options.limit, options.learn_s)
    figures = tabled(TABLE, values | {"limit": options.limit, "learn": options.learn_s})
    write_measured(options, figures, command, engine)
    return 0
