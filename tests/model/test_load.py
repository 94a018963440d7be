# SPDX-License-Identifier: Apache-2.0
"""Loading: every tensor as transformers has it, and checkpoints that are damaged or come in other files."""

import json
import os
import shutil
import types

import pytest
import torch
from expert_models import load, stock_model
from machines import CPU, H100
from peft import PeftModel
from safetensors.torch import load_file, save_file

from grpo.model.experts import quantized_experts
from grpo.model.load import choose_threads, load_adapter, load_base, load_tokenizer, unseen_gpu
from grpo.model.long_layers import LongLayer
from grpo.model.write_checkpoint import write_json
from grpo.output.durable import read_json
from grpo.plan.machine import GIB
from grpo.plan.memory import StepPlan
from grpo.plan.tensors import WEIGHTS_INDEX
from grpo.process.ending import UnloadableModel
from grpo.settings.table import Settings


@pytest.fixture
def copy(tiny, tmp_path):
    """A folder with the tiny model, to be changed."""
    return shutil.copytree(tiny, tmp_path / "model")


def test_a_part_of_a_gpu_is_not_taken_for_the_whole(monkeypatch):
    """nvidia-smi tells the memory of the whole one, with which the run was planned."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for total, machine in ((79.1, H100), (139.8, H100), (39.5, H100.limited(39.0)), (39.5, CPU)):
        properties = types.SimpleNamespace(total_memory=total * GIB)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, values=properties: values)
        assert unseen_gpu(machine) is None
    problem = unseen_gpu(H100)
    assert "torch finds 39.5 GiB where 79.0 of 79.6 GiB are free" in problem and "Set GPU_MEM_LIMIT=39," in problem


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU computes little there")
@pytest.mark.parametrize(
    ("parameters", "cores", "load", "threads"),
    [
        (327_064, 16, 0.0, 1),  # tiny
        (400_000_000, 2, 0.3, 2),
        (400_000_000, 2, 0.9, 1),
        (400_000_000, 2, 8.0, 1),  # Never fewer.
        (400_000_000, 16, 4.2, 12),
        (400_000_000, 1, 3.0, 1),
    ],
)
def test_threads_leave_busy_cores_alone(parameters, cores, load, threads):
    assert choose_threads(parameters, cores, load)[0] == threads


def test_a_small_model_is_computed_by_one_thread(tiny, monkeypatch):
    """Torch is imported by now: the number of its threads must change."""
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    try:
        torch.set_num_threads(2)
        load(tiny, "bf16")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_dequantized_model_is_the_one_that_transformers_dequantizes(tiny):
    """Every tensor bit by bit, its config and its stop tokens."""
    ours = load(tiny, "bf16")
    theirs = stock_model(tiny)
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys() and len(expected) > 10
    for name, tensor in ours.state_dict().items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name
    assert ours.config.to_dict() == theirs.config.to_dict()
    assert ours.generation_config.eos_token_id == theirs.generation_config.eos_token_id
    assert (ours.name_or_path, ours.training) == (theirs.name_or_path, theirs.training)
    assert not any(p.requires_grad for p in ours.parameters())
    theirs.set_experts_implementation("grouped_mm")
    with torch.no_grad():
        assert torch.equal(ours(torch.arange(40)[None]).logits, theirs(torch.arange(40)[None]).logits)


def test_other_files(tiny, copy):
    """Blocks and scales may lie in different files, an adapter beside the weights is not read, and without
    generation_config.json config.json has the stop tokens."""
    tensors = load_file(copy / "model.safetensors")
    scales = {name: tensors.pop(name) for name in list(tensors) if name.endswith("_scales")}
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    save_file(scales, copy / "model-scales.safetensors", {"format": "pt"})
    shards = dict.fromkeys(tensors, "model.safetensors") | dict.fromkeys(scales, "model-scales.safetensors")
    write_json(copy / WEIGHTS_INDEX, {"weight_map": shards})
    save_file({"lora_A": torch.zeros(1)}, copy / "adapter_model.safetensors")
    (copy / "generation_config.json").unlink()
    model, expected = load(copy, "bf16"), load(tiny, "bf16").state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert model.generation_config.eos_token_id == read_json(tiny / "config.json")["eos_token_id"]


@pytest.fixture
def bf16_copy(tiny, tmp_path):
    """A folder with the tiny model in BF16, as transformers saves it."""
    load(tiny, "bf16").save_pretrained(tmp_path / "bf16")
    assert "quantization_config" not in read_json(tmp_path / "bf16" / "config.json")
    return tmp_path / "bf16"


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_bf16_copy_is_the_same_model(tiny, bf16_copy, is_tied):
    """A head that is tied to the embeddings may be missing, and a shard that no index names is none of the model's."""
    save_file({SINKS: torch.zeros(9)}, bf16_copy / "model-00001-of-00002.safetensors")
    expected = load(tiny, "bf16").state_dict()
    if is_tied:
        write_json(bf16_copy / "config.json", read_json(bf16_copy / "config.json") | {"tie_word_embeddings": True})
        tensors = load_file(bf16_copy / "model.safetensors")
        del tensors[HEAD]
        save_file(tensors, bf16_copy / "model.safetensors")
        expected[HEAD] = expected["model.embed_tokens.weight"]
    model = load(bf16_copy)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_tied


