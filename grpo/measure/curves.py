# SPDX-License-Identifier: Apache-2.0
"""Learning curves of this project's trainer beside plain TRL's, seed by seed: on the tiny model in float32, or at any
other settings, on a GPU beside vLLM.

Both ask the same prompts in the same order and start from the same adapter. Before each step plain TRL gets this
project's seed as well: a completion is then drawn by the same random numbers, and a seed's two curves differ by what
the trainers do differently, not by luck. vLLM draws its own numbers.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.trainer_callback import TrainerCallback
from transformers.utils.quantization_config import Mxfp4Config
from trl import GRPOConfig, GRPOTrainer

import rewards
from grpo.data.files import Row
from grpo.data.prompts import sampling_seed
from grpo.data.scoring import Reward, load_rewards, score
from grpo.evaluate.exact import answer_probabilities
from grpo.learn.together import flat_adapter
from grpo.learn.trainer import Trainer
from grpo.measure.record import Figure, Json, figure, save, tabled, write
from grpo.measure.variants import Function, intercept, measure_child, policy_of, read_result, write_result
from grpo.plan.hub import TINY_PATH
from grpo.preflight.adapter import lora_options
from grpo.preflight.checks import preflight
from grpo.preflight.resolve import ResolvedRun
from grpo.run.child import forwarding_signals

BOUND = 0.01  # of reward: a difference is equivalent if its whole interval is smaller
EVERY = 50  # steps between two measurements
KINDS = {"reward": "exact at EVAL_TEMPERATURE", "greedy_reward": "of the likeliest answer"}
SUMMARY = """
equivalent | verdict | 1: the differences of both rewards after the last step lie within {bound:g}, intervals included
seeds | seeds | {steps} steps each
adapter_apart_median adapter_apart_largest | share | over seeds: distance of the adapters by the way training took
ours_s trl_s | s | a seed's training, mean over seeds, one thread each
"""


class RewardCurve(TrainerCallback):
    """`rewards`: the exact held-out rewards of KINDS, every EVERY steps and after the last; these took `seconds`."""

    def __init__(self, trainer: GRPOTrainer, rows: Sequence[Row], temperature: float):
        self.trainer, self.rows, self.temperatures, self.seconds = trainer, rows, (temperature, 0.0), 0.0
        self.rewards: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}  # by step, as JSON writes it

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % EVERY and state.global_step < state.max_steps:
            return
        started, worth = time.perf_counter(), [row.rewards for row in self.rows]
        model = self.trainer.accelerator.unwrap_model(self.trainer.model).get_base_model()
        prompts, tokenizer = [row.prompt for row in self.rows], self.trainer._tokenizer
        for kind, temperature in zip(KINDS, self.temperatures, strict=True):
            p = answer_probabilities(model, tokenizer, prompts, temperature, len(worth[0])).tolist()
            scores = rewards.score_probabilities(worth, p, [1] * len(worth), math.nan)
            self.rewards[kind][str(state.global_step)] = scores["reward"]
        self.seconds += time.perf_counter() - started


class SameRandomNumbers(TrainerCallback):
    """Sets the seed of this project's rollouts before each step."""

    def on_step_begin(self, args, state, control, **kwargs):
        torch.manual_seed(sampling_seed(args.seed, state.global_step, "train"))


def repeated(rows: Sequence[int], size: int, times: int) -> list[int]:
    """The indices of `rows`, each `size` of them `times` times: TRL asks for a step's rows once for each of its
    micro-batches."""
    steps = [list(rows[start : start + size]) for start in range(0, len(rows), size)]
    return [row for step in steps for row in step * times]


def plain_model(model_id: str) -> PreTrainedModel:
    """transformers' own model: on a GPU dequantized to BF16, on a CPU in float32."""
    # Of transformers' own attention with sinks, `eager` needs nothing installed. Of its experts, `grouped_mm` is its
    # choice on a GPU, and `eager` the fastest on a CPU.
    cuda = torch.cuda.is_available()
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        TINY_PATH if model_id == "tiny" else model_id,
        dtype=torch.bfloat16,
        quantization_config=Mxfp4Config(dequantize=True),
        attn_implementation="eager",
        experts_implementation="grouped_mm" if cuda else "eager",
    )
    if cuda:
        torch.nn.Module.cuda(model)
    else:
        model.float()
    return model


def plain_trainer(ours: Trainer, functions: Sequence[Reward], parts: int = 1) -> GRPOTrainer:
    """TRL's own trainer for the run of `ours`: its arguments, rows and reward functions, transformers' model and
    generate. It learns from a step's completions in `parts` micro-batches."""
    args = copy.copy(ours.args)
    assert isinstance(args, GRPOConfig)
    size = args.per_device_train_batch_size
    args.output_dir, args.save_strategy = f"{args.output_dir}-trl", "no"
    args.per_device_train_batch_size = size // parts
    args.gradient_accumulation_steps = args.steps_per_generation = parts

    def reward(completion_ids: list[list[int]], row: list[int], **columns: Any) -> list[float | None]:
        """Decodes with the special tokens that say which channel a text is in: TRL decodes without them."""
        completions = ours.read_completions([ours.run.rows[i] for i in row], completion_ids)
        return [value for (value,) in score(functions, completions, completion_ids, ours.columns, ours.state)]

    plain = GRPOTrainer(
        plain_model(ours.run.settings.MODEL_ID),
        reward,
        args,
        ours.train_dataset,
        processing_class=ours._tokenizer,
        peft_config=LoraConfig(**lora_options(ours.run.settings)),
        callbacks=[SameRandomNumbers()],
    )
    rows = repeated(list(ours._get_train_sampler()), size, parts)
    mock.patch.object(plain, "_get_train_sampler", return_value=rows).start()
    return plain


