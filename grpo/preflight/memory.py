# SPDX-License-Identifier: Apache-2.0
"""How much memory a run takes, and the batch sizes that follow from it."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from grpo.preflight.hub import count_parameters, has_mxfp4
from grpo.preflight.machine import GIB, Machine
from grpo.run.folder import MAY_CHANGE
from grpo.settings import Settings, show


@dataclass(frozen=True)
class EnginePlan:
    """What vLLM gets beside the trainer; sizes in GiB."""

    weights: float
    scratch: float
    cache: float
    cache_reason: str
    cache_least: float
    asleep: float
    max_model_len: int
    max_num_seqs: int
    capture_sizes: tuple[int, ...]

    @property
    def awake(self) -> float:
        return self.weights + self.scratch + self.cache


@dataclass(frozen=True)
class Plan:
    """What a run of these settings needs, in GiB, and how it is cut into passes."""

    weights: float
    adapter: float
    generation: float
    learning: float
    micro_batch: int
    micro_batch_reason: str
    generation_batch: int
    generation_batch_reason: str
    engine: EnginePlan | None = None
    prompt_len: int = 0  # of the longest prompt, in tokens
    # (largest value that fits the card or 0, what stops the next one), with all else as set; None on a CPU.
    largest_length: tuple[int, str] | None = None
    largest_micro_batch: tuple[int, str] | None = None

    @property
    def rollout_peak(self) -> float:
        return self.weights + self.adapter + (self.engine.awake if self.engine else self.generation)

    @property
    def learning_peak(self) -> float:
        return self.weights + self.adapter + self.learning + (self.engine.asleep if self.engine else 0.0)

    @property
    def peak(self) -> float:
        return max(self.rollout_peak, self.learning_peak)

    @property
    def needed(self) -> float:
        """Free memory to ask for: a tenth of it stays free. vLLM's own plan leaves its margin."""
        return max(self.rollout_peak / (1.0 if self.engine else GPU_SHARE), self.learning_peak / GPU_SHARE)


# Ten percent stay free for fragmentation and CUDA's own context; a CPU plans with half of what is free.
GPU_SHARE, CPU_SHARE = 0.9, 0.5
PASS_TOKENS = 50_000  # tokens of a forward and backward pass beyond which more tokens gain nothing
KV_BLOCK = 16  # tokens per block of vLLM's key-value cache
BATCHED_TOKENS = 8192  # tokens of one prefill pass of vLLM
ASLEEP_GIB = 2.1  # left on the GPU by a sleeping engine and the CUDA context: graphs, workspaces, kernels (measured)


def capture_sizes(most: int) -> tuple[int, ...]:
    """Batch sizes that get a CUDA graph: decode batches shrink from `most` to 1 as completions end, and a batch runs in
    the next larger graph, whose surplus rows load experts too. So all sizes up to 16, where many experts are idle otherwise,
    and steps of a quarter to an eighth beyond, where few are.

    >>> capture_sizes(20)
    (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 20)
    """
    sizes, size = {most}, 1
    while size < most:
        sizes.add(size)
        size += 1 if size < 16 else 2 ** (int(math.log2(size)) - 2)
    return tuple(sorted(sizes))


