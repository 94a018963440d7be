# SPDX-License-Identifier: Apache-2.0
"""A model without a trainer, for scripts/evaluate.py."""

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
from grpo.preflight.hub import checkpoint_gib
from grpo.preflight.memory import plan_engine
from grpo.rollout.engine import EngineError, start_engine
from grpo.settings import show

# What the adapter's run recorded of its model and sampling; the rest belongs to the machine and comes from here.
RECORDED = (
    "MODEL_ID", "REASONING_EFFORT", "PROMPT_DATE", "MAX_COMPLETION_LEN", "TEMPERATURE", "TOP_P", "SEED", "DATA", "EVAL_DATA", "EVAL_SAMPLES",
)  # fmt: skip


def recorded_settings(adapter: Path | None, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment with what settings.json of the adapter's folder (or of the run that a checkpoint lies in) says."""

    for path in (adapter, adapter.resolve().parent) if adapter else ():
        try:
            found = json.loads((path / "settings.json").read_text(encoding="utf-8"))["settings"]
            return dict(environ) | {name: show(found[name]) for name in RECORDED if name in found}
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return dict(environ)


class TransformersModel:
    """A model, with its adapter or without, that transformers generates with (eager attention: exact at any length)."""

    def __init__(self, settings: Any, model_path: str, config: Mapping[str, Any], adapter: Path | None):

        self.settings, self.tokenizer = settings, load_tokenizer(model_path)
        self.model = load_model(model_path, config, "eager").eval()
        self.eos = stop_tokens(self.model.generation_config.eos_token_id, self.tokenizer)
        if adapter is not None:
            self.model = PeftModel.from_pretrained(self.model, str(adapter)).eval()

    def ask(self, prompts: Sequence[str], samples: int, seed: int, base: bool = False) -> list[str]:
        """`samples` completions of each prompt, special tokens included, in the order of the prompts."""

        s = self.settings
        rows = [prompt for prompt in prompts for _ in range(samples)]
        chunk = s.GENERATION_BATCH or 64
        texts: list[str] = []
        torch.manual_seed(seed)
        without = self.model.disable_adapter() if base and hasattr(self.model, "disable_adapter") else None
        with torch.no_grad(), without or contextlib.nullcontext():
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
    way). There is no trainer beside it, so it stays awake."""

    def __init__(
        self, settings: Any, files: Any, model_path: str, adapter: Path | None, machine: Any, prompt_len: int, rows: int
    ):

        self.tokenizer = load_tokenizer(model_path)
        rank = settings.LORA_R
        if adapter is not None:
            rank = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))["r"]
        # The plan of a step serves for an hour: as many sequences as are asked at once, no trainer's memory.
        s = dataclasses.replace(
            settings, ROLLOUT_SYNC="lora", LORA_R=rank, PROMPTS_PER_STEP=rows, NUM_GENERATIONS=1,
        )  # fmt: skip
        plan = plan_engine(s, files.config, machine, prompt_len, 0.0, checkpoint_gib(settings.MODEL_ID, files))
        if plan.cache < plan.cache_least:
            need = plan.weights + plan.scratch + plan.cache_least
            raise EngineError(f"it needs {need:.1f} GiB of the GPU, {machine.gpu_free:.1f} are free")
        eos = stop_tokens(load_generation_config(model_path).eos_token_id, self.tokenizer)
        self.engine = start_engine(s, plan, model_path, eos)
        self.engine.wake()
        self.adapter, self.seed = adapter, s.SEED

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
