#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Merge an adapter into its base model, or put either of them on the Hub.

    python scripts/export.py runs/first/best --out merged             # experts stay in MXFP4
    python scripts/export.py runs/first/best --to bf16 --out merged   # 16 bits throughout
    python scripts/export.py runs/first/best --out merged --push you/name   # and upload it
    python scripts/export.py runs/first/best --push you/name          # the adapter
    python scripts/export.py runs/verl/ppo-merged --push you/name     # a whole model with its tokenizer

RUN_DIR is a run's folder (its last step), its best/, a checkpoint, or any LoRA of PEFT on the
attention; with --to bf16 also on the experts. It works on the CPU, a shard at a time
(docs/adapters.md). --push makes a private repository, with a card that names data, settings and
results.
Exit codes: 0 done, 2 bad input (every problem is named), 1 anything else.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import httpx
from safetensors import SafetensorError

from grpo.common import InputError, format_exception
from grpo.evaluate.export import export, prepare
from grpo.evaluate.model_card import staged_adapter
from grpo.evaluate.saved_adapter import note_best
from grpo.output.layout import ADAPTER
from grpo.process.ending import run_script


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


def whole_model(folder: Path) -> list[Path]:
    """The files of a folder that holds a whole model, such as verl's merger writes; [] if it holds an adapter or no
    model. Raises InputError if the model lacks its tokenizer."""
    if not (folder / "config.json").is_file() or (folder / ADAPTER).exists() or not any(folder.glob("*.safetensors")):
        return []
    if not (folder / "tokenizer_config.json").is_file():
        fix = "Copy tokenizer.json, tokenizer_config.json and the chat template of its base into it"
        raise InputError(f"{folder}: the model has no tokenizer. {fix}")
    return sorted(path for path in folder.rglob("*") if path.is_file())


def push_model(args: argparse.Namespace, files: Sequence[Path]) -> None:
    """Uploads the files of a whole model, or with --dry-run says what it would upload."""
    size = sum(path.stat().st_size for path in files) / 1e9
    names = ", ".join(str(path.relative_to(args.adapter)) for path in files)
    print(f"{len(files)} files, {size:.2f} GB, for {args.push}: {names}", flush=True)
    if not args.dry_run:
        print(f"uploaded: {upload(args.adapter, args.push)}")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "adapter", type=Path, metavar="RUN_DIR", help="folder of the adapter or, with --push alone, of a whole model"
    )
    parser.add_argument("--to", choices=("mxfp4", "bf16"), default="mxfp4", help="format of the model (default mxfp4)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the merged model to this new folder")
    parser.add_argument("--model", metavar="MODEL_ID", help="base model (default: what the run or the adapter names)")
    text = "upload it to this repository of the Hub; without --out: the adapter"
    parser.add_argument("--push", metavar="REPO", help=text)
    parser.add_argument("--dry-run", action="store_true", help="of a whole model: say what --push would upload")
    args = parser.parse_args(argv)
    if not args.out and not args.push:
        parser.error("give --out DIR, or --push REPO, or both")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        model = [] if args.out else whole_model(args.adapter)
        if args.dry_run and not model:
            raise InputError(f"{args.adapter}: --dry-run is for a folder with a whole model, and this is none")
        if args.push and not args.dry_run:
            check_account(args.push)
        if model:
            push_model(args, model)
            return 0
        note_best(args.adapter)
        if not args.out:
            s, _, base = prepare(args)
            with staged_adapter(s, args.adapter, base, args.push) as folder:
                print(f"uploaded: {upload(folder, args.push)}")
            return 0
        share = export(args)
        print(f"written: {args.out}")
        if share is None:
            print("the adapter is zero: this is the base model")
        elif share >= 0.9995:  # It would be printed as 100.0%.
            print("all of the adapter's update is in it, to a tenth of a percent")
        else:
            print(
                f"{share:.1%} of the adapter's update is in it: the rest is smaller than half a step of BF16 at these"
                " weights, and was rounded away. The adapter beside its base model loses nothing (scripts/ask.py)"
            )
        if args.push:
            print(f"uploaded: {upload(args.out, args.push)}")
    except InputError as error:
        print(*error.args, sep="\n", file=sys.stderr)
        return 2
    except (OSError, SafetensorError, httpx.HTTPError) as error:  # A broken line is no OSError to httpx.
        print(f"export failed: {format_exception(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
