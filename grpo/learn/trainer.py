# SPDX-License-Identifier: Apache-2.0
"""TRL's GRPOTrainer with this project's rollouts and learner, and what happens around each step."""

from __future__ import annotations

import collections
import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction
from peft import LoraConfig
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer
from trl.kernels import ChunkedLogProbFunction

from grpo.data.files import Row, column_names
from grpo.data.prompts import StepRows, sampling_seed
from grpo.data.scoring import Completion, RewardError, read_completions, score
from grpo.learn.sampling import importance_ratio, kept_randomness
from grpo.learn.timer import StepTimerCallback
from grpo.learn.together import gradients_of, run_on_rank0, sum_over_ranks, sync_stop_signal
from grpo.model.attention import KERNELS, attention_of, hidden_states
from grpo.model.expert_lora import experts_wrapped
from grpo.model.load import evaluating
from grpo.model.packing import PackedBatch, cut_micro_batches, pack_batch, padded_like
from grpo.phases import LINE_S, Phase, with_progress
from grpo.plan.memory import HEAD_TILE, Plan, micro_batch_tokens
from grpo.rollout.engine import Engine
from grpo.rollout.prefill import shared_prefill
from grpo.run.archive import model_card
from grpo.run.best import read_best, which_to_load
from grpo.run.durable import begin_checkpoint, finish_checkpoint, write_text
from grpo.run.folder import rotate_checkpoints
from grpo.run.logs import EVALUATED, RunLog
from grpo.run.ranks import Ranks
from grpo.run.signals import StopRequest
from grpo.settings import Settings

# Columns of metrics.csv that are TRL's own figures, and their names there.
TRL_FIGURES = {
    "reward": "reward", "reward_std": "reward_std", "loss": "loss",
    "grad_norm": "grad_norm", "learning_rate": "learning_rate", "kl": "kl", "entropy": "entropy",
    "clip_fraction": "clip_ratio/region_mean", "logp_diff_mean": "sampling/sampling_logp_difference/mean",
    "logp_diff_max": "sampling/sampling_logp_difference/max",
    "is_ratio_mean": "sampling/importance_sampling_ratio/mean",
}  # fmt: skip
Batch = dict[str, Tensor]  # what TRL hands over for a step, or some of its rows


@dataclass
class RunContext:
    """The run's settings, rows and choices, and what of it changes while it goes on: what trainer, engine, evaluation and
    mismatch check share."""

    settings: Settings
    rows: list[Row]
    plan: Plan
    folder: Path
    attention: str  # of the learner, as ATTN_IMPL names it
    packing: str  # `prefix` or `none`
    stop: StopRequest
    engine: Engine | None = None  # None: transformers generates
    parity: list[dict[str, Any]] = field(default_factory=list)  # what the mismatch check measured
    ranks: Ranks = field(default_factory=Ranks)


