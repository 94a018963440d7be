#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The rows and rewards of train_grpo.py through verl: SFT, PPO with a critic, or GRPO.

    export MODEL_ID=my/llama TASK=gsm8k OUTPUT_DIR=runs/verl
    python scripts/verl/run.py grpo --dry-run      # checks everything, prints verl's command
    python scripts/verl/run.py grpo trainer.total_training_steps=200
    bash scripts/verl/recipes/llama32_gsm8k/run.sh sft ppo merge upload  # all of it

Writes OUTPUT_DIR/data and starts verl with the stage's YAML in scripts/verl/ (docs/verl.md).
Exit codes: 0 done, 2 bad input (every problem is named), 1 anything else.
"""

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from grpo.common import ROOT, InputError, in_range
from grpo.output.durable import write_text
from grpo.plan.machine import installed_versions, read_machine
from grpo.process.child import run_child
from grpo.process.ending import run_script
from grpo.verl.rows import read_input, write_data

VERSION = "0.9.1"


CONFIGS = ROOT / "scripts/verl"
RECIPES = sorted(path.name for path in (CONFIGS / "recipes").iterdir())


def verl_command(stage: str, gpus: int, options: Sequence[str], recipe: str | None = None) -> list[str]:
    """verl's command line for a stage on `gpus` GPUs of this machine; `options` win over its YAML, which a `recipe` is
    laid over."""
    config = ["--config-dir", str(CONFIGS), "--config-name", stage, f"trainer.n_gpus_per_node={gpus}"]
    if recipe:
        config[1:4] = [str(CONFIGS / "recipes" / recipe), "--config-name", f"recipe_{stage}"]
        config.append(f"hydra.searchpath=['file://{CONFIGS}']")
    if stage == "sft":
        launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}", "-m", "verl.trainer.sft_trainer"]
    else:
        launch = ["verl.trainer.main_ppo"]
        # Ray counts the node's CPUs, not a job's, and verl waits without a word for CPUs that Ray does not have. A Ray
        # that is there already takes no such number, and its processes would not get this environment.
        config += [f"ray_kwargs.ray_init.num_cpus={max(len(os.sched_getaffinity(0)), 12 + 3 * gpus)}"]
        config += ["+ray_kwargs.ray_init.address=local"]
    return [sys.executable, "-m", *launch, *config, *options]


def prompts_per_step(stage: str, options: Sequence[str], recipe: str | None) -> int:
    """`data.train_batch_size` of PPO or GRPO, as verl will find it: the last option, else the topmost YAML file's."""
    paths = [CONFIGS / f"{stage}.yaml", CONFIGS / "ppo.yaml"]
    if recipe:
        paths = [CONFIGS / "recipes" / recipe / f"recipe_{path.name}" for path in paths] + paths
    texts = [*reversed(options), *(path.read_text(encoding="utf-8") for path in paths)]
    matches = (re.search(r"\btrain_batch_size[:=] *(\d+)", text) for text in texts)
    return next(int(match[1]) for match in matches if match)


def begun_from(note: Path) -> str | None:
    """The model that a stage's checkpoints, which lie beside `note`, began from; None without checkpoints or note."""
    has_checkpoint = (note.parent / "latest_checkpointed_iteration.txt").exists()
    return note.read_text(encoding="utf-8") if has_checkpoint and note.exists() else None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("sft", "ppo", "grpo"))
    parser.add_argument("options", nargs="*", metavar="KEY=VALUE", help="options of verl")
    parser.add_argument(
        "--gpus", type=in_range(1, 1024, int), help="GPUs of this machine (default: all that are visible)"
    )
    parser.add_argument("--recipe", choices=RECIPES, help="values of a folder of scripts/verl/recipes")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print verl's command, write nothing")
    args = parser.parse_intermixed_args(argv)
    data, problems = read_input(os.environ, args.stage)
    if not args.dry_run and (version := installed_versions(["verl"])["verl"]) != VERSION:
        fix = "pip install -r requirements-verl.txt into an environment of its own"
        problems.add("verl", f"this Python has {version or 'none'}, the options are those of {VERSION}", fix)
    if args.recipe and not os.environ.get("DATA", "").strip():
        problems.add("DATA", "the recipe brings no rows", "Name them, such as DATA=openai/gsm8k:main")
    if args.stage != "sft" and 0 < len(data.rows) < (size := prompts_per_step(args.stage, args.options, args.recipe)):
        fix = f"Name more rows, or append data.train_batch_size={len(data.rows)} or less, a multiple of the GPUs"
        problems.add("DATA", f"{len(data.rows)} training rows, but a step takes {size}, and verl repeats none", fix)
    note, resumes = data.output_dir / args.stage / "model.txt", not any("resume_mode=" in text for text in args.options)
    if resumes and (begun := begun_from(note)) not in (None, data.model):
        fix = f"Name another OUTPUT_DIR, or delete {note.parent}; if it is the same model, delete {note}"
        problems.add(f"MODEL_ID={data.model}", f"verl would continue {note.parent}, which began from {begun}", fix)
    if problems:
        raise InputError(*problems)
    options = args.options
    if args.stage != "sft" and not data.eval_rows:  # verl would validate with training rows.
        options = ["trainer.test_freq=-1", "trainer.val_before_train=false", *options]
    os.environ.pop("ROCR_VISIBLE_DEVICES", None)  # Slurm sets it on NVIDIA's machines too, and verl then stops.
    environ = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "VERL_USE_EXTERNAL_MODULES": "grpo.verl.sum_resolver,grpo.verl.critic",
        "MODEL_ID": data.model,
        "OUTPUT_DIR": str(data.output_dir),
    }
    command = verl_command(args.stage, args.gpus or read_machine().gpus or 1, options, args.recipe)
    print(*(f"{name}={shlex.quote(value)}" for name, value in environ.items()), shlex.join(command), flush=True)
    if args.dry_run:
        return 0
    write_data(data)
    if resumes:
        note.parent.mkdir(exist_ok=True)
        write_text(note, data.model)
    return run_child(command, environ)


if __name__ == "__main__":
    sys.exit(run_script(main))
