# SPDX-License-Identifier: Apache-2.0
"""The learner: Liger's loss against TRL's, and every hook into TRL. Run: python -m pytest tests/test_learner.py"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from types import SimpleNamespace

import pytest
from conftest import RENDERED

import train_grpo
from train_grpo import Plan, Problems, Row, RunState, Settings

BOTH = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo")


def make(tiny, folder, **changes):
    """A trainer on the tiny model over four rows, built as `run` builds it. Returns (trainer, base weights' hash)."""
    settings = dataclasses.replace(
        Settings(MODEL_ID="tiny", OUTPUT_DIR=str(folder), PROMPTS_PER_STEP=2, NUM_GENERATIONS=2, MAX_COMPLETION_LEN=8,
                 TOTAL_STEPS=2, LORA_R=4, SEED=3), **changes,
    )  # fmt: skip
    files = train_grpo.find_model("tiny", Problems())
    prompts = [RENDERED.format(f"hour {8 + i} store 50 load 30") for i in range(4)]
    rows = [Row("t.csv", i + 1, (("rendered", p),), (0.1, 0.2, 0.3, 0.4), {f"reward_action_{k}": k / 10 for k in range(4)}, p) for i, p in enumerate(prompts)]  # fmt: skip
    plan = Plan(0, 0, 0, 0, settings.MICRO_BATCH or 2, "test", 4, "test")
    check = SimpleNamespace(
        settings=settings, reward_specs=[("action", 1.0)], run=RunState(folder), rows=rows, plan=plan
    )
    model = train_grpo.load_model(str(tiny), files.config, "eager").float()
    context = train_grpo.RunContext(check, rows, plan)
    return train_grpo.make_trainer(check, context, model, train_grpo.load_tokenizer(str(tiny)))


def batch(trainer, beta=0.0, old=False):
    """A micro-batch of two completions of different length with random adapter weights, so that nothing is zero."""
    import torch

    generator = torch.Generator().manual_seed(1)
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    vocabulary = trainer.model.config.vocab_size
    ids = lambda *shape: torch.randint(3, vocabulary, shape, generator=generator)  # noqa: E731
    inputs = {
        "prompt_ids": ids(2, 12),
        "prompt_mask": torch.tensor([[0] * 3 + [1] * 9, [1] * 12]),
        "completion_ids": ids(2, 7),
        "completion_mask": torch.tensor([[1] * 7, [1] * 4 + [0] * 3]),
        "advantages": torch.tensor([1.3, -0.7]),
        "num_items_in_batch": torch.tensor(23),
    }
    near = policy_logps(trainer, inputs)  # policy, old policy and reference differ, but not absurdly
    if old:
        inputs["old_per_token_logps"] = near + torch.randn(2, 7, generator=generator) * 0.2
    if beta:
        inputs["ref_per_token_logps"] = near + torch.randn(2, 7, generator=generator) * 0.2
    return inputs


def policy_logps(trainer, inputs):
    """Log-probs of the completion tokens by TRL's own head, without gradient, (B, C)."""
    import torch

    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    with torch.no_grad():
        return trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, inputs["completion_ids"].size(1))[0]


def loss_and_gradients(trainer, inputs, implementation):
    import torch

    trainer.run.settings = dataclasses.replace(trainer.run.settings, LOSS_IMPL=implementation)
    trainer.model.train()
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = 2
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    gradients = [p.grad.flatten() for p in trainer.model.parameters() if p.requires_grad]
    return loss.item(), torch.cat(gradients)


@pytest.mark.parametrize("case", ["on-policy", "off-policy", "kl"])
@pytest.mark.parametrize("loss_type", BOTH)
def test_liger_and_trl_agree(tiny, tmp_path, loss_type, case):
    """Loss and gradient of both implementations, float32, with a policy ratio away from 1 and with a KL term."""
    changes = {"LOSS_TYPE": loss_type, "BETA": 0.1 if case == "kl" else 0.0, "TEMPERATURE": 0.8}
    trainer = make(tiny, tmp_path, **changes)
    trainer.args.bf16 = False
    trainer.accelerator.state._mixed_precision = "no"
    trainer.accelerator.native_amp = False
    inputs = batch(trainer, changes["BETA"], old=case != "on-policy")
    trl_loss, trl_gradient = loss_and_gradients(trainer, inputs, "trl")
    liger_loss, liger_gradient = loss_and_gradients(trainer, inputs, "liger")
    assert trl_gradient.norm() > 1e-4, "a gradient of nothing proves nothing"
    assert liger_loss == pytest.approx(trl_loss, rel=1e-4, abs=1e-6)
    assert ((liger_gradient - trl_gradient).norm() / trl_gradient.norm()).item() < 1e-3


def test_luspo_is_refused_with_liger_because_the_two_differ(tiny, tmp_path):
    trainer = make(tiny, tmp_path, LOSS_TYPE="luspo")
    trainer.accelerator.native_amp = False
    inputs = batch(trainer, old=True)
    trl_loss, _ = loss_and_gradients(trainer, inputs, "trl")
    liger_loss, _ = loss_and_gradients(trainer, inputs, "liger")
    assert liger_loss != pytest.approx(trl_loss, rel=5e-3), "they agree now: lift the refusal in check_settings"
    problems = Problems()
    train_grpo.check_settings(Settings(LOSS_TYPE="luspo"), None, train_grpo.Machine(), problems)
    assert any(p.startswith("LOSS_TYPE") for p in problems)


