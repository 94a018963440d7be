# SPDX-License-Identifier: Apache-2.0
"""What a run offers for download: the zip, and the adapter's model card."""

import functools
import json
import os
import re
import sys
import zipfile
from pathlib import Path

from grpo.common import ROOT, log
from grpo.harmony import ANSWER_BEFORE
from grpo.output.durable import whole_file
from grpo.output.layout import ADAPTER, ADAPTER_CONFIG, BEST, BEST_RECORD, SETTINGS, TRAINING_LOG, run_folder, zip_path
from grpo.settings.table import Settings

TINY = "data/tiny"  # The tiny model's folder in the project.


def base_model_name(s: Settings) -> tuple[str, bool]:
    """(name of the base model in a card, whether it is a local folder). A local one is named by its folder without the
    path on this machine, and `tiny` by its folder in the project."""
    if s.MODEL_ID == "tiny":
        return TINY, True
    local = Path(s.MODEL_ID).is_dir()
    return Path(s.MODEL_ID).resolve().name if local else s.MODEL_ID, local


def asking_code(s: Settings, base: str, adapter: str = "", experts: bool = False) -> str:
    """Markdown with code that asks a model one question, as the run's prompts are rendered: `base` is its Hub id or
    folder, `adapter` those of an adapter, empty for a merged model. `experts`: whether the adapter is on experts, which
    are then dequantized, because PEFT silently skips quantized ones."""
    imports = ["from transformers import AutoModelForCausalLM, AutoTokenizer" + (", Mxfp4Config" if experts else "")]
    option = ", quantization_config=Mxfp4Config(dequantize=True)" if experts else ""
    text = functools.partial(json.dumps, ensure_ascii=False)  # A string of JSON is one of Python.
    lines = [
        f"tokenizer = AutoTokenizer.from_pretrained({text(base)})",
        f'model = AutoModelForCausalLM.from_pretrained({text(base)}, dtype="auto", device_map="auto"{option})',
    ]
    if adapter:
        imports.insert(0, "from peft import PeftModel")
        lines.append(f"model = PeftModel.from_pretrained(model, {text(adapter)})")
    question = text(s.PROMPT_TEMPLATE.replace("{}", "Your question"))
    lines.append(f'messages = [{{"role": "user", "content": {question}}}]')
    if s.SYSTEM_PROMPT:
        lines.append(f'messages.insert(0, {{"role": "system", "content": {text(s.SYSTEM_PROMPT)}}})')
    ending = f" + {text(ANSWER_BEFORE)}" if s.DIRECT_ANSWERS else ""
    lines += [
        "text = tokenizer.apply_chat_template(",
        f'    messages, add_generation_prompt=True, tokenize=False, reasoning_effort="{s.REASONING_EFFORT}"',
        f"){ending}",
        'inputs = tokenizer(text, return_tensors="pt").to(model.device)',
        f"ids = model.generate(**inputs, max_new_tokens={1 if s.DIRECT_ANSWERS else s.MAX_COMPLETION_LEN})",
        'print(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :]))',
    ]
    return "\n".join(["```python", *imports, "", *lines, "```"])


def model_card(s: Settings, step: int, functions: str, note: str = "", adapter: Path | None = None) -> str:
    """README.md of an adapter after `step` steps (https://huggingface.co/docs/hub/model-cards). `functions`: its reward
    functions, empty for scripts/sft.py; `note`: its first paragraph; `adapter`: the folder that its code loads from
    anywhere. Without one the code loads the card's own folder: a checkpoint may go on elsewhere, where a path of this
    machine would be wrong."""
    base, local = base_model_name(s)
    base_model = "" if local else f"\nbase_model: {base}"
    path, where = base, "from any folder"
    if adapter and local:
        path = str(ROOT / TINY if base == TINY else Path(s.MODEL_ID).resolve())
    elif not adapter:
        where = "from the folder of this file"
        where += " and with the path of the base model's folder" if local else ""
        where += f", {TINY} of the project train_grpo.py" if base == TINY else ""
    if functions:
        tag, method, logs = "grpo", "GRPO ([paper](https://arxiv.org/abs/2402.03300))", ", `metrics.csv` each step"
        batch = f"{s.PROMPTS_PER_STEP} prompts a step with {s.NUM_GENERATIONS} completions each, rewards: {functions}"
        if s.DIRECT_ANSWERS:
            batch = f"{s.PROMPTS_PER_STEP} prompts a step, rewards of all actions: {functions}"
    else:
        tag, method, logs = "sft", "supervised fine-tuning", ""
        batch = f"{s.PROMPTS_PER_STEP} rows a step, their answers learned"
    if s.INIT_ADAPTER:
        origin = "/".join(Path(s.INIT_ADAPTER).resolve().parts[-2:])
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

To ask it, {where} (scripts/ask.py also takes the run's `PROMPT_DATE` in place of today's):

{asking_code(s, path, str(adapter or "."), "experts" in s.LORA_TARGETS)}
"""


PICKLES = (".pt", ".pth", ".bin", ".pkl")  # Loading a pickle, such as an optimizer state, runs the code in it.
ADAPTER_FILES = (ADAPTER, ADAPTER_CONFIG, "README.md", SETTINGS, BEST_RECORD)
# These files name paths of the machine.
FILES_WITH_PATHS = (TRAINING_LOG, ADAPTER_CONFIG, "report.html", "README.md")


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
            if path.is_symlink() or not path.is_file() or path.suffix in PICKLES:
                continue
            inside = path.relative_to(folder)
            if any(part.endswith(".tmp") for part in inside.parts) or not is_zipped(inside, contents):
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
