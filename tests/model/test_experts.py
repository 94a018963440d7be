# SPDX-License-Identifier: Apache-2.0
"""Fused and packed experts: against transformers' own, and the Triton kernels (interpreted) against plain torch.

Run: python -m pytest tests/test_experts.py
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import CLEAN, ROOT
from expert_models import config_of, load

from grpo.model.experts import activation, activation_backward, expert_weights, frozen_experts, unpack_mxfp4
from grpo.model.gptoss_format import dequantize_mxfp4
from grpo.model.load import load_generation_config, load_packed
from grpo.preflight.machine import GIB, Machine
from grpo.preflight.memory import plan_memory
from grpo.settings import Settings

KERNELS = """
import torch, triton
import train_grpo as t

K = t.expert_kernels()
torch.manual_seed(0)
E, H, I, N, k = 4, 48, 40, 13, 3
S = N * k
index = torch.stack([torch.randperm(E)[:k] for _ in range(N)])
expert, order = index.flatten().sort()
place = torch.empty_like(order).scatter_(0, order, torch.arange(S))


def near(what, ours, plain):
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5, msg=lambda text: what + ": " + text)


raw, bias, gradient = torch.randn(S, 2 * I) * 6, torch.randn(E, 2 * I), torch.randn(S, I)
out, wide = torch.full((S, I), torch.nan), torch.full((S, 2 * I), torch.nan)
limits = dict(limit=t.GATE_LIMIT, alpha=t.GATE_ALPHA)
t.launch_rows(K.activation, S, I, raw, bias, expert, out, **limits)
near("activation", out, t.activation(raw, bias, expert))
t.launch_rows(K.activation_backward, S, I, raw, bias, expert, gradient, wide, **limits)
near("activation_backward", wide, t.activation_backward(gradient, raw, bias, expert))

rows, bias, weights, gradient = torch.randn(S, H), torch.randn(E, H), torch.rand(N, k), torch.randn(N, H)
out = torch.full((N, H), torch.nan)
t.launch_rows(K.combine, N, H, rows, bias, expert, place, weights, out, pairs=k)
near("combine", out, t.combine(rows, bias, expert, place, weights, k))
out.fill_(torch.nan)
t.launch_rows(K.combine, N, H, rows, None, expert, place, None, out, pairs=k)
near("combine without weights", out, t.combine(rows, None, expert, place, None, k))
spread, d_weights = torch.full_like(rows, torch.nan), torch.full_like(weights, torch.nan)
t.launch_rows(K.combine_backward, S, H, gradient, rows, bias, expert, place, weights, spread, d_weights, pairs=k)
for name, ours, plain in zip(("rows", "weights"), (spread, d_weights),
                             t.combine_backward(gradient, rows, bias, expert, place, weights)):
    near("combine_backward " + name, ours, plain)

blocks = torch.randint(0, 256, (E, 6, 2, 16), dtype=torch.uint8)
blocks[0, 0] = torch.arange(16) * 17  # each code in the low and in the high bits
# Ordinary scales, and the extreme ones, where 2 ** -127 is subnormal. These in float32, as the interpreter's rounding to
# BF16 knows no subnormal values. Compared by their bits, so that -0 counts.
for dtype, lowest, highest in ((torch.bfloat16, 100, 150), (torch.float32, 0, 3), (torch.float32, 248, 253)):
    scales = torch.randint(lowest, highest, (E, 6, 2), dtype=torch.uint8)
    scales[0, 0] = lowest
    out, groups = torch.empty(E, 6, 64, dtype=dtype), scales.numel()
    K.unpack[(triton.cdiv(groups, 128),)](blocks, scales, out, groups, BLOCK=128, num_warps=4)
    plain = t.unpack_mxfp4(blocks, scales).transpose(1, 2).to(dtype).contiguous()
    assert torch.equal(out.view(torch.int16), plain.view(torch.int16)), f"unpack, scales from {lowest}"
print("all equal")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_equal_plain_torch():
    """In Triton's interpreter, which must be chosen before triton is imported."""
    environ = CLEAN | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", KERNELS], env=environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and "all equal" in done.stdout, done.stdout + done.stderr


