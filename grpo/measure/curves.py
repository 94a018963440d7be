# SPDX-License-Identifier: Apache-2.0
"""Learning curves of this project's trainer beside plain TRL's: seed by seed on the tiny model in float32, or with the proof's
model on a GPU, there beside vLLM with each ROLLOUT_SYNC.

All ask the same prompts in the same order and start from the same adapter. Before each step plain TRL gets this project's
seed as well: a completion is then drawn by the same random numbers, and a seed's two curves differ by what the trainers do
differently, not by luck. The numbers are as random as TRL's own, so neither mean changes by that. vLLM draws its own.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import shutil
import statistics
import sys
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
from grpo.measure.campaign import import_all
from grpo.measure.forks import Campaign, Found, run_to_end, said_in, tasks_done
from grpo.measure.proof_data import SCALES
from grpo.measure.record import figure, read_json, save, shown, tabled, write
from grpo.measure.watched import child_result, intercept, keep, run_child
from grpo.plan.hub import TINY_PATH
from grpo.preflight.adapter import lora_options
from grpo.preflight.checks import preflight
from grpo.preflight.resolve import ResolvedRun
from grpo.settings import choices

BOUND = 0.01  # of reward: equivalent is a difference whose whole interval is smaller
EVERY = 50  # steps between two measurements
MICRO_BATCHES = 8  # of a step, in plain TRL's learning of a proof: there each completion carries its prompt
TRL = "trl"  # plain, beside the values of ROLLOUT_SYNC
RESULT = "curves.json"  # of a seed, beside its run
KINDS = {"reward": "exact at EVAL_TEMPERATURE", "greedy_reward": "of the likeliest answer"}
SUMMARY = """
equivalent | verdict | 1: the differences of both rewards after the last step lie within {bound:g}, intervals included
seeds | seeds | {steps} steps each
adapter_apart_median adapter_apart_largest | share | over seeds: distance of the two adapters by the way that training took
reward_spread greedy_reward_spread | reward | standard deviation of this trainer's last reward over seeds
seeds_unpaired greedy_seeds_unpaired | seeds | at least so many would decide, by that, if each trainer drew its own random numbers
ours_s trl_s | s | a seed's training, mean over seeds, two side by side, one thread each
"""


class Measured(TrainerCallback):
    """`curve`: the exact held-out rewards of KINDS every EVERY steps and after the last; `seconds` that this took."""

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
            found = rewards.score_probabilities(worth, p, [1] * len(worth), math.nan)
            self.curve[kind][str(state.global_step)] = found["reward"]
        self.seconds += time.perf_counter() - started


class SameRandomNumbers(TrainerCallback):
    """Those of this project's rollouts."""

    def on_step_begin(self, args, state, control, **kwargs):
        torch.manual_seed(sampling_seed(args.seed, state.global_step, "train"))


class Repeated:
    """The indices of `rows`, each `size` of them `times` times: TRL asks for a step's rows once for each of its micro-batches."""

    def __init__(self, rows: Sequence[int], size: int, times: int):
        self.rows, self.size, self.times = list(rows), size, times

    def __len__(self) -> int:
        return len(self.rows) * self.times

    def __iter__(self) -> Iterator[int]:
        for start in range(0, len(self.rows), self.size):
            for _ in range(self.times):
                yield from self.rows[start : start + self.size]


def plain_model(model_id: str) -> PreTrainedModel:
    """transformers' own: on a GPU dequantized to BF16, on a CPU in float32."""
    # Of transformers' own attention with sinks, `eager` needs nothing installed; of its experts `grouped_mm` is its choice on a
    # GPU, and `eager` the fastest on a CPU.
    cuda = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(
        TINY_PATH if model_id == "tiny" else model_id, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True),
        attn_implementation="eager", experts_implementation="grouped_mm" if cuda else "eager",
    )  # fmt: skip
    return model.to("cuda:0") if cuda else model.float()


