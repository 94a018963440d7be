# SPDX-License-Identifier: Apache-2.0
"""scripts/export.py --to gguf in llama.cpp itself, which the project does not need and CI does not have. Run, with a
C++ compiler: pip install llama-cpp-python && python -m pytest -s tests/evaluate/test_export_llama_cpp.py"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, read_csv
from export import main
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Mxfp4Config

from grpo.model import gguf
from grpo.model.experts import dequantize_mxfp4
from grpo.model.gptoss_format import Shape, config_dict
from grpo.run.folder import ADAPTER

llama_cpp = pytest.importorskip("llama_cpp")
pytestmark = pytest.mark.slow
TOKENS = [16, 90, 600]  # the tiny model's window is 32


@pytest.fixture(scope="module")
def adapter(saved_adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random one that changes most of what the model answers."""
    folder = shutil.copytree(saved_adapter, tmp_path_factory.mktemp("adapter") / "large")
    generator = torch.Generator().manual_seed(0)
    weights = load_file(folder / ADAPTER)
    save_file({name: 0.2 * torch.randn(w.shape, generator=generator) for name, w in weights.items()}, folder / ADAPTER)
    return folder


@contextlib.contextmanager
def opened(path: Path, **more: object) -> Iterator[llama_cpp.Llama]:
    """The file in llama.cpp, on one thread, with keys and values in float32."""
    single_thread = {"n_threads": 1, "n_threads_batch": 1, "verbose": False, "type_k": 0, "type_v": 0}
    with contextlib.closing(llama_cpp.Llama(str(path), **single_thread, **more)) as model:
        yield model


def logits(path: Path, ids: torch.Tensor) -> torch.Tensor:
    """(T, V) of tokens (T,) in llama.cpp."""
    with opened(path, n_ctx=1024, n_batch=1024, logits_all=True) as model:
        model.eval(ids.tolist())
        return torch.tensor(np.array(model.scores[: len(ids)]))


def load(folder: Path) -> torch.nn.Module:
    """transformers' model in float32, with YaRN's bounds rounded to whole dimensions as llama.cpp rounds them."""
    config = AutoConfig.from_pretrained(folder)
    config.rope_parameters["truncate"] = True
    how = {"quantization_config": Mxfp4Config(dequantize=True), "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.bfloat16, **how).float().eval()


@torch.no_grad()
def test_in_float32_the_logits_are_the_same(adapter, tmp_path, monkeypatch):
    """Metadata, names and shapes, without any rounding: the same file with every tensor in float32."""
    assert main([str(adapter), "--out", str(tmp_path / "merged")]) == 0
    parts = gguf.parts
    monkeypatch.setattr(gguf, "ggml_mxfp4", lambda *packed: dequantize_mxfp4(*packed).mT)
    monkeypatch.setattr(
        gguf, "parts", lambda *a: [(n, gguf.F32, s, lambda m=make: m().float()) for n, _, s, make in parts(*a)]
    )
    assert main([str(adapter), "--to", "gguf", "--out", str(tmp_path / "gguf")]) == 0
    merged = load(tmp_path / "merged")
    for count in TOKENS:
        ids = torch.arange(count) * 5 % 580
        difference = (logits(tmp_path / "gguf" / "model.gguf", ids) - merged(ids[None]).logits[0]).abs()
        print(f"float32, {count} tokens: max {difference.max():.6f}, mean {difference.mean():.7f}")
        assert difference.max() < 2e-3


def test_tokens_and_template_come_along(tiny, tmp_path):
    """TOKENIZER=folder compares gpt-oss's own; the tiny model's splits numbers in another way than llama.cpp knows."""
    folder = Path(os.environ.get("TOKENIZER", tiny))
    texts = ["<|start|>user<|message|>Answer off, half or full.<|end|><|start|>assistant<|channel|>final<|message|>"]
    if folder != tiny:
        texts += [row["prompt"] for row in read_csv(ROOT / "data" / "tes_train.csv")]
        texts += [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")]  # Japanese too
    about = gguf.vocabulary(folder, 201088, "{{ messages }}") | gguf.metadata(config_dict(Shape()), "tokens")
    gguf.write_gguf(tmp_path / "tokens.gguf", about, {}, lambda name: torch.empty(0))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with opened(tmp_path / "tokens.gguf", vocab_only=True) as model:
        assert model.metadata["tokenizer.chat_template"] == "{{ messages }}"
        assert model.token_eos() == tokenizer.eos_token_id
        for text in texts:
            expected = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert model.tokenize(text.encode(), add_bos=True, special=True) == expected, text
