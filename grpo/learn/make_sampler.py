# SPDX-License-Identifier: Apache-2.0
"""What writes the completions of a run, over all its processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from grpo.environment.pool import EnvironmentPool
from grpo.learn.context import RunContext
from grpo.model.attention import unwrap_peft
from grpo.plan.memory import micro_batch_tokens
from grpo.reward.loading import reads_environments
from grpo.reward.lookup import action_tokens
from grpo.rollout.episodes import EpisodePlayer
from grpo.rollout.sampler import DirectSampler, EndTokens, RankedSampler, Sampler, TransformersSampler, VllmSampler


def make_sampler(
    run: RunContext,
    policy: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    stops: list[int],
    autocast: Callable[[], contextlib.AbstractContextManager[object]],
) -> RankedSampler:
    """By DIRECT_ANSWERS a choice of tokens, else vLLM if the run has it, else transformers. `autocast` makes the
    context in which the learner's own passes run."""
    s, base, share = run.settings, unwrap_peft(policy), run.settings.PACKING == "prefix"

    def token_limit(longest_prompt: int) -> int:
        return micro_batch_tokens(s, run.plan.micro_batch, longest_prompt, share)

    sampler: Sampler
    if s.DIRECT_ANSWERS:
        actions = action_tokens(tokenizer, max(len(row.rewards) for row in run.rows))
        sampler = DirectSampler(base, policy, tokenizer, actions, s.ATTN_IMPL, token_limit, share, autocast)
    elif run.engine is not None:
        sampler = VllmSampler(run.engine, policy)
    else:
        at_once = -(-run.plan.generation_batch // run.ranks.size)
        sampler = TransformersSampler(base, policy, tokenizer, stops, at_once)
    return RankedSampler(sampler, run.ranks)


def make_player(
    run: RunContext, sampler: Sampler, tokenizer: PreTrainedTokenizerBase, ends: EndTokens
) -> EpisodePlayer:
    """What plays the episodes of ENVIRONMENT with a process's own `sampler`; environments stay for the whole run."""
    s, description, files = run.settings, run.resolved.environment, run.resolved.files
    assert description and files  # A run that passed its checks has both.
    run.environments = run.environments or EnvironmentPool(s.ENVIRONMENT, s.ENV_TIMEOUT)
    engine = run.plan.engine
    at_once = engine.max_num_seqs if engine else -(-s.completions_per_rollout // run.ranks.size)
    pool, tools, wants_copy = run.environments, description.tools, reads_environments(run.resolved.reward_specs)
    return EpisodePlayer(sampler, pool, tokenizer, ends, s, tools, files.template, at_once, wants_copy)
