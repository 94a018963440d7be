# SPDX-License-Identifier: Apache-2.0
"""This learner beside TRL's padded path."""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from trl import GRPOTrainer

from grpo.learn.trainer import Trainer
from grpo.measure.record import BENCH, NOISE, commit, figure, shown, steps_of, write
from grpo.measure.watched import (
    PeakMemory,
    ballast,
    given_step,
    joined,
    keep_trainer,
    limit_completions,
    our_learning,
    padded_batch,
    weighed,
)
from grpo.preflight.hub import count_parameters
from grpo.rollout.engine import Engine

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # dense BF16, from the data sheets


def floor_seconds(config: dict[str, Any], distinct: int, scored: int) -> float:
    """Time of the arithmetic alone at the card's peak: three products (forward, recomputed forward, gradient of the input;
    weights are frozen) for each of `distinct` tokens, and the head for the `scored` ones."""

    parts = count_parameters(config)
    active = parts["attention"] + parts["experts"] * config["num_experts_per_tok"] / config["num_local_experts"]
    name = torch.cuda.get_device_name(0)
    peak = next((value for key, value in PEAK_FLOPS.items() if key in name), math.nan)
    return 6 * (active * distinct + config["vocab_size"] * config["hidden_size"] * scored) / peak


def trl_learning(trainer: Any, batch: dict[str, Any], micro: int, least: int | None = None) -> dict[str, Any]:
    """TRL's own padded path on `batch`: the pass for old log-probs that it makes beside vLLM, then loss and backward of
    micro-batches of `micro`. Returns seconds (in all, and of that pass), log-probs, the adapter's gradient in one piece and the
    most memory that torch allocated meanwhile. `least`: only so many micro-batches, to warm up."""

    ours = trainer.__class__
    trainer.__class__ = GRPOTrainer
    model, (ids, mask, keep) = trainer.model, joined(batch)
    count = len(ids) if least is None else micro * least
    trainer.current_gradient_accumulation_steps = max(count // micro, 1)
    try:
        with weighed() as found:
            started = time.perf_counter()
            with torch.no_grad():
                logps = trainer._get_per_token_logps_and_entropies(
                    model, ids[:count], mask[:count], keep, batch_size=micro
                )[0]
            torch.cuda.synchronize()
            old = time.perf_counter() - started
            for i in range(0, count, micro):
                part = {k: v[i : i + micro] if v.ndim else v for k, v in batch.items()}
                trainer._compute_loss(model, part | {"old_per_token_logps": logps[i : i + micro]}).backward()
        return found | {"old_seconds": old, "logps": logps, "gradient": adapter_gradient(model)}
    finally:
        trainer.__class__, trainer.current_gradient_accumulation_steps = ours, 1
        trainer._metrics["train"].clear()
        model.zero_grad(set_to_none=True)


def adapter_gradient(model: Any) -> Any:
    """The gradient of all that learns, in one float32 vector."""

    return torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])


def compare_gradients(trainer: Any, batch: dict[str, Any], attention: str = "flex_attention") -> dict[str, float]:
    """Relative differences (2-norm of the difference by the 2-norm) of the adapter's gradient on the first two groups of
    `batch`: this learner against TRL's path, TRL's with micro-batches of 4 against 8, and this learner with the prompts exchanged.

    Every completion counts to its last column, so that TRL's mean over a micro-batch is the same however it is cut; the
    importance correction, which TRL applies beside its own vLLM alone, is left out of both. Leaves the model with `attention`
    and transformers' experts, as TRL's path needs it.
    """

    rows = 2 * trainer.num_generations
    part = {k: v[:rows] if v.ndim else v for k, v in batch.items() if torch.is_tensor(v) and "sampling" not in k}
    part["completion_mask"] = torch.ones_like(part["completion_mask"])
    part["num_items_in_batch"] = part["completion_mask"].sum().float()
    wrong = {**part, **{k: part[k].roll(trainer.num_generations, 0) for k in ("prompt_ids", "prompt_mask")}}
    ours = []
    for one in (part, wrong):
        trainer.learn(trainer.model, one)
        ours.append(adapter_gradient(trainer.model))
        trainer.model.zero_grad(set_to_none=True)
    trainer._metrics["train"].clear()
    base = trainer.accelerator.unwrap_model(trainer.model).get_base_model()
    base.set_attn_implementation(attention)
    base.set_experts_implementation("grouped_mm")
    theirs, four = (trl_learning(trainer, part, micro)["gradient"] for micro in (8, 4))

    def apart(one: Any) -> float:
        return ((one - theirs).norm() / theirs.norm()).item()

    return {"difference": apart(ours[0]), "batching": apart(four), "wrong_prompt": apart(ours[1])}


