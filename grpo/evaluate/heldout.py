# SPDX-License-Identifier: Apache-2.0
"""Held-out reward before and after training."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

import rewards
from grpo.data.files import Row, column_names, data_fingerprint
from grpo.data.heldout import date_of
from grpo.data.reward_checks import FINAL, GARBAGE, tried_text
from grpo.data.scoring import completion_rates, score, total
from grpo.evaluate.exact import answer_probabilities
from grpo.learn.trainer import Trainer
from grpo.phases import Phase
from grpo.run.durable import is_intact, read_sealed, write_sealed
from grpo.settings import Settings, log


def generate_completions(
    trainer: Trainer, prompts: Sequence[str], samples: int, base: bool, step: int = 0, temperature: float | None = None
) -> list[list[int]]:
    """Token ids of one completion for each prompt, generated as the rollouts are (same engine and length) at `temperature`
    (None: EVAL_TEMPERATURE, 0: greedily). The seed is that of `step`, before as after training. `base`: without the adapter."""
    prompt_ids = trainer._tokenize_prompts(list(prompts))[0]
    temperature = trainer.run.settings.EVAL_TEMPERATURE if temperature is None else temperature
    return trainer.answers(prompt_ids, samples, base, step, temperature)


def exact_probabilities(trainer: Trainer, prompts: Sequence[str], base: bool, greedy: bool, actions: int) -> np.ndarray:
    """(N, K): `answer_probabilities` of the trainer's model, greedily or at EVAL_TEMPERATURE."""
    policy = trainer.accelerator.unwrap_model(trainer.model)
    temperature = 0.0 if greedy else trainer.run.settings.EVAL_TEMPERATURE
    with policy.disable_adapter() if base else contextlib.nullcontext():
        return answer_probabilities(policy.get_base_model(), trainer.processing_class, prompts, temperature, actions)


def evaluate(
    trainer: Trainer, rows: Sequence[Row], exact: bool, base: bool = False, greedy: bool = False
) -> dict[str, Any]:
    """What the answers to the held-out rows are worth, from EVAL_SAMPLES completions a row (`greedy`: from one) with their
    lengths, or from all answers (`exact`). By the file where every row has rewards of its actions:
    `rewards.score_probabilities`, an answer that cannot be parsed counts as INVALID_REWARD, or as the row's lowest reward
    where that is auto or nan. Else by REWARDS: `rewards.score_values` of their weighted sum, and the parse rate.
    `functions`: the latter of each function of REWARDS."""
    s, worth, days = trainer.run.settings, [row.rewards for row in rows], [day_of(row) for row in rows]
    invalid = math.nan if s.INVALID_REWARD is None else s.INVALID_REWARD
    samples = 1 if greedy else s.EVAL_SAMPLES
    if exact:
        found = exact_probabilities(trainer, [row.prompt for row in rows], base, greedy, max(map(len, worth)))
        p = [mine[: len(row)] for mine, row in zip(found.tolist(), worth, strict=True)]
        made = rewards.score_probabilities(worth, p, [samples] * len(rows), invalid, days)
        return made | {"functions": expected_scores(trainer, rows, p, days)}
    sampled = [row for row in rows for _ in range(samples)]
    temperature = 0.0 if greedy else None
    ids = generate_completions(trainer, [row.prompt for row in sampled], samples, base, temperature=temperature)
    read = trainer.read_completions(sampled, ids)
    rates, firsts = completion_rates(read), range(0, len(read), samples)
    figures = {name: rates[name] for name in ("clipped_ratio", "tokens_mean", "tokens_max")}
    scores = score(trainer.reward_funcs, read, ids, column_names(rows), trainer.state)
    figures["functions"] = function_scores(trainer, [scores[first : first + samples] for first in firsts], days)
    if all(worth):
        answers = [[one.action for one in read[first : first + samples]] for first in firsts]
        return rewards.score_answers(worth, answers, invalid, days) | figures
    weighted = [total([w * value for w, value in zip(trainer.args.reward_weights, one, strict=True)]) for one in scores]
    made = rewards.score_values([weighted[first : first + samples] for first in firsts], days)
    return made | {"parse_rate": rates["parse_rate"]} | figures


def day_of(row: Row) -> tuple[str, str]:
    """What a row's answers vary with: its day, where the file says it (the hours of a day resemble each other), else the row."""
    return row.file, date_of(row) or f"row {row.number}"


def function_scores(
    trainer: Trainer, scores: Sequence[Sequence[Sequence[float]]], days: Sequence[Hashable]
) -> dict[str, Any]:
    """`rewards.score_values`, without its list, of each function of REWARDS: scores by prompt, completion and function."""
    made = {}
    for i, name in enumerate(trainer.reward_func_names):
        found = rewards.score_values([[one[i] for one in mine] for mine in scores], days)
        made[name] = {key: found[key] for key in ("reward", "reward_low", "reward_high")}
    return made


def expected_scores(
    trainer: Trainer, rows: Sequence[Row], probabilities: Sequence[Sequence[float]], days: Sequence[Hashable]
) -> dict[str, Any]:
    """`function_scores` of the answers `[k]` by their probabilities (N, K); the rest of 1 is an answer without an action."""
    asked = [
        (row, tried_text(row.prompt, text))
        for row in rows
        for text in (GARBAGE[0], *(FINAL.format(f"[{k}]") for k in range(len(row.rewards))))
    ]
    ids = trainer.processing_class(text=[text for _, text in asked])["input_ids"]
    read = trainer.read_completions([row for row, _ in asked], ids)
    scores = iter(score(trainer.reward_funcs, read, ids, column_names(rows), trainer.state))
    expected = []
    for p in probabilities:
        shares = [1 - math.fsum(p), *p]
        mine = [next(scores) for _ in shares]
        expected.append([[expectation(shares, values) for values in zip(*mine, strict=True)]])
    return function_scores(trainer, expected, days)


