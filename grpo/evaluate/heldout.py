# SPDX-License-Identifier: Apache-2.0
"""Held-out reward before and after training."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import rewards
from grpo.data.files import Row, data_fingerprint
from grpo.data.scoring import completion_rates
from grpo.learn.trainer import Trainer
from grpo.model.load import evaluating
from grpo.run.folder import write_text
from grpo.settings import log


def generate_completions(
    trainer: Trainer, prompts: Sequence[str], samples: int, base: bool, step: int = 0
) -> list[list[int]]:
    """Token ids of one completion for each prompt, generated as the rollouts are (same engine, temperature and length).
    The seed is that of `step`, before as after training. `base`: without the adapter."""
    run, now = trainer.run, trainer.state.global_step
    prompt_ids = trainer._tokenize_prompts(list(prompts))[0]
    run.stream = "base" if base else "evaluation"
    trainer.state.global_step = step
    try:
        with evaluating(trainer.model), trainer.model.disable_adapter() if base else contextlib.nullcontext():
            return trainer._generate_single_turn(prompt_ids, None, {}, samples)[0]
    finally:
        run.stream, trainer.state.global_step = "train", now


def evaluate(trainer: Trainer, rows: Sequence[Row], samples: int, base: bool = False) -> dict[str, Any]:
    """What `samples` completions for each held-out row are worth by the CSV: `rewards.score_answers` and their lengths.
    An answer that cannot be parsed counts as INVALID_REWARD, or as the row's lowest reward where that is nan."""
    sampled = [row for row in rows for _ in range(samples)]
    ids = generate_completions(trainer, [row.prompt for row in sampled], samples, base)
    read = trainer.read_completions(sampled, ids)
    answers = [[one.action for one in read[start : start + samples]] for start in range(0, len(read), samples)]
    scores = rewards.score_answers([row.rewards for row in rows], answers, trainer.run.settings.INVALID_REWARD)
    rates = completion_rates(read)
    return scores | {name: rates[name] for name in ("clipped_ratio", "tokens_mean", "tokens_max")}


def table(results: Mapping[str, Any]) -> str:
    """evaluation.json as the table that the run prints last."""
    lines = ["Held-out mean reward, 95% interval over prompts", f"  random action         {results['random']:.3f}"]
    lines.append(f"  best constant action  {results['constant']:.3f}   (always [{results['constant_action']}])")
    for name in ("before", "after"):
        row = "{reward:.3f}   {reward_low:.3f} to {reward_high:.3f}   (regret {regret:.3f}, parse rate {parse_rate:.2f}, best action {best_action_rate:.2f})"
        lines.append(f"  {name + ' training':<21} " + row.format(**results[name]))
    lines.append(f"  oracle                {results['oracle']:.3f}")
    row = "  after - before       {reward:+.3f}   {reward_low:+.3f} to {reward_high:+.3f}"
    return "\n".join([*lines, row.format(**results["difference"])])


def measure_rewards(trainer: Trainer, rows: Sequence[Row], base: bool) -> None:
    """evaluation.json: reward of the held-out `rows` before training (`base`) or after it, beside what other policies
    earn. A resumed run keeps what was measured at its start."""
    path, samples = trainer.run.folder / "evaluation.json", trainer.run.settings.EVAL_SAMPLES
    results: dict[str, Any] = rewards.baselines([row.rewards for row in rows])
    results |= {"samples": samples, "data_sha256": data_fingerprint(rows)}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        earlier = json.loads(path.read_text(encoding="utf-8"))
        same = all(earlier[name] == results[name] for name in ("samples", "data_sha256"))
        if same and len(earlier["before"]["reward_by_prompt"]) == len(rows):
            results["before"] = earlier["before"]
    if "before" not in results:
        results["before"] = evaluate(trainer, rows, samples, base=True)
    if base:
        told = f"held-out reward before training: {results['before']['reward']:.3f}"
    else:
        results["after"] = evaluate(trainer, rows, samples)
        scores = (results[name]["reward_by_prompt"] for name in ("before", "after"))
        results["difference"] = rewards.paired_difference(*scores)
        told = f"\n{table(results)}\n"
    write_text(path, json.dumps(results, indent=2) + "\n")
    log.info("%s", told)
