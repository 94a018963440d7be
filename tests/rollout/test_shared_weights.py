# SPDX-License-Identifier: Apache-2.0
"""The learner on vLLM's own weights: a stand-in with the tensors that vLLM's code makes of the checkpoint's."""

from __future__ import annotations

import operator
import sys
from types import SimpleNamespace as Some

import pytest
import torch
from expert_models import load
from interpreter import interpreted, third_party
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from grpo.model.expert_lora import experts_wrapped
from grpo.preflight.adapter import lora_options
from grpo.rollout.engine import Engine, EngineError
from grpo.rollout.shared_weights import SCALES, VALUES
from grpo.settings import Settings

pytestmark = pytest.mark.numeric

LEARNING = """
import operator
import sys
from types import SimpleNamespace as Some
import torch
from torch.nn.functional import pad
from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
from triton_kernels.tensor_details.layout import HopperMXScaleLayout, HopperMXValueLayout
from grpo.model.load import load_quantized
from grpo.rollout.shared_weights import share_weights


def swizzled(blocks, scales):  # _swizzle_mxfp4 of vllm/model_executor/layers/quantization/utils/mxfp4_utils.py
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


packed, shared = (load_quantized(sys.argv[1], "eager", "cpu", packed) for packed in (True, False))
layers = []
for layer in packed.model.layers:
    e = layer.mlp.experts
    w13, w13_config = swizzled(e.gate_up_proj_blocks, e.gate_up_proj_scales)
    w2, w2_config = swizzled(e.down_proj_blocks, e.down_proj_scales)
    method = Some(w13_precision_config=w13_config, w2_precision_config=w2_config)
    layers.append(Some(mlp=Some(experts=Some(routed_experts=Some(w13_weight=w13, w2_weight=w2, quant_method=method)))))
embedding, head = padded(packed.get_input_embeddings()), padded(packed.get_output_embeddings())
engine = Some(model=Some(layers=layers, embedding=embedding), lm_head=head)
names = set(shared.state_dict())
assert {name for name in packed.state_dict() if not name.endswith(("_blocks", "_scales"))} == names
share_weights(shared, engine)
assert set(shared.state_dict()) == names, "vLLM's experts are none of the model's"
lent = [w.data for layer in layers for w in vars(layer.mlp.experts.routed_experts).values() if hasattr(w, "data")]
lent += [embedding.weight.data, head.weight.data]
before = [tensor.clone() for tensor in lent]
for expected, tensor in zip(learned(packed), learned(shared), strict=True):
    assert expected.any() and torch.equal(expected, tensor)
assert len(lent) == 2 * len(layers) + 2 and all(map(torch.equal, before, lent)), "written"
layers[-1].mlp.experts.routed_experts.quant_method.w2_precision_config.weight_scale.storage.layout.num_warps = 4
try:
    share_weights(shared, engine)
except RuntimeError as error:
    print("all equal", error)
"""


def test_what_is_learned_on_vllms_weights_is_what_is_learned_on_ones_own(tiny):
    """States, logits and gradients bit by bit; vLLM's tensors are not written, and other layouts not read. Before they
    are lent, nothing is computed."""
    interpreted(LEARNING, third_party(), tiny)


@pytest.fixture
def engine(tiny, monkeypatch):
    """A model without its weights, vLLM's with all that it lends, an engine, and the addresses that its sleep backend
    keeps on the GPU."""
    policy, kept = load(tiny, "shared"), []
    config = Some(weight_scale=Some(storage=Some(layout=Some(**SCALES), data=torch.zeros(2))))
    weight = Some(storage=Some(layout=Some(**VALUES), data=torch.zeros(1)))
    method = Some(w13_precision_config=config, w2_precision_config=config)
    held = Some(w13_weight=weight, w2_weight=weight, quant_method=method)
    layers = [Some(mlp=Some(experts=Some(routed_experts=held)))] * len(policy.model.layers)
    rows, hidden = policy.get_input_embeddings().weight.shape
    tables = [Some(weight=torch.nn.Parameter(torch.rand(rows + 7, hidden).bfloat16())) for _ in range(2)]
    vllm = Some(model=Some(layers=layers, embedding=tables[0]), lm_head=tables[1])
    backend = Some(lend=lambda pointers: kept.extend(["all"] if pointers is None else pointers))
    monkeypatch.setitem(sys.modules, "grpo.rollout.sleep_backend", backend)  # the real one imports vLLM
    return policy, vllm, Engine(Some(apply_model=lambda function: [function(vllm)]), None, None, Settings(), []), kept


