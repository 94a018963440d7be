# SPDX-License-Identifier: Apache-2.0
"""Rollouts without vLLM, on a small card."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from grpo.measure import watched
from grpo.measure.record import shown, steps_of, tabled, write
from grpo.measure.rollout import hf_tokens_per_second

CARD_GIB, TOKENS = 22.0, 512
GENERATE = """
generate_tok_s | tokens/s | 96 x 512 tokens without vLLM, EXPERTS=mxfp4, {rows} at once: the rollouts of steps 2 and 3, prefill and capture included
hf_generate_tok_s | tokens/s | transformers' own generate in the same process, on the same experts, 48 of the prompts x 64 tokens, with the whole card
speedup | x | the two above
token_s | s | a token of all {rows} rows, prefill and capture included
step_s rollout_s learn_s | s | the whole step, and its parts
job_peak_gib | GiB | by the driver, CUDA context included; all but 22 GiB of the card were occupied
plan_error | share | plan of --check against that peak
"""


def bench_generate(options: argparse.Namespace) -> int:
    """W1 without vLLM in this process, with CARD_GIB of the card, and transformers' own generate. Returns the exit code."""
    memory = watched.PeakMemory()  # before this process touches the GPU
    context = memory.before - torch.cuda.mem_get_info()[0] / 2**30
    ballast = watched.occupy(CARD_GIB - context)
    with watched.kept_trainers() as trainers, memory:
        if code := watched.run_w1(options, USE_VLLM=0, EXPERTS="mxfp4", MAX_COMPLETION_LEN=TOKENS):
            return code
    peak = memory.peak - ballast.nbytes / 2**30
    del ballast
    torch.cuda.empty_cache()
    trainer, later = trainers[0], steps_of(Path(options.run))[1:]
    plan, prompts = trainer.run.plan, watched.prompts_of(watched.padded_batch(trainer, [1] * 48))
    found = {name: later[name].mean() for name in ("step_s", "rollout_s", "learn_s")}
    found |= {"rows": plan.generation_batch, "job_peak_gib": peak, "plan_error": plan.peak / peak - 1}
    found["generate_tok_s"] = later.rollout_tokens_per_s.mean()
    found["token_s"] = found["rows"] / found["generate_tok_s"]
    found["hf_generate_tok_s"] = hf_tokens_per_second(trainer, prompts, 64)
    found["speedup"] = found["generate_tok_s"] / found["hf_generate_tok_s"]
    write(Path(options.out), tabled(GENERATE, found), shown("generate"))
    return 0
