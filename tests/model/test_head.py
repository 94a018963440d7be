# SPDX-License-Identifier: Apache-2.0
"""The output head with logits in float32."""

import pytest
import torch
from expert_models import load

from grpo.model.head import Float32Head, float32_logits
from grpo.model.load import in_compute_dtype, vocab_weights

pytestmark = pytest.mark.numeric


def test_logits_around_26_are_not_rounded():
    """BF16 has steps of 0.125 there. Where a gradient is asked for, the head is as it was."""
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(2, 3, 64, generator=generator)
    head = Float32Head(64, 40, bias=False, dtype=torch.bfloat16)
    head.weight.data = (states[0, 0] + 0.1 * torch.randn(40, 64, generator=generator)).bfloat16()
    states = (states * 26 / states[0, 0].square().sum()).bfloat16()
    exact = states.double() @ head.weight.double().t()
    assert 25 < exact[0, 0].mean() < 27
    with torch.no_grad():
        logits = head(states)
        # Other numbers of rows are summed in another order on some CPUs.
        written = float32_logits(states[0], head.weight, out=torch.empty(3, 40))
    torch.testing.assert_close(logits[0], written, rtol=1e-6, atol=1e-5)
    assert logits.dtype == torch.float32 and logits.shape == (2, 3, 40)
    assert (logits - exact).abs().max() < 1e-4
    learning = head(states.requires_grad_())
    assert learning.dtype == torch.bfloat16 and (learning - exact).abs().max() > 0.03
    learning.sum().backward()


def test_only_a_model_on_a_gpu_needs_the_head(tiny):
    """Its weight stays the parameter that it was, under the same name: vLLM lends its own to it, or it is paged. On a
    CPU the whole model becomes float32."""
    elsewhere, on_cpu = load(tiny).to("meta"), in_compute_dtype(load(tiny))
    weight, names = vocab_weights(elsewhere)[1], list(elsewhere.state_dict())
    assert in_compute_dtype(elsewhere) is elsewhere and type(elsewhere.lm_head) is Float32Head
    assert vocab_weights(elsewhere)[1] is weight and list(elsewhere.state_dict()) == names
    assert weight.dtype == torch.bfloat16 and not weight.requires_grad
    assert type(on_cpu.lm_head) is torch.nn.Linear and on_cpu.lm_head.weight.dtype == torch.float32
