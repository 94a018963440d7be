# SPDX-License-Identifier: Apache-2.0
"""The learner on vLLM's own experts: a model of its structure, with the tensors that vLLM's code makes of the checkpoint's."""

from __future__ import annotations

import sys
from types import SimpleNamespace as Some

import pytest
import torch
from expert_models import load
from interpreter import interpreted, third_party
from peft import LoraConfig, get_peft_model

from grpo.model.expert_lora import experts_wrapped
from grpo.rollout.engine import Engine, EngineError
from grpo.rollout.shared_experts import SCALES, VALUES
from grpo.settings import Settings
from train_grpo import lora_options

pytestmark = pytest.mark.numeric

LEARNING = """
import sys
from types import SimpleNamespace as Some
import torch
from torch.nn.functional import pad
from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
from triton_kernels.tensor_details.layout import HopperMXScaleLayout, HopperMXValueLayout
from grpo.model.load import load_quantized
from grpo.rollout.shared_experts import share_experts


def swizzled(blocks, scales):  # _swizzle_mxfp4 of vllm/model_executor/layers/quantization/utils/mxfp4_utils.py
    values, scales = blocks.flatten(2).mT, pad(scales, (0, -scales.shape[-1] % 4)).mT
    scales = convert_layout(wrap_torch_tensor(scales), HopperMXScaleLayout, mx_axis=1, num_warps=8)
    return convert_layout(wrap_torch_tensor(values, FP4), HopperMXValueLayout, mx_axis=1), Some(weight_scale=scales)


def learned(model):
    states = torch.randn(1, 20, model.config.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    output = model.model(inputs_embeds=states.requires_grad_()).last_hidden_state
    return output, *torch.autograd.grad(output.float().square().sum(), states)


packed, shared = (load_quantized(sys.argv[1], "eager", "cpu", packed) for packed in (True, False))
layers = []
for layer in packed.model.layers:
    e = layer.mlp.experts
    w13, w13_config = swizzled(e.gate_up_proj_blocks, e.gate_up_proj_scales)
    w2, w2_config = swizzled(e.down_proj_blocks, e.down_proj_scales)
    method = Some(w13_precision_config=w13_config, w2_precision_config=w2_config)
    layers.append(Some(mlp=Some(experts=Some(routed_experts=Some(w13_weight=w13, w2_weight=w2, quant_method=method)))))
names = set(shared.state_dict())
assert {name for name in packed.state_dict() if not name.endswith(("_blocks", "_scales"))} == names
share_experts(shared, Some(model=Some(layers=layers)))
assert set(shared.state_dict()) == names, "vLLM's tensors are none of the model's"
before = [w.data.clone() for layer in layers for w in vars(layer.mlp.experts.routed_experts).values() if hasattr(w, "data")]
for expected, found in zip(learned(packed), learned(shared), strict=True):
    assert expected.any() and torch.equal(expected, found)
after = [w.data for layer in layers for w in vars(layer.mlp.experts.routed_experts).values() if hasattr(w, "data")]
assert len(before) == 2 * len(layers) and all(map(torch.equal, before, after)), "written"
layers[-1].mlp.experts.routed_experts.quant_method.w2_precision_config.weight_scale.storage.layout.num_warps = 4
try:
    share_experts(shared, Some(model=Some(layers=layers)))
except RuntimeError as error:
    print("all equal", error)
"""


def test_what_is_learned_on_vllms_experts_is_what_is_learned_on_packed_ones(tiny):
    """States and gradients bit by bit; vLLM's tensors are not written, and other layouts not read."""
    interpreted(LEARNING, third_party(), tiny)


def engine_with(weight, config, layers, monkeypatch):
    """An engine whose every layer has that weight and configuration, and the addresses that its sleep backend was told of."""
    method = Some(w13_precision_config=config, w2_precision_config=config)
    held = Some(w13_weight=weight, w2_weight=weight, quant_method=method)
    model = Some(model=Some(layers=[Some(mlp=Some(experts=Some(routed_experts=held)))] * layers))
    told: list[int] = []
    monkeypatch.setitem(sys.modules, "grpo.rollout.sleep_backend", Some(lend=told.extend))  # it imports vLLM
    return Engine(Some(apply_model=lambda function: [function(model)]), None, None, Settings(), []), told


def test_what_the_learner_reads_stays_on_the_gpu(tiny, monkeypatch):
    model = load(tiny, "shared")
    values, scales = torch.zeros(1), torch.zeros(2)
    config = Some(weight_scale=Some(storage=Some(layout=Some(**SCALES), data=scales)))
    layers = len(model.model.layers)
    assert not any(name.endswith(("_blocks", "_scales")) for name in model.state_dict())
    engine, told = engine_with(Some(storage=Some(layout=Some(**VALUES), data=values)), config, layers, monkeypatch)
    engine.lend_experts(model)
    assert told == [values.data_ptr(), scales.data_ptr()] * 2 * layers
    found = model.model.layers[-1].mlp.experts.shared["down_proj"]
    assert found[:2] == (values, scales) and found[2:] == (model.config.hidden_size, model.config.intermediate_size)


def test_an_engine_with_other_kernels_lends_nothing(tiny, monkeypatch):
    """Marlin's weights, which an engine with LoRA takes, are parameters, and it has no configuration of the scales."""
    model = load(tiny, "shared")
    engine, told = engine_with(torch.nn.Parameter(torch.zeros(2)), None, len(model.model.layers), monkeypatch)
    with pytest.raises(EngineError, match="vLLM keeps its experts otherwise.*Set EXPERTS=mxfp4"):
        engine.lend_experts(model)
    assert not told and not any(layer.mlp.experts.shared for layer in model.model.layers)


def test_an_adapter_needs_none_of_their_weights(tiny):
    shapes = []
    for experts in ("mxfp4", "shared"):
        with experts_wrapped(model := load(tiny, experts)):
            model = get_peft_model(model, LoraConfig(**lora_options(Settings(LORA_TARGETS="all-linear,experts"))))
        shapes.append({name: p.shape for name, p in model.named_parameters() if p.requires_grad})
    assert shapes[0] and shapes[0] == shapes[1]
