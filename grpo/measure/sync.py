# SPDX-License-Identifier: Apache-2.0
"""The ways of weight sync beside each other: speed, mismatch, and the share of an update that arrives."""

from __future__ import annotations

import argparse
import dataclasses
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from grpo.learn.trainer import Trainer
from grpo.measure import watched
from grpo.measure.record import read_json, shown, tabled, write
from grpo.model.load import evaluating
from grpo.rollout import engine as rollout_engine
from grpo.rollout.parity import compared, differences, make_small, parity_prompts, strong_adapter
from grpo.rollout.weight_sync import sync_share

# Engines, each in a process of its own -> the values of ROLLOUT_SYNC that one can be measured with.
ENGINES = {"side": ("side",), "merged": ("stochastic", "merge"), "lora": ("lora",)}
PROMPTS, GROUP, TOKENS, ROLLOUTS = 12, 8, 512, 3
SYNC = """
tok_s | tokens/s | 96 x 512 tokens, strong adapter, {way}; mean of those after the first; prefill of 12 prompts included
first_tok_s | tokens/s | the first such rollout of the process
same_seed_alike | completions | of 96: the last two rollouts, with one seed
sync_s | s | weight sync, `sync_share` included; mean of those after the first
sync_peak_gib | GiB | memory that torch takes for it beyond what was there
share_s | s | `sync_share` alone
share_1 share_10 | share | of an update that arrives, B of +-LEARNING_RATE times 1 and 10: AdamW's first and tenth step
share_error_1 | share | its standard error
small_mean small_max | nats | mismatch with the adapter of one step, worst of fixed and sampled tokens
strong_mean strong_max | nats | mismatch with a strong adapter, worst of fixed and sampled tokens
strong_control_mean | nats | smallest with the trainer's adapter off
rollout_mean rollout_max | nats | mismatch with the strong adapter, on 4 of the 96 completions
"""


def timed_rollouts(trainer: Trainer, policy: Any) -> dict[str, float]:
    """Rollouts of 96 x 512 tokens with the adapter as it is: figures by name."""
    run, engine = trainer.run, trainer.run.engine
    ids = trainer.processing_class(text=[row.prompt for row in run.rows[:PROMPTS]])["input_ids"]
    prompts = [row for row in ids for _ in range(GROUP)]
    made = []
    with mock.patch.object(engine, "stop_token_ids", []):
        for _ in range(ROLLOUTS):
            engine.wake()
            with watched.weighed() as sync:
                engine.sync_weights(policy, seed=7)
            with watched.weighed() as share:
                if run.settings.ROLLOUT_SYNC != "lora":
                    engine.llm.apply_model(lambda model: sync_share(model, policy))
            completions, values = engine.generate(prompts, 7, TOKENS, top_p=1.0)
            rate = sum(map(len, completions)) / engine.seconds["generate"]
            engine.sleep()
            made.append((rate, sync["seconds"], sync["peak_gib"], share["seconds"], completions))
    mean = [sum(values) / (ROLLOUTS - 1) for values in zip(*(one[:4] for one in made[1:]), strict=True)]
    some = range(0, len(prompts), len(prompts) // 4)
    rows, firsts = [prompts[i] + completions[i] for i in some], [len(prompts[i]) for i in some]
    apart = differences(trainer, [values[i] for i in some], rows, firsts, run.settings.TEMPERATURE)
    return {
        **dict(zip(("tok_s", "sync_s", "sync_peak_gib", "share_s"), mean, strict=True)),
        "first_tok_s": made[0][0],
        "same_seed_alike": sum(one == other for one, other in zip(made[-2][4], made[-1][4], strict=True)),
        "rollout_mean": apart["mean"],
        "rollout_max": apart["max"],
    }


def measure_way(trainer: Trainer, way: str) -> dict[str, Any]:
    """Figures by name of ROLLOUT_SYNC=`way`, which the trainer's engine must be built for."""
    run, engine = trainer.run, trainer.run.engine
    run.settings = engine.settings = dataclasses.replace(run.settings, ROLLOUT_SYNC=way)
    policy, prompts = trainer.accelerator.unwrap_model(trainer.model), parity_prompts(trainer)
    found: dict[str, Any] = {"way": f"ROLLOUT_SYNC={way}"}

    def mismatch(name: str) -> None:
        pairs = [pair for _, pair in compared(trainer, policy, prompts)]
        found[f"{name}_mean"], found[f"{name}_max"] = (max(pair[kind] for pair in pairs) for kind in ("mean", "max"))
        found[f"{name}_control_mean"] = min(pair["control_mean"] for pair in pairs)

    with evaluating(trainer.model), strong_adapter(policy, run.settings.SEED) as matrices:
        mismatch("strong")
        found |= timed_rollouts(trainer, policy)
        for steps in (10, 1):
            make_small(matrices, steps * run.settings.LEARNING_RATE, run.settings.SEED)
            mismatch("small")
            if engine.share:
                found[f"share_{steps}"], found[f"share_error_{steps}"] = engine.share
    return found


def sync_child(options: argparse.Namespace) -> int:
    """One child of `bench_sync`: the entry point makes one short step, then every way of its engine is measured; what is
    found is written after each."""

    def start(start_engine: Callable[..., Any], *given: Any) -> Any:
        try:
            return start_engine(*given)
        except Exception:
            traceback.print_exc()  # the run's log has one line of it
            raise

    found, ways = {}, ENGINES[options.child]
    short = {"TOTAL_STEPS": 1, "MAX_COMPLETION_LEN": TOKENS, "PARITY": "off", "ROLLOUT_SYNC": ways[0]}
    starts = watched.intercept(rollout_engine, "start_engine", start)
    with watched.completions_of(8), watched.kept_trainers() as made, starts:
        code = watched.run_w1(options, **short)
    for way in () if code else ways:
        found[way] = measure_way(made[0], way)
        watched.keep(options, found)
    return code


def bench_sync(options: argparse.Namespace) -> int:
    """A child for each engine, then the figures of those that ended well. Returns the exit code of the last that did not."""
    if options.child:
        return sync_child(options)
    worst, figures = 0, []
    for child in options.engines:
        worst = watched.run_child(options, child) or worst
        for way, found in read_json(watched.child_result(options, child)).items():
            figures += [one | {"name": f"{way}_{one['name']}"} for one in tabled(SYNC, found)]
        if figures:
            write(Path(options.out), figures, shown("sync", "--engines", *options.engines))
    return worst
