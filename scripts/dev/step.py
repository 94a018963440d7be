# SPDX-License-Identifier: Apache-2.0
"""This learner beside TRL's own padded path on the same completions (docs/results/step-h200.json, again)."""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from trl import GRPOTrainer

from grpo.learn.trainer import Trainer
from grpo.model.load import unwrap_peft
from grpo.plan.machine import GIB
from grpo.process.child import run_child
from scripts.dev.harness import Function, intercept, run_settings
from scripts.dev.record import BENCH, command_with_variables, read_json, tabled, write
from scripts.dev.rollout import RUN, RunWatch, child_path

MICRO_BATCHES = (8, 16, 24, 32, 48, 96)  # completions, tried for TRL's path
STEP = """
learn_again_s | s | learning from the last step's completions once more, alone
learn_peak_gib | GiB | of that, allocated beyond weights and sleeping engine
learn_trl_s | s | TRL's padded path on the same, {attention}, in its fastest micro-batches within that memory: {trl_micro}
trl_old_logps_s | s | of that, the pass for old log-probs, which TRL makes only beside vLLM
trl_peak_gib | GiB | allocated beyond weights and sleeping engine
speedup speedup_without_pass | x | TRL's path against learn_again_s, with and without that pass
"""


@contextlib.contextmanager
def weighed() -> Iterator[dict[str, float]]:
    cost: dict[str, float] = {}
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats(); before = torch.cuda.memory_allocated(); torch.cuda.synchronize()
    started = time.perf_counter()
    yield cost
    if gpu:
        torch.cuda.synchronize()
    cost["seconds"] = time.perf_counter() - started
    cost["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / GIB if gpu else 0.0


def trl_learning(trainer: Any, batch: Any, micro: int, only_first: bool = False) -> dict[str, float]:
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    count, kept = micro if only_first else len(ids), batch["completion_ids"].size(1)
    ours = trainer.__class__
    trainer.__class__, trainer.current_gradient_accumulation_steps = GRPOTrainer, max(count // micro, 1)
    try:
        with weighed() as cost:
            started = time.perf_counter()
            with torch.no_grad():
                logps, *_ = trainer._get_per_token_logps_and_entropies(trainer.model, ids[:count], mask[:count], kept, batch_size=micro)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            old_s = time.perf_counter() - started
            for i in range(0, count, micro):
                part = {k: v[i : i + micro] if torch.is_tensor(v) and v.ndim else v for k, v in batch.items()}
                part.pop("sampling_per_token_logps", None)
                trainer._compute_loss(trainer.model, part | {"old_per_token_logps": logps[i : i + micro]}).backward()
        return cost | {"old_s": old_s, "micro": micro}
    finally:
        trainer.__class__, trainer.current_gradient_accumulation_steps = ours, 1
        trainer._metrics["train"].clear()


def fastest_trl(trainer: Any, batch: Any, most_gib: float) -> dict[str, float]:
    costs: list[dict[str, float]] = []
    for micro in MICRO_BATCHES:
        if micro > len(batch["advantages"]):
            break
        try:
            if trl_learning(trainer, batch, micro, only_first=True)["peak_gib"] > most_gib and costs:
                break
            trainer.model.zero_grad(set_to_none=True)
            costs.append(trl_learning(trainer, batch, micro))
            print("TRL", costs[-1], flush=True)
        except torch.OutOfMemoryError:
            if not costs:
                raise
            break
        finally:
            trainer.model.zero_grad(set_to_none=True)
    return min(costs, key=lambda cost: cost["seconds"])


def step_child(options: argparse.Namespace) -> int:
    with contextlib.ExitStack() as stack:
        watch, last = RunWatch(stack, options.tokens), {}

        def keep(learn: Function, trainer: Trainer, *arguments: Any) -> Any:
            last["arguments"] = arguments
            return learn(trainer, *arguments)

        stack.enter_context(intercept(Trainer, "learn", keep))
        os.environ |= run_settings(options, {"MAX_COMPLETION_LEN": 4000, "EXPERTS": "bf16", **dict(options.set)})
        if code := options.main([]):
            return code
        values = watch.values(Path(options.run))
        trainer: Any = watch.trainer
        model, batch, *rest = last["arguments"]
        print("batch", {k: tuple(v.shape) if torch.is_tensor(v) else v for k, v in batch.items()}, rest, flush=True)
        trainer.model.train()
        for _ in range(2):
            with weighed() as ours:
                trainer.learn(model, batch, *rest)
            trainer.model.zero_grad(set_to_none=True)
        trainer._metrics["train"].clear()
        print("ours", ours, flush=True)
        base = unwrap_peft(trainer.model)
        attention = "flex_attention" if torch.cuda.is_available() else "eager"
        base.set_attn_implementation(attention)
        base.set_experts_implementation("grouped_mm")
        trl = fastest_trl(trainer, batch, ours["peak_gib"])
        values |= {"learn_again_s": ours["seconds"], "learn_peak_gib": ours["peak_gib"], "attention": attention,
            "learn_trl_s": trl["seconds"], "trl_old_logps_s": trl["old_s"], "trl_peak_gib": trl["peak_gib"], "trl_micro": trl["micro"],
            "speedup": trl["seconds"] / ours["seconds"], "speedup_without_pass": (trl["seconds"] - trl["old_s"]) / ours["seconds"]}
    child_path(options).write_text(json.dumps(values), encoding="utf-8")
    return 0


def bench_step(options: argparse.Namespace) -> int:
    if options.child:
        return step_child(options)
    child_path(options).unlink(missing_ok=True)
    code = run_child([sys.executable, str(BENCH), *sys.argv[1:], "--child"])
    if values := read_json(child_path(options)):
        setup = ", ".join([values["size"], *(f"{name}={value}" for name, value in options.set)])
        write(Path(options.out), tabled(RUN, values | {"setup": setup}) + tabled(STEP, values), command_with_variables())
    return code
