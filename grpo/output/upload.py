# SPDX-License-Identifier: Apache-2.0
"""Publishing on the Hub: parts of the model card, and the upload."""

from collections.abc import Mapping
from pathlib import Path

from grpo.common import InputError, format_exception, one_line, split_commas
from grpo.output.durable import Record
from grpo.settings.parsing import show
from grpo.settings.table import FIELDS

MERGED_CODE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".", dtype="auto", device_map="auto")
tokenizer = AutoTokenizer.from_pretrained(".")
```"""


def table(header: list[str], rows: list[list[str]], longest_cell: int = 300) -> str:
    """A Markdown table, each cell on one line; longer cells lose their middle."""
    lines = [header, ["---"] * len(header), *rows]
    escaped = ([one_line(cell, longest_cell).replace("|", "\\|") for cell in cells] for cells in lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in escaped)


def without_folders(text: str) -> str:
    """A setting's value with absolute paths cut to their file names, because a report may be shown to others."""
    return ", ".join(Path(part).name if part.startswith("/") else part for part in split_commas(text))


def chosen_settings(sources: Mapping[str, str], values: Record) -> str:
    """A section of the model card with the settings that are not at their defaults."""
    chosen = [name for name, spec in FIELDS.items() if spec.metadata["group"] != "Output"]
    chosen = [name for name in chosen if name in values and sources.get(name, "default") != "default"]
    rows = table(["Setting", "Value"], [[f"`{name}`", without_folders(show(values[name]))] for name in chosen])
    return f"## Settings\n\nThose that are not train_grpo.py's defaults.\n\n{rows}\n"


def check_account(repo: str) -> None:
    """Checks that the Hub accepts the name and the token, before long work begins. Raises InputError."""
    try:
        from huggingface_hub import HfApi  # Imported here, as a card does not need it.
        from huggingface_hub.utils import validate_repo_id

        validate_repo_id(repo)
        HfApi().whoami()
    except Exception as error:  # huggingface_hub raises many types: no token, no network, a refusal.
        fault = f"--push {repo}: it cannot be uploaded ({format_exception(error)})"
        token = "run `hf auth login` or set HF_TOKEN to a token that may write there"
        raise InputError(f"{fault}. Name it user/name or organization/name, and {token}") from error


def upload(folder: Path, repo: str) -> str:
    """Uploads all files of a folder to a model repository of the Hub and returns its address. A new one is private."""
    from huggingface_hub import HfApi

    api = HfApi()
    address = api.create_repo(repo, private=True, exist_ok=True)
    api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload by train_grpo.py's scripts")
    return str(address)