def routed(module, tokens=17, top=4, seed=0, dtype=torch.float32):
    """hidden (N, H), index (N, k), weights (N, k) for one layer's experts; one expert gets no token."""
    g = torch.Generator().manual_seed(seed)
    count, hidden = module.gate_up_proj_bias.shape[0], module.down_proj_bias.shape[1]
    top = min(top, count - 1)
    index = torch.stack([torch.randperm(count - 1, generator=g)[:top] for _ in range(tokens)])
    states = (torch.randn(tokens, hidden, generator=g) * 3).to(dtype).requires_grad_()
    weights = torch.rand(tokens, top, generator=g).softmax(-1).to(dtype).requires_grad_()
    return states, index, weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_experts_equal_transformers_grouped_mm(tiny, dtype):
    """The forward pass bit by bit; gradients of states and weights, in float32 to rounding."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    module = load(tiny, "bf16").model.layers[0].mlp.experts.to(dtype)
    module.requires_grad_(False)
    with torch.no_grad():  # the tiny model's biases are zero, or near it
        g = torch.Generator().manual_seed(5)
        for bias in (module.gate_up_proj_bias, module.down_proj_bias):
            bias.copy_(torch.randn(bias.shape, generator=g))
        module.gate_up_proj.mul_(8)  # so that the clamps at the gate's limit count
    states, index, weights = routed(module, dtype=dtype)
    ours = frozen_experts()(states, index, weights, module)
    theirs = grouped_mm_experts_forward(module, states, index, weights)
    assert torch.equal(ours, theirs)
    gradient = torch.randn_like(ours)
    found, expected = (torch.autograd.grad(x, (states, weights), gradient) for x in (ours, theirs))
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype == dtype
        assert ((a - b).norm() / b.norm()).item() < (1e-5 if dtype == torch.float32 else 1e-2)


def test_activation_backward_is_that_of_autograd():
    """On both sides of each clamp and at its limit; far below, where the slope is almost nothing, gates are not clamped."""
    grid = torch.tensor([-20, -7.5, -7, -6.5, -1, 0, 0.3, 6.5, 7, 7.5, 20], dtype=torch.float64)
    raw = torch.cartesian_prod(grid, grid).flatten()[None].requires_grad_()  # interleaved gate and up
    bias, expert = torch.zeros(1, raw.shape[1], dtype=torch.float64), torch.zeros(1, dtype=torch.long)
    gradient = torch.linspace(-2, 2, raw.shape[1] // 2, dtype=torch.float64)[None]
    (expected,) = torch.autograd.grad(activation(raw, bias, expert), raw, gradient)
    found = activation_backward(gradient, raw.detach(), bias, expert)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
    assert not found[0, ::2][raw[0, ::2] > 7].any() and not found[0, 1::2][raw[0, 1::2].abs() > 7].any()


def test_packed_experts_equal_unpacked_ones(tiny):
    wide, packed = (load(tiny, kind).model.layers[0].mlp.experts for kind in ("bf16", "mxfp4"))
    for name in ("gate_up_proj", "down_proj"):
        assert torch.equal(expert_weights(packed, name), expert_weights(wide, name))
    states, index, weights = routed(wide, dtype=torch.bfloat16)
    apply = frozen_experts()
    with torch.no_grad():
        assert torch.equal(apply(states, index, weights, packed), apply(states, index, weights, wide))


def test_unpack_equals_the_one_that_made_the_model():
    """Every code with every scale that BF16 holds, and the layout that transformers computes with: (E, in, out)."""

    g = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 6, 2, 16), generator=g, dtype=torch.uint8)
    scales = torch.randint(10, 240, (3, 6, 2), generator=g, dtype=torch.uint8)
    found = unpack_mxfp4(blocks, scales)
    expected = dequantize_mxfp4(blocks, scales)
    expected = expected if expected.shape == found.shape else expected.transpose(1, 2)
    assert found.shape == (3, 64, 6) and found.dtype == torch.bfloat16
    assert torch.equal(found.float(), expected.float())


def test_unpacked_model_is_the_one_that_transformers_dequantizes(tiny):
    """Every tensor bit by bit, its config and what it generates with."""
    from transformers import AutoModelForCausalLM, Mxfp4Config

    ours = load(tiny, "bf16")
    theirs = AutoModelForCausalLM.from_pretrained(
        tiny, dtype=torch.bfloat16, attn_implementation="eager", quantization_config=Mxfp4Config(dequantize=True)
    )
    assert type(ours.model.layers[0].mlp.experts) is type(theirs.model.layers[0].mlp.experts)
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys() and len(expected) > 10
    for name, tensor in ours.state_dict().items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name
    assert ours.config.to_dict() == theirs.config.to_dict()
    assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()
    assert (ours.name_or_path, ours.training) == (theirs.name_or_path, theirs.training)
    ids = torch.arange(40)[None]
    theirs.set_experts_implementation("grouped_mm")
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
    ours.set_experts_implementation("grouped_mm")  # the new modules read the model's config
    assert ours.model.layers[0].mlp.experts.config._experts_implementation == "grouped_mm"


def test_load_packed_equals_from_pretrained_in_all_but_the_experts(tiny):
    wide, packed = (load(tiny, kind).state_dict() for kind in ("bf16", "mxfp4"))
    names = {n for n in wide if "mlp.experts" not in n}
    assert names == {n for n in packed if "mlp.experts" not in n} and len(names) > 10
    for name in names:
        assert packed[name].dtype == wide[name].dtype and torch.equal(packed[name], wide[name]), name
    experts = [p for n, p in packed.items() if n.endswith(("_blocks", "_scales"))]
    assert experts and {p.dtype for p in experts} == {torch.uint8}
    model = load(tiny, "mxfp4")
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert not any(p.is_meta for p in (*model.parameters(), *model.buffers()))
    assert model.generation_config.eos_token_id == load(tiny, "bf16").generation_config.eos_token_id


def damaged(tiny, folder, change):
    """A copy of the tiny model whose first shard went through `change`."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny, folder)
    shard = sorted(folder.glob("*.safetensors"))[0]
    tensors = load_file(shard)
    change(tensors)
    save_file(tensors, shard, {"format": "pt"})
    return folder


