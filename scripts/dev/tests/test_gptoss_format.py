# SPDX-License-Identifier: Apache-2.0
"""gpt-oss's format: MXFP4 as transformers reads it, config and chat template."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from grpo.model.write_checkpoint import expected_tensors
from grpo.plan.hub import count_parameters
from scripts.dev import gptoss_format as gptoss
from scripts.dev.gptoss_format import E2M1, GPT_OSS_20B, GPT_OSS_120B, TINY, config_dict, quantize_mxfp4

pytestmark = pytest.mark.numeric


def dequantized(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What transformers reads, as float32 (..., K)."""
    rows = blocks.view(1, -1, *blocks.shape[-2:]), scales.view(1, -1, scales.shape[-1])
    return convert_moe_packed_tensors(*rows).transpose(1, 2).float().reshape(*blocks.shape[:-2], -1)


REPRESENTABLE = [sign * value for value in E2M1 for sign in (1.0, -1.0)]


@settings(deadline=None)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=64, max_size=64))
def test_rounding_is_to_nearest_within_the_range_of_the_block(values: list[float]) -> None:
    weight = torch.tensor(values, dtype=torch.float64)
    blocks, scales = quantize_mxfp4(weight)
    scale = torch.ldexp(torch.ones(2, dtype=torch.float64), scales.int() - 127).repeat_interleave(32)
    grid = torch.tensor(REPRESENTABLE, dtype=torch.float64)
    nearest = (weight[:, None] / scale[:, None] - grid).abs().amin(1) * scale
    error = (dequantized(blocks, scales).double() - weight).abs()
    assert torch.allclose(error, nearest, rtol=1e-6, atol=1e-37)
    # The scale is not too small, only 6 to 8 saturates, and not too large.
    assert (weight.abs() < 8 * scale).all()
    largest = weight.abs().view(2, 32).amax(1)
    assert ((largest >= 4 * scale[::32]) | (scales == 0)).all()


def test_ties_round_to_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 4)
    back = dequantized(*quantize_mxfp4(ties))
    assert back[:8].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]


def test_quantized_experts_are_those_that_the_model_computes_with() -> None:
    model = GptOssForCausalLM(GptOssConfig.from_dict(config_dict(TINY)))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    quantized = gptoss.quantize_experts(model)
    for name, parameter in model.named_parameters():
        if f"{name}_blocks" in quantized:
            stored = convert_moe_packed_tensors(quantized.pop(f"{name}_blocks"), quantized.pop(f"{name}_scales"))
            assert torch.equal(parameter, stored.float()) and not parameter.requires_grad
            assert 0 < (parameter - before[name]).norm() / before[name].norm() < 0.2
        else:
            assert torch.equal(parameter, before[name]) and parameter.requires_grad
    assert not quantized


@pytest.mark.parametrize(
    ("sizes", "size", "weights"),
    [(GPT_OSS_20B, 13_761_264_768, 20_914_757_184), (GPT_OSS_120B, 65_248_815_744, 116_829_156_672)],
)
def test_config_is_gpt_osss(sizes: gptoss.Sizes, size: int, weights: int) -> None:
    """Sizes by total_size in the model.safetensors.index.json of openai/gpt-oss-20b and 120b; numbers of weights."""
    config = config_dict(sizes)
    assert config["max_position_embeddings"] == 131072
    assert sum(tensor.nbytes for tensor in expected_tensors(config).values()) == size
    assert count_parameters(config)["total"] == weights