def test_a_step_moves_the_adapter_and_no_base_weight(tiny, tmp_path):
    import torch

    def digest(trainer, adapter):
        state = {n: p for n, p in trainer.model.named_parameters() if ("lora_" in n) == adapter}
        return {
            n: hashlib.sha256(p.detach().contiguous().view(torch.uint8).numpy()).hexdigest() for n, p in state.items()
        }

    trainer = make(tiny, tmp_path, LEARNING_RATE=1e-2, PROMPTS_PER_STEP=4, NUM_GENERATIONS=4)
    base, adapter = digest(trainer, False), digest(trainer, True)
    trainer.train()
    assert digest(trainer, False) == base
    moved = [n for n, h in digest(trainer, True).items() if h != adapter[n]]
    assert len(moved) >= len(adapter) / 2, "every lora_B has a gradient in the first step"
    assert {n.split(".")[-4] for n in adapter} == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_an_update_raises_the_probability_of_what_was_rewarded(tiny, tmp_path):
    """The sign of everything at once: advantage +1 on one completion, -1 on another, one step of gradient descent."""
    import torch

    trainer = make(tiny, tmp_path)
    inputs = batch(trainer)
    inputs["advantages"] = torch.tensor([1.0, -1.0])

    def margin():
        first, second = (policy_logps(trainer, inputs) * inputs["completion_mask"]).sum(1).tolist()
        return first - second

    before = margin()
    loss_and_gradients(trainer, inputs, "liger")
    with torch.no_grad():
        for p in trainer.model.parameters():
            if p.requires_grad:
                p -= 0.01 * p.grad / (p.grad.norm() + 1e-9)
    assert margin() > before + 0.1


HOOKS = {
    "_get_train_sampler": ["self", "dataset"],
    "_generate_single_turn": [
        "self",
        "prompt_ids",
        "images",
        "multimodal_fields",
        "num_generations",
        "has_tool_images",
    ],
    "_calculate_rewards": ["self", "inputs", "prompts", "completions", "completion_ids_list"],
    "_compute_loss": ["self", "model", "inputs"],
    "log": ["self", "logs", "start_time"],
}


@pytest.mark.parametrize("name", HOOKS)
def test_hook_points_of_trl_have_not_moved(name):
    from trl import GRPOTrainer

    assert list(inspect.signature(getattr(GRPOTrainer, name)).parameters) == HOOKS[name]
    ours = getattr(train_grpo.Rollouts, name, None) or getattr(train_grpo.Learner, name)
    assert list(inspect.signature(ours).parameters) == HOOKS[name]


def test_trl_still_calls_its_hooks():
    from trl import GRPOTrainer

    source = {name: inspect.getsource(getattr(GRPOTrainer, name)) for name in (
        "_generate", "_generate_and_score_completions", "compute_loss", "get_train_dataloader", "_prepare_inputs")}  # fmt: skip
    assert "self._generate_single_turn(" in source["_generate"]
    assert (
        "self._calculate_rewards(inputs, prompts, completions, completion_ids_list)"
        in source["_generate_and_score_completions"]
    )
    assert "self._compute_loss(model, inputs)" in source["compute_loss"]
    assert "self._get_train_sampler" in source["get_train_dataloader"]
    for key in (
        "num_items_in_batch",
        "completion_mask",
        "advantages",
        "old_per_token_logps",
        "importance_sampling_ratio",
    ):
        assert f'"{key}"' in source["_generate_and_score_completions"]


def test_sampler_repeats_groups_and_batches():
    sampler = train_grpo.PromptSampler(rows=5, seed=0, steps=3, prompts=2, generations=3, repeats=2)
    drawn = list(sampler)
    assert len(drawn) == len(sampler) == 36
    order = list(train_grpo.prompt_order(5, 0, 6))
    for step in range(3):
        a, b = order[2 * step : 2 * step + 2]
        assert drawn[12 * step : 12 * (step + 1)] == [a, a, a, b, b, b] * 2


def test_sampling_seed_depends_on_seed_step_and_stream():
    seeds = {
        train_grpo.sampling_seed(s, n, stream) for s in (1, 2) for n in (0, 1) for stream in ("train", "evaluation")
    }
    assert len(seeds) == 8 and all(0 <= seed < 2**63 for seed in seeds)


def test_truncation_agrees_with_trl(tiny, tmp_path):
    trainer = make(tiny, tmp_path)
    stop, pad = trainer.eos_token_ids, trainer._tokenizer.pad_token_id
    assert len(stop) >= 2, "gpt-oss ends a turn with <|return|> or <|call|>"
    assert not any(trainer.is_truncated([5, token]) for token in (*stop, pad))
    assert trainer.is_truncated([*stop, 5])


def test_sampling_is_a_function_of_the_step(tiny, tmp_path):
    """The same step samples the same completions whatever was drawn before it, another step other ones."""
    import torch

    trainer = make(tiny, tmp_path, TEMPERATURE=3.0)
    trainer.model.eval()
    prompts = trainer.processing_class(text=[row.prompt for row in trainer.run.rows])["input_ids"]

    def sample(step):
        trainer.state.global_step = step
        torch.rand(step + 1)
        return trainer._generate_single_turn(prompts, None, {}, 1)[0]

    first, second, again = sample(0), sample(1), sample(0)
    assert first == again != second
    trainer.run.plan = dataclasses.replace(trainer.run.plan, generation_batch=2)
    assert [len(ids) for ids in sample(0)] and len(sample(0)) == 4, "in two parts"
