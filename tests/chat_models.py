# SPDX-License-Identifier: Apache-2.0
"""The small files of a chat model, without weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from grpo.plan.hub import TINY_PATH

PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_chat_model(parent: Path, harmony: bool = False, **config: object) -> Path:
    """A folder in `parent` with the files of a model that answers in Harmony's channels, or of a plain one."""
    folder = parent / ("harmony" if harmony else "plain")
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY_PATH / name, folder)
    if not harmony:
        (folder / "chat_template.jinja").write_text(PLAIN)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    (folder / "model.safetensors").touch()
    return folder
