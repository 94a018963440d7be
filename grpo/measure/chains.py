# SPDX-License-Identifier: Apache-2.0
"""What the chains of a model that reasons are worth: each of two models answers behind its own and the other's."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import numpy as np

from grpo.data.prompts import ANSWER_BEFORE
from grpo.evaluate.ask import prepare
from grpo.evaluate.models import start_model
from grpo.measure.record import Json
from grpo.model.warmup_rows import ACTIONS
from grpo.plan.machine import read_machine


def chain_figures(run: Path, heldout: Path) -> Json:
    """How often the plans of the base model and of the adapter in `run` are the best action, in one chain for each
    held-out prompt at EVAL_TEMPERATURE, and the expected reward of both models' answers behind both models' chains. The
    answers are not sampled."""
    options = argparse.Namespace(adapter=run, model=None, serve=False, csv=heldout, system=None, out=None)
    settings, files, rows = prepare(options)
    model = start_model(settings, files, run, read_machine(), use_vllm=False)
    prompts = [row.prompt for row in rows]
    rewards = np.array([[float(str(row.columns[f"reward_action_{k}"])) for k in range(ACTIONS)] for row in rows])
    chains: dict[str, list[str]] = {}
    figures: dict[str, float] = {}
    for name in ("base", "trained"):
        completions = model.tokenizer.batch_decode(model.complete(prompts, base=name == "base"))
        chains[name] = [text.partition(ANSWER_BEFORE)[0] for text in completions]
        pairs = zip(chains[name], rewards, strict=True)
        is_best = [f"action {reward.argmax()}<|end|>" in chain for chain, reward in pairs]
        figures[f"plan_best_{name}"] = float(np.mean(is_best))
    for chain, answer in itertools.product(chains, chains):
        opened = [prompt + text for prompt, text in zip(prompts, chains[chain], strict=True)]
        shares = model.probabilities(opened, ACTIONS, greedy=False, base=answer == "base")
        figures[f"reward_chain_{chain}_answer_{answer}"] = float((shares * rewards).sum(-1).mean())
    return figures
