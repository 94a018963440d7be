#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Does the main road learn language? Trains a small trained model on tasks in English, sampled through vLLM.

    python scripts/dev/language.py warm stories --seed 1 --model checkpoints/smollm2 --out runs/stories-1
    python scripts/dev/language.py learn runs/stories-1 --name grpo --set LEARNING_RATE=3e-4
    python scripts/dev/language.py imitate runs/stories-1 --name sft --set TOTAL_STEPS=100
    python scripts/dev/language.py collect runs --results docs/results/language.json

`warm` writes the rows of a task (stories, tickets, sentences, days) and OUT/model: the checkpoint after a supervised
warm-up that teaches the form of answers, and not which is right. `learn` runs train_grpo.py from there, as a user
would. `imitate` runs scripts/sft.py on right answers to the same rows instead, and scores it on the held-out rows.
`collect` writes the held-out rewards before and after, their paired differences and the seconds of all runs in a
folder, and beside them, as .jsonl, ten completions of the first and of the last step of one run of each task.
docs/maintainers/language.md has what came out.

Exit codes: 0 done, 2 a usage error; those of the program that fails.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pandas

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from grpo.common import ROOT, InputError, reflow
from grpo.figures.statistics import paired_difference
from grpo.figures.text import with_interval
from grpo.output.layout import LOGS
from grpo.process.child import run_child
from grpo.process.ending import run_script
from scripts.dev import record
from scripts.dev.language_days import rule_rewards
from scripts.dev.language_rows import TASKS, write_rows
from scripts.dev.record import Figure, Json, figure, parse_assignment, read_json, read_lines

WARMUP = record.split_settings("""REWARDS=format EVAL_SHARE=0 LORA_R=32 LORA_ALPHA=64 PROMPTS_PER_STEP=32
    TOTAL_STEPS=90 LEARNING_RATE=1e-3 LR_SCHEDULER=linear WARMUP_STEPS=5""")
RUN = "run.json"  # What was run, in the folder of a run: task, seed, settings, seconds.
EXAMPLES = 10  # completions of a run's first and of its last step that `collect` keeps


def run(command: Sequence[str | Path], settings: dict[str, str]) -> float:
    """Runs a script of the project and returns its seconds; ends this program with its exit code if it fails."""
    started = time.perf_counter()
    if code := run_child([sys.executable, *command], settings):
        raise SystemExit(code)
    return round(time.perf_counter() - started, 1)


def warm(options: argparse.Namespace) -> None:
    """Writes OUT/rows and OUT/model, whose attention weights contain the adapter of the warm-up; a model that
    make_model.py has warmed up stays as it is."""
    rows, adapter = options.out / "rows", options.out / "warmup"
    write_rows(TASKS[options.task], rows, options.seed)
    if (options.model / "warmup.json").is_file():
        (options.out / "model").symlink_to(options.model.resolve())
        return write_run(options.out, options.task, options.seed, {}, 0.0)
    settings = {"MODEL_ID": str(options.model), "DATA": str(rows / "warmup.jsonl"), "SEED": str(options.seed)}
    settings |= TASKS[options.task].settings | WARMUP | dict(options.set)
    seconds = run([ROOT / "scripts/sft.py", "--out", adapter], settings)
    seconds += run([ROOT / "scripts/export.py", adapter, "--out", options.out / "model"], {})
    write_run(options.out, options.task, options.seed, settings, seconds)


def write_run(folder: Path, task: str, seed: int, settings: dict[str, str], seconds: float) -> None:
    values: Json = {"task": task, "seed": seed, "settings": settings, "seconds": seconds}
    (folder / RUN).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def start(options: argparse.Namespace) -> tuple[str, int, Path, dict[str, str]]:
    """Task, seed, folder of the new run, and settings of a run that starts at OUT/model."""
    warmed = read_json(options.out / RUN)
    if not warmed:
        raise InputError(f"{options.out} holds no warmed-up model: run `warm` first")
    task, rows, folder = str(warmed["task"]), options.out / "rows", options.out / options.name
    settings = {"MODEL_ID": str(options.out / "model"), "SEED": str(warmed["seed"]), "OUTPUT_DIR": str(folder)}
    settings |= {"EVAL_DATA": str(rows / "heldout.jsonl"), **TASKS[task].settings}
    return task, int(warmed["seed"]), folder, settings


