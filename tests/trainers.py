# SPDX-License-Identifier: Apache-2.0
"""Trainers on the tiny model, and their loss and gradients."""

import contextlib
import dataclasses
import math
from types import SimpleNamespace

import torch
from expert_models import load
from helpers import RENDERED
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from grpo.data.files import Row
from grpo.learn.context import RunContext
from grpo.learn.distributed import adapter_parameters, flat_adapter
from grpo.learn.options import grpo_options
from grpo.learn.trainer import Trainer
from grpo.model.load import load_tokenizer
from grpo.output.folder import RunState
from grpo.plan.memory import Plan
from grpo.preflight.adapter import lora_options
from grpo.preflight.choices import choose_epsilon_high, choose_rewards, choose_scale_rewards
from grpo.process.ending import StopRequest
from grpo.process.ranks import Ranks
from grpo.reward.calling import load_rewards
from grpo.reward.loading import reward_specs
from grpo.rollout.sampler import Sample
from grpo.settings.table import FIELDS, Settings
from grpo.tasks.simulator import SimulationPlan

LOSSES = FIELDS["LOSS_TYPE"].metadata["choices"]


def four_rows():
    """Rendered prompts with four actions."""
    prompts = [RENDERED.format(f"hour {8 + i} store 50 load 30") for i in range(4)]
    columns = {f"reward_action_{k}": k / 10 for k in range(4)}
    return [Row("t.csv", i + 1, (("rendered", p),), (0.1, 0.2, 0.3, 0.4), columns, p) for i, p in enumerate(prompts)]


def build(settings, tiny, folder, ranks=None, rows=None):
    """A trainer on the tiny model, over four rows by default, built as `train_grpo.train` builds it."""
    rows = rows or four_rows()
    specs = reward_specs(choose_rewards(settings.REWARDS, rows, settings.ENVIRONMENT).value)
    scale, high = choose_scale_rewards(settings.SCALE_REWARDS).value, choose_epsilon_high(settings).value
    chosen = {"SCALE_REWARDS": scale, "EPSILON_HIGH": high, "ATTN_IMPL": "eager", "PACKING": "prefix"}
    settings = dataclasses.replace(settings, **chosen)
    resolved = SimpleNamespace(
        settings=settings,
        rows=rows,
        plan=Plan(weights=0.0, learning=0.0, micro_batch=settings.MICRO_BATCH or 2, generation_batch=4),
        state=RunState(folder),
        ranks=ranks or Ranks(),
        closed_loop=SimulationPlan(),
        reward_specs=specs,
        environment=None,
    )
    trainer = Trainer(
        RunContext(resolved, StopRequest()),
        load(tiny).float(),
        load_tokenizer(str(tiny)),
        LoraConfig(**lora_options(settings)),
        GRPOConfig(**grpo_options(settings, False, specs)),
        load_rewards(specs, settings),
    )
    # transformers sets it when training begins; TRL's own loss, with which tests compare, needs it before.
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def make(tiny, folder, ranks=None, rows=None, **changes):
    """A trainer with few, short completions."""
    small = {"PROMPTS_PER_STEP": 2, "NUM_GENERATIONS": 2, "MAX_COMPLETION_LEN": 8, "TOTAL_STEPS": 2, "SEED": 3}
    small["GRADIENT_CHECKPOINTING"] = True  # `resolve`, which replaces `auto`, is not called here.
    return build(
        Settings(**{"MODEL_ID": "tiny", "OUTPUT_DIR": str(folder)} | small | changes), tiny, folder, ranks, rows
    )


def plain_float32(trainer):
    """Switches autocast off, so that a difference between two trainers is no rounding."""
    trainer.args.bf16 = False
    trainer.accelerator.state._mixed_precision = "no"
    trainer.accelerator.native_amp = False
    return trainer


def uniform(generator, *shape):
    """Numbers of mean 0 and variance 1, the same on every CPU: `randn`'s last bits depend on its instructions."""
    return (torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5) * 12**0.5


def step_of(trainer, count):
    """`count` completions of a step and an engine's log-probs of them, the same for every caller.

    One completion in three is truncated. The log-probs are around -6.5 nats, and that of one token is None."""
    generator, (stop, *_) = torch.Generator().manual_seed(trainer.state.global_step), trainer.eos_token_ids
    lengths = torch.randint(2, 9, (count,), generator=generator).tolist()
    ids = [torch.randint(3, 500, (n,), generator=generator).tolist() for n in lengths]
    logps = [(-6.5 + 0.3 * uniform(generator, n)).float().tolist() for n in lengths]
    logps[0][1] = None
    return [row[:-1] + [stop] * (i % 3 > 0) + row[-1:] * (i % 3 == 0) for i, row in enumerate(ids)], logps


