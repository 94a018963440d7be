# SPDX-License-Identifier: Apache-2.0
"""Held-out reward: the reward of a model's answers to rows that it is not trained on."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo.common import log
from grpo.data.files import Row, column_names, data_fingerprint
from grpo.data.heldout import date_of, group_of
from grpo.evaluate.heldout_table import evaluation_table
from grpo.evaluate.models import EvaluatedModel, trained_model
from grpo.figures import statistics
from grpo.figures.text import object_at, with_interval
from grpo.harmony import answer_turn, completion_of
from grpo.learn.trainer import Trainer
from grpo.output.durable import read_measured, write_sealed
from grpo.phases import Phase
from grpo.reward.calling import Reward
from grpo.reward.episode import Episode
from grpo.reward.reward_checks import GARBAGE
from grpo.reward.scoring import Completion, completion_rates, read_completions, score, total
from grpo.rollout.episodes import warn_of_failures
from grpo.settings.table import Settings

Results = dict[str, Any]  # evaluation.json


@dataclass(frozen=True)
class HeldoutEvaluation:
    """Held-out rows, a model that answers them, and the reward functions that score its answers."""

    model: EvaluatedModel
    rows: Sequence[Row]
    exact: bool  # whether the probabilities of all answers are used instead of samples
    functions: Sequence[Reward]
    state: object  # passed to the functions as TRL's `trainer_state`

    @property
    def clusters(self) -> list[tuple[str, str]]:
        """The cluster of each row for confidence intervals: its day, because hours of a day resemble each other, or its
        prompt if it has no date. The file does not matter: the same day in two files is one day."""
        return [group_of(row, bool(self.model.settings.ENVIRONMENT)) for row in self.rows]

    def add_models(self, results: Results, names: Sequence[str]) -> None:
        """Measure the models in `names` that the results lack: `before` is the base model, `after` the adapter, `start`
        the one that it began as. Also compute the differences of the adapter."""
        for name in names:
            if name not in results:
                results[name] = self.measure(name == "before")
                results[f"{name}_greedy"] = self.measure(name == "before", greedy=True)
        self.add_differences(results)

    def add_differences(self, results: Results) -> None:
        """Computes the differences of `after`, if it was measured, from other models and the best constant action."""
        after, constant = object_at(results, "after").get("reward_by_prompt"), results.get("constant_action")
        models = {"difference": "before", "difference_start": "start"}
        others = {name: object_at(results, model).get("reward_by_prompt") for name, model in models.items()}
        others["difference_constant"] = None if constant is None else [row.rewards[constant] for row in self.rows]
        for name, other in others.items():
            results.pop(name, None)
            if other and after and any(None not in pair for pair in zip(other, after, strict=True)):
                results[name] = statistics.paired_difference(other, after, self.clusters)

    def measure(self, base: bool = False, greedy: bool = False) -> dict[str, Any]:
        """The figures of a model's answers: EVAL_SAMPLES completions a row (one if `greedy`), or all answers if exact.

        If every row has rewards for its actions, the figures are `score_probabilities` of these: an answer without an
        action earns INVALID_REWARD, or the row's lowest reward if that is auto or nan. Otherwise they are
        `score_values` of the weighted sum of REWARDS. `functions` has the figures of each reward function."""
        s, row_rewards = self.model.settings, [row.rewards for row in self.rows]
        invalid = math.nan if s.INVALID_REWARD is None else s.INVALID_REWARD
        samples = 1 if greedy else s.EVAL_SAMPLES
        if self.exact:
            prompts = [row.prompt for row in self.rows]
            shares = self.model.probabilities(prompts, max(map(len, row_rewards)), greedy, base).tolist()
            shares = [row_shares[: len(row)] for row_shares, row in zip(shares, row_rewards, strict=True)]
            answers = [samples] * len(row_rewards)
            figures = statistics.score_probabilities(row_rewards, shares, answers, invalid, self.clusters)
            return figures | {"functions": self.function_figures(self.expected_scores(shares))}
        sampled = [row for row in self.rows for _ in range(samples)]
        episodes: list[Episode] = []
        if self.model.player:
            played = self.model.play(sampled, greedy=greedy, base=base)
            ids, episodes = [sample.ids for sample in played], [sample.episode for sample in played if sample.episode]
            warn_of_failures(episodes)
            sampled = [replace(row, prompt=episode.prompt) for row, episode in zip(sampled, episodes, strict=True)]
        else:
            ids = self.model.complete([row.prompt for row in sampled], samples, greedy=greedy, base=base)
        completions, scores = self.score_completions(sampled, ids, episodes)
        rates = completion_rates(completions)
        by_row = [slice(first, first + samples) for first in range(0, len(completions), samples)]
        figures = {name: rates[name] for name in ("clipped_ratio", "tokens_mean", "tokens_max")}
        figures |= {"functions": self.function_figures([scores[row] for row in by_row])}
        if all(row_rewards) and not episodes:
            actions = [[completion.action for completion in completions[row]] for row in by_row]
            return statistics.score_answers(row_rewards, actions, invalid, self.clusters) | figures
        weighted = [total([f.weight * v for f, v in zip(self.functions, values, strict=True)]) for values in scores]
        figures_of_sum = statistics.score_values([weighted[row] for row in by_row], self.clusters)
        return figures_of_sum | {"parse_rate": rates["parse_rate"]} | figures

    def score_completions(
        self, rows: Sequence[Row], completion_ids: Sequence[Sequence[int]], episodes: Sequence[Episode] = ()
    ) -> tuple[list[Completion], list[list[float]]]:
        """The decoded completions of `rows`, and their rewards by completion and function (N, F)."""
        completions = read_completions(self.model.tokenizer, self.model.stops, rows, completion_ids, episodes)
        columns = column_names(self.rows)
        return completions, score(self.functions, completions, completion_ids, columns, self.state)

    def function_figures(self, scores: Sequence[Sequence[Sequence[float]]]) -> dict[str, statistics.Scores]:
        """`statistics.score_values`, without its list, of each function; `scores` by row, completion and function."""
        figures = {}
        for i, function in enumerate(self.functions):
            values = statistics.score_values([[values[i] for values in row] for row in scores], self.clusters)
            figures[function.__name__] = {key: values[key] for key in ("reward", "reward_low", "reward_high")}
        return figures

    def expected_scores(self, shares: Sequence[Sequence[float]]) -> list[list[list[float]]]:
        """The expected reward of each function, (N, 1, F), if the answers `[k]` have the probabilities `shares` (N, K)
        and the remainder to 1 is an answer without an action."""
        answers = [
            (row, completion_of(row.prompt, text))
            for row in self.rows
            for text in (GARBAGE[0], *(answer_turn(f"[{k}]") for k in range(len(row.rewards))))
        ]
        ids = self.model.tokenizer(text=[text for _, text in answers])["input_ids"]
        scores: Iterator[list[float]] = iter(self.score_completions([row for row, _ in answers], ids)[1])
        expected = []
        for row_shares in shares:
            every_share = [1 - math.fsum(row_shares), *row_shares]
            row_scores = [next(scores) for _ in every_share]
            expected.append([[expectation(every_share, values) for values in zip(*row_scores, strict=True)]])
        return expected


def expectation(shares: Sequence[float], values: Sequence[float]) -> float:
    """Mean of the values weighted by their shares, without NaN values; NaN if no value is left."""
    kept = [(share, value) for share, value in zip(shares, values, strict=True) if share > 0 and not math.isnan(value)]
    whole = math.fsum(share for share, _ in kept)
    return math.fsum(share * value for share, value in kept) / whole if whole else math.nan


def trainer_evaluation(trainer: Trainer, rows: Sequence[Row], exact: bool) -> HeldoutEvaluation:
    """The evaluation of held-out rows with a trainer's current model and its reward functions."""
    return HeldoutEvaluation(trained_model(trainer), rows, exact, trainer.scorer.functions, trainer.state)


