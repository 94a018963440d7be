# SPDX-License-Identifier: Apache-2.0
"""The model card, and the other files that are published with an adapter or a merged model; for scripts/export.py."""

import contextlib
import json
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from grpo.common import InputError
from grpo.evaluate.heldout_table import heldout_table
from grpo.evaluate.report_text import facts, setting_text, simulator_section
from grpo.evaluate.run_files import Run, read_json, read_run
from grpo.evaluate.saved_adapter import run_folder
from grpo.figures.text import markdown_table, object_at
from grpo.figures.verdict import reward_verdict
from grpo.output.archive import asking_code, base_model_name
from grpo.output.durable import Record, write_text
from grpo.output.layout import ADAPTER, ADAPTER_CONFIG, SETTINGS
from grpo.plan.hub import MODEL_FILES
from grpo.plan.tensors import WEIGHTS_INDEX
from grpo.preflight.adapter import is_on_experts
from grpo.settings.parsing import show
from grpo.settings.table import FIELDS, Settings

FORMS = {
    "": "a LoRA adapter for {base}",
    "mxfp4": "{base} with a LoRA adapter merged into it, its experts as they were, in MXFP4",
    "bf16": "{base} with a LoRA adapter merged into it, in BF16 throughout",
}
# The settings that decide what the model is asked: a merged model has no record of its run.
PROMPT_SETTINGS = (
    "SYSTEM_PROMPT", "PROMPT_TEMPLATE", "REASONING_EFFORT", "PROMPT_DATE", "DIRECT_ANSWERS", "ENVIRONMENT",
)  # fmt: skip
GRPO = "\nTrained by train_grpo.py with GRPO ([paper](https://arxiv.org/abs/2402.03300))."


def results(run: Run, adapter: Path) -> str:
    """The run's figures for this adapter: those of the report for the last step's, that of best.json for best/."""
    if not run.folder.samefile(adapter):
        words = read_json(adapter / "best.json").get("in_words")
        return f"{words[0].upper()}{words[1:]}." if words else f"`{adapter.name}` was not measured by itself."
    verdicts = " ".join(filter(None, (reward_verdict(run.evaluation), simulator_section(run).verdict)))
    header, rows = heldout_table(run.evaluation)
    return verdicts + (f"\n\n{markdown_table(header, rows)}" if rows else "")


def chosen_settings(sources: Mapping[str, str], values: Record) -> str:
    """A section of the model card with the settings that are not at their defaults."""
    chosen = [name for name, spec in FIELDS.items() if spec.metadata["group"] != "Output"]
    chosen = [name for name in chosen if name in values and sources.get(name, "default") != "default"]
    rows = markdown_table(["Setting", "Value"], [[f"`{name}`", setting_text(name, values[name])] for name in chosen])
    return f"## Settings\n\nThose that are not train_grpo.py's defaults.\n\n{rows}\n"


def about_training(adapter: Path) -> str:
    """Data, results and settings of the adapter's run as sections of a card, as far as they are known."""
    folder = run_folder(adapter)
    if folder is None:
        return "How it was trained is not recorded.\n"
    record = read_json(folder / SETTINGS)
    settings = chosen_settings(object_at(record, "sources"), object_at(record, "settings"))
    try:
        run = read_run(folder)
    except (InputError, OSError):  # scripts/sft.py writes no metrics
        return settings
    run_facts = markdown_table(["", ""], list(map(list, facts(run))))
    return f"""## Data and training

{run_facts}

## Results

{results(run, adapter)}

{settings}"""


def serving(s: Settings, where: str, form: str) -> str:
    """Markdown on how to serve a merged model in `where`; vLLM takes its experts in MXFP4."""
    command = f"vllm serve {shlex.quote(where)} --max-model-len {s.MAX_PROMPT_LEN + s.MAX_COMPLETION_LEN}"
    settings = {name: getattr(s, name) for name in PROMPT_SETTINGS if getattr(s, name) != getattr(Settings, name)}
    variables = "".join(f"{name}={shlex.quote(show(value))} " for name, value in settings.items())
    ask = f"{variables}python scripts/ask.py --model {shlex.quote(where)} 'Your question'    # in the project's folder"
    return "\n".join(["```bash", *([command] if form == "mxfp4" else []), ask, "```"])


def model_readme(s: Settings, adapter: Path, where: str, form: str = "", share: float | None = None) -> str:
    """The model card (README.md) of the adapter of a run with settings `s`, or of the model that it was merged into:
    `where` is its folder or its repository on the Hub, `form` a key of FORMS, `share` the part of the adapter's update
    that survived rounding."""
    base, local = base_model_name(s)
    run = run_folder(adapter) or adapter
    is_grpo = (run / "metrics.csv").is_file()  # scripts/sft.py writes none
    tags = f"grpo, {form or 'lora'}" if is_grpo else form or "lora"
    base_tags = "" if local else f"\nbase_model: {base}\nbase_model_relation: {'finetune' if form else 'adapter'}"
    code = asking_code(s, where) if form else asking_code(s, base, where, is_on_experts(adapter))
    code += f"\n\nTo serve it, or to ask it with scripts/ask.py:\n\n{serving(s, where, form)}" if form else ""
    survived = f" {share:.1%} of the adapter's update survived the rounding to BF16." if share is not None else ""
    description = FORMS[form].format(base=base)
    return f"""---
library_name: {"transformers" if form else "peft"}
pipeline_tag: text-generation
tags: [{tags}]{base_tags}
---

# {run.resolve().name}

This is {description}.{survived}{GRPO if is_grpo else ""}

{code}

{about_training(adapter)}"""


def copy_small(base: Path, folder: Path) -> None:
    """Copy tokenizer, chat template and generation config of the model in the folder `base` to `folder`."""
    for path in (path for pattern in MODEL_FILES for path in base.glob(pattern)):
        if path.name not in ("config.json", WEIGHTS_INDEX):
            shutil.copyfile(path, folder / path.name)


@contextlib.contextmanager
def staged_adapter(s: Settings, adapter: Path, base: Path, repo: str) -> Iterator[Path]:
    """Yields a temporary folder with the files of an adapter to upload to `repo`: its weights, its config without paths
    of this machine, the tokenizer of the model in the folder `base`, and the card."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copyfile(adapter / ADAPTER, folder / ADAPTER)
        config = read_json(adapter / ADAPTER_CONFIG) | {"base_model_name_or_path": base_model_name(s)[0]}
        write_text(folder / ADAPTER_CONFIG, json.dumps(config, indent=2) + "\n")
        copy_small(base, folder)
        write_text(folder / "README.md", model_readme(s, adapter, repo))
        yield folder