class Trainer(GRPOTrainer):
    """GRPO with this project's prompts, completions and rewards, and each step's completions in few dense micro-batches.

    `measure` gives columns of metrics.csv every EVAL_STEPS steps; None: nothing is measured while it trains.

    Tests hold the signatures of TRL's methods that it overrides. The loss is Liger's, and however the step is cut, loss and
    gradient are those of the whole batch. Nothing is computed twice: a prompt once for its completions, no padding, and no
    pass for old log-probs, as there is one optimizer step a rollout: they are the current ones.
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
        """Behind the last file of the checkpoint comes its manifest, and only then the oldest one goes. By step: transformers
        goes by modification times, and would delete a new checkpoint where older ones are dated later. Rank 0's alone."""
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
        """Token ids of one completion for each prompt, of which each stands there `samples` times, generated as the rollouts
        are at `temperature` (0: greedily), with the seed of `step`; `base`: without the adapter. For an evaluation: rank 0 is
        asked, inside of `run_on_rank0`, and asks the others."""
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
                return torch.tensor(self.run.ranks.broadcast(), device=self.accelerator.device)
            read = self.read_completions([self.run.rows[x["row"]] for x in inputs], completion_ids_list)
            logs = self._log_completion_extra, self._log_metric
            scores = score(self.reward_funcs, read, completion_ids_list, self.columns, self.state, *logs)
            per_function = torch.tensor(scores, dtype=torch.float32, device=self.accelerator.device)
            weights = self.reward_weights.to(per_function.device)
            totals = (per_function * weights).nansum(dim=1).masked_fill(per_function.isnan().all(dim=1), math.nan)
            # TRL's own figure is the batch's with SCALE_REWARDS=batch, and leaves out groups with fewer than two rewards.
            groups = totals.view(-1, self.num_generations)
            least, most = groups.nan_to_num(nan=math.inf).amin(1), groups.nan_to_num(nan=-math.inf).amax(1)
            zero_std = (most <= least).float().mean().item()
            step, by_function = self.state.global_step + 1, per_function.tolist()
            self.run_log.write_completions(step, read, totals.tolist(), by_function, zero_std)
            self.run.ranks.broadcast(by_function)
        return per_function

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Rollout, rewards, then forward and backward of each micro-batch. Returns the step's loss, a scalar."""
        model.train()
        # Not by TRL's _prepare_inputs, which shuffles completions for steps that learn from a part of them, by torch's own
        # generator: after a rollout by vLLM that is another on every rank. Here each learns from its own prompts, whole groups.
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
            loss = self.learn(model, batch)
        self._metrics["train"]["step_time"].append(time.perf_counter() - started)
        return loss

    def learn(self, model: torch.nn.Module, batch: Batch) -> Tensor:
        """Gradients of the loss of `batch`, from each rank's own prompts and added up: `prompt_ids` (B, P), `completion_ids`
        (B, C), their masks, `advantages` (B,), and where they are known `sampling_per_token_logps` and
        `ref_per_token_logps` (B, C). Returns the loss, a scalar."""
        s, base, mask = self.run.settings, self.base_model_of(model), batch["completion_mask"]
        total = torch.zeros((), device=mask.device)
        logps = torch.zeros(mask.shape, device=mask.device)
        ratios = torch.zeros(mask.shape, device=mask.device)
        sums: collections.Counter[str] = collections.Counter()
        for rows, packed in with_progress("learning", self.micro_batches(batch), "micro-batch", first_s=LINE_S):
            with self.accelerator.autocast():
                states = hidden_states(base, packed, self.run.attention)
                leaf = states.detach().requires_grad_()  # head and loss first: their memory is free before the rest
                found, entropy = self.compute_logps(base, leaf, packed.targets)
            part = {
                name: value[rows] if torch.is_tensor(value) and value.ndim else value for name, value in batch.items()
            }
            found, entropy = (padded_like(part["completion_mask"], packed, values) for values in (found, entropy))
            policy, sampled = found.detach(), part.get("sampling_per_token_logps")
            logps[rows], ratios[rows] = policy, 1.0
            if sampled is not None and s.IS_CORRECTION != "none":
                ratio = importance_ratio(policy, sampled, part["completion_mask"], s.IS_CORRECTION, s.IS_CLIP_MAX)
                part["importance_sampling_ratio"], ratios[rows] = ratio, ratio.expand_as(policy)
            loss, metrics = self.liger_loss(part, batch, found, entropy)
            loss.backward()
            states.backward(leaf.grad)
            total += loss.detach()
            sums.update(metrics)
        if self.run.ranks.size > 1:
            sum_over_ranks(self.run.ranks, [*gradients_of(model), total, logps, ratios])
            parts, sums = self.run.ranks.share(sums), collections.Counter()
            for part in parts:
                sums.update(part)
        self.record_learning(batch, logps, ratios, sums)
        return total

    def base_model_of(self, model: torch.nn.Module) -> PreTrainedModel:
        """The gpt-oss inside of PEFT's and accelerate's wrappers."""
        return self.accelerator.unwrap_model(model).get_base_model()

    def micro_batches(self, batch: Batch) -> Iterator[tuple[Tensor, PackedBatch]]:
        """Indices (b,) of some completions and these packed, one micro-batch after the other: together all of `batch` that is
        this rank's."""
        s, share, attention = self.run.settings, self.run.packing == "prefix", self.run.attention
        tokens, own = [], self.run.ranks.share_out(len(batch["prompt_ids"]), s.NUM_GENERATIONS)
        for kind in ("prompt", "completion"):
            ids, kept = (batch[f"{kind}_{of}"][own.start : own.stop].cpu() for of in ("ids", "mask"))
            kept = kept.bool()
            tokens.append([row.tolist() for row in ids[kept].split(kept.sum(1).tolist())])
        prompts, completions = tokens
        lengths = [(len(p), len(c)) for p, c in zip(prompts, completions, strict=True)]
        most = micro_batch_tokens(s, self.run.plan.micro_batch, max(p for p, _ in lengths), share)
        device = batch["completion_ids"].device
        for rows in cut_micro_batches(list(map(tuple, prompts)), lengths, most, share):
            chosen = [prompts[i] for i in rows], [completions[i] for i in rows]
            packed = pack_batch(*chosen, share, attention in KERNELS, device)
            yield torch.tensor(rows, device=device) + own.start, packed

    def compute_logps(self, base: PreTrainedModel, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies (N,) of `targets` (N,) after `states` (N, hidden) of `base`. Logits are held for one tile
        of tokens and vocabulary at a time. TRL's kernel: Liger's own streams several float32 copies of each
        tile through memory, and a step of 12 x 8 x 512 tokens took 6.4 s with it, 5.2 s with TRL's (docs/tried.md)."""
        head = base.get_output_embeddings()
        return ChunkedLogProbFunction.apply(
            states, head.weight, head.bias, targets, self.temperature, HEAD_TILE, None, 1.0, ("entropy",)
        )[:2]

    def liger_loss(self, part: Batch, batch: Batch, logps: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, float]]:
        """The share of the loss of `batch` that its `part` has, from log-probs and entropies (b, C), and sums for the logs."""
        whole = batch["completion_mask"]
        # Liger's own luspo divides by the length, TRL's is a sum over tokens and a mean over completions: dr_grpo's with 1.
        luspo = self.loss_type == "luspo"
        loss, metrics = LigerFusedLinearGRPOFunction.ppo_loss_fn(
            logps, part["completion_mask"], part["advantages"], whole,  # normalized by the whole step's tokens
            ref_per_token_logps=part.get("ref_per_token_logps"), old_per_token_logps=part.get("old_per_token_logps"),
            epsilon_low=self.epsilon_low, epsilon_high=self.epsilon_high, beta=self.beta,
            loss_type="dr_grpo" if luspo else self.loss_type, max_completion_length=1 if luspo else self.max_completion_length,
            use_bias_correction_kl=self.args.use_bias_correction_kl,
            vllm_is_ratio=part.get("importance_sampling_ratio"), num_items_in_batch=batch["num_items_in_batch"],
        )  # fmt: skip
        names = ("kl", "clip_ratio/region_mean") if self.beta else ("clip_ratio/region_mean",)
        sums = {name: value.item() for name, value in zip(names, metrics, strict=True)}
        return loss, sums | {"entropy": (entropy.detach().sum() / whole.sum()).item()}

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, **kwargs
    ):
        """Log-probs (B, C) of the last `logits_to_keep` tokens: TRL asks for those of the reference."""
        keep = logits_to_keep
        batch = {
            "prompt_ids": input_ids[:, :-keep], "prompt_mask": attention_mask[:, :-keep],
            "completion_ids": input_ids[:, -keep:], "completion_mask": attention_mask[:, -keep:],
        }  # fmt: skip
        logps = input_ids.new_zeros(batch["completion_ids"].shape, dtype=torch.float32)
        base = self.base_model_of(model)
        for rows, packed in self.micro_batches(batch):
            with self.accelerator.autocast():
                found, _ = self.compute_logps(base, hidden_states(base, packed, self.run.attention), packed.targets)
            logps[rows] = padded_like(batch["completion_mask"][rows], packed, found)
        sum_over_ranks(self.run.ranks, [logps])
        return logps, None, None

    def record_learning(self, batch: Batch, logps: Tensor, ratios: Tensor, sums: Mapping[str, float]) -> None:
        """The step's means under TRL's names, and how far the engine's log-probs are from the trainer's `logps` (B, C)."""
        metrics, mask = self._metrics["train"], batch["completion_mask"].bool()
        for name, value in sums.items():
            metrics[name].append(value)
        if (sampled := batch.get("sampling_per_token_logps")) is not None:
            difference = (logps - sampled).abs()
            difference = difference[mask & ~difference.isnan()]
            if difference.numel():
                metrics["sampling/sampling_logp_difference/mean"].append(difference.mean().item())
                metrics["sampling/sampling_logp_difference/max"].append(difference.max().item())
            metrics["sampling/importance_sampling_ratio/mean"].append(ratios[mask].mean().item())

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL merges its metrics into `logs`; a training step's become a row of metrics.csv, with what is measured after it
        every EVAL_STEPS steps."""
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
