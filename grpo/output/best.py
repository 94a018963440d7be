# SPDX-License-Identifier: Apache-2.0
"""The best adapter of the steps that were evaluated, in OUTPUT_DIR/best."""

import contextlib
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import get_type_hints

from grpo.figures.verdict import DECIDING, Comparison, describe_best
from grpo.output.checkpoints import CUT_OFF
from grpo.output.durable import Record, file_sha256, read_sealed, sync, sync_files, write_sealed
from grpo.output.layout import ADAPTER, BEST, BEST_RECORD, COMPLETE, MANIFEST, unused_path


def is_better(best_by: str, value: float, other: float) -> bool:
    """Whether `value` of BEST_BY's figure is better than `other`: a reward should be high, a simulator's figure low."""
    gain = value - other if best_by == "reward" else other - value
    return round(gain, 9) > 0  # A smaller one is rounding, as in `paired_difference`.


def adapter_fault(folder: Path) -> str | None:
    """Why the adapter in `folder` is not the one that was written there, by the checksum in the record of best/, of a
    complete run, or of a checkpoint; None if it is, or if there is no checksum. Only the weights are compared, because
    a run's zip has other paths in adapter_config.json and no optimizer states."""
    for name in (BEST_RECORD, COMPLETE, MANIFEST):
        try:
            record = read_sealed(folder / name)
            if name == MANIFEST and not record:
                return CUT_OFF
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


def read_best(folder: Path) -> Record:
    """best.json of the run in `folder`; empty where there is none, or where it or its adapter is damaged."""
    with contextlib.suppress(FileNotFoundError):
        record = {} if adapter_fault(folder / BEST) else read_sealed(folder / BEST / BEST_RECORD)
        return record if all(map(is_comparison, record.get("comparisons", ()))) else {}
    return {}


def is_comparison(record: Record) -> bool:
    """Whether `record` holds a Comparison: best.json may have been edited."""
    kinds = {name: kind if kind is str else kind | int for name, kind in get_type_hints(Comparison).items()}
    with contextlib.suppress(TypeError):  # Of a name that is missing, or that is none of its own.
        return all(isinstance(value, kinds[name]) for name, value in asdict(Comparison(**record)).items())
    return False


def is_whole(record: Record) -> bool:
    """Whether a best.json has all that the choice of the best adapter reads: the file may have been edited."""
    if not record.keys() >= {"by", "measured", "evaluated", "step", "value"}:
        return False
    return math.isfinite(record["value"]) and all("step" in row for row in record["evaluated"])


def keep_best(
    folder: Path,
    best_by: str,
    base: Mapping[str, float],
    measured: Record,
    values: Mapping[str, float],
    save: Callable[[Path, Record], None],
    comparisons: Sequence[Comparison] = (),
) -> Record:
    """Adds an evaluated step to best.json, and puts its adapter into best/ if it is the best so far. Returns the record
    in best.json, or an empty one if the figure that `best_by` names was not measured.

    `values`: `step` and the columns measured after that step; `base`: those of the base model; `measured`: the
    conditions of the measurement, and if a resumed run changes them, the choice begins again; `save` writes the adapter
    and its card into a new folder; `comparisons`: the step's adapter against other policies, by the same figure."""
    column, _ = DECIDING[best_by]
    if values.get(column) is None or base.get(column) is None:
        return {}
    record = read_best(folder)
    if not is_whole(record) or (record["by"], record["measured"]) != (best_by, measured):
        record = {"by": best_by, "figure": column, "base": dict(base), "measured": measured, "evaluated": []}
    steps = {row["step"]: row for row in record["evaluated"]} | {values["step"]: dict(values)}
    record["evaluated"] = [steps[step] for step in sorted(steps)]
    if "step" not in record or is_better(best_by, values[column], record["value"]):
        record |= {"step": values["step"], "value": values[column], "base_value": base[column]}
        record["better_than_base"] = is_better(best_by, values[column], base[column])
        record["comparisons"] = [asdict(comparison) for comparison in comparisons]
        record["in_words"] = describe_best(record)
        replace_best(folder, lambda new: save(new, record), record)
    else:
        write_sealed(folder / BEST / BEST_RECORD, record)
    return record


def replace_best(folder: Path, save: Callable[[Path], None], record: Record) -> None:
    """Replaces best/ by a new one. At every moment one of the two is whole, and `recover_best` finds it."""
    best, new, old = (folder / (BEST + suffix) for suffix in ("", ".tmp", ".old"))
    shutil.rmtree(new, ignore_errors=True)
    try:
        new.mkdir()
        save(new)
        sync_files(new)  # A power cut after the old folder is gone must not find empty files in the new one.
        record["adapter_sha256"] = file_sha256(new / ADAPTER)
        write_sealed(new / BEST_RECORD, record)  # Written last: a folder with it is whole.
    except Exception:  # The disk may be full: the unfinished folder would only take room.
        shutil.rmtree(new, ignore_errors=True)
        raise
    if best.exists():
        best.rename(old)
    new.rename(best)
    sync(folder)
    shutil.rmtree(old, ignore_errors=True)


def recover_best(folder: Path) -> None:
    """Repairs best/ after a kill inside `replace_best`: takes the new folder if it is whole, else the old one. A
    damaged best/ is renamed to `superseded-best`."""
    best, new, old = (folder / (BEST + suffix) for suffix in ("", ".tmp", ".old"))
    if not best.exists() and (whole := next((path for path in (new, old) if (path / BEST_RECORD).is_file()), None)):
        whole.rename(best)
    if adapter_fault(best):
        best.rename(unused_path(folder, f"superseded-{BEST}"))
    for path in (new, old):
        shutil.rmtree(path, ignore_errors=True)
