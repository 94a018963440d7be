# SPDX-License-Identifier: Apache-2.0
"""Loading: every tensor as transformers has it, and checkpoints that are damaged or come in other files."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from expert_models import config_of, load
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

from grpo.model.experts import quantized_experts
from grpo.model.load import load_base, load_generation_config, load_quantized, load_tokenizer
from grpo.settings import Settings


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU computes little there")
def test_a_small_model_is_computed_by_one_thread(tiny, monkeypatch):
    """Unless OMP_NUM_THREADS says otherwise. Torch is imported by now: the number of its threads must change."""
    before = torch.get_num_threads()
    try:
        for value, threads in (("2", 2), ("", 1)):
            monkeypatch.setenv("OMP_NUM_THREADS", value)
            torch.set_num_threads(2)
            load(tiny, "bf16")
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_dequantized_model_is_the_one_that_transformers_dequantizes(tiny):
    """Every tensor bit by bit, its config and what it generates with."""
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
    assert not any(p.requires_grad for p in ours.parameters()) and not any(b.is_meta for b in ours.buffers())
    ids = torch.arange(40)[None]
    theirs.set_experts_implementation("grouped_mm")
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
    ours.set_experts_implementation("grouped_mm")  # the new modules read the model's config
    assert ours.model.layers[0].mlp.experts.config._experts_implementation == "grouped_mm"


def damaged(tiny, folder, change):
    """A copy of the tiny model whose first shard went through `change`."""
    shutil.copytree(tiny, folder)
    shard = sorted(folder.glob("*.safetensors"))[0]
    tensors = load_file(shard)
    change(tensors)
    save_file(tensors, shard, {"format": "pt"})
    return folder


def test_blocks_and_scales_may_lie_in_different_files(tiny, tmp_path):
    scales = {}

    def part(tensors):
        for name in [name for name in tensors if name.endswith("_scales")]:
            scales[name] = tensors.pop(name)

    folder = damaged(tiny, tmp_path / "model", part)
    save_file(scales, folder / "model-scales.safetensors", {"format": "pt"})
    expected, tensors = (load(path, "bf16").state_dict() for path in (tiny, folder))
    assert scales and all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), 'Missing key.* "model.norm.weight"'),
        (lambda t: t.update(extra=torch.zeros(1)), 'Unexpected key.* "extra"'),
        (lambda t: t.update({"model.norm.weight": torch.zeros(7)}), r"size mismatch for model.norm.weight.*\[7\]"),
        (None, "model.safetensors: "),
    ],
    ids=["missing", "extra", "shape", "cut short"],
)
def test_what_is_wrong_with_a_checkpoint_is_named(tiny, tmp_path, change, words):
    folder = damaged(tiny, tmp_path / "model", change or (lambda tensors: None))
    if change is None:
        shard = folder / "model.safetensors"
        shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"{words}.*Download the model again"):
        load_quantized(str(folder), "eager", "cpu")


def test_what_else_lies_in_the_folder_and_what_does_not(tiny, tmp_path):
    """An adapter beside the weights is not read; without generation_config.json config.json has the stop tokens."""
    shutil.copytree(tiny, tmp_path / "model")
    save_file({"lora_A": torch.zeros(1)}, tmp_path / "model" / "adapter_model.safetensors")
    (tmp_path / "model" / "generation_config.json").unlink()
    model = load(tmp_path / "model", "bf16")
    assert model.generation_config.eos_token_id == config_of(tiny)["eos_token_id"]
    # evaluate.py's engine asks for them without a model
    generation_config = load_generation_config(str(tmp_path / "model"))
    assert generation_config.eos_token_id == config_of(tiny)["eos_token_id"]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ({"eos_token": None}, "names no stop token"),
        ({"model_max_length": "x"}, "is damaged"),
        ({"model_input_names": None}, "is damaged"),
    ],
)
def test_a_tokenizer_config_that_no_run_could_use_is_named(tiny, tmp_path, edit, words):
    """Each ended in a traceback of the libraries, once the model was loaded."""
    shutil.copytree(tiny, tmp_path / "model")
    path = tmp_path / "model" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | edit))
    with pytest.raises(ValueError, match=f"tokenizer_config.json {words}"):
        load_tokenizer(str(tmp_path / "model"))


@pytest.mark.parametrize("checkpointing", [True, False])
def test_packed_experts_are_dequantized_again_where_no_layer_is_recomputed(tiny, checkpointing):
    settings = Settings(EXPERTS="mxfp4", GRADIENT_CHECKPOINTING=checkpointing)
    modules = quantized_experts(load_base(settings, str(tiny), config_of(tiny), "eager"))
    assert modules and {module.dequantize_again for module in modules} == {not checkpointing}
