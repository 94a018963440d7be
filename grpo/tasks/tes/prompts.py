# SPDX-License-Identifier: Apache-2.0
"""The plant's state before a decision, and the prompts that describe it."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, time

import numpy as np

from grpo.harmony import ASSISTANT
from grpo.tasks.tes.plant import HOURS, PLANT, low_co2
from grpo.tasks.tes.profiles import Window


@dataclass(frozen=True)
class State:
    """The plant before a decision, as a prompt describes it; arrays (10,) cover the decision hours of a day."""

    stamp: datetime  # start of the hour that is decided on
    energy_kwh: float
    load_kw: np.ndarray  # today
    co2: np.ndarray  # today [kg/kWh]
    next_load_kw: np.ndarray  # the next day
    next_co2: np.ndarray  # the next day [kg/kWh]

    @property
    def short_kwh(self) -> float:
        """Load of the hour that the stored energy cannot serve, and that output 0 would leave unserved."""
        return max(0.0, float(self.load_kw[HOURS.index(self.stamp.hour)]) - self.energy_kwh)


def state_at(window: Window, t: int, energy_kwh: float) -> State:
    """The state that the prompt of decision t of a window describes, in the CSVs as in the closed loop."""
    day, i = divmod(t, len(HOURS))
    stamp = datetime.combine(window.dates[day], time(HOURS[i]))
    today, after = (window.load_kw[day], window.co2[day]), (window.load_kw[day + 1], window.co2[day + 1])
    return State(stamp, float(energy_kwh), *today, *after)


# The text below is an interface: it is what the users' files say, word for word.
FULL_SYSTEM = """\
You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06
Current date: 2025-11-06

Reasoning: medium

# Valid channels: analysis, commentary, final. Channel must be included for every message."""
FULL_DEVELOPER = """\
# Instructions

You are an optimisation agent that supervises a thermal energy storage (TES) plant. Your job is to minimise cumulative \
CO₂ emissions over the full simulation horizon by planning TES charge and discharge decisions.
Developer instructions: respond using ASCII characters only. Return a single line formatted exactly as \
`[action_index]`, where action_index is an integer in {0, 1, 2, 3}. Do not include additional text, explanations, \
markdown, or keys.

"""
FULL_USER = """\
Objective:
- Minimise total CO₂ emissions = electricity consumption × time-varying CO₂ intensity over the horizon.

Current context:
- Current time [h]: {stamp}
- Current TES energy [kWh]: {energy:.0f}

Forecast data:
Forecast features (raw values aligned with the RL look-ahead):

- Remaining business hours today (08:00-17:00, close at 18:00):
{hours}

- Next-day planning metrics (for terminal planning):
  - load_mean={load_mean:.1f} kW (average cooling demand for next day)
  - co2_low5_avg={co2_low:.3f} kg-CO2/kWh (average of lowest 5 hours of CO2 factor for next day)
  - co2_min={co2_min:.3f} kg-CO2/kWh (minimum CO2 factor for next day)

System parameters:
ASHP rated capacity [kW]: {plant.rated_kw:.1f}
ASHP base COP [-]: {plant.cop:.1f}
TES capacity [kWh]: {plant.capacity_kwh:.1f}

Action space for the next hour:
0 → ASHP output ratio = 0.00 (ASHP off; rely on TES if demand exists)
1 → ASHP output ratio ≈ 0.33 (low output; TES covers most of the remaining demand)
2 → ASHP output ratio ≈ 0.67 (medium output; TES supplements when load exceeds this level)
3 → ASHP output ratio = 1.00 (full output; any surplus charges TES if capacity remains)

Operational notes:
- TES discharges automatically when load exceeds the scheduled ASHP output and energy is available.
- TES charges automatically when ASHP output exceeds the load and free capacity exists.
- Always maintain TES capacity between minimum and maximum bounds (0 < capacity < {plant.capacity_kwh:.0f}); \
violating these constraints incurs a large penalty.

Decision requirements:
- Optimise with a full-horizon perspective rather than a greedy step.
- Keep TES utilisation efficient; avoid unnecessary saturation or depletion.
- Prioritise emission reductions even if it requires near-term energy use.
- Consider pre-charging during low-carbon periods and discharging during high-carbon periods while respecting TES \
energy limits.
- Consider next-day information when making decisions.

Return format:
- Output a single token formatted as `[action_index]` (e.g., `[0]`, `[1]`, `[2]`, `[3]`)."""
COMPACT_SYSTEM = "Answer with one action: [0] [1] [2] [3]."


