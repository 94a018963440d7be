# SPDX-License-Identifier: Apache-2.0
"""LoRA on experts, in BF16 and packed: values, gradients and files are plain PEFT's on transformers' own experts."""

import contextlib

import pytest
import torch
from expert_models import load, stock_model
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import load_file

import train_grpo
from grpo.model import experts
from grpo.model.expert_lora import ExpertAdapter, experts_wrapped, lora_factors, update_norm, weight_norm
from grpo.output.durable import read_json
from grpo.plan.targets import expected_shapes
from grpo.settings.table import Settings

pytestmark = pytest.mark.numeric
IDS = torch.randint(500, (2, 30), generator=torch.Generator().manual_seed(3))
TARGETS = "q_proj,1.experts,2.experts"


def plain(tiny):
    """transformers' own model in float32."""
    return stock_model(tiny, experts_implementation="eager").float()


def adapted(model, wrapped, rank=3):
    """The model with a seeded adapter that matters; `wrapped` as this project does it."""
    settings = Settings(LORA_TARGETS=TARGETS, LORA_R=rank, LORA_ALPHA=2.0 * rank)
    with experts_wrapped(model) if wrapped else contextlib.nullcontext():
        policy = get_peft_model(model, LoraConfig(**train_grpo.lora_options(settings)))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in sorted(policy.named_parameters()):
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return policy


def ours(tiny, kind, rank=3):
    model = load(tiny, kind).float()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return adapted(model.train(), wrapped=True, rank=rank)


@torch.no_grad()
def logits_of(policy):
    return policy(input_ids=IDS).logits


def logits_and_gradients(policy, ids=IDS):
    logits = policy(input_ids=ids).logits
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits * direction).mean().backward()
    return logits.detach(), {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}


def assert_near(logits, expected):
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("kind", "rank"), [("bf16", 3), ("mxfp4", 8)])
def test_values_and_gradients_are_those_of_plain_peft(tiny, kind, rank):
    mine = ours(tiny, kind, rank)
    assert {type(m) for m in mine.modules() if isinstance(m, ParamWrapper)} == {ExpertAdapter}
    # The shapes that PEFT asks for take no memory and are gone.
    experts = mine.get_base_model().model.layers[1].mlp.experts.get_base_layer()
    assert hasattr(experts, "gate_up_proj") == (kind == "bf16")
    expected, expected_gradients = logits_and_gradients(adapted(plain(tiny), wrapped=False, rank=rank))
    logits, gradients = logits_and_gradients(mine)
    assert_near(logits, expected)
    assert gradients.keys() == expected_gradients.keys() and sum("experts" in name for name in gradients) == 8
    for name, gradient in expected_gradients.items():
        assert ((gradients[name] - gradient).norm() / gradient.norm()).item() < 1e-4, name
    with mine.disable_adapter():
        bare = logits_of(mine)
    assert_near(bare, logits_of(plain(tiny)))
    assert (bare - expected).abs().max() > 0.1, "the adapter matters"


def test_experts_without_rows_get_no_gradient(tiny, monkeypatch):
    """Whatever the kernels leave there."""
    product = experts.grouped_mm

    def unwritten(rows, weights, offs):
        """The product, which gives the weights of experts without rows a gradient of NaN."""
        weights, without_rows = weights.clone(), offs.diff(prepend=offs.new_zeros(1)) == 0
        if weights.requires_grad:
            weights.register_hook(lambda gradient: gradient.masked_fill(without_rows[:, None, None], torch.nan))
        return product(rows, weights, offs=offs)

    monkeypatch.setattr(experts, "grouped_mm", unwritten)
    _, by_name = logits_and_gradients(ours(tiny, "bf16"), torch.tensor([[3]]))
    gradients = [gradient for name, gradient in by_name.items() if "experts" in name]
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert any((gradient == 0).any() for gradient in gradients), "one token does not meet all experts"


def test_a_merged_adapter_does_not_count_twice(tiny):
    mine = ours(tiny, "bf16")
    mine.merge_adapter()
    with pytest.raises(RuntimeError, match="merged"):
        logits_of(mine)


def test_the_saved_adapter_is_pefts(tiny, tmp_path):
    """Names and shapes are those that the checks expect; plain PEFT loads it, and so do packed experts."""
    mine = ours(tiny, "mxfp4")
    mine.save_pretrained(tmp_path)
    shapes = {n: list(t.shape) for n, t in load_file(tmp_path / "adapter_model.safetensors").items()}
    assert shapes == expected_shapes(read_json(tiny / "config.json"), 3, TARGETS)
    expected = logits_of(mine)
    packed = load(tiny, "mxfp4").float()
    for base, wrapping in ((plain(tiny), contextlib.nullcontext()), (packed, experts_wrapped(packed))):
        with wrapping:
            loaded = PeftModel.from_pretrained(base, str(tmp_path))
        assert_near(logits_of(loaded), expected)


def test_norms_are_those_of_the_merged_matrices(tiny):
    mine = ours(tiny, "mxfp4").get_base_model().model.layers[1]
    matrix = plain(tiny).model.layers[1].mlp.experts.down_proj
    a, b = lora_factors(mine.mlp.experts)
    torch.testing.assert_close(update_norm(mine.mlp.experts), (b @ a).norm(), rtol=1e-4, atol=0)
    torch.testing.assert_close(weight_norm(mine.mlp.experts), matrix.norm(), rtol=1e-4, atol=0)
    query = mine.self_attn.q_proj
    torch.testing.assert_close(update_norm(query), query.get_delta_weight("default").norm(), rtol=1e-4, atol=0)
