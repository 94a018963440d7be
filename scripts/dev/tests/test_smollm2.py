# SPDX-License-Identifier: Apache-2.0
"""A Llama rewritten into gpt-oss's format computes the same. The one here is small and random, in SmolLM2's form."""

import json

import pytest
import torch
from make_model import main
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaMLP

from grpo.common import InputError
from grpo.model.experts import dequantize_mxfp4
from grpo.model.load import load_model, load_tokenizer
from grpo.plan.hub import TINY_PATH
from grpo.plan.vllm_model import vllm_faults
from scripts.dev import smollm2

SPECIAL = ["<|endoftext|>", *smollm2.RENAMED, "<jupyter_text>"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A folder of the Hub's form, with a model of two layers, three query heads to a key head, and weights as large
    as a trained model's: MXFP4's blocks would hide an error of scale in smaller ones."""
    folder = tmp_path_factory.mktemp("source")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: n for n, token in enumerate([*SPECIAL, *alphabet, "th", "12"])}
    tokenizer = Tokenizer(BPE(vocabulary, [("t", "h"), ("1", "2")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=96, intermediate_size=256, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, rope_theta=1e5,
        rms_norm_eps=9.999999747378752e-06,  # As a GGUF file holds 1e-5, which vLLM must be told.
        tie_word_embeddings=True, initializer_range=0.15,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rewritten(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("made") / "smollm2"
    assert main(["smollm2", "--source", str(source), "--out", str(out)]) == 0
    return out


def read_config(folder):
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


@pytest.mark.numeric
def test_the_rewritten_model_computes_the_same(source, rewritten):
    """But for what two MXFP4 terms a weight and BF16 leave out: the rows of new tokens are others."""
    llama, _ = smollm2.read_source(source)
    ids = torch.tensor([load_tokenizer(str(rewritten))("the 12 of 3 + 4, again and again")["input_ids"]])
    model = load_model(str(rewritten), read_config(rewritten), "eager").float()
    with torch.no_grad():
        expected, logits = (m(input_ids=ids).logits[0, :, len(SPECIAL) :] for m in (llama, model))
    error = (logits - expected).norm() / expected.norm()
    assert expected.std() > 0.5 and error < 0.05


@pytest.mark.numeric
@pytest.mark.parametrize("largest_up", [1.0, 20.0])
def test_experts_equal_the_mlp(largest_up):
    """Also where `up` would be clamped without a scale of its own; one MXFP4 term would err by a tenth."""
    torch.manual_seed(1)
    mlp = LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=256)).requires_grad_(False)
    for projection in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        projection.weight.normal_(0.0, 0.1)
    mlp.up_proj.weight.mul_(largest_up)
    x = torch.randn(50, 64)
    tensors = smollm2.expert_tensors(mlp, mlp.up_proj(x).abs().max().item())
    gate_up, down = (
        dequantize_mxfp4(tensors[f"{name}_blocks"], tensors[f"{name}_scales"]).float()
        for name in ("gate_up_proj", "down_proj")
    )  # (E, in, out)
    hidden = torch.cat([x, x], 1) @ gate_up + tensors["gate_up_proj_bias"][:, None]
    gate, up = hidden[..., ::2].clamp(max=7.0), hidden[..., 1::2].clamp(-7.0, 7.0)
    out = ((gate * torch.sigmoid(1.702 * gate) * (up + 1)) @ down).mean(0)  # every expert with a weight of 1/4
    assert torch.equal(out[:, :64], out[:, 64:]), "both halves of the residual stream get the same"
    assert (out[:, :64] - mlp(x)).norm() / mlp(x).norm() < 0.04


def test_tokens_and_config(rewritten):
    """Harmony's tokens keep the ids of those that they take over, and differ in embedding and head. vLLM computes what
    config.json says."""
    tokenizer, config = load_tokenizer(str(rewritten)), read_config(rewritten)
    ids = {new: tokenizer.convert_tokens_to_ids(new) for new in smollm2.RENAMED.values()}
    assert list(ids.values()) == list(range(1, len(ids) + 1)) and tokenizer.eos_token == "<|return|>"
    assert tokenizer.tokenize("the 12") == ["th", "e", "Ġ", "1", "2"], "numbers are split into digits"
    assert tokenizer.decode(tokenizer("<|start|>user<|message|>the 12")["input_ids"]).endswith("the 12")
    model = load_model(str(rewritten), config, "eager")
    for matrix in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
        rows = matrix[list(ids.values())].float()
        distances = torch.cdist(rows, rows) + 1e6 * torch.eye(len(rows))
        assert distances.min() > 0.3, "an adapter on attention could not part tokens of one row"
    assert vllm_faults(config, longest=512) == [] and config["num_attention_heads"] == 8
    assert set(config["layer_types"]) == {"full_attention", "sliding_attention"} and config["sliding_window"] == 512


def test_as_a_llama_it_is_the_same_in_the_hub_s_form(source, tmp_path):
    """Answers end at <|im_end|>, whatever the source calls the end; a GGUF file names the token that begins one."""
    smollm2.write_llama(tmp_path / "llama", source)
    tokenizer, written = AutoTokenizer.from_pretrained(tmp_path / "llama"), read_config(tmp_path / "llama")
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>" and written["rms_norm_eps"] == 1e-5
    assert tokenizer.tokenize("the 12<|im_end|>") == ["th", "e", "Ġ", "1", "2", "<|im_end|>"], "digits are apart"
    llama = LlamaForCausalLM.from_pretrained(tmp_path / "llama")
    ends = (tokenizer.eos_token_id, llama.config.eos_token_id, llama.generation_config.eos_token_id)
    assert ends == (2, 2, 2) and llama.dtype == torch.bfloat16
    original = smollm2.read_source(source)[0].bfloat16().state_dict()
    assert all(torch.equal(tensor, original[name]) for name, tensor in llama.state_dict().items())


@pytest.mark.parametrize("source", ["no folder", TINY_PATH])
def test_another_source_is_refused(tmp_path, source):
    with pytest.raises(InputError, match="SmolLM2-135M-Instruct"):
        smollm2.write_smollm2(tmp_path / "out", tmp_path / source)
    assert not (tmp_path / "out").exists()