def head_peak(trainer: Any, tokens: int) -> float:
    """GiB that log-probs of `tokens` tokens and their backward pass take beyond the states."""

    base = trainer.accelerator.unwrap_model(trainer.model).get_base_model()
    states = torch.randn(tokens, base.config.hidden_size, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    targets = torch.randint(0, base.config.vocab_size, (tokens,), device="cuda")
    torch.cuda.empty_cache()
    with weighed() as found:
        with trainer.accelerator.autocast():
            logps, _ = trainer.compute_logps(base, states, targets)
        logps.sum().backward()
    return found["peak_gib"]


def real_lengths(path: Path, model: str) -> list[int]:
    """Tokens of the `completion` column of a CSV, in the model's vocabulary."""

    csv.field_size_limit(2**31 - 1)
    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    with path.open(newline="", encoding="utf-8") as file:
        return [len(tokenizer.encode(row["completion"]).ids) for row in csv.DictReader(file)]


def step_child(options: argparse.Namespace) -> int:
    """One child of `bench_step`: three steps of W1 through the entry point; with BF16 experts also TRL's path, W2 and W3."""

    tokens, seen = 512, {"child": options.child, "commit": commit()}
    generate, most = limit_completions(tokens), "4000" if options.child == "bf16" else str(tokens)
    learn = Trainer.learn

    def learn_and_keep(self: Any, model: Any, batch: dict[str, Any]) -> Any:
        seen["batch"] = batch
        return learn(self, model, batch)

    Trainer.learn = learn_and_keep
    memory = PeakMemory()
    run = Path(options.run).absolute()
    settings = {
        "MODEL_ID": str(options.model), "DATA": options.data, "USE_VLLM": "1", "PROMPTS_PER_STEP": "12",
        "NUM_GENERATIONS": "8", "MAX_COMPLETION_LEN": most, "TOTAL_STEPS": "3", "SAVE_STEPS": "9", "EVAL_SAMPLES": "0",
        "OUTPUT_DIR": str(run), "OVERWRITE": "1", "REWARDS": f"action,{NOISE}", "EXPERTS": options.child,
    }  # fmt: skip
    os.environ.update(settings)
    wake, sleep = Engine.wake, Engine.sleep

    def watched_wake(self: Any) -> None:
        memory.phase = "rollout"
        wake(self)

    def watched_sleep(self: Any) -> None:
        sleep(self)
        memory.phase = "learning"

    keep_trainer(seen)
    Engine.wake, Engine.sleep = watched_wake, watched_sleep
    code = options.main([])
    memory.running = False
    memory.join()
    Trainer.learn, Engine.wake, Engine.sleep = learn, wake, sleep
    if code:
        return code
    trainer, batch = seen.pop("trainer"), seen.pop("batch")
    config = json.loads((Path(options.model) / "config.json").read_text(encoding="utf-8"))
    plan = json.loads((run / "settings.json").read_text(encoding="utf-8"))["choices"]["plan"]
    engine = plan["engine"]
    awake = engine["weights"] + engine["scratch"] + engine["cache"]
    planned = plan["weights"] + plan["adapter"] + max(awake, plan["learning"] + engine["asleep"])
    seen["steps"] = steps_of(run)
    seen |= {"job_peaks_gib": memory.peaks, "planned_gib": planned, "micro_batch": plan["micro_batch"]}
    out = Path(options.out)

    def keep() -> None:  # after each part: what was measured is not lost with a part that fails
        out.write_text(json.dumps(seen), encoding="utf-8")

    trainer.model.train()
    seen["w1"] = our_learning(trainer, batch)
    prompts = batch["prompt_mask"].sum(1)[:: trainer.num_generations].sum().item()
    scored = int(batch["completion_mask"].sum().item())
    seen["w1_floor_s"] = floor_seconds(config, prompts + scored, scored)
    keep()
    if options.child == "mxfp4":
        return 0
    lengths = real_lengths(Path(options.lengths), options.model)
    ragged = [lengths[i % len(lengths)] for i in range(96)]
    # W3: rollout and learning of the first sixteen of those completions, two prompts.
    w3 = given_step(trainer, generate, lengths[:16])
    seen["w3_rollout_s"], seen["w3_learn_s"], seen["w3_tokens"] = w3["rollout"], w3["learn"], w3["tokens"]
    seen["long_peak_gib"] = our_learning(trainer, padded_batch(trainer, [4000] * 16, 8), 1)["peak_gib"]
    scored = min(16, plan["micro_batch"]) * 4000
    seen["long_logits_gib"] = scored * config["vocab_size"] * 4 / 2**30
    seen["long_head_gib"] = head_peak(trainer, scored)
    keep()
    w2 = padded_batch(trainer, ragged, 8)
    seen["w2"] = our_learning(trainer, w2, 1)  # its kernels are compiled by now
    seen["w2_mean"], seen["w2_max"] = sum(ragged) / 96, max(ragged)
    keep()
    with torch.no_grad():
        ours = trainer._get_per_token_logps_and_entropies(trainer.model, *joined(batch))[0]
        shifted = {**batch, **{k: batch[k].roll(trainer.num_generations * 3, 0) for k in ("prompt_ids", "prompt_mask")}}
        wrong = trainer._get_per_token_logps_and_entropies(trainer.model, *joined(shifted))[0]
    seen["gradients"] = compare_gradients(trainer, batch)
    trl_learning(trainer, batch, 8, least=1)
    theirs = trl_learning(trainer, batch, 8)
    seen |= {
        "w1_trl_s": theirs["seconds"],
        "w1_trl_old_s": theirs["old_seconds"],
        "w1_trl_peak_gib": theirs["peak_gib"],
    }
    keep()
    four = trl_learning(trainer, batch, 4, least=2)["logps"]
    mask = batch["completion_mask"].bool()
    seen["logp_difference"] = (ours - theirs["logps"]).abs()[mask].mean().item()
    seen["logp_wrong_prompt"] = (wrong - theirs["logps"]).abs()[mask].mean().item()
    seen["logp_batching"] = (four - theirs["logps"][:8]).abs()[mask[:8]].mean().item()
    keep()
    try:
        trl_learning(trainer, w2, 4, least=1)
        seen["w2_trl_s"] = trl_learning(trainer, w2, 4)["seconds"]
    except torch.OutOfMemoryError as error:
        seen["w2_trl_error"] = str(error).splitlines()[0][:200]
        print(f"bench: TRL's padded path does not fit W2: {seen['w2_trl_error']}", file=sys.stderr)
    keep()
    return 0


def bench_step(options: argparse.Namespace) -> int:
    """Two children, BF16 and packed experts; with the packed ones all but 40 GiB of the card is occupied."""
    results: dict[str, Any] = {}
    for child in ("bf16", "mxfp4"):
        out = Path(options.run).absolute().with_name(f"step-{child}.json")
        out.parent.mkdir(parents=True, exist_ok=True)
        if options.only in (None, child):
            out.unlink(missing_ok=True)
            command = [sys.executable, str(BENCH), "step", "--child", child, "--model", options.model]
            command += ["--data", options.data, "--lengths", options.lengths, "--out", str(out), "--run", options.run]
            with contextlib.nullcontext() if child == "bf16" else ballast(40.0):
                code = subprocess.run(command, check=False).returncode
            if code:
                print(f"child {child} ended with exit code {code}; {out} holds what it had measured", file=sys.stderr)
                return code
        elif child == "mxfp4" and not out.exists():
            continue
        if not out.exists():
            print(f"no {out}: run --only {child} first", file=sys.stderr)
            return 1
        results[child] = json.loads(out.read_text(encoding="utf-8"))
        if results[child]["commit"] != commit():
            print(f"{out} is of commit {results[child]['commit']}: run --only {child} again", file=sys.stderr)
            return 1
        # After each child: what was measured is not lost when the machine is given back during the next one.
        write(Path(options.out), step_figures(results), shown("step", "--lengths real_completions.csv"))
    return 0


def step_figures(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Figures of the children that have ended: `bf16`, then `mxfp4`."""
    one, packed = results["bf16"], results.get("mxfp4")
    later = one["steps"][1:]

    def mean(name: str) -> float:
        return sum(float(step[name]) for step in later) / len(later)

    generated = sum(
        float(step["rollout_tokens_per_s"])
        * float(step["rollout_s"])
        / (float(step["rollout_s"]) - sum(float(step[name]) for name in ("wake_s", "handover_s", "sleep_s")))
        for step in later
    )
    # What a step has besides: rewards, clipping, the optimizer, logging; of 96 completions, so rather more than W3's.
    rest = mean("step_s") - mean("rollout_s") - one["w1"]["seconds"]
    peak = {child: max(seen["job_peaks_gib"].values()) for child, seen in results.items()}
    error = {child: seen["planned_gib"] / peak[child] - 1 for child, seen in results.items()}
    figures = [
        figure("w1_step_s", mean("step_s"), "s", "12 x 8 completions of 512 tokens, the whole step: mean of steps 2 and 3 of a run"),
        figure("w1_rollout_s", mean("rollout_s"), "s", "its rollout, hand-over, waking and sleeping included"),
        figure("w1_wake_s", mean("wake_s"), "s", "of that"),
        figure("w1_handover_s", mean("handover_s"), "s", "of that"),
        figure("w1_sleep_s", mean("sleep_s"), "s", "of that"),
        figure("w1_reward_s", mean("reward_s"), "s", "decoding and scoring the completions"),
        figure("rollout_tok_s", mean("rollout_tokens_per_s"), "tokens/s", "tokens by that time"),
        figure("generate_tok_s", generated / len(later), "tokens/s", "the same without hand-over, waking and sleeping"),
        figure("w1_learn_s", one["w1"]["seconds"], "s", f"its learning alone, in passes of up to {one['micro_batch']} completions of 4,000"),
        figure("w1_learn_peak_gib", one["w1"]["peak_gib"], "GiB", "allocated beyond weights and sleeping engine"),
        figure("w1_floor_s", one["w1_floor_s"], "s", "the arithmetic alone at the card's dense BF16 peak"),
        figure("w1_floor_ratio", one["w1"]["seconds"] / one["w1_floor_s"], "x", "learning against it"),
        figure("w2_learn_s", one["w2"]["seconds"], "s", f"96 completions, mean {one['w2_mean']:.0f}, longest {one['w2_max']} tokens, with their prompts"),
        figure("w2_peak_gib", one["w2"]["peak_gib"], "GiB", "allocated beyond weights and sleeping engine"),
        figure("long_learn_peak_gib", one["long_peak_gib"], "GiB", f"16 completions of 4,000 tokens in passes of up to {one['micro_batch']}, allocated beyond weights and sleeping engine"),
        figure("long_head_gib", one["long_head_gib"], "GiB", "of that, what the log-probs of one such pass and their backward take beyond the states"),
        figure("long_logits_gib", one["long_logits_gib"], "GiB", "what the logits of one such pass would take in float32; half of it in BF16"),
        figure("w3_step_s", one["w3_rollout_s"] + one["w3_learn_s"] + rest, "s", f"16 completions of that kind, {one['w3_tokens']} tokens in all: rollout, learning, and the {rest:.2f} s that a step of W1 has besides"),
        figure("w3_rollout_s", one["w3_rollout_s"], "s", "waking, hand-over and sleeping included"),
        figure("w3_learn_s", one["w3_learn_s"], "s"),
        figure("job_peak_bf16_gib", peak["bf16"], "GiB", "EXPERTS=bf16, MAX_COMPLETION_LEN=4000; " + ", ".join(f"{phase} {gib:.1f}" for phase, gib in one["job_peaks_gib"].items())),
        figure("plan_error_bf16", error["bf16"], "share", "plan of --check against that peak"),
        figure("w1_learn_trl_s", one["w1_trl_s"], "s", "TRL's padded path on the same rollouts in the same process: flex attention, old log-probs, micro-batches of 8"),
        figure("w1_speedup", one["w1_trl_s"] / one["w1"]["seconds"], "x", "learning against it"),
        figure("w1_trl_old_logps_s", one["w1_trl_old_s"], "s", "of that, the pass for old log-probs"),
        figure("w1_trl_peak_gib", one["w1_trl_peak_gib"], "GiB", "allocated beyond weights and sleeping engine"),
        figure("gradient_difference", one["gradients"]["difference"], "share", "adapter's gradient on 16 of the completions, this learner against TRL's path: 2-norm of the difference by the 2-norm"),
        figure("gradient_batching", one["gradients"]["batching"], "share", "TRL's path with micro-batches of 4 against 8"),
        figure("gradient_wrong_prompt", one["gradients"]["wrong_prompt"], "share", "this learner with the prompts exchanged against TRL's path"),
        figure("logp_difference", one["logp_difference"], "nats", "mean over tokens, this learner against TRL's path"),
        figure("logp_batching", one["logp_batching"], "nats", "TRL's path against itself with micro-batches of 4"),
        figure("logp_wrong_prompt", one["logp_wrong_prompt"], "nats", "this learner with other rows' prompts against TRL's path"),
    ]  # fmt: skip
    if packed:
        figures += [
            figure("w1_job_peak_mxfp4_gib", peak["mxfp4"], "GiB", "EXPERTS=mxfp4, all but 40 GiB of the card occupied; by the driver, engine and CUDA context included"),
            figure("w1_learn_mxfp4_s", packed["w1"]["seconds"], "s", f"EXPERTS=mxfp4, passes of up to {packed['micro_batch']} completions"),
            figure("mxfp4_ratio", packed["w1"]["seconds"] / one["w1"]["seconds"], "x", "learning against EXPERTS=bf16"),
            figure("plan_error_mxfp4", error["mxfp4"], "share", "the same with EXPERTS=mxfp4"),
        ]  # fmt: skip
    if "w2_trl_s" in one:
        figures.append(figure("w2_learn_trl_s", one["w2_trl_s"], "s", "TRL's padded path, micro-batches of 4"))
        figures.append(figure("w2_speedup", one["w2_trl_s"] / one["w2"]["seconds"], "x", "learning against it"))
    return figures