def tables_of(policy):
    return [policy.get_input_embeddings().weight, policy.get_output_embeddings().weight]


def test_what_the_learner_reads_stays_on_the_gpu(engine):
    policy, vllm, engine, kept = engine
    held, tables = vllm.model.layers[0].mlp.experts.routed_experts, tables_of(policy)
    values, scales = held.w2_weight.storage.data, held.quant_method.w2_precision_config.weight_scale.storage.data
    assert [table.untyped_storage().nbytes() for table in tables] == [2, 2], "of nothing"
    engine.lend_weights(policy)
    addresses = [table.weight.data_ptr() for table in (vllm.model.embedding, vllm.lm_head)]
    assert kept == [values.data_ptr(), scales.data_ptr()] * 2 * len(policy.model.layers) + addresses
    engine.lend_weights(policy, whole=True)
    assert kept.pop() == "all"
    shared = policy.model.layers[-1].mlp.experts.shared["down_proj"]
    assert shared == (values, scales, policy.config.hidden_size, policy.config.intermediate_size)
    assert all(map(operator.is_, tables_of(policy), tables)), "the parameters that others may hold"
    assert [table.data_ptr() for table in tables] == addresses and not any(table.requires_grad for table in tables)


def replace_experts(vllm, policy):
    """By Marlin's, which an engine with LoRA takes: parameters, without a configuration of the scales."""
    vllm.model.layers[0].mlp.experts.routed_experts.w2_weight = torch.ones(2)


def replace_table(change):
    return lambda vllm, policy: setattr(vllm.lm_head, "weight", change(vllm.lm_head.weight))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (replace_experts, "vLLM keeps its weights otherwise"),
        (replace_table(lambda table: table[:-8]), "vLLM keeps its embeddings"),
        (replace_table(torch.Tensor.float), "vLLM keeps its embeddings"),
        (replace_table(lambda table: table.T.contiguous().T), "vLLM keeps its embeddings"),
        (lambda vllm, policy: setattr(policy.config, "tie_word_embeddings", True), "tied"),
    ],
    ids=["kernel", "rows", "type", "order", "tied"],
)
def test_an_engine_that_keeps_a_weight_otherwise_lends_nothing(engine, other, words):
    policy, vllm, engine, kept = engine
    other(vllm, policy)
    with pytest.raises(EngineError, match=f"{words}.*Set EXPERTS=paged"):
        engine.lend_weights(policy)
    assert not kept and not any(layer.mlp.experts.shared for layer in policy.model.layers)
    assert all(table.isnan().all() for table in tables_of(policy))


def test_what_is_lent_is_not_saved(engine, tmp_path):
    """Nor does what libraries do with a model before the engine is there make a copy of the stand-ins."""
    policy, _, engine, _ = engine
    with experts_wrapped(policy):
        model = get_peft_model(policy, LoraConfig(**lora_options(Settings(LORA_TARGETS="all-linear,experts"))))
    model.to(policy.device).train().enable_input_require_grads()
    assert policy.get_input_embeddings().weight.untyped_storage().nbytes() == 2
    engine.lend_weights(model)
    model.save_pretrained(str(tmp_path))
    (path,) = tmp_path.glob("*.safetensors")
    assert all("lora_" in name for name in load_file(path))