def plain_trainer(ours: Trainer, parts: int = 1) -> GRPOTrainer:
    """TRL's own trainer for the run of `ours`: its arguments, rows and rewards, transformers' model and generate. It learns from
    a step's completions in `parts` micro-batches."""
    args, size = copy.copy(ours.args), ours.args.per_device_train_batch_size
    args.output_dir, args.save_strategy = f"{args.output_dir}-trl", "no"
    args.per_device_train_batch_size = size // parts
    args.gradient_accumulation_steps = args.steps_per_generation = parts

    def reward(completion_ids: list[list[int]], row: list[int], **columns: Any) -> list[float]:
        """With the special tokens that say which channel a text is in: TRL decodes without them."""
        read = ours.read_completions([ours.run.rows[i] for i in row], completion_ids)
        return [value for (value,) in score(ours.reward_funcs, read, completion_ids, ours.columns, ours.state)]

    plain = GRPOTrainer(
        plain_model(ours.run.settings.MODEL_ID), reward, args, ours.train_dataset, processing_class=ours.processing_class,
        peft_config=LoraConfig(**lora_options(ours.run.settings)), callbacks=[SameRandomNumbers()],
    )  # fmt: skip
    plain._get_train_sampler = lambda dataset=None: Repeated(ours._get_train_sampler(), size, parts)
    return plain


def followed(trainer: GRPOTrainer, resolved: ResolvedRun, train: Callable[[], Any]) -> dict[str, Any]:
    """What `train` does to the held-out rewards of `trainer` (`Measured.curve`), and its seconds `s` without the measuring."""
    measured, started = Measured(trainer, resolved.eval_rows, resolved.settings.EVAL_TEMPERATURE), time.perf_counter()
    trainer.add_callback(measured)
    train()
    return measured.curve | {"s": time.perf_counter() - started - measured.seconds}


def train_both(main: Callable[[list[str]], int], arguments: list[str]) -> int:
    """The entry point's run, and where it trains plain TRL after it; writes RESULT. Returns the run's exit code."""
    torch.set_num_threads(1)
    resolved, found = preflight(os.environ | {"EVAL_SAMPLES": "1"}), {}  # the run itself reads no held-out rows

    def watch(train: Any, ours: Trainer, *given: Any, **named: Any) -> None:
        start = flat_adapter(ours.model)
        found["ours"] = followed(ours, resolved, lambda: train(ours, *given, **named))
        plain = plain_trainer(ours)
        found["trl"] = followed(plain, resolved, plain.train)
        moved, apart = flat_adapter(ours.model) - start, flat_adapter(ours.model) - flat_adapter(plain.model)
        found["adapter_apart"] = (apart.norm() / moved.norm()).item()
        ours.run.folder.with_name(RESULT).write_text(json.dumps(found), encoding="utf-8")

    with intercept(Trainer, "train", watch):
        return main(arguments)


def run_seed(campaign: Campaign, steps: int, place: Path, seed: int, found: Found) -> None:
    """`train_both` in the folder `place`, with the demo's settings but for the steps and the temperature."""
    settings = {"MODEL_ID": "tiny", "SEED": seed, "TOTAL_STEPS": steps, "SAVE_STEPS": steps, "EVAL_SAMPLES": 0}
    settings["TEMPERATURE"] = 1.0  # the default elsewhere
    if code := run_to_end(campaign, place, settings):
        found.findings.append((seed, f"exit code {code}\n{said_in(place)[-2000:]}"))


