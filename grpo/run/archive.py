# SPDX-License-Identifier: Apache-2.0
"""What a run leaves to download: the zip, and the adapter's model card."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

from grpo.run.folder import BEST, run_folder
from grpo.settings import Settings

TINY = "data/tiny"  # from the project's folder


def model_card(s: Settings, step: int, functions: str, note: str = "", tokenizer: str = ".") -> str:
    """README.md of an adapter after `step` steps, as the Hub reads it (https://huggingface.co/docs/hub/model-cards).
    `functions`: those that rewarded it, empty for one that scripts/sft.py made; `note`: its first paragraph; `tokenizer`:
    where that lies, from the card's folder.

    A local base model is named after its folder, not after its path on this machine; `tiny` after its place in the project.
    """
    tiny, local = s.MODEL_ID == "tiny", s.MODEL_ID == "tiny" or Path(s.MODEL_ID).is_dir()
    base = TINY if tiny else Path(s.MODEL_ID).resolve().name if local else s.MODEL_ID
    path = " and with the path of the base model's folder" * local
    path += f", {TINY} of the project train_grpo.py (`MODEL_ID=tiny` there; it is on no Hub)" * tiny
    base_model = "" if local else f"\nbase_model: {base}"
    tag, method, logs = "sft", "supervised fine-tuning", ""
    batch = f"{s.PROMPTS_PER_STEP} rows a step, their answers learned"
    if functions:
        tag, method, logs = "grpo", "GRPO ([paper](https://arxiv.org/abs/2402.03300))", ", `metrics.csv` each step"
        batch = f"{s.PROMPTS_PER_STEP} prompts a step with {s.NUM_GENERATIONS} completions each, rewards: {functions}"
    if s.INIT_ADAPTER:
        where = Path(s.INIT_ADAPTER).expanduser().resolve().parts[-2:]
        batch += f".\nIt started from the adapter in `{'/'.join(where)}`, not from a fresh one"
    return f"""---
library_name: peft
pipeline_tag: text-generation
tags: [{tag}, lora]{base_model}
---

# {run_folder(s).name}

{note}{chr(10) * bool(note)}A LoRA adapter for {base}, trained for {step} steps with {method}: rank {s.LORA_R}
on {s.LORA_TARGETS}, {batch}.
The run's `settings.json` holds every setting, `versions.json` the packages' versions{logs}.

To load it, from the folder of this file{path}:

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained("{base}", dtype="auto", device_map="auto")
model = PeftModel.from_pretrained(base, ".")
tokenizer = AutoTokenizer.from_pretrained("{tokenizer}")
```
"""


def write_zip(folder: Path) -> Path:
    """OUTPUT_DIR.zip beside OUTPUT_DIR: everything but optimizer states and half-written files, best/ first; whole or not
    at all."""
    target = folder.with_name(folder.name + ".zip")
    temporary = target.with_name(target.name + ".tmp")
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for path in sorted(folder.rglob("*"), key=lambda path: (not path.is_relative_to(folder / BEST), path)):
                state = path.name in ("optimizer.pt", "scheduler.pt") or path.name.startswith("rng_state")
                if path.is_file() and not state and path.suffix != ".tmp":
                    archive.write(path, path.relative_to(folder.parent))
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)  # a part of a zip would only fill a disk that is full already
    return target
