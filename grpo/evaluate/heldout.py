# SPDX-License-Identifier: Apache-2.0
"""Held-out reward: what a model's answers to rows that do not train are worth."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rewards
from grpo.data.files import Row, column_names, data_fingerprint
from grpo.data.heldout import date_of
from grpo.data.reward_checks import FINAL, GARBAGE, tried_text
from grpo.data.scoring import Completion, Reward, completion_rates, score, total
from grpo.evaluate.models import EvaluatedModel, TrainedModel
from grpo.evaluate.tables import table
from grpo.learn.trainer import Trainer
from grpo.phases import Phase
from grpo.run.durable import is_intact, read_sealed, write_sealed
from grpo.settings import Settings, log
from grpo.tasks.figure_text import spread

Results = dict[str, Any]  # evaluation.json


@dataclass(frozen=True)
class HeldoutEvaluation:
    """Held-out rows, a model that answers them, and what its answers are scored by."""

    model: EvaluatedModel
    rows: Sequence[Row]
    exact: bool  # by the probabilities of all answers, instead of samples of them
    names: Sequence[str]  # of the reward functions, in the logs
    functions: Sequence[Reward]
    weights: Sequence[float]
    state: object  # what the functions get as TRL's `trainer_state`

    @property
    def days(self) -> list[tuple[str, str]]:
        """What the answers to each row vary with: its day, where the file says it (the hours of a day resemble each
        other), else the row itself."""
        return [(row.file, date_of(row) or f"row {row.number}") for row in self.rows]

    def add_models(self, results: Results, names: Sequence[str]) -> None:
        """Put what is missing of `names` into the results: `before` is the base model, `after` the adapter; of both
        also their difference."""
        for name in names:
            if name not in results:
                results[name] = self.measure(name == "before")
                results[f"{name}_greedy"] = self.measure(name == "before", greedy=True)
        if {"before", "after"} <= results.keys():
            before, after = (results[name]["reward_by_prompt"] for name in ("before", "after"))
            if any(None not in pair for pair in zip(before, after, strict=True)):
                results["difference"] = rewards.paired_difference(before, after, self.days)

    def measure(self, base: bool = False, greedy: bool = False) -> dict[str, Any]:
        """What the answers are worth, from EVAL_SAMPLES completions a row (`greedy`: from one) with their lengths, or
        from all answers. By the file where every row has rewards of its actions: `rewards.score_probabilities`, an
        answer that cannot be parsed counts as INVALID_REWARD, or as the row's lowest reward where that is auto or nan.
        Else by REWARDS: `rewards.score_values` of their weighted sum, and the parse rate. `functions`: the latter of
        each function."""
        s, worth = self.model.settings, [row.rewards for row in self.rows]
        invalid = math.nan if s.INVALID_REWARD is None else s.INVALID_REWARD
        samples = 1 if greedy else s.EVAL_SAMPLES
        if self.exact:
            prompts = [row.prompt for row in self.rows]
            shares = self.model.probabilities(prompts, max(map(len, worth)), greedy, base).tolist()
            shares = [row_shares[: len(row)] for row_shares, row in zip(shares, worth, strict=True)]
            figures = rewards.score_probabilities(worth, shares, [samples] * len(worth), invalid, self.days)
            return figures | {"functions": self.function_figures(self.expected_scores(shares))}
        sampled = [row for row in self.rows for _ in range(samples)]
        ids = self.model.complete([row.prompt for row in sampled], samples, greedy=greedy, base=base)
        read, scores = self.scored(sampled, ids)
        rates = completion_rates(read)
        by_row = [slice(first, first + samples) for first in range(0, len(read), samples)]
        figures = {name: rates[name] for name in ("clipped_ratio", "tokens_mean", "tokens_max")}
        figures |= {"functions": self.function_figures([scores[row] for row in by_row])}
        if all(worth):
            answers = [[completion.action for completion in read[row]] for row in by_row]
            return rewards.score_answers(worth, answers, invalid, self.days) | figures
        weighted = [total([w * v for w, v in zip(self.weights, values, strict=True)]) for values in scores]
        whole = rewards.score_values([weighted[row] for row in by_row], self.days)
        return whole | {"parse_rate": rates["parse_rate"]} | figures

    def scored(
        self, rows: Sequence[Row], completion_ids: Sequence[Sequence[int]]
    ) -> tuple[list[Completion], list[list[float]]]:
        """What the completions of `rows` say, and what each function gives them (N, F)."""
        read = self.model.read(rows, completion_ids)
        columns = column_names(self.rows)
        return read, score(self.functions, read, completion_ids, columns, self.state)

    def function_figures(self, scores: Sequence[Sequence[Sequence[float]]]) -> dict[str, dict[str, float]]:
        """`rewards.score_values`, without its list, of each function; `scores` by row, completion and function."""
        figures = {}
        for i, name in enumerate(self.names):
            values = rewards.score_values([[values[i] for values in row] for row in scores], self.days)
            figures[name] = {key: values[key] for key in ("reward", "reward_low", "reward_high")}
        return figures

    def expected_scores(self, shares: Sequence[Sequence[float]]) -> list[list[list[float]]]:
        """What each function gives the answers `[k]` by their `shares` (N, K), as (N, 1, F); the rest of 1 is an answer
        without an action."""
        questions = [
            (row, tried_text(row.prompt, text))
            for row in self.rows
            for text in (GARBAGE[0], *(FINAL.format(f"[{k}]") for k in range(len(row.rewards))))
        ]
        ids = self.model.tokenizer(text=[text for _, text in questions])["input_ids"]
        scores: Iterator[list[float]] = iter(self.scored([row for row, _ in questions], ids)[1])
        expected = []
        for row_shares in shares:
            every_share = [1 - math.fsum(row_shares), *row_shares]
            row_scores = [next(scores) for _ in every_share]
            expected.append([[expectation(every_share, values) for values in zip(*row_scores, strict=True)]])
        return expected


def expectation(shares: Sequence[float], values: Sequence[float]) -> float:
    """Mean of values by their shares, without those that are NaN; NaN where nothing is left."""
    kept = [(share, value) for share, value in zip(shares, values, strict=True) if share > 0 and not math.isnan(value)]
    whole = math.fsum(share for share, _ in kept)
    return math.fsum(share * value for share, value in kept) / whole if whole else math.nan


def trainer_evaluation(trainer: Trainer, rows: Sequence[Row], exact: bool) -> HeldoutEvaluation:
    """Held-out rows scored by the reward functions and in the present state of a run's trainer."""
    functions = [function for function in trainer.reward_funcs if callable(function)]
    names, weights = trainer.reward_func_names, vars(trainer.args)["reward_weights"]
    return HeldoutEvaluation(TrainedModel(trainer), rows, exact, names, functions, weights, trainer.state)


