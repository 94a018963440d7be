# SPDX-License-Identifier: Apache-2.0
"""Learning curves of this project's trainer beside plain TRL's, seed by seed: on the tiny model in float32, or at any
other settings, on a GPU beside vLLM.

Both ask the same prompts in the same order and start from the same adapter. Before each step plain TRL gets this
project's seed as well: a completion is then drawn by the same random numbers, and a seed's two curves differ by what
the trainers do differently, not by luck. The numbers are as random as TRL's own, so neither mean changes by that. vLLM
draws its own.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, Mxfp4Config, PreTrainedModel
from transformers.trainer_callback import TrainerCallback
from trl import GRPOTrainer

import rewards
from grpo.data.files import Row
from grpo.data.prompts import sampling_seed
from grpo.data.scoring import score
from grpo.evaluate.exact import answer_probabilities
from grpo.learn.together import flat_adapter
from grpo.learn.trainer import Trainer
from grpo.measure.record import figure, save, tabled, write
from grpo.measure.variants import keep, kept, run_child
from grpo.measure.watched import intercept
from grpo.plan.hub import TINY_PATH
from grpo.preflight.adapter import lora_options
from grpo.preflight.checks import preflight
from grpo.preflight.resolve import ResolvedRun

BOUND = 0.01  # of reward: a difference is equivalent if its whole interval is smaller
EVERY = 50  # steps between two measurements
KINDS = {"reward": "exact at EVAL_TEMPERATURE", "greedy_reward": "of the likeliest answer"}
SUMMARY = """
equivalent | verdict | 1: the differences of both rewards after the last step lie within {bound:g}, intervals included
seeds | seeds | {steps} steps each
adapter_apart_median adapter_apart_largest | share | over seeds: distance of the adapters by the way training took
reward_spread greedy_reward_spread | reward | standard deviation of this trainer's last reward over seeds
seeds_unpaired greedy_seeds_unpaired | seeds | at least so many would decide, by that, without common random numbers
ours_s trl_s | s | a seed's training, mean over seeds, one thread each
"""


class Measured(TrainerCallback):
    """`curve`: the exact held-out rewards of KINDS every EVERY steps and after the last; `seconds` that these took."""

    def __init__(self, trainer: GRPOTrainer, rows: Sequence[Row], temperature: float):
        self.trainer, self.rows, self.temperatures, self.seconds = trainer, rows, (temperature, 0.0), 0.0
        self.curve: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}  # by step, as JSON writes it

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % EVERY and state.global_step < state.max_steps:
            return
        started, worth = time.perf_counter(), [row.rewards for row in self.rows]
        model = self.trainer.accelerator.unwrap_model(self.trainer.model).get_base_model()
        prompts, tokenizer = [row.prompt for row in self.rows], self.trainer.processing_class
        for kind, temperature in zip(KINDS, self.temperatures, strict=True):
            p = answer_probabilities(model, tokenizer, prompts, temperature, len(worth[0])).tolist()
            scores = rewards.score_probabilities(worth, p, [1] * len(worth), math.nan)
            self.curve[kind][str(state.global_step)] = scores["reward"]
        self.seconds += time.perf_counter() - started


class SameRandomNumbers(TrainerCallback):
    """Sets the seed of this project's rollouts before each step."""

    def on_step_begin(self, args, state, control, **kwargs):
        torch.manual_seed(sampling_seed(args.seed, state.global_step, "train"))


class Repeated:
    """The indices of `rows`, each `size` of them `times` times: TRL asks for a step's rows once for each of its
    micro-batches."""

    def __init__(self, rows: Sequence[int], size: int, times: int):
        self.rows, self.size, self.times = list(rows), size, times

    def __len__(self) -> int:
        return len(self.rows) * self.times

    def __iter__(self) -> Iterator[int]:
        for start in range(0, len(self.rows), self.size):
            for _ in range(self.times):
                yield from self.rows[start : start + self.size]


def plain_model(model_id: str) -> PreTrainedModel:
    """transformers' own model: on a GPU dequantized to BF16, on a CPU in float32."""
    # Of transformers' own attention with sinks, `eager` needs nothing installed. Of its experts, `grouped_mm` is its
    # choice on a GPU, and `eager` the fastest on a CPU.
    cuda = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(
        TINY_PATH if model_id == "tiny" else model_id,
        dtype=torch.bfloat16,
        quantization_config=Mxfp4Config(dequantize=True),
        attn_implementation="eager",
        experts_implementation="grouped_mm" if cuda else "eager",
    )
    return model.to("cuda:0") if cuda else model.float()


