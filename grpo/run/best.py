# SPDX-License-Identifier: Apache-2.0
"""The best adapter of the steps that were evaluated, in OUTPUT_DIR/best."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo.run.durable import MANIFEST, file_sha256, read_sealed, write_sealed
from grpo.run.place import ADAPTER, BEST, COMPLETE, unused
from grpo.settings import TASK_FILES

Record = dict[str, Any]  # best.json
# The figure that each value of BEST_BY names, and how it reads in a sentence; of a simulator it is the first one.
FIGURES, WORDS = {"reward": "heldout_reward"}, {"reward": "held-out reward of {:.3f}"}
for task in filter(lambda task: "best_by" in task, TASK_FILES.values()):
    FIGURES[task["best_by"]], figure = next(iter(task["figures"].items()))
    WORDS[task["best_by"]] = figure["words"]


def better(by: str, value: float, than: float) -> bool:
    """Whether a value of the figure that `by` names is better: a higher reward, or less of a simulator's figure."""
    return value > than if by == "reward" else value < than


def adapter_fault(folder: Path, records: Sequence[str] = ("best.json", COMPLETE, MANIFEST)) -> str | None:
    """Why the adapter in `folder` is not what was written there, in words; None where it is, and where none of `records`
    says so: that of a best/, of a complete run, of a checkpoint. Only the weights are compared: a zip has other paths in
    adapter_config.json, and no optimizer states."""
    for name in records:
        try:
            record = read_sealed(folder / name)
            if name == MANIFEST and not record:
                return "it was cut off while it was written"
            # None: an earlier version, or another program, wrote the record
            expected = record.get("adapter_sha256") or dict(record.get("files") or {}).get(ADAPTER)
        except FileNotFoundError:
            continue
        except (OSError, TypeError, ValueError) as error:
            return f"{name} cannot be read ({error})"
        try:
            if expected not in (None, file_sha256(folder / ADAPTER)):
                return f"{ADAPTER} is damaged"
        except OSError as error:
            return f"{ADAPTER} cannot be read ({error.strerror})"
    return None


def best_fault(best: Path) -> str | None:
    """`adapter_fault` of the folder `best`, by its best.json."""
    return adapter_fault(best, ("best.json",))


def read_best(folder: Path) -> Record:
    """best.json of the run in `folder`; empty where there is none, or where it or its adapter is damaged."""
    with contextlib.suppress(FileNotFoundError):
        return {} if best_fault(folder / BEST) else read_sealed(folder / BEST / "best.json")
    return {}


def keep_best(
    folder: Path,
    by: str,
    base: Mapping[str, Any],
    measured: Mapping[str, Any],
    values: Mapping[str, Any],
    save: Callable[[Path, Record], None],
) -> Record:
    """Put an evaluated step into best.json, which is returned, and its adapter into best/ where none before was as good.

    values: `step` and the columns that were measured after it; base: those of the base model. measured: how; with another
    way (a resumed run may change it) the choice begins again, a step that is measured again replaces itself. `save` writes
    the adapter and its card into a new folder. Returns an empty record where the figure has no value.
    """
    name = FIGURES[by]
    if values.get(name) is None or base.get(name) is None:
        return {}
    record = read_best(folder)
    if (record.get("by"), record.get("measured")) != (by, dict(measured)):
        record = {"by": by, "figure": name, "base": dict(base), "measured": dict(measured), "evaluated": []}
    steps = {one["step"]: one for one in record["evaluated"]} | {values["step"]: dict(values)}
    record["evaluated"] = [steps[step] for step in sorted(steps)]
    is_best = "step" not in record or better(by, values[name], record["value"])
    if is_best:
        record |= {"step": values["step"], "value": values[name], "base_value": base[name]}
        record["better_than_base"] = better(by, values[name], base[name])
        record["in_words"] = in_words(record)
        replace_best(folder, lambda new: save(new, record), record)
    else:
        write_sealed(folder / BEST / "best.json", record)
    return record


def replace_best(folder: Path, save: Callable[[Path], None], record: Record) -> None:
    """Put a new best/ in the old one's place: at every moment one of them is whole, `recover_best` finds it."""
    best, new, old = (folder / (BEST + end) for end in ("", ".tmp", ".old"))
    shutil.rmtree(new, ignore_errors=True)
    try:
        new.mkdir()
        save(new)
        record["adapter_sha256"] = file_sha256(new / ADAPTER)
        write_sealed(new / "best.json", record)  # last: with it the folder is whole
    except Exception:  # a full disk has no room for a part of it
        shutil.rmtree(new, ignore_errors=True)
        raise
    if best.exists():
        best.rename(old)
    new.rename(best)
    shutil.rmtree(old, ignore_errors=True)


def recover_best(folder: Path) -> None:
    """After a kill inside `replace_best`: the new best/ where it was whole, else the old one. A damaged one is set aside."""
    best, new, old = (folder / (BEST + end) for end in ("", ".tmp", ".old"))
    if not best.exists() and (whole := next((path for path in (new, old) if (path / "best.json").is_file()), None)):
        whole.rename(best)
    if best_fault(best):
        best.rename(unused(folder, f"superseded-{BEST}"))
    for path in (new, old):
        shutil.rmtree(path, ignore_errors=True)


def in_words(record: Record) -> str:
    """Which step best/ is of, and whether it beats the base model."""
    mine, theirs = (WORDS[record["by"]].format(record[name]) for name in ("value", "base_value"))
    said = f"step {record['step']} is the best of the evaluated ones, with a {mine}"
    if record["better_than_base"]:
        return f"{said} (base model: {theirs})"
    return f"{said}, but NOT BETTER than the base model without any adapter ({theirs})"


def which_to_load(record: Record, last: int) -> str:
    """For the run's model card, at step `last`: which of the two adapters to load, and why."""
    if not record:
        return "**Nothing was measured** on held-out rows: whether this adapter beats the base model is not known.\n"
    if not record["better_than_base"]:
        return f"**No adapter beats the base model**: {record['in_words']}; it is in `best/`.\n"
    if record["step"] == last:
        return f"**Load the adapter in this folder**, or `best/`, which is the same: {record['in_words']}.\n"
    return (
        f"**Load the adapter in `best/`**: {record['in_words']}. The one in this folder is of the last step, {last}.\n"
    )
