# SPDX-License-Identifier: Apache-2.0
"""TRL's GRPOTrainer with this project's rollouts and learner, and what happens around each step."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig

from grpo.data.files import Row, column_names
from grpo.data.prompts import StepRows, sampling_seed
from grpo.data.scoring import Completion, RewardError, read_completions, score
from grpo.learn.answer_rewards import RewardLookup, expected_text
from grpo.learn.context import RunContext
from grpo.learn.expected_reward import (
    AnswerRewards,
    StepRewards,
)
from grpo.learn.learner import Learner
from grpo.learn.sampling import kept_randomness
from grpo.learn.timer import StepTimerCallback
from grpo.learn.together import run_on_rank0, sync_stop_signal
from grpo.model.attention import attention_of
from grpo.model.expert_lora import experts_wrapped
from grpo.model.load import evaluating
from grpo.phases import LINE_S, Phase
from grpo.rollout.prefill import shared_prefill
from grpo.run.archive import model_card
from grpo.run.best import read_best, which_to_load
from grpo.run.checkpoints import begin_checkpoint, finish_checkpoint, rotate_checkpoints
from grpo.run.durable import write_text
from grpo.run.logs import EVALUATED, RunLog
from grpo.settings import log

# Columns of metrics.csv that are TRL's own figures, and their names there.
TRL_FIGURES = {
    "reward": "reward", "reward_std": "reward_std", "loss": "loss",
    "grad_norm": "grad_norm", "learning_rate": "learning_rate", "kl": "kl", "entropy": "entropy",
    "clip_fraction": "clip_ratio/region_mean", "logp_diff_mean": "sampling/sampling_logp_difference/mean",
    "logp_diff_max": "sampling/sampling_logp_difference/max",
    "is_ratio_mean": "sampling/importance_sampling_ratio/mean",
}  # fmt: skip


class Trainer(Learner):
    """GRPO with this project's prompts, completions and rewards. Tests hold the signatures of TRL's methods that it
    overrides.

    `measure` gives columns of metrics.csv every EVAL_STEPS steps; None: nothing is measured while it trains.
    """

    def __init__(
        self,
        run: RunContext,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        lora: LoraConfig,
        config: GRPOConfig,
        rewards: list[Callable[..., Any]],
        measure: Callable[[Trainer], dict[str, float]] | None = None,
    ):
        self.run, self.measure = run, measure
        self.timer = StepTimerCallback(run.stop, lambda *now: sync_stop_signal(run.ranks, *now, self.state.global_step))
        s, names = run.settings, [function.__name__ for function in rewards]
        self.run_log: RunLog | None = None  # rank 0 writes
        if not run.ranks.rank:
            self.run_log = RunLog(run.folder, s.TOTAL_STEPS, s.EVAL_STEPS, names, s.LOG_PROMPTS)
        self.columns = column_names(run.rows)  # that reward functions get with every row
        self.rollout_tokens = 0  # of the last rollout
        self.lookup: RewardLookup | None = None  # None without EXPECTED_REWARD
        if run.looked_up:
            self.lookup = RewardLookup(rewards, config.reward_weights or [], run.looked_up, self.columns, tokenizer)
        self.step_rewards: StepRewards | None = None  # of the last completions, with EXPECTED_REWARD
        # Only the index travels through TRL: the columns are looked up where they are needed.
        dataset = Dataset.from_dict({"prompt": [row.prompt for row in run.rows], "row": list(range(len(run.rows)))})
        with experts_wrapped(model):
            super().__init__(
                model, rewards, config, dataset, processing_class=tokenizer, peft_config=lora, callbacks=[self.timer]
            )
        self.current_gradient_accumulation_steps = 1  # the Trainer sets it when it trains, losses ask for it before
        self.remove_callback(PrinterCallback)  # training.log has a line for each step
        # PEFT writes README.md into every folder that the adapter is saved in, with the path of the base model's files.
        weighted = zip(self.reward_func_names, config.reward_weights, strict=True)
        self.functions = ", ".join(f"{name} x {weight:g}" for name, weight in weighted)
        self.model.create_or_update_model_card = self.write_model_card

    def create_model_card(self, *arguments: Any, **options: Any) -> None:
        """TRL writes one into OUTPUT_DIR; PEFT's place has this project's."""

    def write_model_card(self, folder: str | Path) -> None:
        """README.md of the adapter in `folder`; the run's own says which adapter to load."""
        own = Path(folder) == self.run.folder
        note = which_to_load(read_best(self.run.folder), self.state.global_step) if own else ""
        write_text(
            Path(folder) / "README.md", model_card(self.run.settings, self.state.global_step, self.functions, note)
        )

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Behind the last file of the checkpoint comes its manifest, and only then the oldest one goes. By step:
        transformers goes by modification times, and would delete a new checkpoint where older ones are dated later.
        Rank 0's alone. Another file is written before the manifest, and INNER_FILES in grpo/run/layout.py names it."""
        if self.run.ranks.rank:
            return
        checkpoint = self.run.folder / f"checkpoint-{self.state.global_step}"
        begin_checkpoint(checkpoint)
        super()._save_checkpoint(model, trial)
        finish_checkpoint(checkpoint, self.run_log.sync())
        rotate_checkpoints(self.run.folder, self.run.settings.SAVE_TOTAL_LIMIT)

    def save_last_step(self) -> None:
        """A checkpoint of the last finished step, where it has none, for a run that ends before the next step has
        learned: weights, optimizer and logs are still those of the finished one."""
        step = self.state.global_step
        if step and not (self.run.folder / f"checkpoint-{step}").exists():
            self._save_checkpoint(self.model, None)

    def _get_train_sampler(self, dataset: Any = None) -> StepRows:
        s = self.run.settings
        return StepRows(len(self.run.rows), s.SEED, s.TOTAL_STEPS * s.PROMPTS_PER_STEP, s.NUM_GENERATIONS)

    def _tokenize_prompts(self, prompts: list):
        """Each prompt once, however many completions it gets: 256 prompts of 890 tokens take a third of a second."""
        different = list(dict.fromkeys(prompts))
        prompt_ids, *rest = super()._tokenize_prompts(different)
        ids_of = dict(zip(different, prompt_ids, strict=True))
        return [ids_of[prompt] for prompt in prompts], *rest

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        """TRL's hook: a step's rollout."""
        return self.generate(prompt_ids, num_generations, self.state.global_step)

    def generate(
        self,
        prompt_ids: list[list[int]],
        num_generations: int,
        seed_step: int,
        stream: str = "train",
        temperature: float | None = None,
        base: bool = False,
    ) -> tuple[list[list[int]], list[list[float | None]] | None]:
        """Token ids of one completion for each prompt, of which each stands there `num_generations` times, and the
        engine's log-probs of them, None where transformers generates. Every rank generates for its own rows, whole
        groups, with a seed of its own, drawn from `seed_step` and `stream`; all get all. `temperature`: None is
        TEMPERATURE, 0 is greedy; `base`: vLLM leaves the adapter out, which of the trainer's own model the caller
        disables."""
        run, ranks = self.run, self.run.ranks
        seed = sampling_seed(run.settings.SEED, seed_step, stream) + ranks.rank
        torch.manual_seed(seed)
        own, logprobs = ranks.share_out(len(prompt_ids), num_generations), None
        with self.timer.part("rollout"):
            if run.engine is not None:
                policy = self.accelerator.unwrap_model(self.model)
                own_ids, own_logprobs = [], []
                if own:
                    own_prompts = prompt_ids[own.start : own.stop]
                    own_ids, own_logprobs = run.engine.rollout(policy, own_prompts, seed, not base, temperature)
                completion_ids, logprobs = ranks.share_rows(own_ids, "i"), ranks.share_rows(own_logprobs, "d")
                self.timer.used_gib = max(self.timer.used_gib, run.engine.used_gib)
            else:
                own_ids = self.generate_own(prompt_ids, num_generations, own, temperature)
                completion_ids = ranks.share_rows(own_ids, "i")
        self.rollout_tokens = sum(map(len, completion_ids))
        return completion_ids, logprobs

    def generate_own(
        self, prompt_ids: list[list[int]], num_generations: int, own: range, temperature: float | None
    ) -> list[list[int]]:
        """Token ids of the completions of this rank's `own` prompts, by transformers, GENERATION_BATCH at once."""
        chunk_size, own_ids = -(-self.run.plan.generation_batch // self.run.ranks.size), []
        with (
            attention_of(self.model, "eager"),
            evaluating(self.model),
            self.generating_at(temperature),
            shared_prefill(self.base_model_of(self.model)),
            Phase("generating", "completion", len(own), LINE_S) as phase,
        ):
            for start in range(own.start, own.stop, chunk_size):
                chunk = prompt_ids[start : min(start + chunk_size, own.stop)]
                own_ids += super()._generate_single_turn(chunk, None, {}, num_generations)[0]
                phase.done = len(own_ids)
        return own_ids

    def answers(
        self, prompt_ids: list[list[int]], samples: int, base: bool, step: int, temperature: float
    ) -> list[list[int]]:
        """Token ids of one completion for each prompt, of which each stands there `samples` times, generated as the
        rollouts are at `temperature` (0: greedily), with the seed of `step`; `base`: without the adapter. For an
        evaluation: rank 0 is asked, inside of `run_on_rank0`, and asks the others."""
        if not self.run.ranks.rank:
            request = dict(prompt_ids=prompt_ids, samples=samples, base=base, step=step, temperature=temperature)
            self.run.ranks.broadcast(request)
        with evaluating(self.model), self.model.disable_adapter() if base else contextlib.nullcontext():
            return self.generate(prompt_ids, samples, step, "evaluation", temperature, base)[0]

    @contextlib.contextmanager
    def generating_at(self, temperature: float | None) -> Iterator[None]:
        """Let transformers generate at another temperature than TEMPERATURE for a while; 0: greedily."""
        before = self.generation_config, self.generation_kwargs
        if temperature is not None:
            changed = before[1] | {"do_sample": temperature > 0, "temperature": temperature or 1.0}
            if not temperature:
                changed |= {"top_p": 1.0, "top_k": 50}  # the defaults: greedily, others would be warned about
            self.generation_config = GenerationConfig(**changed, disable_compile=True)
            self.generation_kwargs = changed
        try:
            yield
        finally:
            self.generation_config, self.generation_kwargs = before

    def read_completions(self, rows: Sequence[Row], completion_ids: Sequence[Sequence[int]]) -> list[Completion]:
        """What the completions of `rows` say."""
        return read_completions(self._tokenizer, self.eos_token_ids, rows, completion_ids)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        """Rank 0's: a reward function may be random, or ask a judge. The functions are called by `score`, as the
        checks before the run and the evaluations call them."""
        with self.timer.part("reward"):
            if self.run.ranks.rank:
                by_function, answers = self.run.ranks.broadcast()
                self.set_step_rewards(answers)
                return torch.tensor(by_function, device=self.accelerator.device)
            read = self.read_completions([self.run.rows[x["row"]] for x in inputs], completion_ids_list)
            logs = self._log_completion_extra, self._log_metric
            scores = score(self.reward_funcs, read, completion_ids_list, self.columns, self.state, *logs)
            per_function = torch.tensor(scores, dtype=torch.float32, device=self.accelerator.device)
            weights = self.reward_weights.to(per_function.device)
            totals = (per_function * weights).nansum(dim=1).masked_fill(per_function.isnan().all(dim=1), math.nan)
            answers = self.lookup.look_up(read, completion_ids_list, scores, self.state) if self.lookup else []
            # TRL's own figure is the batch's with SCALE_REWARDS=batch, and leaves out groups with fewer than two
            # rewards.
            groups = totals.view(-1, self.num_generations)
            least, most = groups.nan_to_num(nan=math.inf).amin(1), groups.nan_to_num(nan=-math.inf).amax(1)
            teaches = most > least
            if answers:
                differing = [len(set(answer.gains)) > 1 for answer in answers]
                teaches |= torch.tensor(differing, device=teaches.device).view(groups.shape).any(1)
            zero_std = 1 - teaches.float().mean().item()
            step, by_function = self.state.global_step + 1, per_function.tolist()
            share = sum(answer.column >= 0 for answer in answers) / len(answers) if answers else None
            self.run_log.write_completions(step, read, totals.tolist(), by_function, zero_std, share)
            if answers and self._step == 0:
                log.info("%s", expected_text(read, answers))
            answers = [dataclasses.astuple(answer) for answer in answers]
            self.run.ranks.broadcast([by_function, answers])
            self.set_step_rewards(answers)
        return per_function

    def set_step_rewards(self, answers: Sequence[Sequence[Any]]) -> None:
        """Keeps the AnswerRewards of a step, as tuples, for its learning: TRL carries none from the rewards to
        there."""
        device = self.accelerator.device
        self.step_rewards = StepRewards.stack([AnswerRewards(*a) for a in answers], device) if answers else None

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Rollout, rewards, then forward and backward of each micro-batch. Returns the step's loss, a scalar."""
        model.train()
        # Not by TRL's _prepare_inputs, which shuffles completions for steps that learn from a part of them, by torch's
        # own generator: after a rollout by vLLM that is another on every rank. Here each learns from its own prompts,
        # whole groups.
        with Phase(f"step {self.state.global_step + 1}", first_s=LINE_S):
            tokens = self.state.num_input_tokens_seen
            try:
                batch = self._generate_and_score_completions(inputs)
            except RewardError:
                self.state.num_input_tokens_seen = tokens  # those of this step come again
                self.save_last_step()
                raise
            self._step += 1
            started = time.perf_counter()
            loss = self.learn(model, batch, self.step_rewards)
        self._metrics["train"]["step_time"].append(time.perf_counter() - started)
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL merges its metrics into `logs`; a training step's become a row of metrics.csv, with what is measured
        after it every EVAL_STEPS steps."""
        if stepped := "loss" in logs and self.model.training:
            row, engine = self.timer.figures(), self.run.engine
            for part in ("wake", "handover", "sleep"):
                row[f"{part}_s"] = engine.seconds[part] if engine else None
            row["sync_share"] = engine.share[0] if engine and engine.share else None
            row["rollout_tokens_per_s"] = self.rollout_tokens / max(row["rollout_s"], 1e-9)
            row |= dict.fromkeys((*EVALUATED, "eval_s"))
            if self.is_evaluated(self.state.global_step):
                row |= run_on_rank0(self, self.measured) or {}
            # To the trackers; TRL has the means of the reward functions under names of its own.
            rates = self.run_log.rates if self.run_log else {}
            logs |= {name: value for name, value in (rates | row).items() if value is not None and "/" not in name}
        super().log(logs, start_time)
        if stepped and self.run_log:
            row |= {column: logs.get(name) for column, name in TRL_FIGURES.items()}
            self.run_log.write_step(self.state.global_step, row)

    def measured(self) -> dict[str, float]:
        """Columns of metrics.csv that are measured after some steps."""
        if not self.measure:
            return {}
        started = time.perf_counter()
        with kept_randomness():
            figures = self.measure(self)
        return figures | {"eval_s": time.perf_counter() - started}

    def is_evaluated(self, step: int) -> bool:
        """Whether `step` is measured while it trains: the last one is measured after training."""
        s = self.run.settings
        return bool(s.EVAL_STEPS) and step % s.EVAL_STEPS == 0 and step < s.TOTAL_STEPS
