# SPDX-License-Identifier: Apache-2.0
"""Training rows and held-out rows: decisions along trajectories through windows of the plant's days."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from grpo.common import ROOT, InputError
from grpo.tasks.tes import profiles as tes_profiles
from grpo.tasks.tes.plant import DECISION_DAYS, HOURS, PLANT, START_KWH, best_action, q_values, softmax, step
from grpo.tasks.tes.profiles import HELDOUT_START, TRAIN_START, Profile, Window, cut_windows
from grpo.tasks.tes.prompts import State, render_compact, render_full, state_at

EXPLORE = 0.25  # share of decisions on a trajectory that are random instead of optimal
SHORT_SHARE = 0.3  # short hours (`with_short_hours`) as a share of the rows of the committed training files
SEED = 1  # The files under data/ are made with this seed, those of gsm8k too.
TRAIN_WINDOWS, HELDOUT_WINDOWS = {"full": 4, "compact": 20}, {"full": 2, "compact": 5}
# `max_factor` of training days; those of compact prompts, for the tiny model, cover other seasons too.
TRAIN_FACTOR = {"full": 1.0, "compact": 2.0}
# Random streams: with one seed, no two streams give the same day.
TRAIN_STREAM, HELDOUT_STREAM, ROWS_STREAM, SHORT_STREAM = 0, 1, 2, 3
MOST_DRAWS = 200  # Short hours are drawn from each window of a profile at most so many times.
DATA_DIR = ROOT / "data"
CONTEXT_COLUMNS = {"full": ("prompt",), "compact": ("system", "user")}
CsvRow = dict[str, Any]  # cells by column
Decision = tuple[CsvRow, State]  # a row of the CSV, and the state that its prompt describes


def trajectory(
    window: Window, rng: np.random.Generator, prompt: str, start_kwh: float | None = START_KWH, explore: float = EXPLORE
) -> list[Decision]:
    """Follows one trajectory through a window; returns the row and the state of each of its 30 decisions.

    The trajectory takes the optimal action, or with probability `explore` a random one, so that later rows start from
    states an imperfect policy gets into. The values in a row are those of its own state and do not depend on the action
    taken. start_kwh None draws the start from 0 to the capacity. The same rng state gives the same trajectory for both
    prompts. Keys: timestep (hours since the first day's midnight), timestamp, the prompt's columns, optimal_action,
    q_action_k, reward_action_k (floats)."""
    energy = round(float(rng.uniform(0.0, PLANT.capacity_kwh)), 1) if start_kwh is None else start_kwh
    solution = window.solve(start_kwh=energy)
    decisions = []
    for t in range(DECISION_DAYS * len(HOURS)):
        day, i = divmod(t, len(HOURS))
        decisions.append(decision_at(window, t, energy, q_values(solution, t, energy), prompt))
        # Both numbers are drawn in every hour, so that those of later hours do not depend on `explore`.
        chance, random_action = rng.random(), int(rng.integers(len(PLANT.ratios)))
        action = random_action if chance < explore else decisions[-1][0]["optimal_action"]
        energy = float(step(energy, action, window.load_kw[day, i], window.co2[day, i]).energy_kwh)
    return decisions


def decision_at(window: Window, t: int, energy_kwh: float, q: np.ndarray, prompt: str) -> Decision:
    """The row (keys: see `trajectory`) and state of a window's decision `t`, given the values `q` of its K actions."""
    state = state_at(window, t, energy_kwh)
    texts = (render_full(state),) if prompt == "full" else render_compact(state)
    day, i = divmod(t, len(HOURS))
    row = {
        "timestep": 24 * day + HOURS[i],
        "timestamp": state.stamp.isoformat(),
        **dict(zip(CONTEXT_COLUMNS[prompt], texts, strict=True)),
        "optimal_action": best_action(q),
        **{f"q_action_{k}": float(value) for k, value in enumerate(q)},
        **{f"reward_action_{k}": float(value) for k, value in enumerate(softmax(q))},
    }
    return row, state


def short_hours(window: Window, rng: np.random.Generator, prompt: str) -> list[Decision]:
    """Decisions with less stored energy than load: one for each decision hour, each on a random one of the three days.

    The energies are random below the load, so hours without a load give none. On trajectories nearly all short hours
    are in the morning, and a policy trained on those empties the storage before the last load of the day."""
    decisions = []
    for i in range(len(HOURS)):
        day, share = int(rng.integers(DECISION_DAYS)), rng.random()
        load, t = window.load_kw[day, i], len(HOURS) * day + i
        energy = math.floor(10 * share * load) / 10
        if energy < load:
            rest = window.solve(t, start_kwh=energy)
            decisions.append(decision_at(window, t, energy, q_values(rest, 0, energy), prompt))
    return decisions


def with_short_hours(
    decisions: Sequence[Decision], windows: Iterable[tuple[Window, np.random.Generator]], prompt: str, share: float
) -> list[CsvRow]:
    """The rows of `decisions`, followed by `short_hours` of `windows` until short hours are `share` of all rows.

    A short hour's load exceeds the stored energy: it has to be served now, and not doing so costs a hundred times what
    serving costs. The optimum's neighbourhood holds few of them; a policy that saves CO2 with an emptier storage meets
    many (docs/evaluation.md). If `windows` end first, the share stays smaller."""
    rows, short = [row for row, _ in decisions], sum(state.short_kwh > 0 for _, state in decisions)
    short_rows = (row for window, rng in windows for row, _ in short_hours(window, rng, prompt))
    while short < share * len(rows) and (row := next(short_rows, None)):
        rows.append(row)
        short += 1
    return rows


def synthetic_windows(
    seed: int, stream: int, count: int | None, start: date
) -> Iterator[tuple[Window, np.random.Generator]]:
    """`count` windows of synthetic days, one on each Monday from `start`, each with its own random generator.

    With a `count` of None the windows never end and repeat the Mondays of the training days."""
    for i in itertools.count() if count is None else range(count):
        monday = start + timedelta(weeks=i if count is not None else i % max(TRAIN_WINDOWS.values()))
        profile = tes_profiles.synthetic_profile((seed, stream, i), DECISION_DAYS + 1, monday)
        yield cut_windows(profile)[0], np.random.default_rng((seed, stream, i, 1))


def rows_csv(rows: list[CsvRow]) -> str:
    """Writes rows as CSV text; eight decimals, so that all machines write the same bytes."""
    columns = list(rows[0])
    cells = [[f"{row[c]:.8f}" if isinstance(row[c], float) else row[c] for c in columns] for row in rows]
    return tes_profiles.to_csv(columns, cells)


def synthetic_files(
    seed: int,
    prompts: Sequence[str],
    train: Mapping[str, int] = TRAIN_WINDOWS,
    heldout: Mapping[str, int] = HELDOUT_WINDOWS,
    factor: Mapping[str, float] = TRAIN_FACTOR,
) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of the files under data/, or of files with other numbers of windows by form of prompt
    (`train`, `heldout`) and other factors of the training loads (`factor`). Full prompts describe the first of the
    windows that compact prompts describe."""
    for prompt in prompts:
        drawn = synthetic_windows(seed, TRAIN_STREAM, train[prompt], TRAIN_START)
        trajectories = (trajectory(vary_loads(window, rng, factor[prompt]), rng, prompt, None) for window, rng in drawn)
        drawn = synthetic_windows(seed, SHORT_STREAM, None, TRAIN_START)
        for_short = ((vary_loads(window, rng, factor[prompt]), rng) for window, rng in drawn)
        rows = with_short_hours(list(itertools.chain.from_iterable(trajectories)), for_short, prompt, SHORT_SHARE)
        yield file_name("train", prompt), rows_csv(rows)
        drawn = synthetic_windows(seed, HELDOUT_STREAM, heldout[prompt], HELDOUT_START)
        decisions = itertools.chain.from_iterable(trajectory(window, rng, prompt) for window, rng in drawn)
        yield file_name("heldout", prompt), rows_csv([row for row, _ in decisions])
    dates = [HELDOUT_START + timedelta(weeks=i) for i in range(max(heldout.values()))]
    days = DECISION_DAYS + 1
    blocks = [tes_profiles.synthetic_profile((seed, HELDOUT_STREAM, i), days, day) for i, day in enumerate(dates)]
    yield "profile_heldout.csv", tes_profiles.profile_csv(blocks)


def read_profiles(paths: Iterable[Path]) -> dict[Path, Profile]:
    """Users' profiles by path; the stem of a path names the files that are made of its profile, so no two may be equal.
    Raises InputError with the problems of all profiles."""
    profiles: dict[Path, Profile] = {}
    problems: list[str] = []
    for path in paths:
        if path.stem in {other.stem for other in profiles}:
            problems.append(f"{path}: another profile has this name too; rename one of them")
        try:
            profiles[path] = tes_profiles.read_profile(path)
        except InputError as error:
            problems += error.args
    if problems:
        raise InputError(*problems)
    return profiles


def profile_files(
    profiles: Mapping[Path, Profile],
    prompts: Sequence[str],
    seed: int,
    explore: float = EXPLORE,
    trajectories: int = 1,
    short_share: float = 0.0,
    vary: float = 1.0,
) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of the files made from the users' profiles, one for each profile and form of prompt. The
    first trajectory through a window starts at START_KWH with the profile's own loads. Further trajectories start at
    random energies; their loads, and those of short hours, get factors from 1 / vary to vary."""
    for (path, profile), prompt in itertools.product(profiles.items(), prompts):
        numbered = list(enumerate(cut_windows(profile)))
        decisions: list[Decision] = []
        for (w, window), n in itertools.product(numbered, range(trajectories)):
            rng = np.random.default_rng((seed, w, n))
            if n == 0:
                decisions += trajectory(window, rng, prompt, START_KWH, explore)
            else:
                decisions += trajectory(vary_loads(window, rng, vary), rng, prompt, None, explore)
        draws = itertools.product(range(trajectories, trajectories + MOST_DRAWS), numbered)
        drawn = ((window, np.random.default_rng((seed, w, n))) for n, (w, window) in draws)
        for_short = ((vary_loads(window, rng, vary), rng) for window, rng in drawn)
        yield file_name(path.stem, prompt), rows_csv(with_short_hours(decisions, for_short, prompt, short_share))


def vary_loads(window: Window, rng: np.random.Generator, max_factor: float) -> Window:
    """The window with the loads of each day times a factor of its own, log-uniform from 1 / max_factor to max_factor.

    A few real days show one season's loads, and a policy that has seen no other leaves the next season's unserved
    (domain randomization, Tobin et al. 2017, 1703.06907). A varied window's values are exact too: it is simulated."""
    if max_factor == 1:
        return window
    factors = max_factor ** rng.uniform(-1.0, 1.0, size=(len(window.dates), 1))
    return dataclasses.replace(window, load_kw=np.round(window.load_kw * factors, 1))


def file_name(stem: str, prompt: str) -> str:
    """Name of a data file: the split or the profile's stem, and a suffix for the compact prompt."""
    return f"tes_{stem}.csv" if prompt == "full" else f"tes_{stem}_compact.csv"
