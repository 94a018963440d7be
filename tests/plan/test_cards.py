# SPDX-License-Identifier: Apache-2.0
"""The table of cards: its names, and the times that a run takes on them."""

import dataclasses
import json

import pytest
from helpers import ROOT
from make_docs import plan_for_card

from grpo.common import InputError
from grpo.plan import cards
from grpo.plan.cards import CARDS, H200, LONG, NAMES, OLDER_KERNELS, SHORT, SMALL, StepTime, step_seconds, step_times
from grpo.settings.table import Settings

RUN = Settings(USE_VLLM=True, MAX_COMPLETION_LEN=SHORT)
RECORDED = [  # the time in the table, and the file that it is from
    (H200[SHORT], "experts-shared-h200"),
    (H200[LONG], "experts-shared-4000-h200"),
    (SMALL[SHORT], "experts-shared-22-h200"),
    (SMALL[LONG], "experts-shared-22-4000-h200"),
    (OLDER_KERNELS[SHORT], "experts-paged-22-older-cards-h200"),
    (NAMES["H100"].measured[SHORT], "experts-shared-h100"),
]


@pytest.mark.parametrize(("time", "name"), RECORDED)
def test_times_are_those_that_were_measured(time, name):
    record = json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    values = {figure["name"]: figure["value"] for figure in record["figures"]}
    assert time == StepTime(pytest.approx(values["step_s"], rel=1e-3), pytest.approx(values["learn_s"], rel=1e-3))


@pytest.mark.parametrize(("card", "name"), [(CARDS[3], "long-22-h200"), (NAMES["H100"], "long-78-h200")])
def test_the_longest_completions_are_those_that_ran(card, name):
    command = json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text(encoding="utf-8"))["command"]
    assert f"--free-gib {card.free:g} --set MAX_COMPLETION_LEN={card.longest} " in command


def test_a_card_is_found_by_the_names_that_people_and_drivers_give_it():
    names = {"h100": "H100", "NVIDIA H100 80GB HBM3": "H100", "NVIDIA A100-SXM4-80GB": "A100", "RTX_4090": "4090"}
    assert {text: cards.find_card(text) for text in names} == names
    assert cards.find_card("H1000") == "" and cards.find_card("") == ""
    machine = cards.rented_machine("nvidia h200")
    assert machine.is_planned and (machine.gpu, machine.gpu_free, machine.capability) == ("H200", 139.8, 9.0)
    with pytest.raises(InputError, match="--card T4: unknown. Name one of 4090, .*H100, GH200, H200. For another of"):
        cards.rented_machine("T4")
    for name in (*names, "GH200 480GB", "H200 141GB", "RTX 4090 24G", "an L4 GPU", "A10 GPU", "RTX4090", "A100-80"):
        assert cards.rented_machine(name).gpu
    for name, size in (("A100-40", 39), ("H100 MIG 3g.40gb", 39), ("H100 80GB HBM3 MIG 1g.10gb", 9)):
        with pytest.raises(InputError, match=f"free. To plan for less, set GPU_MEM_LIMIT={size} with --card [AH]100"):
            cards.rented_machine(name)


@pytest.mark.parametrize(("name", "mib"), [("A10", 23_028), ("L4", 23_034), ("L40S", 46_068), ("A40", 46_068)])
def test_a_card_is_not_planned_with_more_memory_than_it_has(name, mib):
    """By nvidia-smi; 0.4 GiB of it are the driver's."""
    assert NAMES[name].free <= mib / 1024 - 0.4
    with pytest.raises(InputError, match="A100 stands for a card with 78.6 GiB free. .*GPU_MEM_LIMIT=39 with --card"):
        cards.rented_machine("NVIDIA A100-SXM4-40GB")


def test_a_measured_step_is_told_as_it_was_and_others_between_the_measured_ones():
    times, source = step_times("H200")
    assert source == "between steps that were measured on its SXM form"
    assert step_seconds(times, RUN, SHORT) == pytest.approx(8.131)
    assert step_seconds(times, RUN, LONG) == pytest.approx(63.03)
    assert 30 < step_seconds(times, RUN, 2200) < 40
    shared = dataclasses.replace(RUN, STEPS_PER_GENERATION=4)
    assert step_seconds(times, shared, SHORT) == pytest.approx(5.63, rel=0.15), "steps-per-generation-h200.json"
    wide = dataclasses.replace(RUN, NUM_GENERATIONS=32)
    assert step_seconds(times, wide, SHORT) == pytest.approx(23.5, rel=0.1), "experts-shared-384-h200.json"


def test_few_long_or_short_completions_take_their_time():
    """As they were measured; each of few completions takes a pass over the weights for every token."""
    times, four = step_times("H200")[0], dataclasses.replace(RUN, PROMPTS_PER_STEP=1, NUM_GENERATIONS=4)
    assert step_seconds(times, four, 28_563) == pytest.approx(157.6, rel=0.2), "long-22-h200.json"
    assert step_seconds(times, four, 65_536) == pytest.approx(363, rel=0.05), "long-46-h200.json"
    assert step_seconds(times, four, 130_048) == pytest.approx(873, rel=0.05), "long-78-h200.json"
    halves = [cards.rollout_seconds(times, number, SHORT) for number in (48, 96)]
    assert halves[0] / halves[1] == pytest.approx(3.99 / 4.87, rel=0.05), "many-h100.json"
    shortest, short = (step_seconds(times, RUN, length) for length in (1, SHORT // 2))
    assert 0.5 < shortest < 1 and short == pytest.approx((shortest + 8.131) / 2, rel=0.01), "prompts are learned too"


def test_completions_that_the_cache_has_no_room_for_wait():
    """In steps and in evaluations: as measured with 22 GiB free. Of 32,768 tokens eight run at a time."""
    times, (settings, plan) = step_times("H200")[0], plan_for_card(CARDS[3], LONG)
    at_once = cards.running_at_once(plan.engine, settings, 3938)
    assert cards.rollout_seconds(times, 96, 3938, at_once) == pytest.approx(54.6, rel=0.05), "experts-shared-22-4000"
    assert cards.running_at_once(plan.engine, settings, LONG // 2) == 96, "shorter ones have room"
    settings, plan = plan_for_card(CARDS[3], 32_768)
    length = settings.MAX_COMPLETION_LEN
    step, free = (step_seconds(times, settings, length, engine) for engine in (plan.engine, None))
    assert cards.running_at_once(plan.engine, settings, length) == pytest.approx(8, abs=0.5) and step > 2 * free
    evaluations = [cards.evaluation_seconds(times, settings, 60, length, engine) for engine in (plan.engine, None)]
    assert evaluations[0] > 3 * evaluations[1]
    assert cards.evaluation_seconds(times, settings, 0, length, plan.engine) == 0


def test_cards_that_nobody_has_measured_are_marked_and_slower():
    fastest = [step_seconds(step_times(name)[0], RUN, LONG) for name in ("H200", "H100", "A100", "L40S", "4090", "L4")]
    assert fastest == sorted(fastest)
    assert "estimated from 512 tokens, which were measured on its SXM form" in step_times("H100")[1]
    for name in set(NAMES) - {"H100", "H200"}:
        assert "nobody has measured this card" in step_times(name)[1] or NAMES[name].measured
