# SPDX-License-Identifier: Apache-2.0
"""Measures what turns cost: episodes of many short turns against one answer of as many tokens, in vLLM alone."""

import argparse
import itertools
import random
import time
from collections.abc import Sequence
from typing import Any

import torch

from grpo.rollout import engine as rollout_engine
from grpo.rollout.engine import Engine
from grpo.rollout.sampler import AwakeVllmSampler, Sampling, Session, Tokens
from scripts.dev.decode import Point, start_alone, write_measured
from scripts.dev.harness import Function, intercept
from scripts.dev.record import Figure, command_with_variables, tabled

EPISODES, GROUP, PROMPT = 96, 8, 940  # episodes, those of a prompt, its tokens
TURNS, RESULT = 24, 16  # turns of an episode, tokens between two
WARMUP_TURNS = 2  # of the trial that does not count
# How episodes are played -> whether their turns differ in length, and whether they wait until nothing else runs.
WAYS = {"turns": (False, False), "uneven": (True, False), "lockstep": (True, True)}
TABLE = """
turns_s | s | {episodes} episodes of {turns} turns of {tokens} tokens, results of {result} tokens between them
uneven_s | s | for as many tokens, with turns of {least} to {most} tokens, so that each ends at another step
lockstep_s | s | as uneven_s, but all wait for the longest turn, as in TRL's loop, which also sends weights each time
answer_s | s | answers of as many tokens as the first episodes, from the same prompts
turns_ratio uneven_ratio lockstep_ratio | | seconds a token, divided by those of answer_s
cached | % | of the tokens before all turns but the first, how many vLLM's prefix cache had
turns_tok_s uneven_tok_s lockstep_tok_s answer_tok_s | tokens/s | of what the model wrote
"""


def play_turns(
    session: Session,
    prompts: Sequence[Tokens],
    lengths: Sequence[Sequence[int]],
    result: Tokens = (),
    lockstep: bool = False,
) -> int:
    """Lets a model write turns of these `lengths` behind each prompt, with `result` between them; each turn begins when
    its last one has ended, or in `lockstep` when all have. Returns how many tokens it wrote."""
    playing: dict[int, tuple[list[int], Sequence[int]]] = {}
    ready = [(list(prompt), own) for prompt, own in zip(prompts, lengths, strict=True)]
    written = 0
    while playing or ready:
        if not (lockstep and playing):
            playing |= {session.submit(history, own[0]): (history, own[1:]) for history, own in ready}
            ready.clear()
        for number, sample in session.advance():
            history, left = playing.pop(number)
            written += len(sample.ids)
            if left:
                ready.append(([*history, *sample.ids, *result], left))
    return written


def uneven_lengths(tokens: int) -> range:
    """Lengths of turns that differ, whose mean is `tokens`."""
    return range(tokens - tokens // 2, tokens + tokens // 2 + 1)


def turn_lengths(tokens: int, uneven: bool, seed: int) -> list[list[int]]:
    """The tokens of each turn of each episode, `tokens` or on average as many."""
    draw, lengths = random.Random(seed), uneven_lengths(tokens)
    return [[draw.choice(lengths) if uneven else tokens for _ in range(TURNS)] for _ in range(EPISODES)]


def measure(engine: Engine, vocab: int, trials: int, tokens: int) -> dict[str, float]:
    """The figures of TABLE for turns of `tokens` tokens, from the fastest of some trials. Each has other prompts, so
    that no prefix is cached from an earlier one; before them a short one that does not count compiles kernels."""
    cached: list[tuple[int, int]] = []

    def count(completion_of: Function, output: Any, with_logps: bool) -> Any:
        if len(output.prompt_token_ids) > PROMPT:  # It is no first turn.
            cached.append((output.num_cached_tokens, len(output.prompt_token_ids)))
        return completion_of(output, with_logps)

    best = dict.fromkeys((*WAYS, "answer"), 0.0)
    awake = AwakeVllmSampler(engine, None)
    for trial, name in itertools.product(range(trials + 1), best):
        is_uneven, in_lockstep = WAYS.get(name, (False, False))
        prompts = Point(EPISODES, PROMPT, tokens, GROUP).prompts(vocab, trial)
        lengths = turn_lengths(tokens, is_uneven, trial)
        if not trial:
            lengths = [own[:WARMUP_TURNS] for own in lengths]
        if name == "answer":
            lengths = [[sum(own)] for own in lengths]
        engine.llm.reset_prefix_cache()
        sampling = Sampling(trial, 1.0, 1.0, sum(lengths[0]), with_logps=True, in_turns=name != "answer")
        torch.cuda.synchronize()
        started = time.perf_counter()
        with awake.session(sampling) as session, intercept(rollout_engine, "completion_of", count):
            written = play_turns(session, prompts, lengths, prompts[0][:RESULT], in_lockstep)
        torch.cuda.synchronize()
        assert written == sum(map(sum, lengths)), (name, written)
        if trial:
            best[name] = max(best[name], written / (time.perf_counter() - started))
    total = EPISODES * TURNS * tokens
    return (
        {f"{name}_tok_s": rate for name, rate in best.items()}
        | {f"{name}_s": total / rate for name, rate in best.items()}
        | {f"{name}_ratio": best["answer"] / best[name] for name in WAYS}
        | {"cached": 100 * sum(part for part, _ in cached) / max(1, sum(whole for _, whole in cached))}
    )


def bench_turns(options: argparse.Namespace) -> int:
    """Starts vLLM alone, as with an ENVIRONMENT, measures turns of each length, and writes the figures, whose
    names end in the length. VLLM_PREFIX_CACHE_RETENTION_INTERVAL may be set."""
    command, longest = command_with_variables(), TURNS * (uneven_lengths(max(options.tokens))[-1] + RESULT)
    options.set = [("TASK", "tes_day"), *options.set]
    engine, config = start_alone(options, [Point(EPISODES, PROMPT, longest, GROUP)], whole=False)
    figures: list[Figure] = []
    for tokens in options.tokens:
        values, lengths = measure(engine, config["vocab_size"], options.trials, tokens), uneven_lengths(tokens)
        sizes = {"episodes": EPISODES, "turns": TURNS, "tokens": tokens, "result": RESULT}
        sizes |= {"least": lengths[0], "most": lengths[-1]}
        figures += [{**row, "name": f"{row['name']}_{tokens}"} for row in tabled(TABLE, values | sizes)]
        write_measured(options, figures, command, engine)
    return 0
