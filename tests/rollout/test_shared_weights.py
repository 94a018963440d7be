# SPDX-License-Identifier: Apache-2.0
"""The learner on vLLM's own weights: a stand-in with the tensors that vLLM's code makes of the checkpoint's."""

import pytest
import torch
from expert_models import load
from interpreter import cached_source, interpreted
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from grpo.model.expert_lora import experts_wrapped
from grpo.preflight.adapter import lora_options
from grpo.settings.table import Settings

pytestmark = pytest.mark.numeric

LEARNING = """
import operator
import sys
from types import SimpleNamespace as Some
import torch
from torch.nn.functional import pad
from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
from triton_kernels.tensor_details.layout import HopperMXScaleLayout, HopperMXValueLayout
from grpo.model.load import load_checkpoint
from grpo.rollout.shared_weights import share_weights


def swizzled_tensors(blocks, scales):  # _swizzle_mxfp4 of vllm/model_executor/layers/quantization/utils/mxfp4_utils.py
    values, scales = blocks.flatten(2).mT, pad(scales, (0, -scales.shape[-1] % 4)).mT
    scales = convert_layout(wrap_torch_tensor(scales), HopperMXScaleLayout, mx_axis=1, num_warps=8)
    return convert_layout(wrap_torch_tensor(values, FP4), HopperMXValueLayout, mx_axis=1), Some(weight_scale=scales)


def padded(module):  # VocabParallelEmbedding's weight
    return Some(weight=torch.nn.Parameter(pad(module.weight, (0, 0, 0, 7), value=9.0), requires_grad=False))


def learned(model):
    ids = torch.randint(model.config.vocab_size, (1, 20), generator=torch.Generator().manual_seed(0))
    states = model.get_input_embeddings()(ids).requires_grad_()
    output = model.model(inputs_embeds=states).last_hidden_state
    logits = model.get_output_embeddings()(output)
    return states.detach(), output, logits, *torch.autograd.grad(logits.float().square().sum(), states)


packed, shared = (load_checkpoint(sys.argv[1], "eager", "cpu", packed) for packed in (True, False))
layers = []
for layer in packed.model.layers:
    e = layer.mlp.experts
    w13, w13_config = swizzled_tensors(e.gate_up_proj_blocks, e.gate_up_proj_scales)
    w2, w2_config = swizzled_tensors(e.down_proj_blocks, e.down_proj_scales)
    method = Some(w13_precision_config=w13_config, w2_precision_config=w2_config)
    layers.append(Some(mlp=Some(experts=Some(routed_experts=Some(w13_weight=w13, w2_weight=w2, quant_method=method)))))
embedding, head = padded(packed.get_input_embeddings()), padded(packed.get_output_embeddings())
engine = Some(model=Some(layers=layers, embedding=embedding), lm_head=head)
names = set(shared.state_dict())
assert {name for name in packed.state_dict() if not name.endswith(("_blocks", "_scales"))} == names
tables = shared.get_input_embeddings().weight, shared.get_output_embeddings().weight
assert [table.untyped_storage().nbytes() for table in tables] == [2, 2], "of nothing"


def refused(owner, name, value, words):  # an engine that keeps a weight otherwise lends nothing
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        share_weights(shared, engine)
        raise SystemExit(f"{name} was not refused")
    except RuntimeError as error:
        assert words in str(error), error
    setattr(owner, name, kept)
    assert not any(layer.mlp.experts.shared for layer in shared.model.layers)
    assert all(table.isnan().all() for table in tables)


last = layers[-1].mlp.experts.routed_experts
refused(last, "w2_weight", torch.ones(2), "otherwise")  # as Marlin's, which an engine with LoRA takes
refused(last.quant_method.w2_precision_config.weight_scale.storage.layout, "num_warps", 4, "experts as")

addresses = share_weights(shared, engine)
assert set(shared.state_dict()) == names, "vLLM's experts are none of the model's"
assert all(map(operator.is_, tables, (shared.get_input_embeddings().weight, shared.get_output_embeddings().weight)))
assert not any(table.requires_grad for table in tables), "the parameters that others may hold"
lent = []
for layer in layers:
    held = layer.mlp.experts.routed_experts
    lent += [held.w13_weight.storage.data, held.quant_method.w13_precision_config.weight_scale.storage.data]
    lent += [held.w2_weight.storage.data, held.quant_method.w2_precision_config.weight_scale.storage.data]
lent += [embedding.weight.data, head.weight.data]
assert addresses == [tensor.data_ptr() for tensor in lent]
before = [tensor.clone() for tensor in lent]
for parts in (1, 3):
    for layer in shared.model.layers:
        layer.mlp.experts.parts, layer.mlp.experts.dequantize_again = parts, parts > 1
    for expected, tensor in zip(learned(packed), learned(shared), strict=True):
        assert expected.any() and torch.equal(expected, tensor)
assert all(map(torch.equal, before, lent)), "written"
print("all equal")
"""


@pytest.mark.slow
def test_what_is_learned_on_vllms_weights_is_what_is_learned_on_ones_own(tiny):
    """States, logits and gradients bit by bit. vLLM's tensors are not written, and others than expected not read."""
    interpreted(LEARNING, cached_source() / "third_party", tiny)


def test_what_is_lent_is_not_saved(tiny, tmp_path):
    """Nor does what libraries do with a model before the engine is there make a copy of the stand-ins."""
    policy = load(tiny, "shared")
    with experts_wrapped(policy):
        model = get_peft_model(policy, LoraConfig(**lora_options(Settings(LORA_TARGETS="all-linear,experts"))))
    model.to(policy.device).train().enable_input_require_grads()
    table = policy.get_input_embeddings().weight
    assert table.untyped_storage().nbytes() == 2
    table.data = torch.zeros(table.shape, dtype=table.dtype)
    model.save_pretrained(str(tmp_path))
    (path,) = tmp_path.glob("*.safetensors")
    assert all("lora_" in name for name in load_file(path))
