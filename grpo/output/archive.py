# SPDX-License-Identifier: Apache-2.0
"""What a run offers for download: the zip, and the adapter's model card."""

import os
import re
import sys
import zipfile
from pathlib import Path

from grpo.common import ROOT, log
from grpo.harmony import ANSWER_BEFORE
from grpo.output.durable import whole_file
from grpo.output.layout import ADAPTER, BEST, BEST_RECORD, SETTINGS, TRAINING_LOG, run_folder, zip_path
from grpo.settings.table import Settings

TINY = "data/tiny"  # The tiny model's folder in the project.


def base_model_name(s: Settings) -> tuple[str, bool]:
    """(name of the base model in a card, whether it is a local folder). A local one is named by its folder without the
    path on this machine, and `tiny` by its folder in the project."""
    if s.MODEL_ID == "tiny":
        return TINY, True
    local = Path(s.MODEL_ID).is_dir()
    return Path(s.MODEL_ID).resolve().name if local else s.MODEL_ID, local


def loading_code(base: str, experts: bool, adapter: str = ".", tokenizer: str = ".") -> str:
    """Markdown with the code that loads an adapter of the model `base`; `adapter` and `tokenizer` are folders relative
    to the card's. `experts`: whether the adapter is on experts, which are then dequantized, because PEFT silently skips
    quantized ones."""
    package = ", Mxfp4Config" if experts else ""
    option = ", quantization_config=Mxfp4Config(dequantize=True)" if experts else ""
    return f"""```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer{package}

base = AutoModelForCausalLM.from_pretrained("{base}", dtype="auto", device_map="auto"{option})
model = PeftModel.from_pretrained(base, "{adapter}")
tokenizer = AutoTokenizer.from_pretrained("{tokenizer}")
```"""


def model_card(s: Settings, step: int, functions: str, note: str = "", adapter: str = ".", tokenizer: str = ".") -> str:
    """README.md of an adapter after `step` steps (https://huggingface.co/docs/hub/model-cards). `functions`: its reward
    functions, empty for scripts/sft.py; `note`: its first paragraph; `adapter`, `tokenizer`: as in `loading_code`."""
    base, local = base_model_name(s)
    base_model = "" if local else f"\nbase_model: {base}"
    path_note = " and with the path of the base model's folder" if local else ""
    if base == TINY:
        path_note += f", {TINY} of the project train_grpo.py (`MODEL_ID=tiny` there; it is on no Hub)"
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

To load it, from the folder of this file{path_note}:

{loading_code(base, "experts" in s.LORA_TARGETS, adapter, tokenizer)}
"""


PICKLES = (".pt", ".pth", ".bin", ".pkl")  # Loading a pickle, such as an optimizer state, runs the code in it.
ADAPTER_FILES = (ADAPTER, "adapter_config.json", "README.md", SETTINGS, BEST_RECORD)
FILES_WITH_PATHS = (TRAINING_LOG, "adapter_config.json", "report.html")  # These files name paths of the machine.


def without_paths(folder: Path, text: str) -> str:
    """A text of the run in `folder` without this machine's paths to OUTPUT_DIR, the project, Python and the home."""
    replacements = {str(folder): folder.name, str(ROOT): ".", sys.prefix: "python"}
    if (home := os.path.expanduser("~")) != "/":
        replacements[home] = "~"
    paths = "|".join(map(re.escape, sorted(replacements, key=len, reverse=True)))
    return re.sub(rf"(?<![\w.~/-])(?:{paths})(?!\w)", lambda match: replacements[match[0]], text)


def is_zipped(path: Path, contents: str) -> bool:
    """Whether the file at this path relative to OUTPUT_DIR belongs to the `contents` of its zip, a value of ZIP."""
    if contents == "adapter":
        return str(path.parent) in (".", BEST) and path.name in ADAPTER_FILES
    return contents == "all" or path.name != "completions.csv"


def write_zip(folder: Path, contents: str = "all") -> Path:
    """Writes OUTPUT_DIR.zip beside OUTPUT_DIR, whole or not at all, and returns its path. It holds all readable files
    but pickles, links and unfinished ones, or those of `contents`, a value of ZIP; best/ comes first. This machine's
    paths are taken out of FILES_WITH_PATHS alone."""
    with (
        whole_file(zip_path(folder)) as temporary,
        zipfile.ZipFile(temporary, "x", zipfile.ZIP_DEFLATED, compresslevel=1, strict_timestamps=False) as archive,
    ):
        for path in sorted(folder.rglob("*"), key=lambda path: (not path.is_relative_to(folder / BEST), path)):
            if path.is_symlink() or not path.is_file() or path.suffix in (*PICKLES, ".tmp"):
                continue
            if not is_zipped(path.relative_to(folder), contents):
                continue
            if not os.access(path, os.R_OK):
                log.warning("the zip lacks %s, which cannot be read", path)
                continue
            # A zip's names are UTF-8; those of this file system may be any bytes.
            name = os.fsencode(path.relative_to(folder.parent)).decode("utf-8", "backslashreplace")
            if path.name not in FILES_WITH_PATHS:
                archive.write(path, name)
                continue
            text = without_paths(folder, path.read_text(encoding="utf-8", errors="surrogateescape"))
            entry = zipfile.ZipInfo.from_file(path, name, strict_timestamps=False)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, text.encode("utf-8", "surrogateescape"), compresslevel=1)
    return zip_path(folder)
