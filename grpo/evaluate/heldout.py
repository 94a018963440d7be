# SPDX-License-Identifier: Apache-2.0
"""Held-out reward before and after training."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import rewards
from grpo.data.files import Row, data_fingerprint
from grpo.data.scoring import completion_rates
from grpo.evaluate.exact import answer_probabilities
from grpo.learn.trainer import Trainer
from grpo.model.load import evaluating
from grpo.run.folder import write_text
from grpo.settings import log


def generate_completions(
    trainer: Trainer,
    prompts: Sequence[str],
    samples: int,
    base: bool,
    step: int = 0,
    temperature: float | None = None,
) -> list[list[int]]:
    """Token ids of one completion for each prompt, generated as the rollouts are (same engine and length) at `temperature`
    (None: EVAL_TEMPERATURE, 0: greedily). The seed is that of `step`, before as after training. `base`: without the adapter."""
    run, now = trainer.run, trainer.state.global_step
    prompt_ids = trainer._tokenize_prompts(list(prompts))[0]
    run.stream = "base" if base else "evaluation"
    run.temperature = run.settings.EVAL_TEMPERATURE if temperature is None else temperature
    trainer.state.global_step = step
    try:
        with evaluating(trainer.model), trainer.model.disable_adapter() if base else contextlib.nullcontext():
            return trainer._generate_single_turn(prompt_ids, None, {}, samples)[0]
    finally:
        run.stream, run.temperature, trainer.state.global_step = "train", None, now


def exact_probabilities(trainer: Trainer, prompts: Sequence[str], base: bool, greedy: bool, actions: int) -> np.ndarray:
    """(N, K): `answer_probabilities` of the trainer's model, greedily or at EVAL_TEMPERATURE."""
    policy = trainer.accelerator.unwrap_model(trainer.model)
    temperature = 0.0 if greedy else trainer.run.settings.EVAL_TEMPERATURE
    with policy.disable_adapter() if base else contextlib.nullcontext():
        return answer_probabilities(policy.get_base_model(), trainer.processing_class, prompts, temperature, actions)


def evaluate(
    trainer: Trainer, rows: Sequence[Row], exact: bool, base: bool = False, greedy: bool = False
) -> dict[str, Any]:
    """What the answers to the held-out rows are worth by the CSV: `rewards.score_probabilities` of EVAL_SAMPLES completions
    a row (`greedy`: of one) with their lengths, or of all answers (`exact`). An answer that cannot be parsed counts as
    INVALID_REWARD, or as the row's lowest reward where that is auto or nan."""
    s, worth = trainer.run.settings, [row.rewards for row in rows]
    invalid = math.nan if s.INVALID_REWARD is None else s.INVALID_REWARD
    samples = 1 if greedy else s.EVAL_SAMPLES
    if exact:
        found = exact_probabilities(trainer, [row.prompt for row in rows], base, greedy, max(map(len, worth)))
        p = [mine[: len(row)] for mine, row in zip(found.tolist(), worth, strict=True)]
        return rewards.score_probabilities(worth, p, [samples] * len(rows), invalid)
    sampled = [row for row in rows for _ in range(samples)]
    temperature = 0.0 if greedy else None
    ids = generate_completions(trainer, [row.prompt for row in sampled], samples, base, temperature=temperature)
    read = trainer.read_completions(sampled, ids)
    answers = [[one.action for one in read[start : start + samples]] for start in range(0, len(read), samples)]
    rates = completion_rates(read)
    lengths = {name: rates[name] for name in ("clipped_ratio", "tokens_mean", "tokens_max")}
    return rewards.score_answers(worth, answers, invalid) | lengths


def table(results: Mapping[str, Any]) -> str:
    """evaluation.json as the table that the run prints last."""
    way = "exact" if results["exact"] else f"{results['samples']} completions a prompt"
    lines = [f"Held-out mean reward at temperature {results['temperature']:g}, {way}, 95% interval over prompts"]
    lines.append(f"  random action            {results['random']:.3f}")
    lines.append(f"  best constant action     {results['constant']:.3f}   (always [{results['constant_action']}])")
    row = "{reward:.3f}   {reward_low:.3f} to {reward_high:.3f}   (regret {regret:.3f}, parse rate {parse_rate:.2f}, best action {best_action_rate:.2f})"
    for name in ("before", "after"):
        for key, label in ((name, f"{name} training"), (f"{name}_greedy", f"{name} training, greedy")):
            lines.append(f"  {label:<24} " + row.format(**results[key]))
    lines.append(f"  oracle                   {results['oracle']:.3f}")
    row = "  after - before          {reward:+.3f}   {reward_low:+.3f} to {reward_high:+.3f}"
    return "\n".join([*lines, row.format(**results["difference"])])


def measure_rewards(trainer: Trainer, rows: Sequence[Row], exact: bool, base: bool) -> dict[str, Any]:
    """evaluation.json, which is returned: reward of the held-out `rows` before training (`base`) or after it, beside what
    other policies earn. A resumed run keeps what was measured at its start in the same way."""
    path, s = trainer.run.folder / "evaluation.json", trainer.run.settings
    results: dict[str, Any] = rewards.baselines([row.rewards for row in rows])
    results |= {"samples": s.EVAL_SAMPLES, "temperature": s.EVAL_TEMPERATURE, "exact": exact}
    results["data_sha256"] = data_fingerprint(rows)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        earlier = json.loads(path.read_text(encoding="utf-8"))
        same = all(earlier[name] == results[name] for name in ("samples", "temperature", "exact", "data_sha256"))
        if same and len(earlier["before"]["reward_by_prompt"]) == len(rows):
            results |= {name: earlier[name] for name in ("before", "before_greedy")}
    for name in ("before",) if base else ("before", "after"):
        if name not in results:
            results[name] = evaluate(trainer, rows, exact, name == "before")
            results[f"{name}_greedy"] = evaluate(trainer, rows, exact, name == "before", greedy=True)
    told = f"held-out reward before training: {results['before']['reward']:.3f}"
    if not base:
        scores = (results[name]["reward_by_prompt"] for name in ("before", "after"))
        results["difference"] = rewards.paired_difference(*scores)
        told = f"\n{table(results)}\n"
    write_text(path, json.dumps(results, indent=2) + "\n")
    log.info("%s", told)
    return results
