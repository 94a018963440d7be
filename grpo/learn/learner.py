# SPDX-License-Identifier: Apache-2.0
"""Computes the gradients of a scored batch: the loss of TRL's GRPOTrainer, over few dense micro-batches."""

import collections
import contextlib
from collections.abc import Iterator, Mapping

import torch
from accelerate import Accelerator
from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel
from trl import GRPOConfig, GRPOTrainer

from grpo.learn.context import RunContext
from grpo.learn.distributed import adapter_gradients, sum_over_ranks
from grpo.learn.expected_reward import ExpectedReward, StepRewards
from grpo.learn.log_probs import HeadLogProbs
from grpo.learn.step import Batch, learned_mask
from grpo.model.attention import KERNELS, hidden_states, unwrap_peft
from grpo.model.load import evaluating
from grpo.model.packing import PackedBatch, cut_micro_batches, pack_batch, padded_like
from grpo.phases import LINE_S, with_progress
from grpo.plan.memory import micro_batch_tokens
from grpo.rollout.parity import sampled_kl


def importance_ratio(logps: Tensor, sampled: Tensor, mask: Tensor, mode: str, limit: float) -> tuple[Tensor, Tensor]:
    """(the corrected importance ratio, what the correction multiplied it by), each (B, C) by token or (B, 1) by
    sequence.

    The ratio is that of the policy's probabilities to those with which the engine sampled, from `logps` and `sampled`
    (B, C; NaN: unknown, ratio 1). It is corrected as TRL does: truncated at `limit`, or 0 above it."""
    difference = ((logps - sampled) * mask).nan_to_num(nan=0.0)
    if mode.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    ratio = difference.exp()
    if mode.endswith("truncate"):
        return ratio.clamp(max=limit), (limit / ratio).clamp(max=1.0)
    return ratio.masked_fill(ratio > limit, 0.0), (ratio <= limit).to(ratio.dtype)


