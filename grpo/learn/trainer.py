# SPDX-License-Identifier: Apache-2.0
"""TRL's GRPOTrainer with this project's rollouts, rewards, checkpoints and logs."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig

from grpo.data.files import column_names
from grpo.data.prompts import prompt_order, sampling_seed
from grpo.data.scoring import Reward, RewardError, read_completions, score
from grpo.learn.answer_rewards import RewardLookup, expected_text
from grpo.learn.context import RunContext
from grpo.learn.expected_reward import AnswerRewards, StepRewards, action_tokens
from grpo.learn.learner import Batch, Learner
from grpo.learn.timer import StepTimerCallback
from grpo.learn.together import sync_stop_signal
from grpo.model.attention import attention_of
from grpo.model.expert_lora import experts_wrapped
from grpo.model.load import evaluating
from grpo.phases import LINE_S, Phase
from grpo.plan.memory import micro_batch_tokens
from grpo.rollout.decode import shared_prefill
from grpo.rollout.direct import choose_tokens, completions_of
from grpo.run.archive import model_card
from grpo.run.best import loading_advice, read_best
from grpo.run.checkpoints import begin_checkpoint, finish_checkpoint, rotate_checkpoints
from grpo.run.durable import write_text
from grpo.run.logs import EVALUATED, RunLog
from grpo.settings import log

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Generated = tuple[list[list[int]], list[list[float | None]] | None]

# Columns of metrics.csv that are TRL's own figures, by TRL's names of them.
TRL_FIGURES = {
    "reward": "reward",
    "reward_std": "reward_std",
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "kl": "kl",
    "entropy": "entropy",
    "clip_fraction": "clip_ratio/region_mean",
    "logp_diff_mean": "sampling/sampling_logp_difference/mean",
    "logp_diff_max": "sampling/sampling_logp_difference/max",
    "is_ratio_mean": "sampling/importance_sampling_ratio/mean",
}


class Trainer(Learner):
    """GRPO with this project's prompts, completions and rewards. Tests hold the signatures of TRL's methods that it
    overrides.

    `measure` computes columns of metrics.csv every EVAL_STEPS steps; with None nothing is measured while it trains.
    """

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
        self.timer = StepTimerCallback(
            run.stop, lambda signal, model: sync_stop_signal(run.ranks, signal, model, self.state.global_step)
        )
        s, names = run.settings, [function.__name__ for function in rewards]
        weights = config.reward_weights or [1.0] * len(rewards)  # The default is TRL's.
        self.run_log: RunLog | None = None  # Only rank 0 writes logs.
        if not run.ranks.rank:
            self.run_log = RunLog(run.folder, s.TOTAL_STEPS, s.EVAL_STEPS, names, s.LOG_PROMPTS, s.DIRECT_ANSWERS)
        self.columns = column_names(run.rows)  # Reward functions get them with every row.
        self.rollout_tokens = 0  # Tokens of the last rollout.
        self.lookup: RewardLookup | None = None  # None without EXPECTED_REWARD.
        if run.looked_up:
            self.lookup = RewardLookup(rewards, weights, run.looked_up, self.columns, tokenizer)
        self.actions: list[int] = []  # With DIRECT_ANSWERS, the tokens of all actions that any row has.
        if s.DIRECT_ANSWERS:
            self.actions = action_tokens(tokenizer, max(len(row.rewards) for row in run.rows))
            config.num_generations = s.NUM_GENERATIONS  # `grpo_options` says why the config has another number.
        self.step_rewards: StepRewards | None = None  # Rewards of the last completions, with EXPECTED_REWARD.
        # Only the index travels through TRL: the columns are looked up where they are needed.
        dataset = Dataset.from_dict({"prompt": [row.prompt for row in run.rows], "row": list(range(len(run.rows)))})
        with experts_wrapped(model):
            super().__init__(
                model,
                list(rewards),
                config,
                dataset,
                processing_class=tokenizer,
                peft_config=lora,
                callbacks=[self.timer],
            )
        self.current_gradient_accumulation_steps = 1  # Losses read it before training, which sets it, has begun.
        self.remove_callback(PrinterCallback)  # training.log has a line for each step.
        weighted = zip(self.reward_func_names, weights, strict=True)
        self.functions = ", ".join(f"{name} x {weight:g}" for name, weight in weighted)
        # PEFT writes README.md into every folder that the adapter is saved in, with the path of the base model's files,
        # and has no hook for another text.
        self.model.create_or_update_model_card = self.write_model_card  # type: ignore[method-assign, assignment]

    # TRL and transformers declare different arguments of this method.
    def create_model_card(self, *arguments: object, **options: object) -> None:
        """TRL's card is not written: `write_model_card` takes the place of PEFT's, in the same file."""

    def write_model_card(self, folder: str | Path) -> None:
        """Writes README.md of the adapter in `folder`. That of OUTPUT_DIR says which adapter to load."""
        step, note = self.state.global_step, ""
        if Path(folder) == self.run.folder:
            note = loading_advice(read_best(self.run.folder), step)
        write_text(Path(folder) / "README.md", model_card(self.run.settings, step, self.functions, note))

    # `trial` is None: no run is part of a search.
    def _save_checkpoint(self, model: torch.nn.Module, trial: None) -> None:  # type: ignore[override]
        """Saves on rank 0: the files of the checkpoint, then its manifest, and only then the oldest checkpoint goes.

        The oldest is that of the lowest step. transformers goes by modification times, and would delete a new
        checkpoint where older ones are dated later. Another file is written before the manifest.
        """
        if self.run_log is None:
            return
        checkpoint = self.run.folder / f"checkpoint-{self.state.global_step}"
        begin_checkpoint(checkpoint)
        super()._save_checkpoint(model, trial)
        finish_checkpoint(checkpoint, self.run_log.sync())
        rotate_checkpoints(self.run.folder, self.run.settings.SAVE_TOTAL_LIMIT)

    def save_last_step(self) -> None:
        """Saves a checkpoint of the last finished step, if there is none, for a run that ends before the next step has
        learned: weights, optimizer and logs are still those of the finished step."""
        step = self.state.global_step
        if step and not (self.run.folder / f"checkpoint-{step}").exists():
            self._save_checkpoint(self.model, None)

    # A dataloader takes any sequence of indices: here the prompts' order, each prompt for all its completions.
    def _get_train_sampler(self, dataset: Dataset | None = None) -> list[int]:  # type: ignore[override]
        s = self.run.settings
        order = prompt_order(len(self.run.rows), s.SEED, s.TOTAL_STEPS * s.PROMPTS_PER_STEP)
        return [row for row in order for _ in range(s.NUM_GENERATIONS)]

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        """The rollout of a step, which TRL asks for."""
        return self.generate(prompt_ids, num_generations, self.state.global_step)

    def generate(
        self,
        prompt_ids: list[list[int]],
        num_generations: int,
        seed_step: int,
        stream: str = "train",
        temperature: float | None = None,
        base: bool = False,
    ) -> Generated:
        """Token ids of one completion for each prompt, and the engine's log-probs of them, None where transformers
        generates. Each prompt stands `num_generations` times in `prompt_ids`.

        Every rank generates for its own rows, whole groups, with a seed of its own, drawn from `seed_step` and
        `stream`; all ranks get all completions. `temperature`: None is TEMPERATURE, 0 is greedy. `base`: vLLM leaves
        the adapter out; for transformers the caller disables it.
        """
        run, ranks = self.run, self.run.ranks
        seed = sampling_seed(run.settings.SEED, seed_step, stream) + ranks.rank
        torch.manual_seed(seed)
        rank_rows = ranks.share_out(len(prompt_ids), num_generations)
        completion_ids: list[list[int]] = []
        logprobs: list[list[float | None]] | None = None
        with self.timer.part("rollout"):
            if run.settings.DIRECT_ANSWERS:
                completion_ids = self.choose_own(prompt_ids, rank_rows, temperature)
            elif run.engine is None:
                completion_ids = self.generate_own(prompt_ids, num_generations, rank_rows, temperature)
            else:
                logprobs = []
                if rank_rows:
                    rank_prompts = prompt_ids[rank_rows.start : rank_rows.stop]
                    completion_ids, logprobs = run.engine.rollout(self.model, rank_prompts, seed, not base, temperature)
                self.timer.used_gib = max(self.timer.used_gib, run.engine.used_gib)
                logprobs = sum(ranks.share(logprobs), [])
            completion_ids = sum(ranks.share(completion_ids), [])
        self.rollout_tokens = sum(map(len, completion_ids))
        return completion_ids, logprobs

    def choose_own(self, prompt_ids: list[list[int]], rank_rows: range, temperature: float | None) -> list[list[int]]:
        """Token ids of the completions of this rank's rows with DIRECT_ANSWERS. For a step (`temperature` None) the
        probabilities of all actions are kept for learning, which needs them before its first backward pass."""
        own = prompt_ids[rank_rows.start : rank_rows.stop]
        tokens, probabilities = self.choose_answers(own, self.temperature if temperature is None else temperature)
        if temperature is None:
            self.chosen_by = torch.zeros(len(prompt_ids), len(self.actions), device=tokens.device)
            self.chosen_by[rank_rows.start : rank_rows.stop] = probabilities
        return completions_of(tokens, self._tokenizer)

    def choose_answers(
        self, prompt_ids: Sequence[Sequence[int]], temperature: float, actions: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Calls `choose_tokens` for these prompts, all on this rank, with the learner's model and micro-batches.
        Without `actions` all of the run's are possible."""
        run, share = self.run, self.run.packing == "prefix"
        longest = max(map(len, prompt_ids), default=0)
        limit = micro_batch_tokens(run.settings, run.plan.micro_batch, longest, share)
        base, tokens = self.base_model_of(self.model), self.actions if actions is None else actions
        with self.accelerator.autocast():
            return choose_tokens(base, prompt_ids, tokens, temperature, run.attention, limit, share)

    def generate_own(
        self, prompt_ids: list[list[int]], num_generations: int, rank_rows: range, temperature: float | None
    ) -> list[list[int]]:
        """Token ids of the completions of this rank's rows, by transformers, GENERATION_BATCH at once."""
        chunk_size = -(-self.run.plan.generation_batch // self.run.ranks.size)
        completion_ids: list[list[int]] = []
        with (
            attention_of(self.model, "eager"),
            evaluating(self.model),
            self.generating_at(temperature),
            shared_prefill(self.base_model_of(self.model)),
            Phase("generating", "completion", len(rank_rows), LINE_S) as phase,
        ):
            for start in range(rank_rows.start, rank_rows.stop, chunk_size):
                chunk = prompt_ids[start : min(start + chunk_size, rank_rows.stop)]
                completion_ids += super()._generate_single_turn(chunk, None, {}, num_generations)[0]
                phase.done = len(completion_ids)
        return completion_ids

    def answers(
        self, prompt_ids: list[list[int]], samples: int, base: bool, step: int, temperature: float
    ) -> list[list[int]]:
        """Token ids of one completion for each prompt, for an evaluation. Each prompt stands `samples` times in
        `prompt_ids`.

        They are generated as rollouts are, at `temperature` (0 is greedy), with the seed of `step`, and with `base`
        without the adapter. Rank 0 calls this inside of `run_on_rank0`, and asks the others to do the same.
        """
        if not self.run.ranks.rank:
            request = dict(prompt_ids=prompt_ids, samples=samples, base=base, step=step, temperature=temperature)
            self.run.ranks.broadcast(request)
        with evaluating(self.model), self.model.disable_adapter() if base else contextlib.nullcontext():
            return self.generate(prompt_ids, samples, step, "evaluation", temperature, base)[0]

    def answer_rank0(self) -> None:
        """On the other ranks: generates this rank's share of the answers that a function on rank 0 asks for, until that
        function returns. Where the process of rank 0 ends instead, this raises RankLost with its exit code."""
        while request := self.run.ranks.broadcast():
            self.answers(**request)

    def run_on_rank0(
        self, function: Callable[Arguments, Result], *arguments: Arguments.args, **options: Arguments.kwargs
    ) -> Result | None:
        """Calls a function on rank 0 alone, which may ask for `answers`: all ranks generate them. Returns its result on
        rank 0, None on the others."""
        if self.run.ranks.rank:
            self.answer_rank0()
            return None
        result = function(*arguments, **options)
        self.run.ranks.broadcast()
        return result

    @contextlib.contextmanager
    def generating_at(self, temperature: float | None) -> Iterator[None]:
        """Lets transformers generate at another temperature than TEMPERATURE inside the block; 0 is greedy."""
        before = self.generation_config, self.generation_kwargs
        if temperature is not None:
            changed = before[1] | {"do_sample": temperature > 0, "temperature": temperature or 1.0}
            if not temperature:
                changed |= {"top_p": 1.0, "top_k": 50}  # Other values than these defaults are warned about.
            self.generation_config = GenerationConfig(**changed, disable_compile=True)
            self.generation_kwargs = changed
        try:
            yield
        finally:
            self.generation_config, self.generation_kwargs = before

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        """The rewards (B, F) by function. Rank 0 computes them, as a reward function may be random, or ask a judge. The
        functions are called by `score`, as the checks before the run and the evaluations call them."""
        with self.timer.part("reward"):
            if self.run_log is None:
                by_function, answers = self.run.ranks.broadcast()
                self.set_step_rewards([AnswerRewards(*answer) for answer in answers])
                return torch.tensor(by_function, device=self.accelerator.device)
            rows = [self.run.rows[x["row"]] for x in inputs]
            step_completions = read_completions(self._tokenizer, self.eos_token_ids, rows, completion_ids_list)
            logs = self._log_completion_extra, self._log_metric
            scores = score(self.reward_funcs, step_completions, completion_ids_list, self.columns, self.state, *logs)
            per_function = torch.tensor(scores, dtype=torch.float32, device=self.accelerator.device)
            weights = self.reward_weights.to(per_function.device)
            totals = (per_function * weights).nansum(dim=1).masked_fill(per_function.isnan().all(dim=1), math.nan)
            answers = []
            if self.lookup and self.run.settings.DIRECT_ANSWERS:
                answers = self.lookup.look_up_rows(rows, self.state)
            elif self.lookup:
                answers = self.lookup.look_up(step_completions, completion_ids_list, scores, self.state)
            # TRL's own figure describes the whole batch with SCALE_REWARDS=batch, and leaves out groups with fewer than
            # two rewards.
            groups = totals.view(-1, self.num_generations)
            lowest, highest = groups.nan_to_num(nan=math.inf).amin(1), groups.nan_to_num(nan=-math.inf).amax(1)
            teaches = highest > lowest
            if answers:
                differing = [len(set(answer.gains)) > 1 for answer in answers]
                teaches |= torch.tensor(differing, device=teaches.device).view(groups.shape).any(1)
            zero_std = 1 - teaches.float().mean().item()
            step, by_function = self.state.global_step + 1, per_function.tolist()
            share = sum(answer.column >= 0 for answer in answers) / len(answers) if answers else None
            self.run_log.write_completions(step, step_completions, totals.tolist(), by_function, zero_std, share)
            if answers and self._step == 0:
                log.info("%s", expected_text(step_completions, answers))
            self.run.ranks.broadcast([by_function, [dataclasses.astuple(answer) for answer in answers]])
            self.set_step_rewards(answers)
        return per_function

    def set_step_rewards(self, answers: Sequence[AnswerRewards]) -> None:
        """Keeps the AnswerRewards of a step until it learns: TRL has no place for them in its batch."""
        self.step_rewards = StepRewards.stack(answers, self.accelerator.device) if answers else None

    # `inputs` are rows here, where transformers expects a batch of tensors.
    def training_step(
        self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Rollout, rewards, then forward and backward of each micro-batch. Returns the step's loss, a scalar."""
        model.train()
        # TRL's _prepare_inputs is left out. It shuffles completions, for steps that learn from some of them, by torch's
        # own generator, whose state differs between ranks after a rollout by vLLM. Here each rank learns from its own
        # prompts, whole groups.
        with Phase(f"step {self.state.global_step + 1}", first_s=LINE_S):
            tokens = self.state.num_input_tokens_seen
            try:
                batch = self._generate_and_score_completions(inputs)
            except RewardError:
                self.state.num_input_tokens_seen = tokens  # A resumed run counts this step's tokens again.
                self.save_last_step()
                raise
            self._step += 1
            started = time.perf_counter()
            if self.run.settings.DIRECT_ANSWERS:
                batch = self.cut_to_answers(batch)
            loss = self.learn(model, batch, self.step_rewards)
        self._metrics["train"]["step_time"].append(time.perf_counter() - started)
        return loss

    def cut_to_answers(self, batch: Batch) -> Batch:
        """The `batch` of a step with the first token of each completion alone: the tokens behind it were not sampled,
        so neither the loss, nor the entropy, nor TRL's figures of lengths may count them."""
        for name in [name for name in self._metrics["train"] if name.startswith("completions/")]:
            del self._metrics["train"][name]
        cut = {name: value[:, :1] for name, value in batch.items() if value.ndim == 2 and "prompt" not in name}
        return batch | cut | {"num_items_in_batch": cut["completion_mask"].sum()}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs metrics, into which TRL merges its own. Those of a training step become a row of metrics.csv, with the
        figures that are measured every EVAL_STEPS steps."""
        if stepped := "loss" in logs and self.model.training:
            row, engine = self.timer.figures(), self.run.engine
            for name in ("wake", "handover", "sleep"):
                row[f"{name}_s"] = engine.seconds[name] if engine else None
            row["sync_share"] = engine.share[0] if engine and engine.share else None
            speed = self.rollout_tokens / max(self.timer.parts["rollout"], 1e-9)
            row["rollout_tokens_per_s"] = None if self.run.settings.DIRECT_ANSWERS else speed
            row |= dict.fromkeys((*EVALUATED, "eval_s"))
            s, step = self.run.settings, self.state.global_step
            if s.EVAL_STEPS and step % s.EVAL_STEPS == 0 and step < s.TOTAL_STEPS:  # The last one is measured later.
                row |= self.run_on_rank0(self.measured) or {}
            # These go to the trackers. TRL logs the means of the reward functions under names of its own.
            rates = self.run_log.rates if self.run_log else {}
            logs |= {name: value for name, value in (rates | row).items() if value is not None and "/" not in name}
        super().log(logs, start_time)
        if stepped and self.run_log:
            row |= {column: logs.get(name) for column, name in TRL_FIGURES.items()}
            self.run_log.write_step(self.state.global_step, row)

    def measured(self) -> dict[str, float]:
        """Columns of metrics.csv that are measured every EVAL_STEPS steps."""
        if not self.measure:
            return {}
        started = time.perf_counter()
        # Measuring does not change what is learned, as every rollout sets torch's seed.
        figures = self.measure(self)
        return figures | {"eval_s": time.perf_counter() - started}
