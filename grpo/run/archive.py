# SPDX-License-Identifier: Apache-2.0
"""What a run offers for download: the zip, and the adapter's model card."""

from __future__ import annotations

import contextlib
import html
import json
import os
import re
import sys
import zipfile
from pathlib import Path

from grpo.data.prompts import ANSWER_BEFORE
from grpo.run.durable import read_json, read_sealed, sealed, whole_file
from grpo.run.layout import BEST, SETTINGS, run_folder, zip_path
from grpo.settings import ROOT, Settings, split_commas

TINY = "data/tiny"  # The tiny model's folder in the project.


def base_name(s: Settings) -> tuple[str, bool]:
    """What a card calls the base model, and whether that is local: then the name is its folder's, not its path on this
    machine; `tiny` is named by its folder in the project."""
    if s.MODEL_ID == "tiny":
        return TINY, True
    local = Path(s.MODEL_ID).is_dir()
    return Path(s.MODEL_ID).resolve().name if local else s.MODEL_ID, local


def loading_code(base: str, experts: bool, tokenizer: str = ".") -> str:
    """How to load an adapter of the model `base`, from its folder. PEFT finds nothing to adapt in `experts` that stay
    quantized, and goes on without them."""
    package = ", Mxfp4Config" if experts else ""
    option = ", quantization_config=Mxfp4Config(dequantize=True)" if experts else ""
    return f"""```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer{package}

base = AutoModelForCausalLM.from_pretrained("{base}", dtype="auto", device_map="auto"{option})
model = PeftModel.from_pretrained(base, ".")
tokenizer = AutoTokenizer.from_pretrained("{tokenizer}")
```"""


def model_card(s: Settings, step: int, functions: str, note: str = "", tokenizer: str = ".") -> str:
    """README.md of an adapter after `step` steps, as the Hub reads it (https://huggingface.co/docs/hub/model-cards).
    `functions`: those that rewarded it, empty for one that scripts/sft.py trained; `note`: the card's first paragraph;
    `tokenizer`: its folder, from the card's folder.
    """
    base, local = base_name(s)
    base_model = "" if local else f"\nbase_model: {base}"
    path = " and with the path of the base model's folder" if local else ""
    if base == TINY:
        path += f", {TINY} of the project train_grpo.py (`MODEL_ID=tiny` there; it is on no Hub)"
    if functions:
        tag, method, logs = "grpo", "GRPO ([paper](https://arxiv.org/abs/2402.03300))", ", `metrics.csv` each step"
        batch = f"{s.PROMPTS_PER_STEP} prompts a step with {s.NUM_GENERATIONS} completions each, rewards: {functions}"
        if s.DIRECT_ANSWERS:
            batch = f"{s.PROMPTS_PER_STEP} prompts a step, rewards of all actions: {functions}"
    else:
        tag, method, logs = "sft", "supervised fine-tuning", ""
        batch = f"{s.PROMPTS_PER_STEP} rows a step, their answers learned"
    if s.INIT_ADAPTER:
        origin = "/".join(Path(s.INIT_ADAPTER).expanduser().resolve().parts[-2:])
        batch += f".\nIt started from the adapter in `{origin}`, not from a fresh one"
    if s.DIRECT_ANSWERS:
        batch += f".\nIts prompts end in `{ANSWER_BEFORE}`: the next token names the action"
    paragraph = f"{note}\n" if note else ""
    return f"""---
library_name: peft
pipeline_tag: text-generation
tags: [{tag}, lora]{base_model}
---

# {run_folder(s).name}

{paragraph}A LoRA adapter for {base}, trained for {step} steps with {method}: rank {s.LORA_R}
on {s.LORA_TARGETS}, {batch}.
The run's `settings.json` holds every setting, `versions.json` the packages' versions{logs}.

To load it, from the folder of this file{path}:

{loading_code(base, "experts" in s.LORA_TARGETS, tokenizer)}
"""


PICKLES = (".pt", ".pth", ".bin", ".pkl")  # Who loads one, say an optimizer state, runs the code in it.
PATHS_IN = (SETTINGS, "training.log", "adapter_config.json", "report.html")  # These files name paths of the machine.


def without_paths(folder: Path, text: str) -> str:
    """A text of the run in `folder` without where that, the project, Python, the Hub's cache and the user's files lie
    on this machine: OUTPUT_DIR becomes its name, the project `.`, the home folder `~`. Settings (DATA, a local
    MODEL_ID) stay as they were set."""
    from huggingface_hub.constants import HF_HUB_CACHE  # Late: the preflight says what is missing.

    home = os.path.expanduser("~")
    names = {} if home == "/" else {home: "~"}
    names |= {HF_HUB_CACHE: "hub", os.path.dirname(os.__file__): "python", sys.prefix: "python"}
    # The command and tracebacks name the project as it was reached, perhaps through a link.
    reached = (ROOT, Path(sys.argv[0]).absolute().parent)
    names |= {str(path): "." for path in reached if path.resolve() == ROOT} | {str(folder): folder.name}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        settings = dict(read_json(folder / SETTINGS)["settings"])
        output_dir = Path(settings.pop("OUTPUT_DIR"))  # As it was set, perhaps through a link.
        parts = (part for value in settings.values() if isinstance(value, str) for part in split_commas(value))
        names = {part: part for part in parts if Path(part).is_absolute()} | names
        names |= {str(output_dir): folder.name} if output_dir.is_absolute() else {}
    spelled: dict[str, str] = {}
    for spell in (html.escape, lambda name: json.dumps(name)[1:-1], str):
        spelled |= {spell(path): spell(name) for path, name in names.items()}
    known = "|".join(map(re.escape, sorted(spelled, key=len, reverse=True)))
    return re.sub(rf"(?<![\w.~/-])(?:{known})(?!\w)", lambda match: spelled[match[0]], text)


def settings_without_paths(path: Path, text: str) -> str:
    """settings.json of a zip: among the settings only OUTPUT_DIR is renamed, and the checksum fits the new values. A
    damaged record stays damaged."""
    with contextlib.suppress(ValueError, KeyError):
        settings, record = read_sealed(path)["settings"], json.loads(text)
        record["settings"] = settings | {"OUTPUT_DIR": record["settings"]["OUTPUT_DIR"]}
        return json.dumps(sealed(record), indent=2) + "\n"
    return text


def write_zip(folder: Path) -> Path:
    """Writes OUTPUT_DIR.zip beside OUTPUT_DIR, whole or not at all: everything but pickles, links and unfinished files,
    best/ first, and without paths of this machine."""
    with (
        whole_file(zip_path(folder)) as temporary,
        zipfile.ZipFile(temporary, "x", zipfile.ZIP_DEFLATED, compresslevel=1, strict_timestamps=False) as archive,
    ):
        for path in sorted(folder.rglob("*"), key=lambda path: (not path.is_relative_to(folder / BEST), path)):
            if path.is_symlink() or not path.is_file() or path.suffix in (*PICKLES, ".tmp"):
                continue
            # A zip's names are UTF-8; those of this file system may be any bytes.
            name = os.fsencode(path.relative_to(folder.parent)).decode("utf-8", "backslashreplace")
            if path.name not in PATHS_IN:
                archive.write(path, name)
                continue
            text = without_paths(folder, path.read_text(encoding="utf-8", errors="surrogateescape"))
            if path.name == SETTINGS:
                text = settings_without_paths(path, text)
            entry = zipfile.ZipInfo.from_file(path, name, strict_timestamps=False)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, text.encode("utf-8", "surrogateescape"), compresslevel=1)
    return zip_path(folder)
