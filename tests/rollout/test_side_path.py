# SPDX-License-Identifier: Apache-2.0
"""Side paths in a model that vLLM builds, with stubs of its classes; how they compute: test_weight_sync.py."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from grpo.rollout.side_path import RANK, SidePath, register_side_path


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv_proj, self.o_proj = torch.nn.Linear(64, 96), torch.nn.Linear(48, 64)


class GptOss(torch.nn.Module):
    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()
        self.layers, self.lm_head = torch.nn.ModuleList([Attention(), Attention()]), torch.nn.Linear(64, 8)


@pytest.mark.parametrize(("rank", "columns"), [(4, (64, 64)), (22, (128, 64)), (70, (256, 128)), (None, None)])
def test_gpt_oss_is_built_with_side_paths_that_no_checkpoint_has(monkeypatch, rank, columns):
    known = {}
    vllm, gpt_oss = ModuleType("vllm"), ModuleType("vllm.model_executor.models.gpt_oss")
    vllm.ModelRegistry = SimpleNamespace(register_model=known.__setitem__)
    gpt_oss.GptOssForCausalLM, gpt_oss.OAIAttention = GptOss, Attention
    for name in ("vllm.model_executor", "vllm.model_executor.models"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for module in (vllm, gpt_oss):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    register_side_path()
    config = SimpleNamespace(additional_config={} if rank is None else {RANK: rank})
    model, plain = known["GptOssForCausalLM"](vllm_config=config), GptOss(vllm_config=config)
    assert [(n, p.shape) for n, p in model.named_parameters()] == [(n, p.shape) for n, p in plain.named_parameters()]
    if rank is None:
        assert not list(model.buffers())
        return
    model.load_state_dict(plain.state_dict())  # strict, and into the views
    x = torch.randn(3, 64)
    for layer, other in zip(model.layers, plain.layers, strict=True):
        assert (len(layer.qkv_proj.side_a), len(layer.o_proj.side_a)) == columns
        got = layer.qkv_proj
        assert isinstance(got.quant_method, SidePath) and got.side_b.data_ptr() == got.side_weight[:, 64:].data_ptr()
        torch.testing.assert_close(got.quant_method.apply(got, x, got.bias), other.qkv_proj(x))