def new_results(s: Settings, rows: Sequence[Row], exact: bool) -> Results:
    """evaluation.json before any model was measured: the conditions, and the rewards of reference policies where models
    are measured by the same ones. Episodes earn what REWARDS give, whatever reward_action_k their rows have."""
    row_rewards = [row.rewards for row in rows]
    has_references = all(row_rewards) and not s.ENVIRONMENT
    results: Results = dict(statistics.baselines(row_rewards)) if has_references else {}
    results |= {"samples": s.EVAL_SAMPLES, "temperature": s.EVAL_TEMPERATURE, "exact": exact}
    return results | {"by_day": any(map(date_of, rows)), "data_sha256": data_fingerprint(rows)}


def are_figures(value: object, rows: int) -> bool:
    """Whether a value of evaluation.json holds the figures of a model on `rows` rows that a run reads again: the file
    may have been edited."""
    if not isinstance(value, dict) or not isinstance(value.get("functions"), dict):
        return False
    numbers = [value.get("reward"), *(value.get("reward_by_prompt") or [])]
    return len(numbers) == rows + 1 and all(number is None or type(number) in (int, float) for number in numbers)


def measure_rewards(evaluation: HeldoutEvaluation, folder: Path, base: bool, start: bool = False) -> Results:
    """Measure the held-out reward before training (`base`), also of the adapter that it starts from (`start`), or after
    training; write evaluation.json to `folder` and return it. A resumed run keeps the figures of its start if they were
    measured under the same conditions."""
    path = folder / "evaluation.json"
    results = new_results(evaluation.model.settings, evaluation.rows, evaluation.exact)
    earlier = read_measured(path)
    is_same = all(earlier.get(name) == results[name] for name in ("samples", "temperature", "exact", "data_sha256"))
    for names in [("before", "before_greedy"), ("start", "start_greedy")] if is_same else []:
        if all(are_figures(earlier.get(name), len(evaluation.rows)) for name in names):
            results |= {name: earlier[name] for name in names}
    with Phase(f"held-out reward {'before' if base else 'after'} training") as phase:
        evaluation.add_models(results, ["before", *(["start"] if start else []), *([] if base else ["after"])])
        phase.result = with_interval(results["before" if base else "after"], "reward").partition(" ")[0]
    write_sealed(path, results)
    if not base:
        log.info("\n%s\n", evaluation_table(results))
    return results
