# SPDX-License-Identifier: Apache-2.0
"""TRL's GRPOTrainer, whose steps are those of step.py, with this project's checkpoints and logs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig

from grpo.common import log
from grpo.data.files import Row
from grpo.data.prompts import row_order, sampling_seed
from grpo.figures.verdict import loading_advice, objection
from grpo.learn.context import RunContext
from grpo.learn.finite import FiniteCallback
from grpo.learn.learner import Learner
from grpo.learn.make_sampler import make_player, make_sampler
from grpo.learn.scorer import Scorer
from grpo.learn.shared_rollout import load_rollout, part_of_rollout, save_rollout
from grpo.learn.step import Step, new_step
from grpo.learn.stop import StopCallback
from grpo.learn.timer import StepTimerCallback
from grpo.model.expert_lora import experts_wrapped
from grpo.model.load import stop_tokens
from grpo.model.long_layers import joined_memory
from grpo.output.archive import model_card
from grpo.output.best import read_best
from grpo.output.checkpoints import ROLLOUT, begin_checkpoint, finish_checkpoint, rotate_checkpoints
from grpo.output.durable import write_text
from grpo.output.layout import BEST
from grpo.output.logs import EVALUATED, TRL_FIGURES, Cell, RunLog, tracker_figures
from grpo.phases import LINE_S, Phase
from grpo.reward.calling import Reward, RewardError
from grpo.rollout.episodes import EpisodePlayer, check_played
from grpo.rollout.parity import MismatchGrown
from grpo.rollout.sampler import EndTokens, RankedSampler, Sample, Sampling, rollout_sampling


class Trainer(Learner):
    """GRPO with this project's steps. Of TRL's private methods it overrides three: the order of prompts, and what a
    checkpoint holds and gives back. Tests compare the signatures of overridden methods.

    `measure` computes columns of metrics.csv every EVAL_STEPS steps; None measures nothing during training."""

    def __init__(
        self,
        run: RunContext,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        lora: LoraConfig,
        config: GRPOConfig,
        rewards: Sequence[Reward],
        measure: Callable[[Trainer], dict[str, float]] | None = None,
    ):
        self.run, self.measure = run, measure
        self.timer = StepTimerCallback()
        s = run.settings
        self.rollout: Step | None = None  # None where the next step generates.
        self.rates: dict[str, Cell] = {}  # Columns of metrics.csv about the completions of this step.
        # TRL passes only the index of a row around; its columns are looked up where they are needed.
        data = Dataset.from_dict({"prompt": [row.prompt for row in run.rows], "row": list(range(len(run.rows)))})
        with experts_wrapped(model):
            super().__init__(
                model,
                list(rewards),
                config,
                data,
                processing_class=tokenizer,
                peft_config=lora,
                callbacks=[self.timer, FiniteCallback(), StopCallback(run.stop, run.ranks)],
            )
        self.eos_token_ids = stop_tokens(model.generation_config, tokenizer)  # TRL finds the same ones.
        names, simulates = self.reward_func_names, run.resolved.closed_loop.runs
        self.run_log = None if run.ranks.rank else RunLog(run.folder, s, names, simulates)  # Only rank 0 writes logs.
        self.scorer = Scorer(run, rewards, tokenizer, self.run_log, self.accelerator.device)
        # Reward functions get the state in an evaluation before training too, and may divide by these.
        self.state.max_steps, self.state.num_train_epochs = s.TOTAL_STEPS, 1
        self.remove_callback(PrinterCallback)  # training.log has a line for each step.
        self.reward_summary = ", ".join(f"{reward.__name__} x {reward.weight:g}" for reward in rewards)
        # PEFT writes README.md beside every saved adapter, with the path of the base model's files; no hook changes it.
        self.model.create_or_update_model_card = self.write_model_card  # type: ignore[method-assign, assignment]

    # ---- A step ----

    # `inputs` are rows of the dataset; transformers expects a batch of tensors.
    def training_step(
        self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Samples and scores completions, unless this step shares those of an earlier one, and computes the gradient.
        Returns the step's loss, a scalar."""
        model.train()
        s, step, started = self.run.settings, self.state.global_step, time.perf_counter()
        index, rollout = step % s.steps_per_rollout, self.rollout  # The index among the steps that share a rollout.
        with Phase(f"step {step + 1}", first_s=LINE_S):
            try:
                if rollout is None:
                    rollout = self.new_rollout([self.run.rows[row["row"]] for row in inputs])
                    new_tokens = rollout.metrics["num_tokens"]
                else:
                    # LORA_DROPOUT draws the same noise whether or not an evaluation came in between.
                    torch.manual_seed(sampling_seed(s.SEED, step, "train") + self.run.ranks.rank)
                    new_tokens = 0
                part = part_of_rollout(rollout, index % s.STEPS_PER_GENERATION, s.STEPS_PER_GENERATION)
                with joined_memory(self.run.plan.layer_chunk > 0):
                    loss = self.learn(model, *part)
            except (RewardError, MismatchGrown):
                self.save_last_step()  # A resumed run makes this rollout again.
                raise
        self.rollout = rollout if index < s.steps_per_rollout - 1 else None
        self.state.num_input_tokens_seen += int(new_tokens)
        self.rates = rollout.rates
        for name, value in rollout.metrics.items():
            self._metrics["train"][name].append(value)
        self._metrics["train"]["num_tokens"] = [self.state.num_input_tokens_seen]
        self._metrics["train"]["step_time"].append(time.perf_counter() - started)
        self._step += 1
        return loss

    def new_rollout(self, rows: Sequence[Row]) -> Step:
        """Samples and scores a completion for each of `rows`, in groups, for all steps that share them. Raises
        RewardError."""
        s, ends, sample, episodes = self.run.settings, self.ends, self.sample, []
        if s.ENVIRONMENT:
            samples = self.play(rows)
            episodes = [sample.episode for sample in samples if sample.episode]
            rows = [replace(row, prompt=episode.prompt) for row, episode in zip(rows, episodes, strict=True)]
            prompts = [episode.prompt_ids for episode in episodes]
            sample = lambda prompts: samples  # noqa: E731
        else:
            prompts = self._tokenizer(text=[row.prompt for row in rows])["input_ids"]

        def score(rows, ids):
            with self.timer.part("reward"):
                return self.scorer.score(rows, ids, ends.stops, self.state, episodes)

        return new_step(rows, prompts, sample, score, self.batch_logps, s, ends)

    def sample(self, prompts: Sequence[Sequence[int]]) -> list[Sample]:
        """The rollout of the next step: a completion of each prompt, which stands NUM_GENERATIONS times in a row."""
        return self.timed_rollout(lambda sampling, group: self.sampler.sample(prompts, group, sampling))

    def play(self, rows: Sequence[Row]) -> list[Sample]:
        """Like `sample`, an episode of each row in ENVIRONMENT. Raises RewardError if no episode can be scored."""
        samples = self.timed_rollout(lambda sampling, group: self.sampler.play(self.player, rows, group, sampling))
        check_played(samples, self.run.settings.ENVIRONMENT)
        return samples

    def timed_rollout(self, draw: Callable[[Sampling, int], list[Sample]]) -> list[Sample]:
        """The samples that `draw` returns, given how to draw them and the size of a group."""
        s, engine = self.run.settings, self.run.engine
        with self.timer.part("rollout"):
            samples = draw(rollout_sampling(s, self.state.global_step), s.NUM_GENERATIONS)
        self.timer.rollout_tokens = sum(sample.written for sample in samples)
        if engine is not None:
            self.timer.used_gib = max(self.timer.used_gib, engine.used_gib)
        return samples

    @property
    def ends(self) -> EndTokens:
        """The tokens that end a completion."""
        return EndTokens(self.eos_token_ids, self._tokenizer.pad_token_id)

    @property
    def player(self) -> EpisodePlayer:
        """What plays this process's episodes, in training and evaluation."""
        return make_player(self.run, self.sampler.sampler, self._tokenizer, self.ends)

    @property
    def sampler(self) -> RankedSampler:
        """What writes the completions of training and evaluation."""
        return make_sampler(self.run, self.model, self._tokenizer, self.eos_token_ids, self.accelerator.autocast)

    # A dataloader takes any sequence of indices: here the rows of every step, those of a shared rollout in each of its
    # steps. The sequence must end with the run's last step: transformers trains on while there are rows, and a run that
    # continues from that step would make one more.
    def _get_train_sampler(self, dataset: Dataset | None = None) -> list[int]:  # type: ignore[override]
        return list(row_order(len(self.run.rows), self.run.settings))

    # ---- Checkpoints ----

    # `trial` is None because no run is part of a hyperparameter search.
    def _save_checkpoint(self, model: torch.nn.Module, trial: None) -> None:  # type: ignore[override]
        """Saves on rank 0: the files of the checkpoint, then its manifest; then it deletes the oldest checkpoint.

        The oldest is that of the lowest step. transformers goes by modification times, and would delete a new
        checkpoint where older ones are dated later. The manifest, which lists all files, must be the last."""
        if self.run_log is None:
            return
        checkpoint = self.run.folder / f"checkpoint-{self.state.global_step}"
        begin_checkpoint(checkpoint)
        super()._save_checkpoint(model, trial)
        if self.rollout:
            save_rollout(self.rollout, checkpoint / ROLLOUT)
        finish_checkpoint(checkpoint, self.run_log.sync())
        rotate_checkpoints(self.run.folder, self.run.settings.SAVE_TOTAL_LIMIT)

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and (path := Path(checkpoint) / ROLLOUT).is_file():
            self.rollout = load_rollout(path, self.accelerator.device)

    def save_last_step(self) -> None:
        """Saves a checkpoint of the last finished step if there is none yet. It is called when a run ends before the
        next step has learned: weights, optimizer and logs are still those of the finished step."""
        step = self.state.global_step
        if step and not (self.run.folder / f"checkpoint-{step}").exists():
            self._save_checkpoint(self.model, None)

    # TRL and transformers declare different arguments of this method.
    def create_model_card(self, *arguments: object, **options: object) -> None:
        """Writes nothing in place of TRL's model card: `write_model_card` writes that file instead of PEFT."""

    def write_model_card(self, folder: str | Path) -> None:
        """Writes README.md of the adapter in `folder`; in OUTPUT_DIR it also says which adapter to load."""
        step, note, adapter = self.state.global_step, "", None
        if Path(folder) == self.run.folder:
            record = read_best(self.run.folder)
            note = loading_advice(record, step)
            adapter = self.run.folder / BEST if record and not objection(record) else self.run.folder
        card = model_card(self.run.settings, step, self.reward_summary, note, adapter)
        write_text(Path(folder) / "README.md", card)

    # ---- Logs ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs `logs`, to which TRL adds its own metrics. Those of a training step become a row of metrics.csv, with
        the figures that are measured every EVAL_STEPS steps."""
        if "loss" not in logs or not self.model.training:
            return super().log(logs, start_time)
        failure: RewardError | None = None
        s, step = self.run.settings, self.state.global_step
        row: dict[str, Cell] = {**self.rates, **self.timer.figures(self.run.engine, s.DIRECT_ANSWERS)}
        row |= dict.fromkeys((*EVALUATED, "eval_s"))
        # The last step is measured after training.
        if self.measure and s.EVAL_STEPS and step % s.EVAL_STEPS == 0 and step < s.TOTAL_STEPS:
            started = time.perf_counter()
            try:
                # Measuring does not change the training, because every rollout sets torch's seed.
                row |= self.sampler.run_on_rank0(self.measure, self) or {}
                row["eval_s"] = time.perf_counter() - started
            except RewardError as error:  # The step is finished: it is logged and saved before the run ends.
                failure = error
        logs |= tracker_figures(row, {*logs, *self._metrics["train"]})
        super().log(logs, start_time)
        if self.run_log:
            row |= {column: logs.get(name) for column, name in TRL_FIGURES.items()}
            self.run_log.write_step(step, row)
        if failure:
            log.warning("step %d was not measured: a reward function failed in its evaluation", step)
            self.save_last_step()
            raise failure
