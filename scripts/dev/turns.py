# SPDX-License-Identifier: Apache-2.0
"""Measures what turns cost: episodes of many short turns against one answer of as many tokens, in vLLM alone."""

import argparse
import functools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from grpo.common import InputError
from grpo.data.heldout import Split, read_split
from grpo.data.prepare import prepare_rows
from grpo.evaluate.models import EvaluatedModel, start_vllm_model
from grpo.plan.hub import find_model
from grpo.plan.machine import read_machine
from grpo.preflight.checks import load_run_settings
from grpo.rollout import engine
from grpo.rollout.sampler import AwakeVllmSampler, Sampling, Session, Tokens
from scripts.dev import harness
from scripts.dev.harness import Function, intercept
from scripts.dev.record import tabled, write

EPISODES, TURNS, TOKENS, RESULT, TRIALS = 96, 24, 64, 16, 3
TABLE = """
turns_s | s | {episodes} episodes of {turns} turns of {tokens} tokens, results of {result} tokens between them
answer_s | s | as many answers of {turns} x {tokens} tokens, from the same prompts
ratio | | turns_s divided by answer_s
cached | % | of the tokens before all turns but the first, how many vLLM's prefix cache had
turns_tok_s answer_tok_s | tokens/s | of what the model wrote
"""


def play_turns(session: Session, prompts: Sequence[Tokens], turns: int, tokens: int, result: Tokens) -> int:
    """Lets a model write `turns` turns of `tokens` tokens behind each prompt, with `result` between them; each turn
    begins when its last one has ended. Returns how many tokens it wrote."""
    playing = {session.submit(prompt, tokens): (list(prompt), turns - 1) for prompt in prompts}
    written = 0
    while playing:
        for number, sample in session.advance():
            history, left = playing.pop(number)
            written += len(sample.ids)
            if left:
                history += [*sample.ids, *result]
                playing[session.submit(history, tokens)] = history, left - 1
    return written


def measure(model: EvaluatedModel, prompts: Sequence[Tokens]) -> dict[str, float]:
    """The fastest of TRIALS, each with other tokens, so that no prefix is cached from an earlier one."""
    sampler, seconds = model.sampler.sampler, {"turns": float("inf"), "answer": float("inf")}
    cached, known = [], [len(prompt) for prompt in prompts]

    def count(completion_of: Function, output: Any, with_logps: bool) -> Any:
        if len(output.prompt_token_ids) > max(known):  # It is no first turn.
            cached.append((output.num_cached_tokens, len(output.prompt_token_ids)))
        return completion_of(output, with_logps)

    assert isinstance(sampler, AwakeVllmSampler)
    # No turn ends early: neither by a stop token nor by the config's.
    sampler.engine.stop_token_ids = []
    sampler.engine.sampling = functools.partial(sampler.engine.sampling, ignore_eos=True)
    tokens = EPISODES * TURNS * TOKENS
    for trial in range(TRIALS):
        for name in seconds:
            sampler.engine.llm.reset_prefix_cache()
            sampling = Sampling(trial, 1.0, 1.0, TURNS * TOKENS, with_logps=True, in_turns=name == "turns")
            torch.cuda.synchronize()
            started = time.perf_counter()
            with sampler.session(sampling) as session:
                if name == "turns":
                    with intercept(engine, "completion_of", count):
                        written = play_turns(session, prompts, TURNS, TOKENS, prompts[0][:RESULT])
                else:
                    written = sum(len(sample.ids) for sample in session.complete(prompts))
            torch.cuda.synchronize()
            assert written == tokens, (name, written)
            seconds[name] = min(seconds[name], time.perf_counter() - started)
    figures = {f"{name}_s": value for name, value in seconds.items()}
    return (
        figures
        | {"ratio": seconds["turns"] / seconds["answer"]}
        | {"cached": 100 * sum(part for part, _ in cached) / max(1, sum(whole for _, whole in cached))}
        | {f"{name}_tok_s": tokens / value for name, value in seconds.items()}
    )


def bench_turns(options: argparse.Namespace) -> int:
    """Starts vLLM alone, measures, and writes the figures. VLLM_PREFIX_CACHE_RETENTION_INTERVAL may be set."""
    length = TURNS * (TOKENS + RESULT)
    os.environ |= harness.run_settings(options, {"MAX_COMPLETION_LEN": length, **dict(options.set)})
    settings, _, problems = load_run_settings(os.environ)
    files, split = find_model(settings.MODEL_ID, problems), read_split(settings, problems)
    rows = prepare_rows(settings, files, problems, Split([], split.train, "")).heldout
    if files is None or problems or len(rows) < EPISODES // 8:
        raise InputError(*problems, f"--data: it takes {EPISODES // 8} rows")
    texts = [row.prompt for row in rows[: EPISODES // 8] for _ in range(8)]
    model = start_vllm_model(settings, files, None, read_machine(), texts)
    values = measure(model, model.tokenizer(text=texts)["input_ids"])
    sizes = {"episodes": EPISODES, "turns": TURNS, "tokens": TOKENS, "result": RESULT}
    write(Path(options.out), tabled(TABLE, values | sizes))
    return 0