def new_results(s: Settings, rows: Sequence[Row], exact: bool) -> Results:
    """evaluation.json before a model was asked: how it will be, and what other policies earn."""
    worth = [row.rewards for row in rows]
    results: Results = dict(rewards.baselines(worth)) if all(worth) else {}
    results |= {"samples": s.EVAL_SAMPLES, "temperature": s.EVAL_TEMPERATURE, "exact": exact}
    return results | {"by_day": any(map(date_of, rows)), "data_sha256": data_fingerprint(rows)}


def measure_rewards(evaluation: HeldoutEvaluation, folder: Path, base: bool) -> Results:
    """evaluation.json in `folder`, which is returned: reward of the held-out rows before training (`base`) or after it,
    beside what other policies earn. A resumed run keeps what was measured at its start in the same way."""
    path = folder / "evaluation.json"
    results = new_results(evaluation.model.settings, evaluation.rows, evaluation.exact)
    earlier = read_sealed(path) if is_intact(path) else {}
    same = all(earlier.get(name) == results[name] for name in ("samples", "temperature", "exact", "data_sha256"))
    if same and {"before", "before_greedy"} <= earlier.keys():
        results |= {name: earlier[name] for name in ("before", "before_greedy")}
    with Phase(f"held-out reward {'before' if base else 'after'} training") as phase:
        evaluation.add_models(results, ("before",) if base else ("before", "after"))
        phase.result = spread(results["before" if base else "after"], "reward").partition(" ")[0]
    write_sealed(path, results)
    if not base:
        log.info("\n%s\n", table(results))
    return results