def train_watched(trainer: GRPOTrainer, resolved: ResolvedRun, train: Callable[[], Any]) -> Json:
    """Calls `train`. Returns the held-out rewards of `trainer` by kind and step, and `s`, the seconds without
    measuring."""
    curve, started = RewardCurve(trainer, resolved.eval_rows, resolved.settings.EVAL_TEMPERATURE), time.perf_counter()
    trainer.add_callback(curve)
    train()
    return curve.rewards | {"s": time.perf_counter() - started - curve.seconds}


def seed_child(options: argparse.Namespace) -> int:
    """One seed in this process: the entry point's run, and where that trains, plain TRL after it. Returns the run's
    exit code. The settings are the demo's but for the steps, the temperature and EXPECTED_REWARD: TRL learns from
    sampled rewards."""
    torch.set_num_threads(1)
    steps = {"TOTAL_STEPS": options.steps, "SAVE_STEPS": options.steps, "EVAL_STEPS": 0, "EVAL_SAMPLES": 0}
    paths = {"OUTPUT_DIR": Path(options.run).absolute() / options.child, "OVERWRITE": 1, "SEED": options.child}
    settings = {"MODEL_ID": "tiny", "TEMPERATURE": 1.0, "EXPECTED_REWARD": 0, **steps, **paths, **dict(options.set)}
    os.environ |= {name: str(value) for name, value in settings.items()}
    resolved = preflight(os.environ | {"EVAL_SAMPLES": "1"})  # The run itself reads no held-out rows.

    def watch(train: Function, ours: Trainer, *arguments: Any, **named: Any) -> None:
        start = flat_adapter(policy_of(ours))
        values = {"ours": train_watched(ours, resolved, lambda: train(ours, *arguments, **named))}
        functions = load_rewards(resolved.reward_specs, resolved.settings)
        plain = plain_trainer(ours, functions, options.trl_parts)
        values["trl"] = train_watched(plain, resolved, plain.train)
        end = flat_adapter(policy_of(ours))
        apart = end - flat_adapter(plain.accelerator.unwrap_model(plain.model))
        values["adapter_apart"] = (apart.norm() / (end - start).norm()).item()
        write_result(options, options.child, values, done=True)

    with intercept(Trainer, "train", watch):
        return options.main([])


def curve_figures(seeds: Mapping[int, Json]) -> list[Figure]:
    """Figures of some seeds, by number: the verdict, means over seeds at each measured step, then both rewards of each
    seed after the last."""
    means, singles, apart = [], [], [seed["adapter_apart"] for seed in seeds.values()]
    steps = list(next(iter(seeds.values()))["ours"]["reward"])
    facts: Json = {"equivalent": int(len(seeds) > 1), "seeds": len(seeds), "bound": BOUND, "steps": steps[-1]}
    facts |= {"adapter_apart_median": statistics.median(apart), "adapter_apart_largest": max(apart)}
    facts |= {f"{name}_s": statistics.mean(seed[name]["s"] for seed in seeds.values()) for name in ("ours", "trl")}
    for kind, note in KINDS.items():
        for step in steps:
            ours, trl = ([seed[name][kind][step] for seed in seeds.values()] for name in ("ours", "trl"))
            changes = [a - b for a, b in zip(ours, trl, strict=True)]
            low, high = rewards.confidence_interval(changes)
            for name, value, words in (
                (f"ours_{step}", statistics.mean(ours), f"held-out, {note}, mean over seeds"),
                (f"trl_{step}", statistics.mean(trl), f"held-out, {note}, mean over seeds"),
                (f"difference_{step}", statistics.mean(changes), "this trainer - TRL's"),
                (f"difference_{step}_low", low, "95% interval, paired over seeds"),
                (f"difference_{step}_high", high, ""),
            ):
                means.append(figure(f"{kind}_{name}", value, "reward", words))
        facts["equivalent"] &= int(low > -BOUND and high < BOUND)
        for seed, *pair in zip(seeds, ours, trl, strict=True):
            for name, value in zip(("ours", "trl"), pair, strict=True):
                singles.append(figure(f"seed{seed}_{kind}_{name}", value, "reward"))
    return [*tabled(SUMMARY, facts), *means, *singles]


def bench_curves(options: argparse.Namespace) -> int:
    """Seeds 1 to `options.seeds`, `options.jobs` side by side, each in a process of its own; the JSON is written after
    each. Returns 1 if the two trainers are not equivalent, or a seed failed."""
    if options.child:
        return seed_child(options)
    numbers = range(1, options.seeds + 1)
    waiting = [str(seed) for seed in numbers if not (options.resume and read_result(options, str(seed)))]
    failed, figures = False, []
    with forwarding_signals(), ThreadPoolExecutor(options.jobs) as pool:
        for code in itertools.chain([0], pool.map(partial(measure_child, options), waiting)):
            failed |= code != 0
            if seeds := {seed: values for seed in numbers if (values := read_result(options, str(seed)))}:
                figures = curve_figures(seeds)
                save(Path(options.out), figures)
    if figures:
        write(Path(options.out), figures)
    return int(failed or not figures or not figures[0]["value"])
