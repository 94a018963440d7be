# SPDX-License-Identifier: Apache-2.0
"""Held-out reward before and after training."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rewards
from grpo.data.files import Row, data_fingerprint
from grpo.data.scoring import completion_rates
from grpo.model.load import evaluating
from grpo.preflight.checks import Preflight
from grpo.run.folder import write_text
from grpo.settings import log


def complete(trainer: Any, prompts: Sequence[str], samples: int, base: bool, step: int = 0) -> list[list[int]]:
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


def evaluate(trainer: Any, rows: Sequence[Row], samples: int, base: bool = False) -> dict[str, Any]:
    """What `samples` completions for each held-out row are worth by the CSV: `rewards.score_answers` and their lengths.
    An answer that cannot be parsed counts as INVALID_REWARD, or as the row's lowest reward where that is nan."""
    sampled = [row for row in rows for _ in range(samples)]
    read = trainer.read_completions(sampled, complete(trainer, [row.prompt for row in sampled], samples, base))
    answers = [[one.action for one in read[start : start + samples]] for start in range(0, len(read), samples)]
    scores = rewards.score_answers([row.rewards for row in rows], answers, trainer.run.settings.INVALID_REWARD)
    rates = completion_rates(read)
    return scores | {name: rates[name] for name in ("clipped_ratio", "tokens_mean", "tokens_max")}


def report_evaluation(path: Path, results: Mapping[str, Any]) -> str:
    """Write evaluation.json; returns the table that the run prints last."""
    write_text(path, json.dumps(results, indent=2) + "\n")
    lines = ["Held-out mean reward, 95% interval over prompts", f"  random action         {results['random']:.3f}"]
    lines.append(f"  best constant action  {results['constant']:.3f}   (always [{results['constant_action']}])")
    for name in ("before", "after"):
        if result := results.get(name):
            lines.append(
                f"  {name + ' training':<21} {result['reward']:.3f}   {result['reward_low']:.3f} to "
                f"{result['reward_high']:.3f}   (regret {result['regret']:.3f}, parse rate {result['parse_rate']:.2f}, "
                f"best action {result['best_action_rate']:.2f})"
            )
    lines.append(f"  oracle                {results['oracle']:.3f}")
    if change := results.get("difference"):
        lines.append(
            f"  after - before       {change['reward']:+.3f}   {change['reward_low']:+.3f} to {change['reward_high']:+.3f}"
        )
    return "\n".join(lines)


def measure_rewards(check: Preflight, trainer: Any, base: bool) -> None:
    """evaluation.json: held-out reward before training (`base`) or after it, beside what other policies earn. A resumed
    run keeps what was measured at its start."""
    path = check.run.folder / "evaluation.json"
    results: dict[str, Any] = rewards.baselines([row.rewards for row in check.eval_rows])
    results |= {"samples": check.settings.EVAL_SAMPLES, "data_sha256": data_fingerprint(check.eval_rows)}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        earlier = json.loads(path.read_text(encoding="utf-8"))
        same = all(earlier[name] == results[name] for name in ("samples", "data_sha256"))
        if same and len(earlier["before"]["reward_by_prompt"]) == len(check.eval_rows):
            results["before"] = earlier["before"]
    if "before" not in results:
        results["before"] = evaluate(trainer, check.eval_rows, check.settings.EVAL_SAMPLES, base=True)
    if not base:
        results["after"] = evaluate(trainer, check.eval_rows, check.settings.EVAL_SAMPLES)
        scores = (results[name]["reward_by_prompt"] for name in ("before", "after"))
        results["difference"] = rewards.paired_difference(*scores)
    table = report_evaluation(path, results)
    if base:
        log.info("held-out reward before training: %.3f", results["before"]["reward"])
    else:
        log.info("\n%s\n", table)
