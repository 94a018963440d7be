# SPDX-License-Identifier: Apache-2.0
"""Trainers on the tiny model with a stub of vLLM beside them, and log-probs of both for the same tokens."""

import hashlib

import torch
from stub_vllm import StubLLM, StubLoRARequest, StubSampling
from trainers import make, plain_float32

from grpo.rollout.engine import Engine
from grpo.rollout.parity import MismatchCheck
from grpo.rollout.sampler import Sampling, VllmSampler

EXACT = 2e-4  # Nats: both sides compute in float32, in another order.


def trainer_with_engine(tiny, folder, dtype=torch.float32, **changes):
    """A trainer in float32 without autocast, whose `run.engine` is a sleeping stub with its weights as `dtype`."""
    trainer = plain_float32(make(tiny, folder, **changes))
    settings = trainer.run.settings
    stub = StubLLM(tiny, enable_lora=settings.ROLLOUT_SYNC == "lora", dtype=dtype)
    weights = trainer.model.get_base_model().state_dict()
    stub.model.load_state_dict({n.replace(".base_layer", ""): w for n, w in weights.items() if "lora_" not in n})
    trainer.run.engine = Engine(stub, StubSampling, StubLoRARequest, settings, trainer.eos_token_ids)
    trainer.run.engine.folder = folder / "adapter"
    trainer.run.engine.sleep()
    stub.calls.clear()
    trainer.model.eval()
    return trainer


def set_adapter(trainer, seed, strength=0.3):
    """A random adapter whose values BF16 holds exactly, so that vLLM's copy of it is exact too."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in trainer.model.named_parameters():
        if "lora_" in name:
            scale = strength if "lora_B" in name else 0.2
            parameter.data = (torch.randn(parameter.shape, generator=generator) * scale).bfloat16().float()


def rollout(engine, policy, prompts, seed, with_adapter=True, temperature=None):
    """Token ids of a completion of each prompt, and the engine's log-probs of them: None with a `temperature`, which is
    an evaluation's."""
    s, is_rollout = engine.settings, temperature is None
    sampling = Sampling(
        seed, s.TEMPERATURE if is_rollout else temperature, s.TOP_P, s.MAX_COMPLETION_LEN, with_adapter, is_rollout
    )
    samples = VllmSampler(engine, policy).sample(prompts, sampling)
    return [sample.ids for sample in samples], [sample.logps for sample in samples]


def prompts_of(trainer):
    return trainer.processing_class(text=[row.prompt for row in trainer.run.rows])["input_ids"]


def trainer_logps(trainer, prompts, completions=None, temperature=1.0):
    """Log-probs of the completions' tokens, or without completions of the prompts'."""
    check = MismatchCheck(trainer)
    if completions is None:
        return check.trainer_logps(prompts, [1] * len(prompts), 1.0)
    rows = [list(p) + list(c) for p, c in zip(prompts, completions, strict=True)]
    return check.trainer_logps(rows, list(map(len, prompts)), temperature)


def apart(rows, values):
    """The largest difference of the engine's log-probs, by row, from `values` (N,)."""
    return (torch.tensor([value for row in rows for value in row]) - values).abs().max()


def digest(model, adapter=False):
    """A hash of each base weight, or of each weight of the adapter."""
    return {
        name: hashlib.sha256(p.detach().contiguous().view(torch.uint8).numpy()).hexdigest()
        for name, p in model.named_parameters()
        if ("lora_" in name) == adapter
    }
