# SPDX-License-Identifier: Apache-2.0
"""The reliability campaign: its parts, and the figures that they come to."""

from __future__ import annotations

import argparse
import importlib
import random
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from grpo.measure import hostile_input, kills
from grpo.measure.forks import Campaign, Found, fresh_folder, tasks_done
from grpo.measure.record import figure, save, short, tabled, write

KILLS = """
kills_runs | runs | killed at a random moment and continued by the same command until complete; {asked} asked for
kills_different | runs | of these differ from the uninterrupted run, or left something stray
kills_by_command | runs | of these through the command, the others forked from a process that has imported everything
kills kills_of_continuations | kills | half before a random file operation, half after a random time; a run gets one to four
kills_KILL kills_TERM kills_INT kills_HUP | kills | by signal
kills_in_checks kills_in_deletion kills_in_first_write kills_in_loading | kills | by phase
kills_in_steps kills_in_saving kills_in_last_evaluation kills_in_report kills_in_zip kills_in_end | kills | by phase
kills_median_s | s | a run with its continuations, beside {others} others
"""
DAMAGE = """
damage_cases | files | damaged, each in a run of its own; {asked} asked for
damage_files | files | different ones, each damaged in six ways
damage_continued | runs | came to the result of an undamaged run
damage_refused | runs | refused, as documented
damage_different | runs | did not do as documented
damage_median_s | s | a run, beside {others} others
"""
DISK = """
disk_cases | runs | on a disk that fills up once they have begun; {asked} asked for
disk_met | runs | of these met the full disk, said so in their last line, left no .tmp and were continued with room
disk_different | runs | did otherwise
"""
INPUT = """
{part}_cases | {unit} | {what}; {asked} asked for
{part}_refused | {unit} | with one line for each problem
{part}_accepted | {unit} | by the checks
{part}_loaded | {unit} | of the accepted ones, that trained a step
{part}_load_refused | {unit} | of the accepted ones, that ended in one line when loaded
{part}_by_command | {unit} | of all, asked through the command as well
{part}_findings | {unit} | a traceback, no file named, or slower than 10 s
{part}_slowest_s | s | the slowest answer
"""


@dataclass(frozen=True)
class Part:
    """A part of the campaign: what it does with each of its numbers, how many it has (None: all that there are), and in the
    quick campaign; how many share a process."""

    work: Callable[[Campaign, Path, int, Found], None]
    size: int | None
    quick: int
    table: str
    batch: int = 1
    count: Callable[[Campaign], int] | None = None
    prepare: Callable[[Campaign, int], None] | None = None
    able: Callable[[], bool] | None = None  # whether it can be done here; None: always
    unit: str = ""
    what: str = ""


PARTS = {
    "kills": Part(kills.kill, 350, 6, KILLS, prepare=kills.prepare),
    "damage": Part(
        kills.damage, None, 6, DAMAGE, prepare=kills.prepare, count=lambda campaign: len(kills.damages(campaign))
    ),
    "csv": Part(hostile_input.csv, 10_000, 200, INPUT, 100, unit="CSVs", what="good ones with one to three faults"),
    "settings": Part(
        hostile_input.settings, 5000, 200, INPUT, 100, unit="environments", what="one to four settings changed or mistyped"
    ),
    "models": Part(hostile_input.models, 200, 6, INPUT, 2, unit="folders", what="copies of the tiny model with a fault"),
    "disk": Part(kills.fill_disk, 20, 1, DISK, prepare=kills.prepare, able=kills.can_mount),
}  # fmt: skip


def import_all() -> None:
    """Import here what a run imports, so that none of its forks has to. No thread may be started: forks have only this one."""
    for name in ("trl", "peft", "datasets", "transformers.models.gpt_oss.modeling_gpt_oss", "filelock", "tokenizers", "jinja2",
                 "grpo.evaluate.page", "grpo.evaluate.progress", "grpo.learn.trainer", "grpo.rollout.parity"):  # fmt: skip
        importlib.import_module(name)
    # What these import when they are asked for it.
    from peft import LoraConfig  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401
    from trl import GRPOConfig  # noqa: F401


def figures_of(name: str, found: Found, asked: int, jobs: int) -> list[dict[str, Any]]:
    """A part's figures; what is left out was not counted."""
    part = PARTS[name]
    values: dict[str, Any] = dict(found.counts) | {"asked": f"{asked:,}", "others": jobs - 1}
    values |= {f"{name}_different": len(found.findings), f"{name}_findings": len(found.findings)}
    if found.seconds:
        values |= {f"{name}_median_s": median(found.seconds), f"{name}_slowest_s": max(found.seconds)}
    table = part.table
    for word, text in (("{part}", name), ("{unit}", part.unit), ("{what}", part.what)):
        table = table.replace(word, text)
    return tabled(table, values)


def numbers_of(part: Part, name: str, campaign: Campaign, options: argparse.Namespace) -> list[int]:
    """Which numbers of a part are done."""
    if options.only is not None:
        return [options.only]
    there = part.count(campaign) if part.count else None
    size = options.size if options.size is not None else (part.quick if options.quick else part.size) or there
    if there and size < there:
        return sorted(random.Random(f"{name} {options.seed}").sample(range(there), size))
    return list(range(min(size, there or size)))


def bench_reliability(options: argparse.Namespace) -> int:
    """The chosen parts, one after the other. Exit code 1 where something was found, 2 where --run is not ours, 3 where a part
    came to no end in time."""
    try:
        folder = fresh_folder(Path(options.run).resolve())
    except FileExistsError as error:
        print(error, file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    import_all()
    campaign = Campaign(options.main, folder, options.seed, options.quick)
    began, told, written, made = time.monotonic(), 0.0, 0.0, []
    until = began + options.minutes * 60
    command = " ".join(["python", "scripts/reliability.py", *map(short, sys.argv[1:])])
    findings, short_of = 0, False
    for name in options.part:
        part, found, done = PARTS[name], Found(), 0
        if part.able and not part.able():
            print(f"{name}: left out, it mounts a small disk, which takes root", flush=True)
            continue
        if part.prepare:
            part.prepare(campaign, options.jobs)
        numbers, start = numbers_of(part, name, campaign, options), time.monotonic()
        batches = (numbers[i : i + part.batch] for i in range(0, len(numbers), part.batch))
        for place, one in tasks_done(partial(part.work, campaign), folder / name, batches, options.jobs, until):
            found.add(one)
            done = len(found.seconds)
            for number, text in one.findings:
                again = f"--part {name} --seed {options.seed} --only {number}{' --quick' * options.quick}"
                print(f"FOUND {name} {number}: {text}\n  in {place}; again: {again}", flush=True)
            if not one.findings:
                shutil.rmtree(place)
            now = time.monotonic()
            if now - told > 10 or done == len(numbers):
                told, minutes = now, (now - began) / 60
                print(
                    f"{name}: {done:,} of {len(numbers):,}, {len(found.findings)} found, {minutes:.1f} min", flush=True
                )
            if now - written > 30:
                written = now
                save(Path(options.out), made + figures_of(name, found, len(numbers), options.jobs), command)
        made += figures_of(name, found, len(numbers), options.jobs)
        made.append(figure(f"{name}_minutes", (time.monotonic() - start) / 60, "min"))
        save(Path(options.out), made, command)
        findings += len(found.findings)
        short_of |= done < len(numbers)
    write(Path(options.out), made, command)
    print(f"{findings} found", flush=True)
    return 1 if findings else 3 if short_of else 0