SINKS, HEAD = "model.layers.1.self_attn.sinks", "lm_head.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop(SINKS), f'Missing key.*"{SINKS}"'),
        (lambda tensors: tensors.update(sinks=tensors.pop(SINKS)), f'"{SINKS}".*Unexpected key.*"sinks"'),
        (lambda tensors: tensors.update({HEAD: tensors[HEAD][:9].clone()}), f"size mismatch for {HEAD}"),
        (None, "model.safetensors: "),
    ],
    ids=["missing", "misnamed", "misshapen", "truncated"],
)
@pytest.mark.parametrize("folder", ["copy", "bf16_copy"])
def test_what_is_wrong_with_a_checkpoint_is_named(request, folder, change, words):
    """transformers would warn, and train on random numbers."""
    folder = request.getfixturevalue(folder)
    shard = folder / "model.safetensors"
    if change:
        tensors = load_file(shard)
        change(tensors)
        save_file(tensors, shard, {"format": "pt"})
    else:
        os.truncate(shard, shard.stat().st_size - 100)
    with pytest.raises(ValueError, match=f"{words}.*Download the model again"):
        load(folder)


def test_a_tokenizer_without_a_stop_token_is_named(copy):
    path = copy / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": None}))
    with pytest.raises(ValueError, match="names no stop token"):
        load_tokenizer(str(copy))


@pytest.mark.parametrize(("checkpointing", "parts"), [(True, 1), (False, 1), (True, 4)])
def test_packed_experts_are_dequantized_again_where_no_layer_is_recomputed(tiny, checkpointing, parts):
    """Or where they are dequantized in parts."""
    settings = Settings(EXPERTS="mxfp4", GRADIENT_CHECKPOINTING=checkpointing)
    plan = StepPlan(micro_batch=1, learning=0.0, expert_parts=parts)
    modules = quantized_experts(load_base(settings, str(tiny), read_json(tiny / "config.json"), "eager", plan))
    assert modules and {(m.dequantize_again, m.parts) for m in modules} == {(parts > 1 or not checkpointing, parts)}


@pytest.mark.parametrize(("chunk", "checkpoints"), [(0, 0.0), (8, 0.0), (8, 6.0)])
def test_layers_run_in_chunks_as_planned(tiny, chunk, checkpoints):
    plan = StepPlan(micro_batch=1, learning=0.0, layer_chunk=chunk, checkpoints=checkpoints)
    layers = load_base(Settings(), str(tiny), read_json(tiny / "config.json"), "eager", plan).model.layers
    chunked = {(layer.chunk, layer.on_host) for layer in layers if isinstance(layer, LongLayer)}
    assert chunked == ({(chunk, checkpoints > 0)} if chunk else set())


@pytest.mark.parametrize("value", [torch.nan, 1e38])
def test_an_adapter_without_use_is_refused_by_name(tiny, saved_adapter, tmp_path, value):
    folder = shutil.copytree(saved_adapter, tmp_path / "adapter")
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(name for name in tensors if "lora_A" in name)
    tensors[name][0, 0] = value
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    policy = PeftModel.from_pretrained(load(tiny, "bf16"), str(saved_adapter), is_trainable=True)
    with pytest.raises(UnloadableModel, match=rf"INIT_ADAPTER={folder}: its weight .*lora_A.* is not finite"):
        load_adapter(policy, folder)
    load_adapter(policy, saved_adapter)