def curve_figures(seeds: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Figures of what `train_both` found by seed: the verdict and the spread, means over seeds at each measured step, then
    both rewards of each seed after the last."""
    means, singles, apart = [], [], [one["adapter_apart"] for one in seeds.values()]
    steps = list(next(iter(seeds.values()))["ours"]["reward"])
    facts: dict[str, Any] = {"equivalent": int(len(seeds) > 1), "seeds": len(seeds), "bound": BOUND, "steps": steps[-1]}
    facts |= {"adapter_apart_median": statistics.median(apart), "adapter_apart_largest": max(apart)}
    facts |= {f"{name}_s": statistics.mean(one[name]["s"] for one in seeds.values()) for name in ("ours", "trl")}
    for kind, note in KINDS.items():
        for step in steps:
            ours, trl = ([one[name][kind][step] for one in seeds.values()] for name in ("ours", "trl"))
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
        for seed, one, other in zip(seeds, ours, trl, strict=True):
            singles += [
                figure(f"seed{seed}_{kind}_{name}", value, "reward") for name, value in (("ours", one), ("trl", other))
            ]
    return [*tabled(SUMMARY, facts), *means, *singles]


def proof_child(options: argparse.Namespace) -> int:
    """One of the ways to train the model of `prove.py --stage make`, by the proof's settings: this trainer with a ROLLOUT_SYNC, or
    plain TRL with the trainer's arguments instead of it."""
    way, proof = options.child, Path(options.proof)
    place = {
        "MODEL_ID": proof / "model",
        "DATA": proof / "data/tes_train.csv",
        "EVAL_DATA": proof / "data/tes_heldout.csv",
    }
    ours = {"USE_VLLM": 0} if way == TRL else {"ROLLOUT_SYNC": way}
    ours |= {"OUTPUT_DIR": Path(options.run).resolve() / way, "TOTAL_STEPS": options.steps, "SAVE_STEPS": options.steps}
    settings = {**SCALES["mid"].settings, **place, **ours, "EVAL_STEPS": 0, "EVAL_SAMPLES": 0, "OVERWRITE": 1}
    os.environ |= {name: str(value) for name, value in settings.items()}
    resolved = preflight(os.environ | {"EVAL_SAMPLES": "1"})

    def watch(train: Any, trainer: Trainer, *given: Any, **named: Any) -> None:
        if way == TRL:
            plain = plain_trainer(trainer, MICRO_BATCHES)
            keep(options, followed(plain, resolved, plain.train))
        else:
            keep(options, followed(trainer, resolved, lambda: train(trainer, *given, **named)))

    with intercept(Trainer, "train", watch):
        return options.main([])


def proof_figures(found: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Figures of what `proof_child` found by way, beside plain TRL's."""
    made = []
    for kind, note in KINDS.items():
        for step in found[TRL][kind]:
            for way, one in found.items():
                made.append(figure(f"{kind}_{way}_{step}", one[kind][step], "reward", f"held-out, {note}"))
            for way in (way for way in found if way != TRL):
                change = found[way][kind][step] - found[TRL][kind][step]
                made.append(
                    figure(f"{kind}_{way}_difference_{step}", change, "reward", "beside plain TRL's, one seed each")
                )
    return made + [
        figure(f"{way}_s", one["s"], "s", "training, all ways side by side on one GPU") for way, one in found.items()
    ]


def proof_curves(options: argparse.Namespace) -> int:
    """Each ROLLOUT_SYNC and plain TRL with the proof's model, side by side. Exit code 1 where one failed."""
    ways = [*choices("ROLLOUT_SYNC")[1:], TRL]  # without `auto`
    with ThreadPoolExecutor(len(ways)) as pool:
        failed = any(list(pool.map(partial(run_child, options), ways)))
    if not failed:
        found = {way: read_json(child_result(options, way)) for way in ways}
        write(
            Path(options.out), proof_figures(found), shown("curves", f"--steps {options.steps}", given="--proof PROOF")
        )
    return int(failed)


def bench_curves(options: argparse.Namespace) -> int:
    """Seeds 1 to `options.seeds`, two side by side; the JSON is written after each. Exit code 1 where the two are not
    equivalent, or a seed failed. With `options.proof`: `proof_curves`."""
    if options.proof:
        return proof_child(options) if options.child else proof_curves(options)
    torch.set_num_threads(1)
    import_all()
    folder, failed, done = Path(options.run).resolve(), 0, {}
    shutil.rmtree(folder, ignore_errors=True)
    work = partial(run_seed, Campaign(partial(train_both, options.main), folder, 0), options.steps)
    for place, found in tasks_done(work, folder, [[n + 1] for n in range(options.seeds)], 2, math.inf):
        for seed, text in found.findings:
            failed += 1
            print(f"seed {seed}: {text}", file=sys.stderr)
        if not found.findings:
            done[int(place.name)] = read_json(place / RESULT)
            figures = curve_figures(dict(sorted(done.items())))
            save(Path(options.out), figures)
            print(f"{len(done)} of {options.seeds} seeds", flush=True)
    if done:
        write(Path(options.out), figures)
    return int(bool(failed) or not done or not figures[0]["value"])
