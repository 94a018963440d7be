# SPDX-License-Identifier: Apache-2.0
"""This learner beside TRL's padded path."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import torch
from tokenizers import Tokenizer

from grpo.learn.trainer import Trainer
from grpo.measure import watched
from grpo.measure.record import read_json, shown, steps_of, tabled, write
from grpo.measure.trl_path import compare_step, trl_learning
from grpo.plan.hub import count_parameters
from grpo.plan.memory import Plan

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # dense BF16, from the data sheets
LONGEST = 4000  # tokens of a completion
STEP = """
w1_step_s | s | 12 x 8 completions of 512 tokens, the whole step: mean of steps 2 and 3 of a run
w1_rollout_s | s | its rollout, weight sync, waking and sleeping included
w1_wake_s w1_handover_s w1_sleep_s | s | of that
w1_reward_s | s | decoding and scoring the completions
rollout_tok_s | tokens/s | tokens by that time
w1_learn_s | s | its learning alone, in micro-batches of up to {micro_batch} completions of 4,000
w1_floor_s | s | the arithmetic alone at the card's dense BF16 peak
w2_learn_s | s | 96 completions, mean {w2_mean:.0f}, longest {w2_max} tokens, with their prompts
long_learn_peak_gib | GiB | 16 completions of 4,000 tokens in micro-batches of up to {micro_batch}, allocated beyond weights and sleeping engine
long_head_gib | GiB | of that, what the log-probs of one such micro-batch and their backward take beyond the states
long_logits_gib | GiB | what the logits of one such micro-batch would take in float32; half of it in BF16
w3_step_s | s | 16 completions of that kind, {w3_tokens} tokens in all: rollout, learning, and the {rest:.2f} s that a step of W1 has besides
w3_rollout_s | s | waking, weight sync and sleeping included
w3_learn_s | s |
job_peak_bf16_gib | GiB | EXPERTS=bf16, MAX_COMPLETION_LEN=4000; by the driver, engine and CUDA context included
plan_error_bf16 | share | plan of --check against that peak
w1_learn_peak_gib | GiB | of w1_learn_s, allocated beyond weights and sleeping engine
w1_learn_trl_s | s | TRL's padded path on the same rollouts in the same process: flex attention, old log-probs, micro-batches of {w1_trl_micro_batch}, its fastest within that memory
w1_trl_old_logps_s | s | of that, the pass for old log-probs, which TRL makes only beside vLLM
w1_trl_peak_gib | GiB | allocated beyond weights and sleeping engine
w1_speedup w1_speedup_without_pass | x | TRL's path against w1_learn_s, with and without that pass
gradient_difference | share | adapter's gradient on 16 of the completions, this learner against TRL's path: 2-norm of the difference by the 2-norm
gradient_batching | share | TRL's path with micro-batches of 4 against 8
gradient_wrong_prompt | share | this learner with the prompts exchanged against TRL's path
logp_difference | nats | mean over tokens, this learner against TRL's path
logp_batching | nats | TRL's path against itself with micro-batches of 4
logp_wrong_prompt | nats | this learner with other rows' prompts against TRL's path
w1_job_peak_mxfp4_gib | GiB | EXPERTS=mxfp4, MAX_COMPLETION_LEN=512, all but 40 GiB of the card occupied; by the driver, engine and CUDA context included
w1_learn_mxfp4_s | s | EXPERTS=mxfp4, micro-batches of up to {micro_batch_mxfp4} completions
plan_error_mxfp4 | share | the same with EXPERTS=mxfp4
w2_learn_trl_s | s | TRL's padded path, micro-batches of 4
"""


def floor_seconds(config: dict[str, Any], distinct: int, scored: int) -> float:
    """Time of the arithmetic alone at the card's peak: three products (forward, recomputed forward, gradient of the input;
    weights are frozen) for each of `distinct` tokens, and the head for the `scored` ones."""
    parts = count_parameters(config)
    active = parts["attention"] + parts["experts"] * config["num_experts_per_tok"] / config["num_local_experts"]
    name = torch.cuda.get_device_name(0)
    peak = next((value for key, value in PEAK_FLOPS.items() if key in name), math.nan)
    return 6 * (active * distinct + config["vocab_size"] * config["hidden_size"] * scored) / peak


def head_peak(trainer: Trainer, tokens: int) -> float:
    """GiB that log-probs of `tokens` tokens and their backward pass take beyond the states."""
    base = trainer.accelerator.unwrap_model(trainer.model).get_base_model()
    states = torch.randn(tokens, base.config.hidden_size, dtype=base.dtype, device=base.device, requires_grad=True)
    targets = torch.randint(0, base.config.vocab_size, (tokens,), device=base.device)
    torch.cuda.empty_cache()
    with watched.weighed() as found:
        with trainer.accelerator.autocast():
            logps, _ = trainer.compute_logps(base, states, targets)
        logps.sum().backward()
    return found["peak_gib"]


def real_lengths(path: Path, model: str) -> list[int]:
    """Tokens of the `completion` column of a CSV, in the model's vocabulary."""
    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    texts = pandas.read_csv(path, usecols=["completion"], dtype=str, keep_default_na=False)["completion"]
    return [len(encoding.ids) for encoding in tokenizer.encode_batch(list(texts))]


def run_figures(run: Path, plan: Plan, job_peak: float) -> dict[str, Any]:
    """What the run's metrics tell, and its plan beside the job's peak in GiB."""
    steps = steps_of(run)[1:]
    names = ("step_s", "rollout_s", "wake_s", "handover_s", "sleep_s", "reward_s")
    return {
        **{f"w1_{name}": steps[name].mean() for name in names},
        "rollout_tok_s": steps.rollout_tokens_per_s.mean(),
        "job_peak_gib": job_peak,
        "plan_error": plan.peak / job_peak - 1,
        "micro_batch": plan.micro_batch,
    }


