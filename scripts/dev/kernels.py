# SPDX-License-Identifier: Apache-2.0
"""What a GPU did in steps of decoding, by kind of kernel, and the bytes that such a step must move."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from grpo.plan.hub import ModelConfig, expert_elements, has_mxfp4

# The kinds in the order in which a name is looked for, each with its contents and the words of its kernels' names.
# torch.compile's own kernels come first, because they are named after all operations around them.
KINDS = {
    "norms": (
        "norms, positions, residuals",
        r"^triton_(?:red|poi|per|for)_fused(?!.*(?:_ge_|softmax|argmax|exponential))|rms_norm|rotary",
    ),
    "experts": ("the experts' products", r"_matmul_ogs|marlin|moe_wna16|fused_moe_kernel|humming"),
    "routing": (
        "choice of experts, sums over them",
        r"_topk_forward|bitmatrix|_combined_routing|_expt_data|_reduce_grouped|topkgating|moe_",
    ),
    "attention": ("attention, writes to the cache", r"flash|prepare_varlen|reshape_and_cache|attention|merge_attn"),
    "sampling": (
        "probabilities, the draw, its log-prob",
        r"softmax|exponential|distribution|argmax|gumbel|_ranks_kernel|fused_ge|sort|gather|divfunctor|topk|multinomial",
    ),
    "dense": ("projections, router, output head", r"nvjet|gemm|gemv|cublas|cutlass|splitk"),
    "copies": ("copies and fills", r"memcpy|memset|copy|fill|catarray|indexselect|index_kernel"),
    "other": ("all others", r""),
}
GPU_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")  # of a trace of torch.profiler
LONGEST = 12  # kernels that are named
BF16, FLOAT32, MXFP4 = 2.0, 4.0, 4.25 / 8  # bytes of a number; MXFP4 has a byte more for 32 numbers


class Kernel(NamedTuple):
    """A kernel or a copy on the GPU, in microseconds."""

    name: str
    start: float
    length: float


def kind_of(name: str) -> str:
    """The kind of a kernel, by its name."""
    return next(kind for kind, (_, words) in KINDS.items() if re.search(words, name.lower()))


def read_kernels(trace: Mapping[str, Any]) -> list[Kernel]:
    """The GPU's work in a trace of torch.profiler, in the order of its start."""
    events = [event for event in trace["traceEvents"] if event.get("cat") in GPU_EVENTS]
    return sorted((Kernel(event["name"], event["ts"], event["dur"]) for event in events), key=lambda work: work.start)


def busy_time(kernels: Iterable[Kernel]) -> float:
    """Microseconds in which the GPU computes or copies, given its work in the order of its start."""
    busy, end = 0.0, float("-inf")
    for kernel in kernels:
        busy += max(0.0, kernel.start + kernel.length - max(end, kernel.start))
        end = max(end, kernel.start + kernel.length)
    return busy


def step_times(kernels: Sequence[Kernel], steps: float) -> dict[str, float]:
    """Milliseconds a step: `span` from the first kernel's start to the last one's end, of it `gaps` without any work,
    and each kind. Kinds and gaps exceed the span where a copy runs beside a kernel."""
    if not kernels:
        return {}
    times = dict.fromkeys(KINDS, 0.0)
    for kernel in kernels:
        times[kind_of(kernel.name)] += kernel.length
    span = max(kernel.start + kernel.length for kernel in kernels) - kernels[0].start
    times |= {"gaps": span - busy_time(kernels), "span": span}
    return {name: value / 1000 / steps for name, value in times.items()}


def longest_kernels(kernels: Iterable[Kernel], steps: float) -> list[tuple[str, float, float]]:
    """(name, milliseconds a step, calls a step) of the LONGEST kernels, the longest first."""
    lengths: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        lengths[kernel.name].append(kernel.length)
    rows = [(name, sum(values) / 1000 / steps, len(values) / steps) for name, values in lengths.items()]
    return sorted(rows, key=lambda row: -row[1])[:LONGEST]


def step_bytes(config: ModelConfig, sequences: int, group: int, prompt: int, written: int) -> dict[str, float]:
    """The bytes that a decoding step must at least move, by kind, when each of the `sequences` has `written` tokens
    behind a prompt that `group` of them share: weights and the cache are read once, the float32 logits written and read
    once. Of the experts those count that are chosen if all are equally likely."""
    hidden, layers, vocab = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    queries, heads = config["num_attention_heads"] * config["head_dim"], config["num_key_value_heads"]
    kinds = config.get("layer_types") or ["sliding_attention", "full_attention"] * (layers // 2)
    sliding = kinds.count("sliding_attention")
    experts, chosen = config["num_local_experts"], config["num_experts_per_tok"]
    share = 1 - (1 - chosen / experts) ** sequences
    token = heads * config["head_dim"] * 2 * BF16  # of the cache of a layer
    full = sequences / group * prompt + sequences * written
    window = min(config.get("sliding_window") or prompt + written, prompt + written)
    projections = hidden * (2 * queries + 2 * heads * config["head_dim"]) + hidden * experts
    return {
        "experts": share * layers * expert_elements(config) * (MXFP4 if has_mxfp4(config) else BF16),
        "attention": token * (full * (layers - sliding) + sequences * window * sliding),
        "sampling": 2 * sequences * vocab * FLOAT32,
        "dense": (layers * projections + hidden * vocab) * BF16,
    }