def expectation(shares: Sequence[float], values: Sequence[float]) -> float:
    """Mean of values by their shares, without those that are NaN; NaN where nothing is left."""
    kept = [(share, value) for share, value in zip(shares, values, strict=True) if share > 0 and not math.isnan(value)]
    whole = math.fsum(share for share, _ in kept)
    return math.fsum(share * value for share, value in kept) / whole if whole else math.nan


IN_A_RUN = ("Held-out mean reward", "before training", "after training", "after - before")


def table(results: Mapping[str, Any], words: Sequence[str] = IN_A_RUN) -> str:
    """evaluation.json as the table that the run prints last. `words`: its title, and what base model, adapter and their
    difference are called."""
    title, *models, difference = words
    samples = "one completion" if results["samples"] == 1 else f"{results['samples']} completions"
    way = "exact" if results["exact"] else f"{samples} a prompt"
    over = "prompts, of a day together" if results.get("by_day", True) else "prompts"  # earlier versions do not say
    lines = [f"{title} at temperature {results['temperature']:g}, {way}, 95% interval over {over}"]
    references = [
        ("random action", "random", ""),
        ("best constant action", "constant", "   (always [{constant_action}])"),
    ]
    lines += [
        f"  {label:<23}  {results[key]:.3f}{note.format(**results)}"
        for label, key, note in references
        if key in results
    ]
    names = [
        (f"{name}{end}", f"{model}{way}")
        for name, model in zip(("before", "after"), models, strict=True)
        for end, way in (("", ""), ("_greedy", ", greedy"))
        if name in results
    ]
    for key, label in names:
        found = results[key]
        more = [f"{words} {found[figure]:{form}}" for figure, words, form in SHOWN if figure in found]
        lines.append(f"  {label:<24} {interval_text(found)}   ({', '.join(more)})")
    lines += [f"  oracle                   {results['oracle']:.3f}"] if "oracle" in results else []
    row = f"  {difference:<24}" + "{reward:+.3f}   {reward_low:+.3f} to {reward_high:+.3f}"
    lines += [row.format(**results["difference"])] if "difference" in results else []
    functions = dict.fromkeys(name for key, _ in names for name in results[key].get("functions", {}))
    for name in functions if len(functions) > 1 or "oracle" in results else ():
        lines.append(f"  {name}")
        found = {key: results[key].get("functions", {}).get(name, {}) for key, _ in names}  # earlier versions had none
        lines += [f"    {label:<22} {interval_text(found[key])}" for key, label in names]
    return "\n".join(lines)


SHOWN = (("regret", "regret", ".3f"), ("parse_rate", "parse rate", ".2f"), ("best_action_rate", "best action", ".2f"))


def interval_text(found: Mapping[str, Any]) -> str:
    """A mean reward and its interval, or a dash where there is none."""
    if found.get("reward") is None:
        return "-"
    return "{reward:.3f}   {reward_low:.3f} to {reward_high:.3f}".format(**found)


def measure_rewards(trainer: Trainer, rows: Sequence[Row], exact: bool, base: bool) -> dict[str, Any]:
    """evaluation.json, which is returned: reward of the held-out `rows` before training (`base`) or after it, beside what
    other policies earn. A resumed run keeps what was measured at its start in the same way."""
    path, results = trainer.run.folder / "evaluation.json", new_results(trainer.run.settings, rows, exact)
    earlier = read_sealed(path) if is_intact(path) else {}
    with contextlib.suppress(KeyError, TypeError):
        same = all(earlier[name] == results[name] for name in ("samples", "temperature", "exact", "data_sha256"))
        if same and len(earlier["before"]["reward_by_prompt"]) == len(rows):
            results |= {name: earlier[name] for name in ("before", "before_greedy")}
    with Phase(f"held-out reward {'before' if base else 'after'} training") as phase:
        add_models(trainer, rows, results, ("before",) if base else ("before", "after"))
        phase.result = interval_text(results["before" if base else "after"]).partition(" ")[0]
    write_sealed(path, results)
    if not base:
        log.info("\n%s\n", table(results))
    return results


def new_results(s: Settings, rows: Sequence[Row], exact: bool) -> dict[str, Any]:
    """evaluation.json before a model was asked: how it will be, and what other policies earn."""
    worth = [row.rewards for row in rows]
    results: dict[str, Any] = rewards.baselines(worth) if all(worth) else {}
    results |= {"samples": s.EVAL_SAMPLES, "temperature": s.EVAL_TEMPERATURE, "exact": exact}
    results["by_day"] = any(map(date_of, rows))
    return results | {"data_sha256": data_fingerprint(rows)}


def add_models(trainer: Trainer, rows: Sequence[Row], results: dict[str, Any], names: Sequence[str]) -> None:
    """Put what is missing of `names` into the results: `before` is the base model, `after` the adapter; of both also
    their difference."""
    for name in names:
        if name not in results:
            results[name] = evaluate(trainer, rows, results["exact"], name == "before")
            results[f"{name}_greedy"] = evaluate(trainer, rows, results["exact"], name == "before", greedy=True)
    if {"before", "after"} <= results.keys():
        scores = [results[name]["reward_by_prompt"] for name in ("before", "after")]
        if any(None not in pair for pair in zip(*scores, strict=True)):
            results["difference"] = rewards.paired_difference(*scores, [day_of(row) for row in rows])