def plan_engine(
    settings: Settings, config: Mapping[str, Any], machine: Machine, prompt_len: int, trainer: float, checkpoint: float
) -> EnginePlan:
    """vLLM's memory beside a trainer of `trainer` GiB, for a `checkpoint` of that many GiB on disk.

    The cache of one step: vLLM keeps full and sliding layers in one group each, and both draw blocks of KV_BLOCK tokens
    from one pool (vllm/v1/core/kv_cache_utils.py). The whole blocks of a prompt are shared by its completions; a sliding
    layer keeps its window, plus what two prefill passes have in flight.
    """
    kinds = config.get("layer_types") or ["sliding_attention", "full_attention"] * (config["num_hidden_layers"] // 2)
    layers = max(kinds.count("full_attention"), kinds.count("sliding_attention"), 1)
    block = layers * KV_BLOCK * 2 * config["num_key_value_heads"] * config["head_dim"] * 2 / GIB
    window, length = config.get("sliding_window") or 0, prompt_len + settings.MAX_COMPLETION_LEN
    # Rounded up, as vLLM's compile cache knows it: another longest prompt is no reason to compile anew.
    longest = max(length, min(-(-length // 1024) * 1024, config.get("max_position_embeddings", length)))
    whole, shared = -(-length // KV_BLOCK), prompt_len // KV_BLOCK
    sliding = min(whole, -(-(window + 1) // KV_BLOCK) + 1)
    in_flight = 2 * BATCHED_TOKENS // KV_BLOCK
    prompts, group = settings.PROMPTS_PER_STEP, settings.NUM_GENERATIONS
    wanted = (1 + in_flight + prompts * (shared + group * (whole - shared + sliding))) * block
    most = -(-longest // KV_BLOCK)
    least = (2 + most + min(most, -(-window // KV_BLOCK) + in_flight)) * block
    # Kernels pad the experts by up to a tenth of their bytes.
    weights = checkpoint * 1.08
    inner = config["num_experts_per_tok"] * 3 * config["intermediate_size"] + 8 * config["hidden_size"]
    seqs = settings.completions_per_step
    # Activations of a prefill pass, three float32 copies of a decode step's logits, graphs.
    scratch = (BATCHED_TOKENS * inner * 2 + seqs * config["vocab_size"] * 4 * 3) / GIB + 0.5
    if settings.VLLM_GPU_MEM is None:
        room, where = (
            machine.gpu_free * 0.95 - trainer - weights - scratch,
            "95% of the free memory, beside the trainer",
        )
    else:
        room, where = (
            machine.gpu_total * settings.VLLM_GPU_MEM - weights - scratch,
            f"VLLM_GPU_MEM={settings.VLLM_GPU_MEM:g}",
        )
    cache = max(min(max(wanted, least), room), 0.0)
    reason = (
        f"one step: {prompts} prompts of {prompt_len} tokens x {group} completions of {settings.MAX_COMPLETION_LEN}"
    )
    if cache < wanted:
        reason += (
            f"; {where} leaves {cache / wanted:.0%} of the {wanted:.1f} GiB they may need, the rest waits its turn"
        )
    return EnginePlan(weights, scratch, cache, reason, least, ASLEEP_GIB, longest, seqs, capture_sizes(seqs))


def plan_memory(
    settings: Settings,
    config: Mapping[str, Any],
    machine: Machine,
    prompt_len: int,
    attention: str,
    engine_checkpoint: float | None = None,
    packing: str = "none",
    experts: str = "bf16",
) -> Plan:
    """Memory of a run and, from it, MICRO_BATCH and GENERATION_BATCH where they are `auto`.

    An estimate from shapes: BF16 weights (experts of 4.25 bits and one layer unpacked with `mxfp4`) and activations,
    float32 adapter with gradients and two AdamW moments, checkpointed layer inputs plus one layer in full while learning,
    and the key-value cache plus one layer of prefill while generating. `prompt_len` is the longest prompt in tokens;
    `engine_checkpoint` the size in GiB of the checkpoint that vLLM loads, None where transformers generates.
    """
    layers, hidden, heads = config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"]
    head, kv, top = config["head_dim"], config["num_key_value_heads"], config["num_experts_per_tok"]
    inner = config["intermediate_size"]
    length = prompt_len + settings.MAX_COMPLETION_LEN
    q_and_kv = (heads + 2 * kv) * head
    weights = count_parameters(config)["total"] * 2 / GIB
    matrices = config["num_local_experts"] * 3 * hidden * inner  # of one layer's experts
    if experts == "mxfp4":
        weights += matrices * (layers * (4.25 / 8 - 2) + 2) / GIB
    lora_parameters = layers * settings.LORA_R * (3 * hidden + q_and_kv + heads * head + hidden)
    adapter = lora_parameters * 16 / GIB

    share = packing == "prefix"

    def learning(rows: int) -> float:
        tokens = bucket(pass_tokens(settings, rows, prompt_len, share))
        longest = (
            bucket(prompt_len + min(rows, settings.NUM_GENERATIONS) * settings.MAX_COMPLETION_LEN) if share else length
        )
        scores = tokens * longest * heads * 2 * 6 if attention == "eager" else 0
        # Bytes of a token in one layer's backward pass: its experts' two products with their gradients; queries, keys,
        # values; norms in float32. The head has its turn before: states, their gradient, one tile of logits.
        per_token = 2 * top * (4 * inner + 3 * hidden) + 8 * q_and_kv + 16 * hidden
        kept = (
            tokens * hidden * 2 * layers if settings.GRADIENT_CHECKPOINTING else (tokens * per_token + scores) * layers
        )
        if experts == "mxfp4" and not settings.GRADIENT_CHECKPOINTING:  # every layer's stay unpacked until its backward
            kept += (layers - 1) * matrices * 2
        # flex attention's mask is made in full before it is reduced to blocks; measured.
        mask = 10.5 * tokens**2 if attention == "flex_attention" else 0
        scored = rows * settings.MAX_COMPLETION_LEN
        head_need = min(scored, 4096) * min(config["vocab_size"], HEAD_TILE) * 2 + (tokens * 2 + scored * 8) * hidden
        return max(kept + max(tokens * per_token + scores, head_need), mask) / GIB + 0.1

    def generation(rows: int) -> float:
        window = min(length, config.get("sliding_window") or length)
        cache = rows * 2 * kv * head * 2 * (length + window) * layers / 2
        prefill = rows * (
            heads * prompt_len**2 * 2 * 3 + prompt_len * 2 * (4 * hidden + 4 * top * config["intermediate_size"])
        )
        return (cache + prefill + rows * config["vocab_size"] * 4 * 3) / GIB

    engine = None
    if engine_checkpoint is not None:
        engine = plan_engine(settings, config, machine, prompt_len, weights + adapter, engine_checkpoint)
    total = settings.completions_per_step
    room = (machine.gpu_free * GPU_SHARE if machine.gpus else machine.ram_free * CPU_SHARE) - weights - adapter
    where = (
        f"{machine.gpu_free:.1f} GiB free on the GPU" if machine.gpus else f"{machine.ram_free:.1f} GiB of free memory"
    )

    room -= engine.asleep if engine else 0.0

    def largest(need: Callable[[int], float], most: int) -> int:
        sizes = [n for n in range(1, min(total, most) + 1) if total % n == 0]
        return max((n for n in sizes if need(n) <= room), default=1)

    # Beyond this a pass is no faster, only larger: its products are large enough, and the unpacking of experts and the
    # start of some hundred kernels a layer are spread over enough tokens.
    most = 64
    if length * hidden >= 100_000:
        sizes = [pass_tokens(settings, n, prompt_len, share) for n in range(1, total + 1)]
        most = max(1, bisect.bisect_right(sizes, PASS_TOKENS))
    micro, micro_reason = settings.MICRO_BATCH, "set by MICRO_BATCH"
    if micro is None:
        micro = largest(learning, most)
        micro_reason = (
            f"largest divisor of {total} up to {most} whose {learning(micro):.1f} GiB fit beside the weights in {where}"
        )
    micro = min(micro, total)
    chunk, chunk_reason = settings.GENERATION_BATCH, "set by GENERATION_BATCH"
    if chunk is None:
        chunk = largest(generation, total)
        chunk_reason = (
            f"largest divisor of {total} whose cache and prefill ({generation(chunk):.1f} GiB) fit in {where}"
        )
    return Plan(
        weights, adapter, generation(chunk), learning(micro), micro, micro_reason, chunk, chunk_reason, engine, prompt_len
    )  # fmt: skip


def misfit(plan: Plan, machine: Machine) -> str:
    """Why a plan does not fit into GPU_SHARE of the GPU's free memory, or '' where it does."""
    free, engine = machine.gpu_free, plan.engine
    if engine and engine.cache < engine.cache_least:
        return f"vLLM would have {engine.cache:.1f} GiB of cache, one completion may need {engine.cache_least:.1f}"
    # vLLM's own plan leaves a margin; a share of the GPU that was set by hand may leave none.
    for what, need, share in (
        (f"learning in passes of {plan.micro_batch}", plan.learning_peak, GPU_SHARE),
        ("the rollout", plan.rollout_peak, 1.0 if engine else GPU_SHARE),
    ):
        if need > free * share:
            return f"{what} would need {need:.1f} GiB, {share:.0%} of what is free are {free * share:.1f}"
    return ""


def largest_that_fits(misfit: Callable[[int], str], most: int) -> tuple[int, str]:
    """(largest n up to `most` whose `misfit` is empty, or 0; that of n + 1, '' for n = `most`). What does not fit must
    not fit with more either.

    >>> largest_that_fits(lambda n: f"{n} > 5" if n > 5 else "", 100)
    (5, '6 > 5')
    """
    most = max(most, 0)
    largest = bisect.bisect_left(range(1, most + 1), True, key=lambda n: bool(misfit(n)))
    return largest, misfit(largest + 1) if largest < most else ""


def find_limits(
    settings: Settings,
    config: Mapping[str, Any],
    machine: Machine,
    prompt_len: int,
    planned: Callable[[Settings], Plan],
) -> tuple[tuple[int, str], tuple[int, str]]:
    """Largest MAX_COMPLETION_LEN and largest MICRO_BATCH that fit the GPU, each with all else as set and with what stops
    the next one. `planned(settings)` is the plan of a run with these settings."""

    def stops(**change: int) -> str:
        return misfit(planned(dataclasses.replace(settings, **change)), machine)

    positions, total = config["max_position_embeddings"], settings.completions_per_step
    length, reason = largest_that_fits(lambda n: stops(MAX_COMPLETION_LEN=n), positions - prompt_len)
    what = f"; with {length + 1} {reason}" if length else f": {reason}"
    if not reason:
        what = f"; the model has {positions} positions, the longest prompt takes {prompt_len}"
    size, reason = largest_that_fits(lambda n: stops(MICRO_BATCH=n), total)
    how = (f"; with {size + 1} {reason}" if size else f": {reason}") if reason else ", the whole step"
    return (length, what), (size, how)


def limit_text(name: str, limit: tuple[int, str]) -> str:
    """One limit of a plan in words.

    >>> limit_text("MICRO_BATCH", (96, ", the whole step")), limit_text("MICRO_BATCH", (0, ": learning would ..."))
    ('MICRO_BATCH=96, the whole step', 'no MICRO_BATCH: learning would ...')
    """
    return (f"{name}={limit[0]}" if limit[0] else f"no {name}") + limit[1]


def propose(
    settings: Settings,
    config: Mapping[str, Any],
    machine: Machine,
    planned: Callable[[Settings, Machine], Plan],
    resumed: bool = False,
) -> str:
    """The advice for a run that does not fit the GPU: every setting that alone makes it fit, best first; else the few that
    do together; else how much memory is missing. `planned(settings, machine)` is the plan that is refused, for any
    settings and machine; a `resumed` run may change only some settings."""

    def stops(on: Machine = machine, **change: Any) -> str:
        return misfit(planned(dataclasses.replace(settings, **change), on), on)

    def least_free(**change: Any) -> int:  # GiB
        return bisect.bisect_left(
            range(10_000), True, key=lambda n: not stops(dataclasses.replace(machine, gpu_free=n), **change)
        )

    by_hand = settings.MICRO_BATCH or settings.GENERATION_BATCH
    levers = {  # best first; `...` is a number to lower as little as will do
        "VLLM_GPU_MEM": None,
        "EXPERTS": "mxfp4" if has_mxfp4(config) else settings.EXPERTS,
        "GRADIENT_CHECKPOINTING": True,
        "GENERATION_BATCH": None,
        "MAX_COMPLETION_LEN": ...,
        "MICRO_BATCH": ... if settings.MICRO_BATCH else None,
        # A batch that was set by hand is what to lower, and need not go into the completions of fewer prompts.
        "PROMPTS_PER_STEP": settings.PROMPTS_PER_STEP if by_hand else ...,
        "USE_VLLM": False,
    }
    levers = {n: v for n, v in levers.items() if v != getattr(settings, n) and (not resumed or n in MAY_CHANGE)}

    def smallest(names: Iterable[str]) -> dict[str, Any]:
        return {name: 1 if levers[name] is ... else levers[name] for name in names}

    def written(names: Iterable[str]) -> str:
        change = smallest(names)
        for name in change:
            if levers[name] is ...:
                most = getattr(settings, name)
                change[name] = largest_that_fits(lambda n, name=name: stops(**change | {name: n}), most)[0]
        return " and ".join(f"{name}={show(value)}" for name, value in change.items())

    if alone := [written([name]) for name in levers if not stops(**smallest([name]))]:
        if alone[0] == "VLLM_GPU_MEM=auto":
            larger = (n / 100 for n in range(int(settings.VLLM_GPU_MEM * 100) + 1, 96))
            alone[1:1] = [f"VLLM_GPU_MEM={share:g}" for share in larger if not stops(VLLM_GPU_MEM=share)][:1]
        advice = f"With all else as set, {' or '.join(alone)} fits"
    elif not stops(**smallest(levers)):
        names = list(levers)
        for name in reversed(levers):
            rest = [other for other in names if other != name]
            names = names if stops(**smallest(rest)) else rest
        advice = f"With all else as set, {written(names)} fit together"
    else:
        least = least_free(**smallest(levers))
        advice = f"No setting helps on this GPU: the smallest run needs {least} GiB free, {least - machine.gpu_free:.1f} more than there are"
    if (needed := least_free()) <= machine.gpu_total:
        return f"{advice}. Or free {needed - machine.gpu_free:.1f} GiB more of the GPU (nvidia-smi names its users)"
    return advice if alone else f"{advice}. Or rent a larger GPU"


def bucket(length: int) -> int:
    """`length` rounded up to at most an eighth more, so that few shapes occur: compiled attention compiles once for
    each, and torch's allocator reuses its blocks.

    >>> bucket(5), bucket(100), bucket(1000), bucket(5026)
    (32, 128, 1024, 5120)
    """
    step = max(32, 2 ** (max(length - 1, 1).bit_length() - 4))
    return -(-length // step) * step


# Every touch of vLLM stands in this section. TRL as shipped builds its own engine and pushes every merged BF16 weight,
# which an engine with MXFP4 experts refuses (docs/rollouts.md), so TRL is built without vLLM (`grpo_config`). What is
# overridden of TRL are methods of its trainer: see Rollouts, Learner and `make_trainer`, which puts them together.
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM takes as max_lora_rank


def pass_tokens(settings: Settings, micro_batch: int, prompt_len: int, share: bool) -> int:
    """Tokens of the largest pass: `micro_batch` completions of MAX_COMPLETION_LEN with their prompts.

    >>> pass_tokens(Settings(NUM_GENERATIONS=8, MAX_COMPLETION_LEN=100), 16, 50, share=True)
    1700
    """
    prompts = -(-micro_batch // settings.NUM_GENERATIONS) if share else micro_batch
    return prompts * prompt_len + micro_batch * settings.MAX_COMPLETION_LEN


HEAD_TILE = 32768  # vocabulary of one tile of logits, as in TRL
