# SPDX-License-Identifier: Apache-2.0
"""TRL's GRPOTrainer with this project's rollouts, rewards, checkpoints and logs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
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

from grpo.common import log
from grpo.data.files import column_names
from grpo.data.prompts import prompt_order, sampling_seed
from grpo.figures.verdict import loading_advice, objection
from grpo.learn.context import RunContext
from grpo.learn.distributed import ROLLOUT
from grpo.learn.expected_reward import StepRewards
from grpo.learn.finite import FiniteCallback
from grpo.learn.learner import Batch, Learner
from grpo.learn.scored_rollout import ScoredRollout
from grpo.learn.timer import StepTimerCallback
from grpo.model.attention import unwrap_peft, using_attention
from grpo.model.expert_lora import experts_wrapped
from grpo.model.load import evaluating
from grpo.output.archive import model_card
from grpo.output.best import read_best
from grpo.output.checkpoints import begin_checkpoint, finish_checkpoint, rotate_checkpoints
from grpo.output.durable import write_text
from grpo.output.layout import BEST
from grpo.output.logs import EVALUATED, LOG_METRIC, METRICS, TRL_FIGURES, FunctionLog, RunLog
from grpo.phases import LINE_S, Phase
from grpo.plan.memory import micro_batch_tokens
from grpo.reward.lookup import AnswerRewards, RewardLookup, action_tokens, expected_text
from grpo.reward.scoring import Reward, RewardError, partial_none_text, read_completions, score
from grpo.rollout.decode import shared_prefill
from grpo.rollout.direct import choose_tokens, close_answers
from grpo.rollout.parity import MismatchGrown

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Generated = tuple[list[list[int]], list[list[float | None]] | None]


class Trainer(Learner):
    """GRPO with this project's prompts, completions and rewards. Tests compare the signatures of overridden methods.

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
        self.timer = StepTimerCallback(run.stop, run.ranks)
        s = run.settings
        weights = config.reward_weights or [1.0] * len(rewards)  # The default is TRL's.
        self.run_log: RunLog | None = None  # Only rank 0 writes logs.
        if not run.ranks.rank:
            self.run_log = RunLog(run.folder, s, [function.__name__ for function in rewards])
        self.columns = column_names(run.rows)  # Reward functions get them with every row.
        self.rollout_tokens = 0  # Tokens of the last rollout.
        self.lookup: RewardLookup | None = None  # None without EXPECTED_REWARD.
        if run.action_functions:
            self.lookup = RewardLookup(rewards, weights, run.action_functions, self.columns, tokenizer)
        self.actions: list[int] = []  # With DIRECT_ANSWERS, the tokens of all actions that any row has.
        if s.DIRECT_ANSWERS:
            self.actions = action_tokens(tokenizer, max(len(row.rewards) for row in run.rows))
            config.num_generations = s.NUM_GENERATIONS  # `grpo_options` says why the config has another number.
        self.step_rewards: StepRewards | None = None  # Rewards of the last completions, with EXPECTED_REWARD.
        self.rollout: ScoredRollout | None = None  # None where the next step generates.
        self.has_told_none = False  # Whether the log says what a None beside other rewards counts as.
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
                callbacks=[self.timer, FiniteCallback()],
            )
        # transformers sets it when training begins, but losses are computed before that too.
        self.current_gradient_accumulation_steps = 1
        # Reward functions get the state in an evaluation before training too, and may divide by these.
        self.state.max_steps, self.state.num_train_epochs = s.TOTAL_STEPS, 1
        self.remove_callback(PrinterCallback)  # training.log has a line for each step.
        weighted = zip(self.reward_func_names, weights, strict=True)
        self.reward_summary = ", ".join(f"{name} x {weight:g}" for name, weight in weighted)
        # PEFT writes README.md beside every saved adapter, with the path of the base model's files; no hook changes it.
        self.model.create_or_update_model_card = self.write_model_card  # type: ignore[method-assign, assignment]

    # TRL and transformers declare different arguments of this method.
    def create_model_card(self, *arguments: object, **options: object) -> None:
        """Writes nothing in place of TRL's model card: `write_model_card` writes that file instead of PEFT."""

    def write_model_card(self, folder: str | Path) -> None:
        """Writes README.md of the adapter in `folder`; in OUTPUT_DIR it also says which adapter to load."""
        step, note, adapter = self.state.global_step, "", "."
        if Path(folder) == self.run.folder:
            record = read_best(self.run.folder)
            note, adapter = loading_advice(record, step), BEST if record and not objection(record) else "."
        card = model_card(self.run.settings, step, self.reward_summary, note, adapter)
        write_text(Path(folder) / "README.md", card)

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
            self.rollout.save(checkpoint / ROLLOUT)
        finish_checkpoint(checkpoint, self.run_log.sync())
        rotate_checkpoints(self.run.folder, self.run.settings.SAVE_TOTAL_LIMIT)

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and (path := Path(checkpoint) / ROLLOUT).is_file():
            self.rollout = ScoredRollout.load(path, self.accelerator.device)

    def save_last_step(self) -> None:
        """Saves a checkpoint of the last finished step if there is none yet. It is called when a run ends before the
        next step has learned: weights, optimizer and logs are still those of the finished step."""
        step = self.state.global_step
        if step and not (self.run.folder / f"checkpoint-{step}").exists():
            self._save_checkpoint(self.model, None)

    # A dataloader takes any sequence of indices: here the prompts' order, each prompt for all its completions. It asks
    # for a rollout's prompts once for each step that shares them. It must end with the run's last step: transformers
    # trains on while there are prompts, and a run that continues from that step would make one more.
    def _get_train_sampler(self, dataset: Dataset | None = None) -> list[int]:  # type: ignore[override]
        s = self.run.settings
        prompts, rollouts = s.STEPS_PER_GENERATION * s.PROMPTS_PER_STEP, -(-s.TOTAL_STEPS // s.steps_per_rollout)
        order = list(prompt_order(len(self.run.rows), s.SEED, rollouts * prompts))
        starts = [start for start in range(0, len(order), prompts) for _ in range(s.steps_per_rollout)]
        steps = starts[: s.TOTAL_STEPS]
        return [row for n in steps for row in order[n : n + prompts] for _ in range(s.NUM_GENERATIONS)]

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        """Generates the rollout of a step; TRL calls this."""
        return self.generate(prompt_ids, num_generations, self.state.global_step)

    def generate(
        self,
        prompt_ids: list[list[int]],
        num_generations: int,
        seed_step: int,
        temperature: float | None = None,
        base: bool = False,
    ) -> Generated:
        """Token ids of one completion for each prompt, and the engine's log-probs of them, None where transformers
        generates. Each prompt stands `num_generations` times in `prompt_ids`.

        Every rank generates for its own rows, whole groups, with a seed of its own that depends on `seed_step`; all
        ranks get all completions. `temperature`: None is a rollout at TEMPERATURE, a number an evaluation (0: greedy).
        `base`: vLLM leaves the adapter out; for transformers the caller disables it."""
        run, ranks = self.run, self.run.ranks
        stream = "train" if temperature is None else "evaluation"
        seed = sampling_seed(run.settings.SEED, seed_step, stream) + ranks.rank
        torch.manual_seed(seed)
        rank_rows = ranks.share_out(len(prompt_ids), num_generations)
        rank_prompts = prompt_ids[rank_rows.start : rank_rows.stop]
        completion_ids: list[list[int]] = []
        logprobs: list[list[float | None]] | None = None
        with self.timer.part("rollout"):
            if run.settings.DIRECT_ANSWERS:
                completion_ids = self.choose_rank_answers(prompt_ids, rank_rows, temperature)
            elif run.engine is None:
                completion_ids = self.generate_rank_completions(rank_prompts, num_generations, temperature)
            else:
                logprobs = []
                if rank_prompts:
                    completion_ids, logprobs = run.engine.rollout(self.model, rank_prompts, seed, not base, temperature)
                self.timer.used_gib = max(self.timer.used_gib, run.engine.used_gib)
                logprobs = sum(ranks.share(logprobs), [])
            completion_ids = sum(ranks.share(completion_ids), [])
        self.rollout_tokens = sum(map(len, completion_ids))
        return completion_ids, logprobs

    def choose_rank_answers(
        self, prompt_ids: list[list[int]], rank_rows: range, temperature: float | None
    ) -> list[list[int]]:
        """Token ids of the completions of this rank's rows with DIRECT_ANSWERS. For a rollout (`temperature` None) it
        keeps the probabilities of all actions: learning needs them before its first backward pass."""
        rank_prompts = prompt_ids[rank_rows.start : rank_rows.stop]
        chosen_at = self.temperature if temperature is None else temperature
        tokens, probabilities = self.choose_answers(rank_prompts, chosen_at)
        if temperature is None:
            self.choice_probabilities = torch.zeros(len(prompt_ids), len(self.actions), device=tokens.device)
            self.choice_probabilities[rank_rows.start : rank_rows.stop] = probabilities
        return close_answers(tokens, self._tokenizer)

    def choose_answers(
        self, prompt_ids: Sequence[Sequence[int]], temperature: float, actions: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Calls `choose_tokens` for these prompts, all on this rank, with the learner's model and micro-batches.
        Without `actions` the probabilities are those of all actions of the run."""
        run, share = self.run, self.run.packing == "prefix"
        longest = max(map(len, prompt_ids), default=0)
        limit = micro_batch_tokens(run.settings, run.plan.micro_batch, longest, share)
        base, tokens = unwrap_peft(self.model), self.actions if actions is None else actions
        with self.accelerator.autocast():
            return choose_tokens(base, prompt_ids, tokens, temperature, run.attention, limit, share)

    def generate_rank_completions(
        self, rank_prompts: list[list[int]], num_generations: int, temperature: float | None
    ) -> list[list[int]]:
        """Token ids of completions of this rank's prompts by transformers; all ranks do GENERATION_BATCH at once."""
        chunk_size = -(-self.run.plan.generation_batch // self.run.ranks.size)
        completion_ids: list[list[int]] = []
        with (
            using_attention(self.model, "eager"),
            evaluating(self.model),
            self.generating_at(temperature),
            shared_prefill(unwrap_peft(self.model)),
            Phase("generating", "completion", len(rank_prompts), LINE_S) as phase,
        ):
            for start in range(0, len(rank_prompts), chunk_size):
                chunk = rank_prompts[start : start + chunk_size]
                completion_ids += super()._generate_single_turn(chunk, None, {}, num_generations)[0]
                phase.done = len(completion_ids)
        return completion_ids

    def generate_answers(
        self, prompt_ids: list[list[int]], samples: int, base: bool, step: int, temperature: float
    ) -> list[list[int]]:
        """Token ids of a completion for each prompt, for an evaluation. `prompt_ids` has each prompt `samples` times.

        They are generated like rollouts, at `temperature` (0 is greedy), with the seed of `step`, and with `base`
        without the adapter. Rank 0 calls this inside `run_on_rank0`, and makes the other ranks call it too."""
        if not self.run.ranks.rank:
            request = dict(prompt_ids=prompt_ids, samples=samples, base=base, step=step, temperature=temperature)
            self.run.ranks.broadcast(request)
        with self.model.disable_adapter() if base else contextlib.nullcontext():
            return self.generate(prompt_ids, samples, step, temperature, base)[0]

    def serve_rank0(self) -> None:
        """On ranks other than 0, generates this rank's share of the answers that a function on rank 0 asks for, until
        that function returns. Raises RankLost with its exit code if the process of rank 0 ends instead."""
        while request := self.run.ranks.broadcast():
            self.generate_answers(**request)

    def run_on_rank0(
        self, function: Callable[Arguments, Result], *arguments: Arguments.args, **options: Arguments.kwargs
    ) -> Result | None:
        """Calls a function on rank 0 alone. It may call `generate_answers`, in which all ranks take part. Returns the
        function's result on rank 0, None on the others. If it raises, rank 0 must end, as the others wait for it."""
        if self.run.ranks.rank:
            self.serve_rank0()
            return None
        result = function(*arguments, **options)
        self.run.ranks.broadcast()
        return result

    @contextlib.contextmanager
    def generating_at(self, temperature: float | None) -> Iterator[None]:
        """Lets transformers generate at `temperature` inside the block; 0 is greedy, None leaves TEMPERATURE."""
        before = self.generation_config, self.generation_kwargs
        if temperature is not None:
            changed = before[1] | {"do_sample": temperature > 0, "temperature": temperature or 1.0}
            if not temperature:
                changed |= {"top_p": 1.0, "top_k": 50}  # transformers warns of values other than these defaults.
            self.generation_config = GenerationConfig(**changed, disable_compile=True)
            self.generation_kwargs = changed
        try:
            yield
        finally:
            self.generation_config, self.generation_kwargs = before

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        """The rewards (B, F) by function. Rank 0 computes them for all, because a reward function may be random or ask
        a judge. `score` calls the functions in the same way in checks and evaluations."""
        with self.timer.part("reward"):
            if self.run_log is None:
                by_function, answers = self.run.ranks.broadcast()
                self.set_step_rewards([AnswerRewards(*answer) for answer in answers])
                return torch.tensor(by_function, device=self.accelerator.device)
            rows = [self.run.rows[x["row"]] for x in inputs]
            decoded = read_completions(self._tokenizer, self.eos_token_ids, rows, completion_ids_list)
            # TRL's own would put a metric called `reward` among the values of its own, and drops what log_extra gets.
            logged = FunctionLog(len(decoded))
            log_functions = logged.log_extra, logged.log_metric
            scores = score(self.reward_funcs, decoded, completion_ids_list, self.columns, self.state, *log_functions)
            if not self.has_told_none and (text := partial_none_text(self.reward_func_names, scores)):
                self.has_told_none = True
                log.warning("%s", text)
            per_function = torch.tensor(scores, dtype=torch.float32, device=self.accelerator.device)
            weights = self.reward_weights.to(per_function.device)
            totals = (per_function * weights).nansum(dim=1).masked_fill(per_function.isnan().all(dim=1), math.nan)
            answers = []
            if self.lookup and self.run.settings.DIRECT_ANSWERS:
                answers = self.lookup.look_up_rows(rows, self.state)
            elif self.lookup:
                answers = self.lookup.look_up(decoded, completion_ids_list, scores, self.state)
            # TRL's own figure is the batch's with SCALE_REWARDS=batch, and leaves out groups of fewer than two rewards.
            groups = totals.view(-1, self.num_generations)
            lowest, highest = groups.nan_to_num(nan=math.inf).amin(1), groups.nan_to_num(nan=-math.inf).amax(1)
            teaches = highest > lowest
            if answers:
                differing = [len(set(answer.gains)) > 1 for answer in answers]
                teaches |= torch.tensor(differing, device=teaches.device).view(groups.shape).any(1)
            zero_std = 1 - teaches.float().mean().item()
            step, by_function = self.state.global_step + 1, per_function.tolist()
            expected_share = sum(answer.position >= 0 for answer in answers) / len(answers) if answers else None
            self.run_log.write_completions(
                step, decoded, totals.tolist(), by_function, zero_std, expected_share, logged
            )
            if answers and self._step == 0:
                log.info("%s", expected_text(decoded, answers))
            self.run.ranks.broadcast([by_function, [dataclasses.astuple(answer) for answer in answers]])
            self.set_step_rewards(answers)
        return per_function

    def set_step_rewards(self, answers: Sequence[AnswerRewards]) -> None:
        """Keeps the AnswerRewards of a step for its learning, because TRL's batch has no place for them."""
        self.step_rewards = StepRewards.stack(answers, self.accelerator.device) if answers else None

    # `inputs` are rows of the dataset; transformers expects a batch of tensors.
    def training_step(
        self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Computes rollout and rewards, then each micro-batch's gradient. Returns the step's loss, a scalar."""
        model.train()
        s, step, tokens = self.run.settings, self.state.global_step, self.state.num_input_tokens_seen
        index = step % s.steps_per_rollout  # Of this step among those that share its rollout.
        with Phase(f"step {step + 1}", first_s=LINE_S):
            # TRL's _prepare_inputs is not called, because it shuffles completions (see `ScoredRollout.part`).
            if self.rollout is None:
                rollout = self.new_rollout(inputs)
            else:
                rollout = self.rollout
                self.repeat_figures(rollout)
            self.rollout = rollout if index < s.steps_per_rollout - 1 else None
            self._step += 1
            started = time.perf_counter()
            try:
                loss = self.learn(model, *rollout.part(index % s.STEPS_PER_GENERATION, s.STEPS_PER_GENERATION))
            except MismatchGrown:
                # A resumed run generates and counts this rollout's tokens again.
                self.rollout, self.state.num_input_tokens_seen = None, tokens
                self.save_last_step()
                raise
        self._metrics["train"]["step_time"].append(time.perf_counter() - started)
        return loss

    def new_rollout(self, inputs: Any) -> ScoredRollout:
        """Generates and scores the completions of rows `inputs`, for all steps that share them."""
        tokens = self.state.num_input_tokens_seen
        try:
            batch = self._generate_and_score_completions(inputs)
        except RewardError:
            # A resumed run generates and counts this step's tokens again.
            self.state.num_input_tokens_seen = tokens
            self.save_last_step()
            raise
        if self.run.settings.DIRECT_ANSWERS:
            batch = self.cut_to_answers(batch)
        if self.run.settings.steps_per_rollout > 1 and "sampling_per_token_logps" in batch:
            batch["old_per_token_logps"] = batch["sampling_per_token_logps"]
        metrics = {name: values[-1] for name, values in self._metrics["train"].items() if values}
        return ScoredRollout(batch, self.step_rewards, metrics, self.run_log.rates if self.run_log else {})

    def repeat_figures(self, rollout: ScoredRollout) -> None:
        """Logs the figures of a `rollout` again, in a resumed run those of its checkpoint."""
        # LORA_DROPOUT draws the same noise whether or not an evaluation came in between.
        torch.manual_seed(sampling_seed(self.run.settings.SEED, self.state.global_step, "train") + self.run.ranks.rank)
        for name, value in rollout.metrics.items():
            self._metrics["train"][name].append(value)
        if self.run_log:
            self.run_log.rates = rollout.rates

    def cut_to_answers(self, batch: Batch) -> Batch:
        """The `batch` of a step with the first token of each completion alone: the tokens behind it were not sampled,
        so neither the loss, nor the entropy, nor TRL's figures of lengths may count them."""
        for name in [name for name in self._metrics["train"] if name.startswith("completions/")]:
            del self._metrics["train"][name]
        cut = {name: value[:, :1] for name, value in batch.items() if value.ndim == 2 and "prompt" not in name}
        return batch | cut | {"num_items_in_batch": cut["completion_mask"].sum()}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs `logs`, to which TRL adds its own metrics. Those of a training step become a row of metrics.csv, with
        the figures that are measured every EVAL_STEPS steps."""
        failure: RewardError | None = None
        if is_step := "loss" in logs and self.model.training:
            row, rolled_out = self.timer.figures(), self.timer.parts["rollout"] > 0
            engine = self.run.engine
            for name in ("wake", "handover", "sleep"):
                seconds = engine.seconds[name] if engine and rolled_out else 0.0
                row[f"{name}_s"] = seconds if engine else None
            row["sync_share"] = engine.sync_share[0] if engine and engine.sync_share else None
            has_speed = rolled_out and not self.run.settings.DIRECT_ANSWERS
            row["rollout_tokens_per_s"] = self.rollout_tokens / self.timer.parts["rollout"] if has_speed else None
            row |= dict.fromkeys((*EVALUATED, "eval_s"))
            s, step = self.run.settings, self.state.global_step
            # The last step is measured after training.
            if s.EVAL_STEPS and step % s.EVAL_STEPS == 0 and step < s.TOTAL_STEPS:
                try:
                    row |= self.run_on_rank0(self.evaluation_figures) or {}
                except RewardError as error:  # The step is finished: it is logged and saved before the run ends.
                    failure = error
            # The trackers get these too, except for names with a slash: TRL logs means of reward functions itself.
            figures = (self.run_log.rates if self.run_log else {}) | row
            logged: dict[str, float] = json.loads(str(figures.get(LOG_METRIC) or "{}"))
            taken = {*METRICS, *TRL_FIGURES.values(), *logs, *self._metrics["train"]}
            logs |= {f"{LOG_METRIC}/{name}" if name in taken else name: value for name, value in logged.items()}
            logs |= {
                name: value for name, value in figures.items() if isinstance(value, (int, float)) and "/" not in name
            }
        super().log(logs, start_time)
        if is_step and self.run_log:
            row |= {column: logs.get(name) for column, name in TRL_FIGURES.items()}
            self.run_log.write_step(self.state.global_step, row)
        if failure:
            log.warning("step %d was not measured: a reward function failed in its evaluation", self.state.global_step)
            self.save_last_step()
            raise failure

    def evaluation_figures(self) -> dict[str, float]:
        """Measures the columns of metrics.csv that EVAL_STEPS asks for; none if there is no `measure`."""
        if not self.measure:
            return {}
        started = time.perf_counter()
        # Measuring does not change the training, because every rollout sets torch's seed.
        figures = self.measure(self)
        return figures | {"eval_s": time.perf_counter() - started}
