# SPDX-License-Identifier: Apache-2.0
"""Models without a trainer that complete prompts: by transformers, or by vLLM."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from grpo.model.load import load_generation_config, load_model, load_tokenizer
from grpo.preflight.hub import ModelFiles, checkpoint_gib
from grpo.preflight.machine import Machine
from grpo.preflight.memory import plan_engine
from grpo.rollout.engine import EngineError, start_engine
from grpo.settings import Settings


class TransformersModel:
    """A model, with its adapter or without, that transformers generates with (eager attention: exact at any length)."""

    def __init__(self, settings: Settings, model_path: str, config: Mapping[str, Any], adapter: Path | None):
        self.settings, self.tokenizer = settings, load_tokenizer(model_path)
        self.model = load_model(model_path, config, "eager").eval()
        self.eos = stop_tokens(self.model.generation_config.eos_token_id, self.tokenizer)
        if adapter is not None:
            self.model = PeftModel.from_pretrained(self.model, str(adapter)).eval()

    @torch.no_grad()
    def ask(self, prompts: Sequence[str], samples: int, seed: int, base: bool = False) -> list[str]:
        """`samples` completions of each prompt, special tokens included, in the order of the prompts."""
        s = self.settings
        rows = [prompt for prompt in prompts for _ in range(samples)]
        chunk = s.GENERATION_BATCH or 64
        texts: list[str] = []
        torch.manual_seed(seed)
        switch = getattr(self.model, "disable_adapter", None) if base else None
        with switch() if switch else contextlib.nullcontext():
            for start in range(0, len(rows), chunk):
                batch = self.tokenizer(text=rows[start : start + chunk], padding=True, return_tensors="pt")
                batch = batch.to(self.model.device)
                ids = self.model.generate(
                    **batch, do_sample=True, temperature=s.TEMPERATURE, top_p=s.TOP_P, top_k=0,
                    max_new_tokens=s.MAX_COMPLETION_LEN, eos_token_id=self.eos, pad_token_id=self.tokenizer.pad_token_id,
                )  # fmt: skip
                completions = ids[:, batch["input_ids"].shape[1] :].tolist()
                texts += self.tokenizer.batch_decode([until_stop(one, self.eos) for one in completions])
        return texts


class VllmModel:
    """A model that vLLM generates with: MXFP4 weights, the adapter loaded natively from its folder (ROLLOUT_SYNC=lora's
    way). There is no trainer beside it, so it stays awake. Raises EngineError."""

    def __init__(
        self,
        settings: Settings,
        files: ModelFiles,
        model_path: str,
        adapter: Path | None,
        machine: Machine,
        prompt_len: int,
        rows: int,
    ):
        self.tokenizer, self.adapter = load_tokenizer(model_path), adapter
        rank = settings.LORA_R
        if adapter is not None:
            rank = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))["r"]
        # The plan of a step serves for an hour: as many sequences as are asked at once, no trainer's memory.
        s = dataclasses.replace(settings, ROLLOUT_SYNC="lora", LORA_R=rank, PROMPTS_PER_STEP=rows, NUM_GENERATIONS=1)
        plan = plan_engine(s, files.config, machine, prompt_len, 0.0, checkpoint_gib(settings.MODEL_ID, files))
        if plan.cache < plan.cache_least:
            need = plan.weights + plan.scratch + plan.cache_least
            raise EngineError(f"it needs {need:.1f} GiB of the GPU, {machine.gpu_free:.1f} are free")
        eos = stop_tokens(load_generation_config(model_path).eos_token_id, self.tokenizer)
        self.engine = start_engine(s, plan, model_path, eos)
        self.engine.wake()

    def ask(self, prompts: Sequence[str], samples: int, seed: int, base: bool = False) -> list[str]:
        """`samples` completions of each prompt, special tokens included, in the order of the prompts."""
        rows = [prompt for prompt in prompts for _ in range(samples)]
        self.engine.use_adapter(None if base else self.adapter)
        ids, _ = self.engine.generate(self.tokenizer(text=rows)["input_ids"], seed)
        return self.tokenizer.batch_decode(ids)


def stop_tokens(eos: int | Sequence[int] | None, tokenizer: Any) -> list[int]:
    """The ids that end a completion, as TRL collects them: the generation config's and the tokenizer's."""
    ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    return ids if tokenizer.eos_token_id in ids else [tokenizer.eos_token_id, *ids]


def until_stop(ids: Sequence[int], stop: Sequence[int]) -> list[int]:
    """A completion without the padding behind its stop token.

    >>> until_stop([5, 6, 2, 0, 0], [2])
    [5, 6, 2]
    """
    end = next((i for i, token in enumerate(ids) if token in stop), len(ids) - 1)
    return list(ids[: end + 1])
