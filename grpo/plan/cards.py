# SPDX-License-Identifier: Apache-2.0
"""Cards that one can rent or own: what the plan of a run and its time need to know of them, for `--check --card` and
for the README's table."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from grpo.common import InputError
from grpo.plan.engine_memory import EnginePlan
from grpo.plan.hub import REAL_CONFIG, ModelConfig
from grpo.plan.machine import Machine
from grpo.settings.table import Settings


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and those of them in which it learns; the others are the rollout's."""

    step: float
    learning: float

    @property
    def rollout(self) -> float:
        return self.step - self.learning


Times = Mapping[int, StepTime]  # By the length of the completions, in tokens.


@dataclass(frozen=True)
class Card:
    """A row of the README's table, and the cards in it."""

    label: str
    capability: float  # CUDA compute capability.
    free: float  # GiB that a run finds free on the smallest of them: ECC takes 1.5 of an A10's 24, 3 of an L40S's 48.
    # GB/s of memory and dense BF16 TFLOPS of NVIDIA's data sheets.
    speeds: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # By `--card`'s name.
    measured: Times = field(default_factory=dict)  # With 12 x 8 completions and prompts of PROMPT_TOKENS.
    arch: str = "x86_64"
    longest: int = 0  # MAX_COMPLETION_LEN of the longest step that ran in as much memory (docs/results/long-*.json).


PROMPT_TOKENS, COMPLETIONS = 940, 96  # Of the measured steps.
SHORT, LONG = 512, 4000  # Lengths of completions that were measured.
# The seconds are step_s and learn_s of docs/results/experts-*.json; tests/plan/test_cards.py compares them.
H200 = {SHORT: StepTime(8.131, 3.426), LONG: StepTime(63.03, 24.32)}
SMALL = {SHORT: StepTime(9.772, 5.122), LONG: StepTime(96.35, 41.22)}  # An H200 with 22 GiB free.
# The same with kernels of cards before Hopper. How long a rollout waits for the cache is for `rollout_seconds` to say.
OLDER_KERNELS = {SHORT: StepTime(11.296, 5.243), LONG: StepTime(H200[LONG].rollout + 41.22, 41.22)}
H200_SPEED = (4800.0, 989.0)
CARDS = (
    Card(
        "RTX 4090, A10 (24 GB)",
        8.9,
        22.0,
        {"4090": (1008, 165), "A10": (600, 125), "A10G": (600, 70), "3090": (936, 71), "L4": (300, 121)},
    ),
    Card(
        "L40S, A6000 (48 GB)",
        8.9,
        44.4,
        {"L40S": (864, 362), "A6000": (768, 155), "L40": (864, 181), "A40": (696, 150)},
    ),
    Card("A100 of 80 GB", 8.0, 78.6, {"A100": (2039, 312)}),
    Card("Hopper with 22 GiB free", 9.0, 22.0, measured=SMALL, longest=32_768),
    Card("H100 of 80 GB", 9.0, 78.6, {"H100": (3350, 989)}, {SHORT: StepTime(8.897, 3.834)}, longest=130_048),
    Card("GH200 480GB (97,871 MiB)", 9.0, 94.6, {"GH200": (4000, 989)}, arch="aarch64"),
    Card("H200", 9.0, 139.8, {"H200": H200_SPEED}, H200),
)
NAMES = {name: card for card in CARDS for name in card.speeds}
LARGE = 70.0  # GiB: cards with as much free memory learn from large micro-batches, as the H200 did.
RAM = 64.0  # GiB of host memory that a rented machine has at least.


def find_card(name: str) -> str:
    """The name of a card in NAMES that `name` means: `h100`, `NVIDIA H100 80GB HBM3`, `RTX4090`. Empty if there is
    none."""
    words = [word.removeprefix("RTX") for word in name.upper().replace("-", " ").replace("_", " ").split()]
    return next((known for known in NAMES if known in words), "")


def rented_machine(text: str) -> Machine:
    """A machine with the card that `text` names, which is not here. Raises InputError for an unknown one, and for one
    with less memory, such as an A100 of 40 GB, or a part of a card (MIG 1g.10gb)."""
    if not (name := find_card(text)):
        fix = "For another of compute capability 8.0 or more name the nearest, with GPU_MEM_LIMIT if it has less memory"
        raise InputError(f"--card {text}: unknown. Name one of {', '.join(NAMES)}. {fix}")
    card = NAMES[name]
    sizes = re.findall(r"\b([0-9]{1,4}) ?GI?B?\b(?!\.)|[A-Z0-9] ([0-9]{2})\b", re.sub("[-_]", " ", text.upper()))
    size = min((int(number) for match in sizes for number in match if number), default=math.inf)
    if size < card.free:
        fix = f"To plan for less, set GPU_MEM_LIMIT={max(1, size - 1)} with --card {name}"
        raise InputError(f"--card {text}: {name} stands for a card with {card.free:g} GiB free. {fix}")
    return Machine(name, 1, card.free, card.free, RAM, 16, card.arch, card.capability, is_planned=True)


