# SPDX-License-Identifier: Apache-2.0
"""The whole path for a few steps, weights compared before and after."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from safetensors.torch import load_file

from grpo.measure.record import figure, steps_of, write
from grpo.measure.watched import changed_elements, run_in_process


def bench_main(options: argparse.Namespace) -> int:
    run = Path(options.run).absolute()
    settings = {
        "MODEL_ID": str(options.model), "DATA": options.data, "USE_VLLM": "0", "EVAL_SAMPLES": "0", "PROMPTS_PER_STEP": "4",
        "NUM_GENERATIONS": "4", "MAX_COMPLETION_LEN": "128", "TOTAL_STEPS": str(options.steps), "SAVE_STEPS": "1",
        "SAVE_TOTAL_LIMIT": "99", "OUTPUT_DIR": str(run), "OVERWRITE": "1", "ATTN_IMPL": options.attention,
        "MICRO_BATCH": str(options.micro_batch), "REWARDS": options.rewards,
    }  # fmt: skip
    loaded = run_in_process(options.main, settings)
    if loaded["code"]:
        return loaded["code"]
    total = loaded["total_s"]
    changed = changed_elements(loaded["parameters"])

    elements = sum(p.numel() for p, _ in loaded["parameters"])
    first = load_file(run / "checkpoint-1" / "adapter_model.safetensors")
    last = load_file(run / "adapter_model.safetensors")
    moved = sum(bool((last[name] != first[name]).any()) for name in last)
    trained = sum(bool(last[name].any()) for name in last if "lora_B" in name)
    steps = steps_of(run)
    plan = json.loads((run / "settings.json").read_text(encoding="utf-8"))["choices"]["plan"]
    later = steps[1:] or steps  # the first step pays for compilation and caches

    def mean(name: str) -> float:
        return sum(float(step[name]) for step in later) / len(later)

    figures = [
        figure("load_s", loaded["load_s"], "s", "checkpoint to a dequantized BF16 model on the GPU"),
        figure("first_step_s", float(steps[0]["step_s"]), "s", "compilation and allocation included"),
        *(figure(name, mean(name), "s", f"mean of steps 2 to {len(steps)}") for name in ("step_s", "rollout_s", "reward_s", "learn_s")),
        figure("rollout_tokens_per_s", mean("rollout_tokens_per_s"), "tokens/s", "transformers' generate, 16 sequences"),
        figure("total_s", total, "s", "the whole run, loading and saving included"),
        figure("gpu_peak_gib", max(float(step["gpu_peak_gib"] or 0) for step in steps), "GiB", "allocated, any step"),
        figure("planned_peak_gib", sum(plan[k] for k in ("weights", "adapter")) + max(plan["generation"], plan["learning"]), "GiB", "what --check predicts"),
        figure("base_elements", elements, "", "elements of the base weights that were compared"),
        figure("base_changed_elements", changed, "", "bit for bit, against a copy made right after loading"),
        figure("adapter_tensors", len(last), ""),
        figure("adapter_moved_tensors", moved, "", "differ between the first checkpoint and the end"),
        figure("adapter_nonzero_lora_b", trained, "", "lora_B starts at 0"),
        figure("completed_steps", len(steps), "steps"),
        figure("reward_std", mean("reward_std"), "reward", "the bench rewards noise: advantages were not all 0"),
    ]  # fmt: skip
    environment = " ".join(f"{k}={v}" for k, v in settings.items() if k not in ("MODEL_ID", "DATA", "OUTPUT_DIR"))
    write(Path(options.out), figures, f"python scripts/bench.py main --attention {options.attention}  # {environment}")
    return int(changed != 0 or moved == 0)