def render_full(state: State) -> str:
    """Renders a state as a whole Harmony conversation that ends where the assistant starts to write."""
    lines = [f"  - {hour:02d}:00: past hour -> omitted (state uses zero)" for hour in HOURS if hour < state.stamp.hour]
    for hour, load, co2 in list(zip(HOURS, state.load_kw, state.co2, strict=True))[len(lines) :]:
        now = "  ←Now!!!" if hour == state.stamp.hour else ""
        lines.append(f"  - {hour:02d}:00: load={load:.1f} kW, co2={co2:.3f} kg-CO2/kWh{now}")
    user = FULL_USER.format(
        stamp=state.stamp,
        energy=state.energy_kwh,
        hours="\n".join(lines),
        load_mean=np.mean(state.next_load_kw),
        co2_low=low_co2(state.next_co2),
        co2_min=np.min(state.next_co2),
        plant=PLANT,
    )
    messages = (("system", FULL_SYSTEM), ("developer", FULL_DEVELOPER), ("user", user))
    return "".join(f"<|start|>{role}<|message|>{text}<|end|>" for role, text in messages) + ASSISTANT


def render_compact(state: State) -> tuple[str, str]:
    """Renders a state as (system, user): one short line of words and integers from 0 to 200, for a tiny model.

    hour   of the day                                 short  kWh that the load exceeds the stored energy by
    store  stored energy, percent of the capacity     room   kWh of output that load and free capacity can take
    load   now, kW                                    need   later load of today beyond the stored energy, 10 kWh
    co2    intensity now, 0.01 kg/kWh                 rank   later hours of today with a lower intensity than now
    next   the next day's five lowest, mean, ditto    ahead  intensities of the later hours of today, 0.01 kg/kWh
    gain   50 + next - co2                            loads  loads of the later hours of today, kW"""
    now = state.stamp.hour - HOURS[0]
    load, later_load, later_co2 = state.load_kw[now], state.load_kw[now + 1 :], state.co2[now + 1 :]
    store, capacity, rated = state.energy_kwh, PLANT.capacity_kwh, PLANT.rated_kw
    next_co2, co2 = low_co2(state.next_co2), state.co2[now]
    need = later_load.sum() - max(store - load, 0.0)
    words = {"hour": state.stamp.hour, "store": 100 * store / capacity, "load": load, "co2": 100 * co2}
    words |= {"next": 100 * next_co2, "gain": 50 + 100 * (next_co2 - co2)}
    words |= {"short": min(rated, load - store), "room": min(rated, load + capacity - store)}
    words |= {"need": need / 10, "rank": (later_co2 < co2).sum(), "ahead": 100 * later_co2, "loads": later_load}
    # Each integer from 0 to 200 is one token in the tiny model's vocabulary.
    numbers = {word: np.atleast_1d(value).round().clip(0, 200).astype(int) for word, value in words.items()}
    return COMPACT_SYSTEM, " ".join(" ".join([word, *map(str, values)]) for word, values in numbers.items())


def prompt_kind(conversations: Sequence[Sequence[tuple[str, str]]]) -> str | None:
    """Which renderer of this module wrote these prompts: `full`, `compact`, or None if neither or both did.

    conversations: (role, text) pairs as in `Row.messages`; a rendered prompt is the single pair ("rendered", text).
    What full prompts say of task, plant and actions must agree word for word: another plant is not simulated here."""
    day = np.zeros(len(HOURS))
    sample = render_full(State(datetime(2025, 1, 1, HOURS[0]), 0.0, day, day, day, day))
    head, tail = sample.partition("- Current time [h]:")[0], sample[sample.index("System parameters:") :]

    def kind(conversation: Sequence[tuple[str, str]]) -> str | None:
        roles, texts = zip(*conversation, strict=True)
        if roles == ("rendered",) and texts[0].startswith(head) and texts[0].endswith(tail):
            return "full"
        words = texts[-1].split()
        compact = roles == ("system", "user") and texts[0] == COMPACT_SYSTEM
        return "compact" if compact and words[::2][:4] == ["hour", "store", "load", "co2"] else None

    kinds = {kind(conversation) for conversation in conversations}
    return kinds.pop() if len(kinds) == 1 else None


def renderer(kind: str, render: Callable[[Sequence[tuple[str, str]]], str]) -> Callable[[State], str]:
    """A function that renders a state. `render` applies the model's chat template, which full prompts do not need."""
    if kind == "full":
        return render_full
    cached = functools.cache(render)  # rendering takes longer than a token of the tiny model
    return lambda state: cached(tuple(zip(("system", "user"), render_compact(state), strict=True)))