def seed_weights(model):
    """Sets weights that keep the size of activations, with log-probs around -6.5 and an adapter that is not zero.

    So no test depends on how a machine trained the tiny model."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = uniform(generator, *parameter.shape) * 0.1
            if "norm" in name:
                values += 1
            elif "lora_B" not in name and parameter.ndim > 1:
                values /= 0.1 if "embed" in name else 0.1 * parameter[..., 0].numel() ** 0.5
            parameter.copy_(values)


def batch(trainer, beta=0.0, old=False, sampled=False, near=None):
    """A step of two prompts with two completions each, all of different lengths, on seeded weights.

    Log-probs of old policy, engine and reference differ around `near` (4, 7), by default the policy's own."""
    seed_weights(trainer.model)
    generator, vocabulary = torch.Generator().manual_seed(1), trainer.model.config.vocab_size
    ids = lambda *shape: torch.randint(3, vocabulary, shape, generator=generator)  # noqa: E731
    inputs = {
        "prompt_ids": ids(2, 12).repeat_interleave(2, 0),
        "prompt_mask": torch.tensor([[0] * 3 + [1] * 9] * 2 + [[1] * 12] * 2),
        "completion_ids": ids(4, 7),
        "completion_mask": torch.tensor([[1] * n + [0] * (7 - n) for n in (7, 4, 2, 6)]),
        "advantages": torch.tensor([1.3, -0.7, -1.1, 0.4]),
        "num_items_in_batch": torch.tensor(23),
    }
    near = policy_logps(trainer, inputs) if near is None else near
    noise = lambda: near + (uniform(generator, 4, 7) * 0.2).to(near.dtype)  # noqa: E731
    if old:
        inputs["old_per_token_logps"] = noise()
    if beta:
        inputs["ref_per_token_logps"] = noise()
    if sampled:
        inputs["sampling_per_token_logps"] = noise() - 0.3
        inputs["sampling_per_token_logps"][0, 2] = math.nan
    return inputs


@contextlib.contextmanager
def plain_trl(trainer):
    """The trainer with TRL's methods alone."""
    ours = trainer.__class__
    trainer.__class__ = GRPOTrainer
    try:
        yield trainer
    finally:
        trainer.__class__ = ours


def policy_logps(trainer, inputs):
    """Log-probs of the completion tokens by TRL's own head over padded rows, without gradient, (B, C)."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    with torch.no_grad(), plain_trl(trainer):
        return trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, inputs["completion_ids"].size(1))[0]


def loss_and_gradients(trainer, inputs, micro_batch=None, packing=None, plain=False, answers=None):
    """(loss, all gradients as one vector) of a step, by `learn` or with `plain` by TRL alone from padded rows."""
    run, s = trainer.run, trainer.run.settings
    trainer.model.train()
    trainer.model.zero_grad()
    inputs = dict(inputs)
    if plain:
        sampled = inputs.pop("sampling_per_token_logps", None)
        if sampled is not None and s.IS_CORRECTION != "none":
            difference = (policy_logps(trainer, inputs) - sampled) * inputs["completion_mask"]
            difference[difference.isnan()] = 0.0
            if s.IS_CORRECTION.startswith("sequence"):
                difference = difference.sum(-1, keepdim=True)
            ratio = difference.exp()
            above = torch.full_like(ratio, s.IS_CLIP_MAX if s.IS_CORRECTION.endswith("truncate") else 0.0)
            inputs["importance_sampling_ratio"] = torch.where(ratio > s.IS_CLIP_MAX, above, ratio)
            trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
        try:
            with plain_trl(trainer):
                loss = trainer._compute_loss(trainer.model, inputs)
        finally:
            trainer.use_vllm = trainer.vllm_importance_sampling_correction = False
        loss.backward()
    else:
        run.resolved.plan = dataclasses.replace(run.plan, micro_batch=micro_batch or run.plan.micro_batch)
        run.resolved.settings = dataclasses.replace(s, PACKING=packing or s.PACKING)
        loss = trainer.learn(trainer.model, inputs, answers)
    return loss.item(), gradient_of(trainer)


def apart(vector, other):
    """The norm of the difference of two vectors, relative to that of the second."""
    return ((vector - other).norm() / other.norm()).item()


def sample_with(trainer, completions):
    """Lets the trainer, and TRL's methods in its place, sample what `completions` returns: token ids, and an engine's
    log-probs of them or None."""

    def sample(prompts):
        ids, logps = completions()
        return [Sample(row, logps and logps[n]) for n, row in enumerate(ids)]

    trainer.sample, trainer._generate_single_turn = sample, lambda *arguments: completions()


def score_completions(trainer, ids, logps=None):
    """The step whose completions are `ids`, with an engine's log-probs of them or none."""
    sample_with(trainer, lambda: (ids, logps))
    trainer.model.train()
    return trainer.new_rollout([row for row in trainer.run.rows for _ in range(trainer.run.settings.NUM_GENERATIONS)])


def gradient_of(trainer):
    """All gradients of the adapter as one vector."""
    return torch.cat([p.grad.flatten() for p in adapter_parameters(trainer.model)])


def moved_by_training(trainer):
    """How training moves the adapter, as a list. Only rank 0 calls reward functions."""
    trainer.args.save_strategy = "no"
    if trainer.run.ranks.rank:
        trainer.scorer.functions = [None] * len(trainer.scorer.functions)
        if trainer.scorer.lookup:
            trainer.scorer.lookup.functions = trainer.scorer.functions
    before = flat_adapter(trainer.model)
    trainer.train()
    return (flat_adapter(trainer.model) - before).tolist()
