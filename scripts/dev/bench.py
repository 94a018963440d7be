#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure the project on the machine it runs on, and write the figures as JSON.

    python scripts/dev/bench.py rollout --model M --data D --out rollout.json
    python scripts/dev/bench.py rollout --model M --data D --out R.json --free-gib 22 --set EXPERTS=shared
    python scripts/dev/bench.py mismatch --model M --data D --out mismatch.json
    python scripts/dev/bench.py decode --model M --out decode.json --points 96x940x512x8 4x60000x200
    python scripts/dev/bench.py demo --out docs/results/demo-cpu.json --figure docs/demo.png

M is the folder of a checkpoint (docs/maintainers/models.md, "Full"), D training CSVs.

`rollout` runs three steps of 12 prompts x 8 completions x 512 tokens through the entry point, or what the settings say
instead, and records their time and memory, the mismatch check, and whether frozen weights have changed. Exit code 1 if
they have, that of the run if it fails. It takes `--set NAME=VALUE` for any setting, `--free-gib` to occupy the rest of
the GPU, and `--tokens` for shorter completions than MAX_COMPLETION_LEN (whose memory is planned nevertheless).

`demo` runs train_grpo.py on the tiny model for ten seeds and lets the last and the best adapter control the plant
through three sets of windows that chose neither. Exit code 1 unless the best ones are below the rule charge_when_clean
on all seeds and sets.

`mismatch` runs the mismatch check, then once more for each of a list of faults that it makes in the engine or in the
trainer, and records what the check sees (docs/maintainers/mismatch.md).

`turns` starts vLLM alone and plays 96 episodes of 24 turns, of 64 tokens and of 32 to 96, then lets it write as many
tokens at once; then the same with turns of 20 tokens, which a call in the plant's day has.

`decode` starts vLLM alone and measures its decoding steps, then profiles 30 of them: time by kind of kernel, beside the
bytes that a step must move.

The JSON holds `command, machine, date, versions, commit, figures: [{name, value, unit, note}]`. For a command of
docs/results that is gone, the commit that its JSON names has the code.
"""

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train_grpo
from grpo.common import reflow
from grpo.process.ending import run_script
from grpo.settings.table import FIELDS
from scripts.dev.record import parse_assignment


def add_command(commands: argparse._SubParsersAction, name: str, text: str, model: bool) -> argparse.ArgumentParser:
    """Adds a command with the options that commands share; with `model` also those of a checkpoint on a GPU."""
    command = commands.add_parser(name, help=text)
    command.add_argument("--out", required=True, help="JSON to write")
    if name != "turns":
        about_run = "folder of the traces" if name == "decode" else "OUTPUT_DIR of the runs; deleted first"
        command.add_argument("--run", default=f"runs/bench-{name}", help=f"{about_run} (default %(default)s)")
    settings: dict[str, Any] = {"type": parse_assignment, "action": "append", "default": [], "metavar": "NAME=VALUE"}
    command.add_argument("--set", help="a setting of the runs", **settings)
    if model:
        command.add_argument("--model", required=True, help="checkpoint folder")
        command.add_argument("--data", required=True, help="training CSVs")
    return command


def add_engine_options(command: argparse.ArgumentParser, trials: int) -> None:
    """Adds the options of a measurement that starts vLLM without a run: no rows, but any argument of vLLM, and a number
    of `trials`."""
    command.add_argument("--model", required=True, help="checkpoint folder")
    values: dict[str, Any] = {"action": "append", "default": [], "metavar": "NAME=JSON"}
    command.add_argument("--engine", help="an argument of vllm.LLM; an object joins the one that is there", **values)
    text = "trials, beside one that does not count (default %(default)s)"
    command.add_argument("--trials", type=int, default=trials, help=text)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=reflow(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    rollout = add_command(commands, "rollout", "a run's time, memory and weights, at any settings", True)
    rollout.add_argument("--free-gib", type=float, help="GiB of the GPU that the run gets (default: all)")
    rollout.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    rollout.add_argument("--tokens", type=int, help="length at which vLLM's completions end")
    demo = add_command(commands, "demo", "the demo on ten seeds, on the CPU", False)
    demo.add_argument("--figure", help="PNG to write (default: none)")
    demo.add_argument("--seeds", type=int, default=10, help="number of seeds, from 1 on (default %(default)s)")
    demo.add_argument("--jobs", type=int, default=2, help="seeds side by side (default %(default)s)")
    mismatch = add_command(commands, "mismatch", "vLLM against the trainer, and which faults the check finds", True)
    mismatch.add_argument("--faults", nargs="+", metavar="NAME", help="only these, in this order (default: all)")
    mismatch.add_argument("--cpu", action="store_true", help="with vLLM's CPU build (scripts/dev/cpu_vllm.py)")
    turns = add_command(commands, "turns", "episodes of 24 short turns in vLLM, against one answer", False)
    add_engine_options(turns, 2)
    about_tokens = "mean tokens of a turn, each measured by itself (default 64 20)"
    turns.add_argument("--tokens", help=about_tokens, nargs="+", type=int, default=[64, 20])
    decode = add_command(commands, "decode", "vLLM's decoding steps, profiled by kind of kernel", False)
    add_engine_options(decode, 3)
    about_points = "SEQUENCESxPROMPTxTOKENS[xGROUP], GROUP behind each prompt (default 96x940x512x8 and two of 4)"
    points: dict[str, Any] = {"nargs": "+", "metavar": "POINT", "default": ["96x940x512x8", "4x940x200", "4x60000x200"]}
    decode.add_argument("--points", help=about_points, **points)
    decode.add_argument("--steps", type=int, default=30, help="steps that are profiled (default %(default)s)")
    options = parser.parse_args()
    if unknown := [name for name, _ in options.set if name not in FIELDS]:
        parser.error(f"{', '.join(unknown)}: no setting has this name (docs/settings.md)")
    return options


def main() -> int:
    options = parse_args()
    options.main = train_grpo.main
    module = importlib.import_module(f"scripts.dev.{options.command}")  # Imported here: --help needs no torch.
    return getattr(module, f"bench_{options.command}")(options)


if __name__ == "__main__":
    sys.exit(run_script(main))