class Learner(GRPOTrainer):
    """The part of the trainer that learns from a rollout; `Trainer` adds the rollouts, rewards and logs.

    The loss is Liger's. Loss and gradient are those of the whole batch, however it is cut into micro-batches. Nothing
    is computed in vain: each prompt is computed once for all its completions, there is no padding, and old log-probs
    need no pass: with one optimizer step a rollout they equal the current ones, with several they are vLLM's."""

    run: RunContext
    # TRL's constructor sets these, the numbers from the GRPOConfig of options.py. TRL allows other models and
    # arguments; a run always has an adapter and GRPO's arguments.
    model: PeftModel
    args: GRPOConfig
    accelerator: Accelerator
    beta: float
    epsilon_low: float
    epsilon_high: float
    loss_type: str
    importance_sampling_level: str
    scale_rewards: str
    temperature: float
    max_completion_length: int

    def learn(
        self,
        model: torch.nn.Module,
        batch: Batch,
        answers: StepRewards | None = None,
        probabilities: Tensor | None = None,
    ) -> Tensor:
        """Computes the gradients of the loss of `batch`, on each rank for its own prompts, and sums them over ranks.
        Returns the loss, a scalar.

        The arguments are parts of a `Step`: its `batch`, the rewards of all actions (None without EXPECTED_REWARD), and
        the actions' probabilities (B, K) if they are known, zeros in the rows of other ranks."""
        s, base, mask = self.run.settings, unwrap_peft(model), learned_mask(batch)
        expected: ExpectedReward | None = None
        if answers is not None:
            expected = self.expect(base, batch, answers, probabilities)
            batch = batch | {"advantages": expected.advantages}
        total = torch.zeros((), device=mask.device)
        logps = torch.zeros(mask.shape, device=mask.device)
        ratios = torch.zeros(mask.shape, device=mask.device)
        sums: collections.Counter[str] = collections.Counter()  # Of the logged metrics, over micro-batches.
        names = ("kl", "clip_ratio/region_mean") if self.beta else ("clip_ratio/region_mean",)
        for rows, packed in with_progress("learning", self.micro_batches(batch), "micro-batch", first_s=LINE_S):
            with self.accelerator.autocast():
                states = hidden_states(base, packed, s.ATTN_IMPL)
                # The backward pass of head and loss comes first: their memory is freed before the layers need theirs.
                leaf = states.detach().requires_grad_()
                token_logps, entropy = self.compute_logps(base, leaf, packed.targets)
            micro_batch = {name: value[rows] if value.ndim else value for name, value in batch.items()}
            token_logps, entropy = (padded_like(mask[rows], packed, values) for values in (token_logps, entropy))
            entropy = entropy * mask[rows]
            policy, sampled = token_logps.detach(), micro_batch.get("sampling_per_token_logps")
            logps[rows], ratios[rows] = policy, 1.0
            if sampled is not None and s.IS_CORRECTION != "none":
                ratio, kept = importance_ratio(policy, sampled, mask[rows], s.IS_CORRECTION, s.IS_CLIP_MAX)
                ratios[rows] = ratio.expand_as(policy)
                # Where several steps share a rollout, Liger's loss already divides the policy's probabilities by the
                # engine's. Only the correction of that ratio is left to multiply by.
                micro_batch["importance_sampling_ratio"] = kept if s.steps_per_rollout > 1 else ratio
            if "old_per_token_logps" in batch or self.importance_sampling_level == "sequence":
                old = micro_batch.get("old_per_token_logps", policy)
                micro_batch["old_per_token_logps"] = self.comparable_logps(token_logps, old, mask[rows])
            loss, metrics = self.liger_loss(micro_batch, batch, token_logps)
            summands = {name: value.item() for name, value in zip(names, metrics, strict=True)}
            sums.update(summands | {"entropy": (entropy.detach().sum() / mask.sum().clamp(min=1)).item()})
            if expected is not None and len(packed.targets):
                chances = self.action_probabilities(base, leaf, packed, expected.answers[rows], mask[rows])
                loss = loss + expected.loss(rows, chances)
            loss.backward()
            states.backward(leaf.grad)
            total += loss.detach()
        if self.run.ranks.size > 1:
            sum_over_ranks(self.run.ranks, [*adapter_gradients(model), total, logps, ratios])
            sums_of_ranks, sums = self.run.ranks.share(sums), collections.Counter()
            for rank_sums in sums_of_ranks:
                sums.update(rank_sums)
        self.record_learning(batch, logps, ratios, sums)
        return total

    def comparable_logps(self, policy: Tensor, old: Tensor, mask: Tensor) -> Tensor:
        """The log-probs (b, C) by which the loss divides the `policy`'s: the `old` ones, and with
        IMPORTANCE_SAMPLING_LEVEL=sequence those that give each token its completion's ratio, with that ratio's gradient
        (Liger's own ratio by sequence does not know LOSS_TYPE=cispo and sapo)."""
        old = torch.where(old.isnan(), policy.detach(), old)
        if self.importance_sampling_level == "token":
            return old
        return policy - ((policy - old) * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)

    def micro_batches(self, batch: Batch) -> Iterator[tuple[Tensor, PackedBatch]]:
        """The micro-batches of this rank's completions: their indices (b,) in `batch`, and the completions packed."""
        s = self.run.settings
        share, one_row = s.PACKING == "prefix", s.ATTN_IMPL in KERNELS
        rank_rows = self.run.ranks.share_out(len(batch["prompt_ids"]), s.NUM_GENERATIONS)
        tokens = []
        for kind in ("prompt", "completion"):
            ids, mask = (batch[f"{kind}_{name}"][rank_rows.start : rank_rows.stop].cpu() for name in ("ids", "mask"))
            mask = mask.bool()
            tokens.append([row.tolist() for row in ids[mask].split(mask.sum(1).tolist())])
        prompts, completions = tokens
        lengths = [(len(prompt), len(completion)) for prompt, completion in zip(prompts, completions, strict=True)]
        longest_prompt = max(length for length, _ in lengths)
        token_limit = micro_batch_tokens(s, self.run.plan.micro_batch, longest_prompt, share)
        device = batch["completion_ids"].device
        cut = cut_micro_batches(list(map(tuple, prompts)), lengths, token_limit, share, one_row)
        # The longest comes first, so that torch's allocator has a block for all that follow.
        for rows in sorted(cut, key=lambda rows: sum(len(completions[i]) for i in rows), reverse=True):
            packed = pack_batch([prompts[i] for i in rows], [completions[i] for i in rows], share, one_row, device)
            yield torch.tensor(rows, device=device) + rank_rows.start, packed

    def compute_logps(self, base: PreTrainedModel, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies (N,) of `targets` (N,) after `states` (N, hidden) of `base`."""
        return HeadLogProbs.apply(states, base.get_output_embeddings().weight, targets, self.temperature)

    def expect(
        self, base: PreTrainedModel, batch: Batch, answers: StepRewards, probabilities: Tensor | None = None
    ) -> ExpectedReward:
        """The expected rewards of a step, for which the policy's probabilities are computed unless they are known. All
        ranks must call it."""
        # The probabilities are those of the policy that learns, also in the later steps of a rollout: an older
        # policy's would credit a prefix with answers that are no longer given. (With DIRECT_ANSWERS no steps share a
        # rollout, so those of the choice are the same ones.) That an older policy drew the tokens of the prefix is
        # corrected by their ratios. The answer was not drawn, so V has no ratio, and there is nothing to clip.
        if probabilities is None:
            probabilities = self.probabilities_of_step(base, batch, answers)
        else:
            probabilities = probabilities[:, : answers.tokens.size(1)].clone()
        sum_over_ranks(self.run.ranks, [probabilities])
        group, weights = self.run.settings.NUM_GENERATIONS, self.token_weights(batch)
        return ExpectedReward(answers, probabilities, batch["advantages"], weights, group, self.scale_rewards)

    def probabilities_of_step(self, base: PreTrainedModel, batch: Batch, answers: StepRewards) -> Tensor:
        """Probabilities (B, K) of the actions in this rank's rows, zeros in other ranks', by a forward pass without
        gradient up to the answers: mean and deviation of a step must be known before its first micro-batch learns."""
        mask = batch["completion_mask"]
        probabilities = torch.zeros(answers.tokens.shape, device=mask.device)
        until_answer = torch.arange(mask.size(1), device=mask.device) <= answers.position[:, None]
        cut = batch | {"completion_mask": mask * until_answer}
        with torch.no_grad(), evaluating(base):
            micro_batches = self.micro_batches(cut)
            for rows, packed in with_progress("expected rewards", micro_batches, "micro-batch", first_s=LINE_S):
                if len(packed.targets):
                    with self.accelerator.autocast():
                        states = hidden_states(base, packed, self.run.settings.ATTN_IMPL)
                    probabilities[rows] = self.action_probabilities(base, states, packed, answers[rows], mask[rows])
        return probabilities

    def action_probabilities(
        self, base: PreTrainedModel, states: Tensor, packed: PackedBatch, answers: StepRewards, mask: Tensor
    ) -> Tensor:
        """Probabilities (b, K) of the actions at the answers' tokens, after TEMPERATURE, from the `states` (N, hidden)
        that predict the completion tokens of b completions with `mask` (b, C). For a completion without such a token
        they are those after another token, which does no harm because its gains are 0."""
        indices = padded_like(mask, packed, torch.arange(len(states), device=states.device))
        answer_index = indices.gather(1, answers.position.clamp(min=0)[:, None])[:, 0]
        actions = answers.tokens.size(1)
        answer_states = states[answer_index].repeat_interleave(actions, 0)
        with self.accelerator.autocast():
            logps, _ = self.compute_logps(base, answer_states, answers.tokens.flatten())
        return logps.view(-1, actions).exp()

    def token_weights(self, batch: Batch) -> Tensor:
        """The weight (B, C) that LOSS_TYPE gives each token of `batch`: minus the slope of Liger's loss by its log-prob
        at an advantage of 1."""
        mask = learned_mask(batch)
        logps = torch.zeros(mask.shape, device=mask.device, requires_grad=True)
        advantage_of_1 = {"completion_mask": mask, "advantages": torch.ones(len(mask), device=mask.device)}
        return -torch.autograd.grad(self.liger_loss(advantage_of_1, batch, logps)[0], logps)[0]

    def liger_loss(self, micro_batch: Batch, batch: Batch, logps: Tensor) -> tuple[Tensor, list[Tensor]]:
        """What a `micro_batch` with log-probs (b, C) contributes to the loss of the whole `batch`, as Liger computes
        LOSS_TYPE, and to its metrics: the KL divergence, if there is a reference, and the share of clipped tokens.

        Where `advantages` are (b, C) instead of (b,), completions become sequences of shape (b, 1, C), as Liger spreads
        advantages over the last dimension."""
        names = ("ref_per_token_logps", "old_per_token_logps", "importance_sampling_ratio")
        reference, old, ratio = (micro_batch.get(name) for name in names)
        mask, advantages = learned_mask(micro_batch), micro_batch["advantages"]
        if advantages.ndim == 2:
            logps, mask = logps.unsqueeze(1), mask.unsqueeze(1)
            reference, old, ratio = (None if x is None else x.unsqueeze(1) for x in (reference, old, ratio))
        # Liger's own luspo divides by the length. TRL's is a mean over completions of sums over tokens: dr_grpo's.
        luspo = self.loss_type == "luspo"
        return LigerFusedLinearGRPOFunction.ppo_loss_fn(
            logps,
            mask,
            advantages,
            learned_mask(batch),  # The loss is normalized by the whole step's tokens.
            ref_per_token_logps=reference,
            old_per_token_logps=old,
            epsilon_low=self.epsilon_low,
            epsilon_high=self.epsilon_high,
            beta=self.beta,
            loss_type="dr_grpo" if luspo else self.loss_type,
            max_completion_length=1 if luspo else self.max_completion_length,
            use_bias_correction_kl=self.args.use_bias_correction_kl,
            vllm_is_ratio=ratio,
            num_items_in_batch=batch["num_items_in_batch"],
        )

    @torch.no_grad()
    def batch_logps(self, batch: Batch, with_adapter: bool = True) -> Tensor:
        """Log-probs (B, C) of the completions, as the policy sampled them or, without its adapter, of the base model.
        All ranks must call it."""
        logps = torch.zeros(batch["completion_ids"].shape, device=batch["completion_ids"].device)
        base, policy = unwrap_peft(self.model), self.model
        with contextlib.nullcontext() if with_adapter else policy.disable_adapter(), evaluating(base):
            for rows, packed in self.micro_batches(batch):
                with self.accelerator.autocast():
                    states = hidden_states(base, packed, self.run.settings.ATTN_IMPL)
                    token_logps, _ = self.compute_logps(base, states, packed.targets)
                logps[rows] = padded_like(batch["completion_mask"][rows], packed, token_logps)
        sum_over_ranks(self.run.ranks, [logps])
        return logps

    def record_learning(self, batch: Batch, logps: Tensor, ratios: Tensor, sums: Mapping[str, float]) -> None:
        """Logs `sums`, the step's means by TRL's names, and how far the engine's log-probs are from `logps` (B, C)."""
        metrics, mask = self._metrics["train"], learned_mask(batch).bool()
        for name, value in sums.items():
            metrics[name].append(value)
        if (sampled := batch.get("sampling_per_token_logps")) is not None:
            difference = (sampled - logps)[mask]
            known = difference[~difference.isnan()]
            if known.numel():
                metrics["sampling/sampling_logp_difference/mean"].append(known.abs().mean().item())
                metrics["sampling/sampling_logp_difference/max"].append(known.abs().max().item())
                metrics["sampling/kl"].append(sampled_kl(known).item())
            if not difference.numel():  # MASK_TRUNCATED has left out every completion: there is nothing to compare.
                return
            # From the second step on that shares a rollout, the policy is another one than vLLM's.
            if self.run.watch and self.state.global_step % self.run.settings.steps_per_rollout == 0:
                unknown = 1 - known.numel() / difference.numel()
                self.run.watch.compare(self.state.global_step + 1, known.abs().mean().item(), unknown)
            metrics["sampling/importance_sampling_ratio/mean"].append(ratios[mask].mean().item())