def learn(options: argparse.Namespace) -> None:
    """Runs train_grpo.py from OUT/model."""
    task, seed, folder, settings = start(options)
    settings |= {"DATA": str(options.out / "rows/train.jsonl"), "SAVE_STEPS": "1000", "LOG_PROMPTS": "1"}
    settings |= dict(options.set)
    seconds = run([record.TRAIN_SCRIPT], settings)
    write_run(folder, task, seed, settings, seconds)


def imitate(options: argparse.Namespace) -> None:
    """Runs scripts/sft.py from OUT/model on right answers, and scores it on the held-out rows."""
    task, seed, folder, settings = start(options)
    rewards, heldout = settings["REWARDS"], settings.pop("EVAL_DATA")
    settings |= {"DATA": str(options.out / "rows/right.jsonl"), "REWARDS": "format", "EVAL_SHARE": "0"}
    settings |= {"PROMPTS_PER_STEP": "128"} | dict(options.set)
    seconds = run([ROOT / "scripts/sft.py", "--out", folder], settings)
    scores: list[str | Path] = ["--data", heldout, "--rewards", rewards, "--out", folder / "evaluation.json"]
    run([ROOT / "scripts/evaluate.py", folder, *scores], {"MAX_COMPLETION_LEN": settings["MAX_COMPLETION_LEN"]})
    write_run(folder, task, seed, settings, seconds)


def run_figures(folder: Path, start: Json) -> list[Figure]:
    """The held-out reward at a run's end, its paired difference from its start (SFT's: from `start`), its seconds."""
    ran, evaluation = read_json(folder / RUN), read_json(folder / "evaluation.json")
    name = f"{ran['task']}.{ran['seed']}.{folder.name}"
    assigned = " ".join(f"{key}={shlex.quote(value)}" for key, value in ran["settings"].items() if "/" not in value)
    figures = [scored(name, evaluation["after"], assigned), scored(f"{name}.greedy", evaluation["after_greedy"], "")]
    before = evaluation.get("before", start)
    figures += difference(f"{name}.gain", before, evaluation["after"], "after minus before")
    figures.append(figure(f"{name}.seconds", ran["seconds"], "s", "the whole process, beside other runs"))
    return figures + learning_figures(name, folder)


def learning_figures(name: str, folder: Path) -> list[Figure]:
    """What a run of train_grpo.py earned while it learned, whether it ended or was stopped; nothing of SFT."""
    if not (folder / LOGS[0]).is_file():
        return []
    steps = record.steps_of(folder).dropna(subset=["reward"])
    figures = [figure(f"{name}.learning_s", float(steps.step_s.sum()), "s", f"its {len(steps)} steps")]
    for end, part in (("first_5", steps[:5]), ("last_5", steps[-5:])):
        figures.append(figure(f"{name}.reward_{end}", float(part.reward.mean()), "reward", "sampled at 1"))
        if "ends" in part:
            ends = pandas.DataFrame(json.loads(counts) for counts in part.ends).sum()
            figures.append(
                figure(f"{name}.done_{end}", float(ends.get("done", 0) / ends.sum()), "share", "of the episodes")
            )
    return figures


def scored(name: str, scores: Json, words: str) -> Figure:
    """A model's held-out reward, with its interval in the note."""
    return figure(name, scores["reward"], "reward", f"95% {with_interval(scores, 'reward')} {words}".strip())


def difference(name: str, before: Json, after: Json, words: str) -> list[Figure]:
    """A paired difference of held-out rewards and the ends of its interval."""
    gain = paired_difference(before["reward_by_prompt"], after["reward_by_prompt"])
    note = f"{words}, paired by prompt; 95% interval in _low and _high"
    ends = [(end, gain[f"reward{end}"]) for end in ("", "_low", "_high")]
    return [figure(name + end, value, "reward", note if not end else "") for end, value in ends if value is not None]