def w1_learning(trainer: Trainer, batch: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, float]:
    """Learning from W1's rollouts once more, alone, beside the arithmetic's floor."""
    prompts = batch["prompt_mask"].sum(1)[:: trainer.num_generations].sum().item()
    scored = int(batch["completion_mask"].sum().item())
    floor = floor_seconds(config, prompts + scored, scored)
    return {"w1_learn_s": watched.our_learning(trainer, batch)["seconds"], "w1_floor_s": floor}


def other_lengths(trainer: Trainer, lengths: list[int], config: dict[str, Any]) -> dict[str, float]:
    """W3 (rollout and learning of the first sixteen lengths, two prompts), 16 of the longest completions, and W2."""
    w3 = watched.given_step(trainer, lengths[:16])
    found = {"w3_rollout_s": w3["rollout"], "w3_learn_s": w3["learn"], "w3_tokens": w3["tokens"]}
    longest = watched.padded_batch(trainer, [LONGEST] * 16)
    found["long_learn_peak_gib"] = watched.our_learning(trainer, longest, 1)["peak_gib"]
    scored = min(16, trainer.run.plan.micro_batch) * LONGEST
    found |= {"long_logits_gib": scored * config["vocab_size"] * 4 / 2**30, "long_head_gib": head_peak(trainer, scored)}
    lengths = ragged(lengths)
    w2 = watched.our_learning(trainer, watched.padded_batch(trainer, lengths), 1)  # its kernels are compiled by now
    return found | {"w2_learn_s": w2["seconds"], "w2_mean": sum(lengths) / len(lengths), "w2_max": max(lengths)}


def ragged(lengths: list[int]) -> list[int]:
    """W2's 96 lengths."""
    return [lengths[i % len(lengths)] for i in range(96)]


def step_child(options: argparse.Namespace) -> int:
    """One child of `bench_step`: three steps of W1 through the entry point; with BF16 experts also TRL's path, W2 and W3."""
    full, found, batches = options.child == "bf16", {}, []

    def learn(original: Callable[..., Any], trainer: Trainer, model: Any, batch: dict[str, torch.Tensor]) -> Any:
        batches[:] = [batch]
        return original(trainer, model, batch)

    with (
        watched.PeakMemory() as memory,
        watched.intercept(Trainer, "learn", learn),
        watched.kept_trainers() as trainers,
        watched.completions_of(512),
    ):
        code = watched.run_w1(options, MAX_COMPLETION_LEN=LONGEST if full else 512, EXPERTS=options.child)
    if code:
        return code
    (trainer,), (batch,) = trainers, batches
    config = read_json(Path(options.model) / "config.json")
    trainer.model.train()
    found |= run_figures(Path(options.run), trainer.run.plan, memory.peak) | w1_learning(trainer, batch, config)
    watched.keep(options, found)
    if not full:
        return 0
    lengths = real_lengths(Path(options.lengths), options.model)
    for part in (lambda: other_lengths(trainer, lengths, config), lambda: compare_step(trainer, batch)):
        found |= part()
        watched.keep(options, found)
    try:
        w2 = watched.padded_batch(trainer, ragged(lengths))
        trl_learning(trainer, w2, 4, least=1)
        found["w2_learn_trl_s"] = trl_learning(trainer, w2, 4)["seconds"]
    except torch.OutOfMemoryError as error:
        print(f"bench: TRL's padded path does not fit W2: {str(error).splitlines()[0][:200]}", file=sys.stderr)
    watched.keep(options, found)
    return 0


def bench_step(options: argparse.Namespace) -> int:
    """Two children, BF16 and packed experts; with the packed ones all but 40 GiB of the card is occupied."""
    if options.child:
        return step_child(options)
    results: dict[str, dict[str, Any]] = {}
    for child in ("bf16", "mxfp4"):
        if options.only in (None, child):
            ballast = watched.occupy(40.0) if child == "mxfp4" else None
            code = watched.run_child(options, child)
            del ballast
            if code:
                return code
        there = watched.child_result(options, child)
        if not (result := watched.kept(there, options)):
            if child == "mxfp4" and not there.exists():
                continue
            what = "is of another commit or model" if there.exists() else "is not there"
            print(f"{there} {what}: run --only {child} first", file=sys.stderr)
            return 1
        results[child] = result
        # After each child: what was measured is not lost when the machine is given back during the next one.
        write(Path(options.out), step_figures(results), shown("step", "--lengths real_completions.csv"))
    return 0


def step_figures(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Figures of the children that have ended: `bf16`, then `mxfp4`."""
    found, packed = dict(results["bf16"]), results.get("mxfp4")
    # What a step has besides: rewards, clipping, the optimizer, logging; of 96 completions, so rather more than W3's.
    found["rest"] = found["w1_step_s"] - found["w1_rollout_s"] - found["w1_learn_s"]
    found["w3_step_s"] = found["w3_rollout_s"] + found["w3_learn_s"] + found["rest"]
    if theirs := found.get("w1_learn_trl_s"):
        ours, old = found["w1_learn_s"], found["w1_trl_old_logps_s"]
        found |= {"w1_speedup": theirs / ours, "w1_speedup_without_pass": (theirs - old) / ours}
    found |= {"job_peak_bf16_gib": found["job_peak_gib"], "plan_error_bf16": found["plan_error"]}
    if packed:
        found |= {"w1_job_peak_mxfp4_gib": packed["job_peak_gib"], "plan_error_mxfp4": packed["plan_error"]}
        found |= {"w1_learn_mxfp4_s": packed["w1_learn_s"], "micro_batch_mxfp4": packed["micro_batch"]}
    return tabled(STEP, found)