def test_blocks_and_scales_may_lie_in_different_files(tiny, tmp_path):
    from safetensors.torch import save_file

    scales = {}

    def part(tensors):
        for name in [name for name in tensors if name.endswith("_scales")]:
            scales[name] = tensors.pop(name)

    folder = damaged(tiny, tmp_path / "model", part)
    save_file(scales, folder / "model-scales.safetensors", {"format": "pt"})
    expected = load(tiny, "bf16").state_dict()
    assert scales and all(
        torch.equal(tensor, expected[name]) for name, tensor in load(folder, "bf16").state_dict().items()
    )


@pytest.mark.parametrize("name", ["model.layers.0.mlp.experts.down_proj_scales", "model.norm.weight"])
def test_a_missing_tensor_is_named(tiny, tmp_path, name):
    folder = damaged(tiny, tmp_path / "model", lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=f"{name} is missing .1 tensors.*Download the model again"):
        load_packed(str(folder), "eager", "cpu")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "extra is no part of a gpt-oss in MXFP4"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(7)}),
            r"norm.weight is \(7,\), config.json makes",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(tiny, tmp_path, change, words):
    folder = damaged(tiny, tmp_path / "model", change)
    with pytest.raises(ValueError, match=f"model.*safetensors: .*{words}.*Download the model again"):
        load_packed(str(folder), "eager", "cpu")


def test_a_file_cut_short_is_named(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "model")
    shard = sorted((tmp_path / "model").glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"{shard.name}: .*Download the model again"):
        load_packed(str(tmp_path / "model"), "eager", "cpu")


def test_what_else_lies_in_the_folder_and_what_does_not(tiny, tmp_path):
    """An adapter beside the weights is not read; without generation_config.json stop tokens are those of config.json."""
    from safetensors.torch import save_file

    shutil.copytree(tiny, tmp_path / "model")
    save_file({"lora_A": torch.zeros(1)}, tmp_path / "model" / "adapter_model.safetensors")
    (tmp_path / "model" / "generation_config.json").unlink()
    model = load(tmp_path / "model", "bf16")
    assert model.generation_config.eos_token_id == config_of(tiny)["eos_token_id"]
    # evaluate.py's engine asks for them without a model
    found = load_generation_config(str(tmp_path / "model"))
    assert found.eos_token_id == config_of(tiny)["eos_token_id"]


def test_without_checkpointing_every_layer_stays_unpacked_and_the_plan_knows(tiny):
    """What autograd keeps of packed experts beyond what it keeps of BF16 ones, which are there anyway."""
    kept = {}
    for kind in ("bf16", "mxfp4"):
        model = load(tiny, kind).requires_grad_(False)
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        sizes = {}

        def keep(tensor, parameters=parameters, sizes=sizes):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        states = torch.randn(1, 20, model.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = model.model(inputs_embeds=states).last_hidden_state
        kept[kind] = sum(sizes.values())
        del output
    config = config_of(tiny)
    matrices = config["num_local_experts"] * 3 * config["hidden_size"] * config["intermediate_size"]
    assert kept["mxfp4"] - kept["bf16"] == config["num_hidden_layers"] * matrices * 2

    def learning(checkpointing, experts):
        settings = Settings(GRADIENT_CHECKPOINTING=checkpointing, MICRO_BATCH=1)
        machine = Machine()
        return plan_memory(settings, config, machine, 50, "eager", experts=experts).learning

    extra = (config["num_hidden_layers"] - 1) * matrices * 2 / GIB  # one layer is in the weights already
    assert learning(False, "mxfp4") - learning(False, "bf16") == pytest.approx(extra)
    assert learning(True, "mxfp4") == learning(True, "bf16")
