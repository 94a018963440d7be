# SPDX-License-Identifier: Apache-2.0
"""The picture of a run: its stages from left to right, and what lies on the GPU and on the host in each.

scripts/dev/make_docs.py writes it to docs/architecture.svg. Every size comes from the memory plan."""

from dataclasses import dataclass

from grpo.plan.engine_memory import ASLEEP_GIB, PADDED, SWIZZLED
from grpo.plan.hub import REAL_CONFIG, packed_gib
from grpo.plan.memory import Plan
from grpo.settings.table import Settings

# Part of the memory -> its name in the legend, and its class in STYLE.
PARTS = {
    "experts": ("experts", "a"),
    "attention": ("attention, embeddings", "b"),
    "cache": ("vLLM's key-value cache", "c"),
    "activations": ("activations, one layer's experts", "d"),
    "work": ("workspaces, graphs, loading", "e"),
    "adapter": ("", "f"),  # Too small to be seen: `draw` writes its size.
}
# Name, what happens, the files that it writes, and the left edge and the width of its column.
STAGES = (
    ("check", ("settings, rows, rewards,", "model, memory plan"), "", 20, 176),
    ("load", ("the learner,", "then vLLM's engine"), "settings.json", 216, 160),
    ("rollout", ("vLLM answers with", "the current adapter"), "completions.csv", 408, 166),
    ("learn", ("vLLM sleeps; forward,", "backward, optimizer"), "metrics.csv, checkpoint-N/", 594, 180),
    ("evaluate", ("held-out rows, plant;", "the best adapter"), "evaluation.json, best/", 806, 166),
    ("zip", ("all but the", "optimizer's states"), "report.html, the zip", 992, 148),
)
# What a value of EXPERTS means, in words.
KINDS = {
    "shared": "vLLM and the learner use one copy of the experts",
    "paged": "vLLM's experts and the learner's take turns on the GPU",
}
WIDTH, PIXELS_PER_GIB, BAR, GAP = 1160, 3.4, 96, 3  # GAP: between the bars of GPU and host.
# A browser that prefers dark pages shows the dark colours; the background is part of the picture, so text is readable.
STYLE = """
.bg{fill:#fff} text{fill:#24292f} .dim{fill:#656d76} .line{stroke:#8c959f} .card{fill:#f3f5f7} .in{fill:#fff}
.a{fill:#0b6e99} .b{fill:#4592b5} .c{fill:#c4701b} .d{fill:#4f8a3d} .e{fill:#7d8590} .f{fill:#b5179e}
@media (prefers-color-scheme:dark){
.bg{fill:#0d1117} text{fill:#e6edf3} .dim{fill:#9198a1} .line{stroke:#6e7681} .card{fill:#1c2128} .in{fill:#fff}
.a{fill:#1f6f96} .b{fill:#3f8fb3} .c{fill:#b8691f} .d{fill:#47853a} .e{fill:#6e7681} .f{fill:#c436ae} }
"""


@dataclass(frozen=True)
class Memory:
    """GiB by part on the GPU and on the host."""

    gpu: dict[str, float]
    host: dict[str, float]


def memory_by_stage(settings: Settings, plan: Plan) -> dict[str, Memory]:
    """What lies where in the stages that use the GPU. On the GPU they add up to the plan's three peaks."""
    engine, packed = plan.engine, packed_gib(REAL_CONFIG)
    assert engine, "the picture shows vLLM beside the learner"
    shared = settings.EXPERTS == "shared"
    vllm_experts = packed * (SWIZZLED if shared else PADDED)
    vllm_rest = engine.weights - vllm_experts
    own_experts = 0.0 if shared else packed  # The learner's; with `paged` they are on the host while vLLM is awake.
    awake = {
        "experts": vllm_experts,
        "attention": vllm_rest + plan.beside_rollout - plan.adapter,
        "adapter": plan.adapter,
        "cache": engine.cache,
        "work": engine.scratch,
    }
    loading = awake | {"cache": 0.0, "work": engine.loading}
    lent_experts = vllm_experts if engine.lent else 0.0
    learning = {
        "experts": own_experts + lent_experts,
        "attention": plan.weights - own_experts + engine.lent - lent_experts,
        "adapter": plan.adapter,
        "activations": plan.learning,
        "work": ASLEEP_GIB,
    }
    host_awake = {"experts": own_experts if plan.paged else 0.0, "attention": max(plan.paged - own_experts, 0.0)}
    host_asleep = {"experts": vllm_experts - lent_experts, "attention": engine.on_host - vllm_experts + lent_experts}
    stages = {
        "load": Memory(loading, host_awake),
        "rollout": Memory(awake, host_awake),
        "learn": Memory(learning, host_asleep),
        "evaluate": Memory(awake, host_awake),
    }
    for name, peak in (("load", plan.start_peak), ("rollout", plan.rollout_peak), ("learn", plan.learning_peak)):
        assert abs(sum(stages[name].gpu.values()) - peak) < 0.01, f"the parts of {name} are not the plan's {peak:.2f}"
    return stages