def step_times(name: str) -> tuple[Times, str]:
    """The times of 12 x 8 completions of SHORT and of LONG tokens on the card `name`, and where they come from."""
    card, form = NAMES[name], "on its SXM form"  # PCIe and NVL are slower, and find_card knows them by the same name.
    if card.measured.keys() == H200.keys():
        return card.measured, f"between steps that were measured {form}"
    if first := card.measured.get(SHORT):
        rollout, learning = first.rollout / H200[SHORT].rollout, first.learning / H200[SHORT].learning
        long = StepTime(H200[LONG].rollout * rollout + H200[LONG].learning * learning, H200[LONG].learning * learning)
        return {SHORT: first, LONG: long}, f"estimated from {SHORT} tokens, which were measured {form}"
    bandwidth, tflops = (ours / own for ours, own in zip(H200_SPEED, card.speeds[name], strict=True))
    times = {}
    for length, time in (H200 if card.free > LARGE else OLDER_KERNELS).items():
        learning = time.learning * tflops
        times[length] = StepTime(time.rollout * bandwidth + learning, learning)
    return times, "ESTIMATED from an H200's by bandwidth and TFLOPS: nobody has measured this card"


def interpolate(short: float, long: float, length: int, at_zero: float) -> float:
    """The seconds for completions of `length` tokens from those of SHORT and LONG; without any they are `at_zero`."""
    if length < SHORT:
        return at_zero + (short - at_zero) * length / SHORT
    return short + (long - short) * (length - SHORT) / (LONG - SHORT)


def rollout_seconds(times: Times, completions: int, length: int, at_once: float = math.inf) -> float:
    """Seconds to generate so many completions of `length` tokens, of which `at_once` run and the others wait. Four
    times as many took 2.4 times as long, and half as many 0.82 times (docs/results/many-h100.json): each token reads
    all weights, for however few. Those of long ones read their contexts too (docs/results/long-78-h200.json)."""
    running = min(completions, at_once)
    share = running / COMPLETIONS
    seconds = interpolate(times[SHORT].rollout, times[LONG].rollout, length, 0.0)
    seconds *= share ** (0.62 if share > 1 else 0.27)
    seconds += times[LONG].rollout / LONG * share * max(0, length - LONG) ** 2 / 33_000
    return seconds * completions / max(running, 1)


def running_at_once(engine: EnginePlan | None, settings: Settings, length: int) -> float:
    """How many completions of `length` tokens vLLM's cache holds on average while they grow: half as many again as of
    finished ones (docs/results/experts-shared-22-4000-h200.json)."""
    if engine is None:
        return math.inf
    held = 1.5 * engine.cache / engine.cache_wanted * settings.MAX_COMPLETION_LEN / length
    return engine.max_num_seqs * min(1.0, held)


def step_seconds(times: Times, settings: Settings, length: int, engine: EnginePlan | None = None) -> float:
    """Seconds of a step with these settings, if all completions have `length` tokens. A prompt is learned from once for
    eight completions, and attention to long ones takes its time (docs/results/long-46-h200.json)."""
    prompts = PROMPT_TOKENS / (PROMPT_TOKENS + 8 * SHORT)
    learning = interpolate(times[SHORT].learning, times[LONG].learning, length, times[SHORT].learning * prompts)
    learning *= 1 + max(0, length - LONG) / 30_000
    at_once = running_at_once(engine, settings, length)
    rollout = rollout_seconds(times, settings.completions_per_rollout, length, at_once) / settings.steps_per_rollout
    return rollout + learning * settings.completions_per_step / COMPLETIONS


def knows_times(settings: Settings, config: ModelConfig | None) -> bool:
    """Whether the times hold for a run: they are those of gpt-oss-20b's shapes and of sampled completions by vLLM with
    CUDA graphs."""
    shape = ("num_hidden_layers", "hidden_size", "num_local_experts")
    is_20b = config is not None and all(config.get(key) == REAL_CONFIG[key] for key in shape)
    return is_20b and bool(settings.USE_VLLM) and not (settings.DIRECT_ANSWERS or settings.VLLM_EAGER)


def evaluation_seconds(
    times: Times, settings: Settings, rows: int, length: int, engine: EnginePlan | None = None
) -> float:
    """Seconds of all evaluations of held-out `rows`, if all completions have `length` tokens: before training, of
    INIT_ADAPTER, after it, and every EVAL_STEPS steps. All but the last kind also have a greedy answer a row."""
    at_once = running_at_once(engine, settings, length)
    sampled, greedy = (rollout_seconds(times, rows * n, length, at_once) for n in (settings.EVAL_SAMPLES, 1))
    during = (settings.TOTAL_STEPS - 1) // settings.EVAL_STEPS if settings.EVAL_STEPS else 0
    whole = 2 + bool(settings.INIT_ADAPTER)
    return sampled * (during + whole) + greedy * whole
