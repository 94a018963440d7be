# SPDX-License-Identifier: Apache-2.0
"""What a run leaves to download: the zip, and the adapter's model card."""

from __future__ import annotations

import contextlib
import html
import json
import os
import re
import sys
import zipfile
from pathlib import Path

from grpo.run.durable import read_sealed, sealed, whole_file
from grpo.run.folder import run_folder
from grpo.run.place import BEST, SETTINGS, zip_of
from grpo.settings import ROOT, Settings, listed

TINY = "data/tiny"  # from the project's folder


def base_name(s: Settings) -> tuple[str, bool]:
    """What a card calls the base model, and whether that is local: named then after its folder, not after its path on this
    machine; `tiny` after its place in the project."""
    if s.MODEL_ID == "tiny":
        return TINY, True
    local = Path(s.MODEL_ID).is_dir()
    return Path(s.MODEL_ID).resolve().name if local else s.MODEL_ID, local


def loading_code(base: str, experts: bool, tokenizer: str = ".") -> str:
    """How to load an adapter of the model `base`, from its folder. In experts that stay quantized PEFT finds nothing to adapt,
    and goes on without them."""
    also, how = (", Mxfp4Config", ", quantization_config=Mxfp4Config(dequantize=True)") if experts else ("", "")
    return f"""```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer{also}

base = AutoModelForCausalLM.from_pretrained("{base}", dtype="auto", device_map="auto"{how})
model = PeftModel.from_pretrained(base, ".")
tokenizer = AutoTokenizer.from_pretrained("{tokenizer}")
```"""


def model_card(s: Settings, step: int, functions: str, note: str = "", tokenizer: str = ".") -> str:
    """README.md of an adapter after `step` steps, as the Hub reads it (https://huggingface.co/docs/hub/model-cards).
    `functions`: those that rewarded it, empty for one that scripts/sft.py made; `note`: its first paragraph; `tokenizer`:
    where that lies, from the card's folder.
    """
    base, local = base_name(s)
    path = " and with the path of the base model's folder" * local
    path += f", {TINY} of the project train_grpo.py (`MODEL_ID=tiny` there; it is on no Hub)" * (base == TINY)
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

{loading_code(base, "experts" in s.LORA_TARGETS, tokenizer)}
"""


PICKLES = (".pt", ".pth", ".bin", ".pkl")  # optimizer states among them; who loads one runs what it says
# Files of a run that name paths of its machine.
PATHS_IN = (SETTINGS, "training.log", "adapter_config.json", "report.html")


def without_paths(folder: Path, text: str) -> str:
    """A text of the run in `folder` without where that, the project, Python, the Hub's cache and the user's files lie on
    this machine: OUTPUT_DIR is its name, the project `.`, the home folder `~`. What was set (DATA, a local MODEL_ID) stays
    as set."""
    from huggingface_hub.constants import HF_HUB_CACHE  # late: where packages are missing, the preflight is to say so

    home = os.path.expanduser("~")
    places = {} if home == "/" else {home: "~"}
    places |= {HF_HUB_CACHE: "hub", os.path.dirname(os.__file__): "python", sys.prefix: "python"}
    # The project also as it was reached, perhaps through a link: as in the command and in tracebacks.
    reached = (ROOT, Path(sys.argv[0]).absolute().parent)
    places |= {str(place): "." for place in reached if place.resolve() == ROOT} | {str(folder): folder.name}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        given = dict(json.loads((folder / SETTINGS).read_text(encoding="utf-8"))["settings"])
        own = Path(given.pop("OUTPUT_DIR"))  # as it was set: perhaps through a link
        parts = (part for value in given.values() if isinstance(value, str) for part in listed(value))
        places = {part: part for part in parts if Path(part).is_absolute()} | places
        places |= {str(own): folder.name} if own.is_absolute() else {}
    spelled: dict[str, str] = {}
    for spell in (html.escape, lambda name: json.dumps(name)[1:-1], str):
        spelled |= {spell(place): spell(short) for place, short in places.items()}
    known = "|".join(map(re.escape, sorted(spelled, key=len, reverse=True)))
    return re.sub(rf"(?<![\w.~/-])(?:{known})(?!\w)", lambda found: spelled[found[0]], text)


def write_zip(folder: Path) -> Path:
    """OUTPUT_DIR.zip beside OUTPUT_DIR: everything but pickles, links and half-written files, best/ first, and without
    paths of this machine; whole or not at all."""
    with (
        whole_file(zip_of(folder)) as temporary,
        zipfile.ZipFile(temporary, "x", zipfile.ZIP_DEFLATED, compresslevel=1, strict_timestamps=False) as archive,
    ):
        for path in sorted(folder.rglob("*"), key=lambda path: (not path.is_relative_to(folder / BEST), path)):
            if path.is_symlink() or not path.is_file() or path.suffix in (*PICKLES, ".tmp"):
                continue
            name = path.relative_to(folder.parent)
            if path.name in PATHS_IN:
                text = without_paths(folder, path.read_text(encoding="utf-8", errors="surrogateescape"))
                if path.name == SETTINGS:  # other values, another checksum
                    with contextlib.suppress(ValueError, KeyError):  # damaged, and so it stays
                        given, record = read_sealed(path)["settings"], json.loads(text)
                        record["settings"] = given | {"OUTPUT_DIR": record["settings"]["OUTPUT_DIR"]}
                        text = json.dumps(sealed(record), indent=2) + "\n"
                about = zipfile.ZipInfo.from_file(path, name, strict_timestamps=False)
                about.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(about, text.encode("utf-8", "surrogateescape"), compresslevel=1)
            else:
                archive.write(path, name)
    return zip_of(folder)