def text(x: float, y: float, content: str, style: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" {style}>{content}</text>'.replace(" >", ">")


def bar(x: float, base: float, parts: dict[str, float], down: bool = False) -> list[str]:
    """A stacked bar from `base` upwards, or downwards: its parts, with their GiB where these fit, and their sum."""
    shapes, edge = [], base
    for part, size in parts.items():
        height = size * PIXELS_PER_GIB
        top = edge if down else edge - height
        if height >= 0.5:
            kind = PARTS[part][1]
            shapes.append(f'<rect class="{kind}" x="{x:.0f}" y="{top:.1f}" width="{BAR}" height="{height:.1f}"/>')
        if height >= 15:
            shapes.append(text(x + BAR / 2, top + height / 2 + 4, f"{size:.1f}", 'class="in" font-size="12"', "middle"))
        edge = edge + height if down else edge - height
    total = sum(parts.values())
    if total >= 0.05:
        end = edge + 15 if down else edge - 6
        shapes.append(text(x + BAR / 2, end, f"{total:.0f} GiB", 'font-weight="bold"', "middle"))
    return shapes


def machine_panel(title: str, stages: dict[str, Memory], top: float) -> tuple[list[str], float]:
    """The bars of one machine below `top`, and the y below them."""
    up = max(sum(memory.gpu.values()) for memory in stages.values()) * PIXELS_PER_GIB
    down = max(sum(memory.host.values()) for memory in stages.values()) * PIXELS_PER_GIB
    base = top + 46 + up
    shapes = [text(20, top + 16, title, 'font-weight="bold" font-size="15"')]
    shapes.append(f'<line class="line" x1="20" x2="{WIDTH - 20}" y1="{base:.1f}" y2="{base:.1f}"/>')
    shapes.append(text(20, base - 8, "on the GPU", 'class="dim"'))
    shapes.append(text(20, base + 18, "weights on the host", 'class="dim"'))
    for name, _, _, left, width in STAGES:
        x = left + (width - BAR) / 2
        if memory := stages.get(name):
            shapes += bar(x, base - GAP, memory.gpu) + bar(x, base + GAP, memory.host, down=True)
        if name in stages and sum(stages[name].host.values()) < 0.05:
            shapes.append(text(x + BAR / 2, base + 18, "none", 'class="dim"', "middle"))
    return shapes, base + max(down, 14) + 30


def draw(machines: dict[str, tuple[Settings, Plan]]) -> str:
    """The picture as SVG; `machines` maps a card to its settings and plan."""
    shapes = []
    (_, _, _, first, _), (_, _, _, last, width) = STAGES[2], STAGES[3]
    loop = f'<rect class="line" fill="none" stroke-dasharray="5 4" rx="10" x="{first - 8}" y="8"'
    shapes.append(f'{loop} width="{last + width - first + 16}" height="122"/>')
    shapes.append(text((first + last + width) / 2, 26, "every step, TOTAL_STEPS times", 'class="dim"', "middle"))
    for number, (name, lines, files, left, width) in enumerate(STAGES):
        shapes.append(f'<rect class="card" x="{left}" y="34" width="{width}" height="88" rx="8"/>')
        shapes.append(text(left + width / 2, 54, name, 'font-weight="bold" font-size="15"', "middle"))
        shapes += [text(left + width / 2, 73 + 16 * n, line, "", "middle") for n, line in enumerate(lines)]
        shapes.append(text(left + width / 2, 112, files, 'class="dim" font-size="12"', "middle"))
        if number:
            edge = STAGES[number - 1][3] + STAGES[number - 1][4]
            arrow = f'<line class="line" x1="{edge + 1}" x2="{left - 2}" y1="78" y2="78" stroke-width="1.5"'
            shapes.append(f'{arrow} marker-end="url(#head)"/>')
    y = 144.0
    for card, (settings, plan) in machines.items():
        title = f"{card}, EXPERTS={settings.EXPERTS}: {KINDS[settings.EXPERTS or '']}"
        panel, y = machine_panel(title, memory_by_stage(settings, plan), y)
        shapes += panel
    job = Settings()
    completions = f"{job.PROMPTS_PER_STEP} x {job.NUM_GENERATIONS} completions"
    for number, line in enumerate(
        ("gpt-oss-20b, by the plan,", completions, f"of up to {job.MAX_COMPLETION_LEN:,} tokens")
    ):
        shapes.append(text(WIDTH - 20, 230 + 17 * number, line, 'class="dim"', "end"))
    adapter = max(plan.adapter for _, plan in machines.values())
    x = 20.0
    for label, kind in PARTS.values():
        label = label or f"LoRA and optimizer ({adapter:.2f} GiB)"
        shapes.append(f'<rect class="{kind}" x="{x:.0f}" y="{y + 4:.0f}" width="12" height="12" rx="2"/>')
        shapes.append(text(x + 17, y + 14, label, 'font-size="12"'))
        x += 34 + 6.2 * len(label)
    head = '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    head += '<path class="line" d="M0 0L8 4L0 8" fill="none" stroke-width="1.5"/></marker>'
    size = f'width="{WIDTH}" height="{y + 30:.0f}" viewBox="0 0 {WIDTH} {y + 30:.0f}"'
    font = 'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="13"'
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>\n<style>{STYLE}</style>\n<defs>{head}</defs>'
    background = '<rect class="bg" width="100%" height="100%"/>'
    return "\n".join([frame, background, *shapes, "</svg>"]) + "\n"