def plain_trainer(ours: Trainer, parts: int = 1) -> GRPOTrainer:
    """TRL's own trainer for the run of `ours`: its arguments, rows and rewards, transformers' model and generate. It
    learns from a step's completions in `parts` micro-batches."""
    args, size = copy.copy(ours.args), ours.args.per_device_train_batch_size
    args.output_dir, args.save_strategy = f"{args.output_dir}-trl", "no"
    args.per_device_train_batch_size = size // parts
    args.gradient_accumulation_steps = args.steps_per_generation = parts

    def reward(completion_ids: list[list[int]], row: list[int], **columns: Any) -> list[float]:
        """Decodes with the special tokens that say which channel a text is in: TRL decodes without them."""
        completions = ours.read_completions([ours.run.rows[i] for i in row], completion_ids)
        return [value for (value,) in score(ours.reward_funcs, completions, completion_ids, ours.columns, ours.state)]

    plain = GRPOTrainer(
        plain_model(ours.run.settings.MODEL_ID),
        reward,
        args,
        ours.train_dataset,
        processing_class=ours.processing_class,
        peft_config=LoraConfig(**lora_options(ours.run.settings)),
        callbacks=[SameRandomNumbers()],
    )
    plain._get_train_sampler = lambda dataset=None: Repeated(ours._get_train_sampler(), size, parts)
    return plain


def followed(trainer: GRPOTrainer, resolved: ResolvedRun, train: Callable[[], Any]) -> dict[str, Any]:
    """What `train` does to the held-out rewards of `trainer` (`Measured.curve`), and its seconds `s` without
    measuring."""
    measured, started = Measured(trainer, resolved.eval_rows, resolved.settings.EVAL_TEMPERATURE), time.perf_counter()
    trainer.add_callback(measured)
    train()
    return measured.curve | {"s": time.perf_counter() - started - measured.seconds}


def seed_child(options: argparse.Namespace) -> int:
    """One seed in this process: the entry point's run, and where that trains, plain TRL after it. Returns the run's
    exit code. The settings are the demo's but for the steps, the temperature
    and EXPECTED_REWARD."""
    torch.set_num_threads(1)
    steps = {"TOTAL_STEPS": options.steps, "SAVE_STEPS": options.steps, "EVAL_STEPS": 0, "EVAL_SAMPLES": 0}
    place = {"OUTPUT_DIR": Path(options.run).absolute() / options.child, "OVERWRITE": 1, "SEED": options.child}
    plain = {"TEMPERATURE": 1.0, "EXPECTED_REWARD": 0}  # TRL learns from sampled rewards.
    settings = {"MODEL_ID": "tiny", **plain, **steps, **place, **dict(options.set)}
    os.environ |= {name: str(value) for name, value in settings.items()}
    resolved = preflight(os.environ | {"EVAL_SAMPLES": "1"})  # The run itself reads no held-out rows.

    def watch(train: Any, ours: Trainer, *arguments: Any, **named: Any) -> None:
        start = flat_adapter(ours.model)
        values = {"ours": followed(ours, resolved, lambda: train(ours, *arguments, **named))}
        plain = plain_trainer(ours, options.trl_parts)
        values["trl"] = followed(plain, resolved, plain.train)
        moved, apart = flat_adapter(ours.model) - start, flat_adapter(ours.model) - flat_adapter(plain.model)
        keep(options, values | {"adapter_apart": (apart.norm() / moved.norm()).item()}, done=True)

    with intercept(Trainer, "train", watch):
        return options.main([])


def curve_figures(seeds: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Figures of what `seed_child` measured by seed: the verdict and the spread, means over seeds at each measured
    step, then both rewards of each seed after the last."""
    means, singles, apart = [], [], [seed["adapter_apart"] for seed in seeds.values()]
    steps = list(next(iter(seeds.values()))["ours"]["reward"])
    facts: dict[str, Any] = {"equivalent": int(len(seeds) > 1), "seeds": len(seeds), "bound": BOUND, "steps": steps[-1]}
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
        if len(ours) > 1:
            facts[f"{kind}_spread"] = spread = statistics.stdev(ours)
            # The half width of the interval of the difference of two independent means is 1.96 * spread * sqrt(2 / n).
            facts[f"{kind.removesuffix('reward')}seeds_unpaired"] = math.ceil(2 * (1.96 * spread / BOUND) ** 2)
        for seed, *pair in zip(seeds, ours, trl, strict=True):
            for name, value in zip(("ours", "trl"), pair, strict=True):
                singles.append(figure(f"seed{seed}_{kind}_{name}", value, "reward"))
    return [*tabled(SUMMARY, facts), *means, *singles]


def bench_curves(options: argparse.Namespace) -> int:
    """Seeds 1 to `options.seeds`, `options.jobs` side by side, each in a process of its own; the JSON is written after
    each. Returns 1 if the two trainers are not equivalent, or a seed failed."""
    if options.child:
        return seed_child(options)
    waiting = range(1, options.seeds + 1)
    if options.resume:
        waiting = [seed for seed in waiting if not kept(options, str(seed))]
    seeds, failed, figures = {}, 0, []
    with ThreadPoolExecutor(options.jobs) as pool:
        for code in itertools.chain([0], pool.map(partial(run_child, options), map(str, waiting))):
            failed += code != 0
            seeds = {seed: kept(options, str(seed)) for seed in range(1, options.seeds + 1)}
            if ended := {seed: values for seed, values in seeds.items() if values}:
                figures = curve_figures(ended)
                save(Path(options.out), figures)
    if figures:
        write(Path(options.out), figures)
    return int(bool(failed) or not figures or not figures[0]["value"])