def task_figures(folder: Path) -> list[Figure]:
    """The figures of a warmed-up model and of all runs that began there."""
    ran, runs = read_json(folder / RUN), sorted(path.parent for path in folder.glob(f"*/{RUN}"))
    evaluations = {run.name: read_json(run / "evaluation.json") for run in runs}
    start = next((evaluation for evaluation in evaluations.values() if "before" in evaluation), None)
    name = f"{ran['task']}.{ran['seed']}"
    stopped = sorted({path.parent for path in folder.glob(f"*/{LOGS[0]}")} - set(runs))
    figures = [row for run in stopped for row in learning_figures(f"{name}.{run.name}", run)]
    if not start:
        return figures
    figures += [
        scored(f"{name}.start", start["before"], ""),
        scored(f"{name}.start.greedy", start["before_greedy"], ""),
    ]
    figures.append(figure(f"{name}.warmup_seconds", ran["seconds"], "s", "beside other runs"))
    figures += [row for run in runs for row in run_figures(run, start["before"])]
    if ran["task"] == "days" and "grpo" in evaluations:
        rule, rewards = rule_rewards(read_lines(folder / "rows/heldout.jsonl"))
        figures.append(figure(f"{name}.rule", statistics.fmean(rewards), "reward", f"the best rule, {rule}"))
        of_rule, words = {"reward_by_prompt": rewards}, "GRPO minus the best rule"
        figures += difference(f"{name}.grpo_over_rule", of_rule, evaluations["grpo"]["after"], words)
    if {"grpo", "sft"} <= evaluations.keys():
        grpo, sft = (evaluations[run]["after"] for run in ("grpo", "sft"))
        figures += difference(f"{name}.sft_over_grpo", grpo, sft, "SFT on right answers minus GRPO")
    return figures


def examples(folder: Path) -> list[Json]:
    """The first completions of a run's first and of its last step, as they came."""
    ran, table = read_json(folder / RUN), pandas.read_csv(folder / LOGS[1])
    kept = []
    for when, step in (("before", table.step.min()), ("after", table.step.max())):
        for row in table[table.step == step][:: int(ran["settings"]["NUM_GENERATIONS"])][:EXAMPLES].itertuples():
            message = row.prompt.rpartition("<|start|>user<|message|>")[2].partition("<|end|>")[0]
            kept.append({"task": ran["task"], "when": when, "prompt": message})
            kept[-1] |= {"completion": row.completion, "reward": row.reward}
    return kept


def first_seeds(runs: Sequence[Path]) -> list[Path]:
    """Of each task the run named grpo with the lowest seed."""
    runs = [run for run in runs if run.name == "grpo" and (run / RUN).is_file()]
    runs = sorted(runs, key=lambda run: int(read_json(run / RUN)["seed"]))
    return list({read_json(run / RUN)["task"]: run for run in reversed(runs)}.values())


def collect(options: argparse.Namespace) -> None:
    """Writes the figures of all runs below a folder."""
    tasks = sorted(path.parent for path in options.out.glob(f"*/{RUN}"))
    runs = [path.parent for folder in tasks for path in sorted(folder.glob(f"*/{LOGS[0]}"))]
    if not runs:
        raise InputError(f"{options.out} holds no runs of `learn`")
    more: Json = {"machine": record.machine_words(read_json(runs[0] / "settings.json")["machine"])}
    more |= {"versions": read_json(runs[0] / "versions.json")}
    record.write(options.results, [row for folder in tasks for row in task_figures(folder)], more=more)
    if kept := [row for run in first_seeds(runs) for row in examples(run)]:
        record.write_lines(options.results.with_suffix(".jsonl"), kept)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=reflow(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for function in (warm, learn, imitate, collect):
        command = commands.add_parser(function.__name__, help=(function.__doc__ or "").partition("\n")[0])
        command.set_defaults(function=function)
        if function is warm:
            command.add_argument("task", choices=TASKS)
            command.add_argument("--seed", type=int, default=0, help="of rows, warm-up and runs (default %(default)s)")
            command.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
            command.add_argument("--out", type=Path, required=True, help="new folder")
        else:
            command.add_argument("out", type=Path, metavar="OUT", help="folder of `warm`; of several for `collect`")
        if function is collect:
            command.add_argument("--results", type=Path, required=True, help="JSON to write")
            continue
        if function is not warm:
            command.add_argument("--name", required=True, help="name of the run, a folder in OUT")
        text = "a setting of the run"
        command.add_argument(
            "--set", type=parse_assignment, action="append", default=[], metavar="NAME=VALUE", help=text
        )
    options = parser.parse_args(argv)
    options.function(options)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
