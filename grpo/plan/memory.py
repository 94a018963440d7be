# SPDX-License-Identifier: Apache-2.0
"""Plans the memory of a run and, from it, its batch sizes."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from grpo.plan.engine_memory import SWIZZLED, SWIZZLED_AT_ONCE, EnginePlan, plan_engine
from grpo.plan.hub import ModelConfig, count_parameters, expert_elements, has_mxfp4, packed_gib, weights_gib
from grpo.plan.machine import GIB, Machine
from grpo.plan.targets import adapter_parameters, expert_words, target_matrices
from grpo.plan.vllm_model import sliding_layers
from grpo.settings.table import Settings

Changes = Mapping[str, str | int | None]  # New values of some settings, by name.


@dataclass(frozen=True, kw_only=True)
class LearnerMemory:
    """What the learner holds from the start of a run to its end, in GiB."""

    weights: float
    adapter: float = 0.0  # In float32, with gradients and two AdamW moments.
    nccl: float = 0.0  # NCCL's buffers for sums over several GPUs.
    paged: float = 0.0  # Its weights that are in host memory while vLLM is awake.

    @property
    def beside_rollout(self) -> float:
        """What it keeps on the GPU while vLLM starts or is awake."""
        return self.weights - self.paged + self.adapter + self.nccl

    @property
    def held(self) -> float:
        return self.weights + self.adapter + self.nccl


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The learner's step: its micro-batches, and the GiB that they take beside what is held."""

    micro_batch: int
    learning: float
    expert_parts: int = 1  # Parts in which a layer's packed experts are dequantized, one after the other.
    layer_chunk: int = 0  # Tokens that a layer's experts, norms and projections compute at a time; 0: all of them.
    checkpoints: float = 0.0  # What each layer's backward pass starts from, where that waits in host memory.


@dataclass(frozen=True, kw_only=True)
class Plan(StepPlan, LearnerMemory):
    """The memory that a run needs, in GiB, and the sizes of its batches."""

    engine: EnginePlan | None = None
    generation_batch: int = 1
    generation: float = 0.0  # Where transformers generates `generation_batch` completions.
    prompt_len: int = 0  # Tokens of the longest prompt.

    @property
    def start_peak(self) -> float:
        return self.beside_rollout + self.engine.starting if self.engine else 0.0

    @property
    def rollout_peak(self) -> float:
        return self.beside_rollout + (self.engine.awake if self.engine else self.generation)

    @property
    def on_host(self) -> float:
        """Host memory for weights: the learner's while vLLM is awake, and vLLM's while it sleeps."""
        return self.paged + (self.engine.on_host if self.engine else 0.0)

    @property
    def learning_peak(self) -> float:
        return self.held + self.learning + (self.engine.asleep if self.engine else 0.0)

    @property
    def peak(self) -> float:
        return max(self.start_peak, self.rollout_peak, self.learning_peak)

    @property
    def parts(self) -> str:
        """The sum behind `peak` as text."""
        largest = f"larger of generation {self.generation:.2f} and learning {self.learning:.2f}"
        if engine := self.engine:
            vllm = f"vLLM starting {engine.starting:.2f}, awake {engine.awake:.2f}"
            largest = f"largest of {vllm} and learning {self.learning:.2f} + asleep {engine.asleep:.2f}"
        paged = f" (awake without {self.paged:.2f})" if self.paged else ""
        nccl = f" + NCCL {self.nccl:.2f}" if self.nccl else ""
        return f"weights {self.weights:.2f}{paged} + adapter {self.adapter:.2f}{nccl} + the {largest}"


@dataclass(frozen=True)
class PlanInputs:
    """Everything besides the settings that the plan of a run depends on."""

    config: ModelConfig
    machine: Machine
    prompt_len: int  # Tokens of the longest prompt.
    attention: str
    packing: str = "none"
    beside_vllm: bool = False  # Whether vLLM can generate on this machine; else transformers does.

    @property
    def share_prompts(self) -> bool:
        """Whether a prompt is computed once for all its completions."""
        return self.packing == "prefix"

    def starts_vllm(self, settings: Settings) -> bool:
        return self.beside_vllm and settings.USE_VLLM is not False

    def expert_kinds(self, settings: Settings) -> tuple[str, ...]:
        """The values of EXPERTS that work with these settings, in the order in which `auto` tries them."""
        if not has_mxfp4(self.config):
            return ("bf16",)
        if not self.machine.gpus:
            return ("bf16", "mxfp4")
        if not self.starts_vllm(settings):
            return ("mxfp4", "bf16")
        if unshared_reason(settings.ROLLOUT_SYNC, self.config, self.machine):
            return ("bf16", "paged", "mxfp4")
        return ("shared", "bf16", "paged", "mxfp4")

    def fits(self, settings: Settings, changes: Changes) -> bool:
        """Whether a run with these settings and `changes` fits into the memory of GPU and host."""
        plan = plan_memory(dataclasses.replace(settings, **changes), self)  # type: ignore[arg-type]
        return not (memory_shortfall(plan, self.machine) or host_shortfall(plan, self.machine))


def unshared_reason(sync: str | None, config: ModelConfig | None, machine: Machine) -> str:
    """Why the learner cannot read vLLM's weights (EXPERTS=shared); '' if it can."""
    if sync == "lora":
        return "with ROLLOUT_SYNC=lora vLLM lays its experts out for other kernels"
    if not 9 <= machine.capability < 10:
        return f"shared needs a Hopper card (capability 9.0), {machine.gpu} has {machine.capability}"
    if config and config.get("tie_word_embeddings"):
        return "shared needs an output head that is not tied to the embeddings"
    return ""


# Shares of the free memory: the rest is for fragmentation and CUDA's context, or for a CPU machine's other programs.
GPU_SHARE, CPU_SHARE = 0.9, 0.5
# The same of a GPU where autograd keeps activations, and the tokens of a micro-batch with which that is faster: an H100
# learned from 9,000 and 10,000 tokens in a fifth less time so, an H200 from 15,000 in a quarter less. More tokens only
# fill the H100: 13,000 in 76% of its memory took as long as 10,000 in 64%, 15,000 in 87% longer than without.
KEPT_SHARE, LEAST_KEPT_TOKENS, MOST_KEPT_TOKENS = 0.7, 8_500, 16_000
MICRO_BATCH_TOKENS = 50_000  # Micro-batches with more tokens are not faster per token.
# Tokens of a layer's chunk. Fewer keep a GPU less busy: an H100 took 0.67, 1.63 and 5.94 ms for the products of 2,048,
# 8,192 and 32,768 tokens. More take memory that a card of 24 GB does not have.
LAYER_CHUNK = 4096
HEAD_ROWS, HEAD_TILE = 4096, 16384  # Tokens and vocabulary entries in a tile of logits: 256 MiB, as TRL's of BF16.
# A communicator's buffers grow with the bandwidth between the GPUs: users report 1.6 GB
# (https://github.com/NVIDIA/nccl/issues/864), and 0.5 to 0.7 on A100s (.../964). We have not measured them.
NCCL_GIB = 1.5


def divisors(total: int) -> list[int]:
    """Every divisor of `total` in ascending order; takes about sqrt(total) steps."""
    small = [n for n in range(1, math.isqrt(total) + 1) if total % n == 0]
    return sorted({*small, *(total // n for n in small)})


def attention_elements(config: ModelConfig) -> int:
    """The number of elements of a token's queries, keys and values in one layer."""
    return int((config["num_attention_heads"] + 2 * config["num_key_value_heads"]) * config["head_dim"])


def embeddings_gib(config: ModelConfig) -> float:
    """GiB of embeddings and head in BF16."""
    return count_parameters(config)["embeddings"] * 2 / GIB


def dequantized_gib(settings: Settings, config: ModelConfig, parts: int) -> float:
    """GiB of packed experts that are dequantized at a time: those of a layer, or one of `parts` parts of its larger
    matrix, which has two thirds of them. Nothing of it is left while vLLM is awake."""
    layer = 0.0 if settings.EXPERTS in ("bf16", None) else expert_elements(config) * 2 / GIB
    return layer if parts == 1 else layer * 2 / 3 / parts


def chunked_bytes(config: ModelConfig) -> tuple[int, int]:
    """Bytes of a token in the backward pass of a layer that runs in chunks (grpo/model/long_layers.py), beside those of
    a chunk's tokens: while a chunk is computed, and in attention's own backward pass."""
    hidden, projected = config["hidden_size"], attention_elements(config)
    by_head, keys = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    # Layer input, both gradients; queries, keys, values; attention's result and its gradient.
    held = 2 * (3 * hidden + projected + 2 * by_head)
    # Keys and values gathered and their gradients, in float32 too. In the kernel: the queries' gradient, in float32
    # too, and those of keys and values for each head of the queries.
    return held, held + 16 * keys + 2 * by_head * (1 + 2 + 2)


def learning_gib(
    settings: Settings, inputs: PlanInputs, completions: int, parts: int = 1, chunk: int = 0, on_host: bool = False
) -> float:
    """GiB beside the weights for learning from a micro-batch of `completions`; `parts` as in `dequantized_gib`.
    `chunk`: tokens that a layer computes at a time but for attention; `on_host`: layers' inputs are in host memory."""
    config, prompt_len, layer = inputs.config, inputs.prompt_len, dequantized_gib(settings, inputs.config, parts)
    layers, hidden, top = config["num_hidden_layers"], config["hidden_size"], config["num_experts_per_tok"]
    tokens = bucket(micro_batch_tokens(settings, completions, prompt_len, inputs.share_prompts))
    longest = prompt_len + settings.MAX_COMPLETION_LEN
    if inputs.share_prompts:
        longest = bucket(prompt_len + min(completions, settings.NUM_GENERATIONS) * settings.MAX_COMPLETION_LEN)
    scores = tokens * longest * config["num_attention_heads"] * 2 * 6 if inputs.attention == "eager" else 0
    # Bytes of a token in one layer's backward pass: its experts' two products with their gradients; queries, keys,
    # values; norms in float32. The head's peak is at another time: states, their gradient, one tile of logits.
    per_token = 2 * top * (4 * config["intermediate_size"] + 3 * hidden) + 8 * attention_elements(config) + 16 * hidden
    if expert_words(settings.LORA_TARGETS):  # The inputs of both products, and the adapter's part of the results.
        per_token += 2 * top * (3 * config["intermediate_size"] + 2 * hidden)
    saved = tokens * hidden * 2 * (2 if on_host else layers)  # With `on_host` only the last states and their gradient.
    if settings.GRADIENT_CHECKPOINTING is False:
        # For each token autograd saves the results of both products, queries, keys, values, the attention's result, and
        # the norms' inputs (in float32 too) and results: half of the peak of one layer's backward pass.
        saved_per_token = 2 * top * (2 * config["intermediate_size"] + hidden) + 16 * hidden
        saved_per_token += 2 * (attention_elements(config) + config["num_attention_heads"] * config["head_dim"])
        if expert_words(settings.LORA_TARGETS):  # The inputs of both products.
            saved_per_token += 2 * top * (config["intermediate_size"] + hidden)
        saved = (tokens * saved_per_token + scores) * layers
    completion_tokens = completions * settings.MAX_COMPLETION_LEN
    tile = min(completion_tokens, HEAD_ROWS) * min(config["vocab_size"], HEAD_TILE) * 6  # float32, and BF16 gradients
    head = tile + (tokens * 2 + completion_tokens * 8) * hidden
    # The largest tensor once more, as an allowance for free blocks that torch's allocator cannot join: 12 x 32
    # completions on an H100 took 3 GiB more than the rest (docs/results/experts-shared-384-recomputed-h100.json).
    apart = top * 2 * config["intermediate_size"] * 2
    if 0 < chunk < tokens:
        held, attention = chunked_bytes(config)
        per_token -= 8 * attention_elements(config)  # Attention is not computed by chunk.
        experts = tokens * held + chunk * (per_token + apart) + layer * GIB
        return (saved + max(experts, tokens * attention + scores, head)) / GIB + 0.1
    return layer + (saved + max(tokens * per_token + scores, head) + tokens * apart) / GIB + 0.1


def checkpoints_gib(settings: Settings, inputs: PlanInputs) -> float:
    """GiB of host memory for the layers' inputs of one completion. torch pins blocks whose sizes are powers of two."""
    tokens = bucket(inputs.prompt_len + settings.MAX_COMPLETION_LEN)
    block = 2 ** math.ceil(math.log2(tokens * inputs.config["hidden_size"] * 2))
    return float(inputs.config["num_hidden_layers"] * block / GIB)


def generation_gib(settings: Settings, inputs: PlanInputs, completions: int, parts: int = 1) -> float:
    """GiB that one process needs beside the weights to generate its part of `completions` with transformers: the
    key-value cache, which on a GPU is allocated in full from the start, and the larger of prefill and decoding step."""
    config, prompt_len, gpu = inputs.config, inputs.prompt_len, inputs.machine.gpus
    completions = -(-completions // inputs.machine.ranks)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    length = prompt_len + settings.MAX_COMPLETION_LEN
    window = min(length, config.get("sliding_window") or length)
    columns = sum(window if is_sliding else length for is_sliding in sliding_layers(config))
    cache = completions * 2 * config["num_key_value_heads"] * config["head_dim"] * 2 * columns
    states = 2 * (4 * hidden + 4 * config["num_experts_per_tok"] * config["intermediate_size"])
    # On a GPU prefill takes one prompt at a time.
    prefill = (1 if gpu else completions) * prompt_len * (heads * prompt_len * 2 * 3 + states)
    # Scores of one layer, and float32 logits with their copies in sampling.
    step = completions * (heads * length * 2 * 4 + config["vocab_size"] * 4 * 8)
    return dequantized_gib(settings, config, parts) + (cache + max(prefill, step)) / GIB


def largest_micro_batch(settings: Settings, inputs: PlanInputs, sizes: list[int], parts: int, room: float) -> int:
    """The largest micro-batch of `sizes` completions whose learning fits into `room` GiB; 0 if none does."""
    return max((size for size in sizes if learning_gib(settings, inputs, size, parts) <= room), default=0)


def choose_expert_parts(settings: Settings, inputs: PlanInputs, sizes: list[int], room: float) -> int:
    """The number of parts in which a layer's packed experts are dequantized: one, or parts of SWIZZLED_AT_ONCE experts
    if the largest micro-batch of `sizes` that fits into `room` GiB is then more than twice as large. For parts take up
    to a tenth more time, but each micro-batch dequantizes all layers."""
    if settings.EXPERTS in ("bf16", None):
        return 1
    parts = int(-(-inputs.config["num_local_experts"] // SWIZZLED_AT_ONCE))
    whole, divided = (largest_micro_batch(settings, inputs, sizes, n, room) for n in (1, parts))
    return parts if whole == 0 or divided > 2 * whole else 1


def gains_speed(settings: Settings, inputs: PlanInputs, completions: int) -> bool:
    """Whether a micro-batch of `completions` is faster per token than a smaller one. From some size on it is not:
    matrix products are large enough, and fixed costs are spread over enough tokens."""
    if (inputs.prompt_len + settings.MAX_COMPLETION_LEN) * inputs.config["hidden_size"] < 100_000:
        return completions <= 64
    most = MOST_KEPT_TOKENS if settings.GRADIENT_CHECKPOINTING is False else MICRO_BATCH_TOKENS
    return micro_batch_tokens(settings, completions, inputs.prompt_len, inputs.share_prompts) <= most


def free_gib(machine: Machine) -> float:
    """The free memory of the GPU, or on a CPU machine this process's share of what is free there."""
    return machine.gpu_free if machine.gpus else machine.ram_share


def usable_share(settings: Settings, machine: Machine, learning: bool = False) -> float:
    """The share of the free memory that a run may take, or its `learning` where autograd may keep activations."""
    if machine.gpus:
        return KEPT_SHARE if learning and settings.GRADIENT_CHECKPOINTING is False else GPU_SHARE
    return CPU_SHARE


def rank_completions(settings: Settings, machine: Machine) -> int:
    """The completions of a step from which one process learns, at most."""
    return -(-settings.PROMPTS_PER_STEP // machine.ranks) * settings.NUM_GENERATIONS


def useful_micro_batches(settings: Settings, inputs: PlanInputs) -> list[int]:
    """The sizes that MICRO_BATCH=auto tries, in ascending order."""
    sizes = divisors(rank_completions(settings, inputs.machine))
    return [size for size in sizes if gains_speed(settings, inputs, size)] or [1]


def plan_learner_memory(settings: Settings, inputs: PlanInputs) -> LearnerMemory:
    """The learner's weights and its adapter. With EXPERTS=shared it has no experts, embeddings and head of its own;
    with `paged` they leave the GPU while vLLM is awake."""
    config, layers = inputs.config, inputs.config["num_hidden_layers"]
    weights, paged = weights_gib(config, settings.EXPERTS not in ("bf16", None)), 0.0
    if inputs.starts_vllm(settings) and settings.EXPERTS == "shared":
        weights -= packed_gib(config) + embeddings_gib(config)
    if inputs.starts_vllm(settings) and settings.EXPERTS == "paged":
        paged = packed_gib(config) + embeddings_gib(config)
    parameters = adapter_parameters(config, settings.LORA_R, target_matrices(settings.LORA_TARGETS, layers))
    nccl = NCCL_GIB if inputs.machine.gpus and inputs.machine.ranks > 1 else 0.0
    return LearnerMemory(weights=weights, adapter=parameters * 16 / GIB, nccl=nccl, paged=paged)


def plan_vllm(settings: Settings, inputs: PlanInputs, learner: LearnerMemory) -> EnginePlan | None:
    """vLLM beside the learner; None where it does not generate. With EXPERTS=shared it holds the weights that the
    learner reads on the GPU even while it sleeps."""
    if not inputs.starts_vllm(settings):
        return None
    config = inputs.config
    engine = plan_engine(settings, config, inputs.machine, inputs.prompt_len, learner.beside_rollout)
    if settings.EXPERTS != "shared":
        return engine
    lent = packed_gib(config) * SWIZZLED + embeddings_gib(config)
    return dataclasses.replace(engine, asleep=engine.asleep + lent, lent=lent)


def plan_step(settings: Settings, inputs: PlanInputs, room: float, learning_room: float) -> StepPlan:
    """The learner's step: the largest micro-batch that fits into `learning_room` GiB, unless MICRO_BATCH is set."""
    sizes = [settings.MICRO_BATCH] if settings.MICRO_BATCH else useful_micro_batches(settings, inputs)
    parts = choose_expert_parts(settings, inputs, sizes, room)
    size = settings.MICRO_BATCH or largest_micro_batch(settings, inputs, sizes, parts, learning_room) or 1
    size = min(size, rank_completions(settings, inputs.machine))
    step = StepPlan(micro_batch=size, learning=learning_gib(settings, inputs, size, parts), expert_parts=parts)
    if size > 1 or step.learning <= learning_room or not may_chunk(settings, inputs):
        return step
    # Not even one completion fits. Elsewhere a smaller MICRO_BATCH does, which is faster and the same bit by bit.
    chunked = functools.partial(learning_gib, settings, inputs, 1, parts, LAYER_CHUNK)
    step = dataclasses.replace(step, learning=chunked(), layer_chunk=LAYER_CHUNK)
    if step.learning <= learning_room:
        return step
    return dataclasses.replace(step, learning=chunked(on_host=True), checkpoints=checkpoints_gib(settings, inputs))


def may_chunk(settings: Settings, inputs: PlanInputs) -> bool:
    """Whether layers can run in chunks: on a GPU, where one completion has more tokens than a chunk and activations are
    recomputed, without dropout, which would draw other numbers each time."""
    recomputed = settings.GRADIENT_CHECKPOINTING is not False and not settings.LORA_DROPOUT
    is_long = inputs.prompt_len + settings.MAX_COMPLETION_LEN > LAYER_CHUNK
    return bool(inputs.machine.gpus) and recomputed and is_long


def keep_engine_awake(engine: EnginePlan | None, room: float) -> EnginePlan | None:
    """The engine with all its weights on the GPU while it sleeps, so that sleeping and waking copy nothing, if it lends
    some of them and `room` GiB are left for the others."""
    if engine and engine.lent and engine.on_host <= room:
        return dataclasses.replace(engine, asleep=engine.asleep + engine.on_host, lent=engine.weights)
    return engine


def plan_generation_batch(settings: Settings, inputs: PlanInputs, parts: int, room: float) -> int:
    """Completions that transformers generates at once: as many as `room` GiB hold, unless GENERATION_BATCH is set."""
    if settings.GENERATION_BATCH:
        return settings.GENERATION_BATCH
    sizes = divisors(settings.completions_per_rollout)
    return max((size for size in sizes if generation_gib(settings, inputs, size, parts) <= room), default=1)


def plan_memory(settings: Settings, inputs: PlanInputs) -> Plan:
    """The memory of a run and, from it, MICRO_BATCH and GENERATION_BATCH if they are `auto`: what the learner holds, a
    sleeping vLLM, and the larger of rollout and learning."""
    learner = plan_learner_memory(settings, inputs)
    engine = plan_vllm(settings, inputs, learner)
    held, free = learner.held + (engine.asleep if engine else 0.0), free_gib(inputs.machine)
    room = free * usable_share(settings, inputs.machine) - held
    learning_room = free * usable_share(settings, inputs.machine, learning=True) - held
    step = plan_step(settings, inputs, room, learning_room)
    # With DIRECT_ANSWERS the learner's micro-batches choose one token a prompt, which takes less memory than learning.
    batch, generation = step.micro_batch, 0.0
    if not settings.DIRECT_ANSWERS:
        batch = plan_generation_batch(settings, inputs, step.expert_parts, room)
        generation = generation_gib(settings, inputs, batch, step.expert_parts)
    return Plan(
        **vars(learner),
        **vars(step),
        engine=keep_engine_awake(engine, learning_room - step.learning),
        generation_batch=batch,
        generation=generation,
        prompt_len=inputs.prompt_len,
    )


def memory_shortfall(plan: Plan, machine: Machine) -> str:
    """Why a plan does not fit into the GPU's free memory, '' if it fits. GPU_SHARE of it may be used, but all of it by
    vLLM's start, where nothing varies, and by its rollout, where `plan_engine` or VLLM_GPU_MEM leaves a margin."""
    free, engine = machine.gpu_free, plan.engine
    if engine and engine.cache < engine.cache_least:
        return f"vLLM would have {engine.cache:.1f} GiB of cache, but one completion may need {engine.cache_least:.1f}"
    start = "vLLM's start", plan.start_peak, 1.0
    learning = f"learning in micro-batches of {plan.micro_batch}", plan.learning_peak, GPU_SHARE
    rollout = "the rollout", plan.rollout_peak, 1.0 if engine else GPU_SHARE
    for part, need, share in (start, learning, rollout):
        if need > free * share:
            return f"{part} would need {need:.1f} GiB, {share:.0%} of the free memory are {free * share:.1f}"
    return ""


def host_shortfall(plan: Plan, machine: Machine) -> str:
    """Why host memory has no room for a plan's weights and layers' inputs beside the 2 GiB that a process takes."""
    needed = plan.on_host + plan.checkpoints
    if not needed or needed + 2 <= machine.ram_share:
        return ""
    holder = "sleeping engine" if plan.engine else "learner"
    holder = f"each of {machine.here} {holder}s" if machine.here > 1 else f"the {holder}"
    if plan.paged:
        holder += ", with paged weights,"
    if plan.checkpoints:
        holder += f" with the {plan.checkpoints:.1f} GiB that each layer's backward pass starts from"
    return f"{holder} needs {needed + 2:.1f} GiB of host memory, {machine.ram_free:.1f} GiB are free"


def bucket(length: int) -> int:
    """`length` rounded up to one of a few sizes, an eighth or 32 apart, so that torch's allocator reuses its blocks."""
    step = max(32, 2 ** (max(length - 1, 1).bit_length() - 4))
    return -(-length // step) * step


def micro_batch_tokens(settings: Settings, micro_batch: int, prompt_len: int, share_prompts: bool) -> int:
    """Tokens of the largest micro-batch: `micro_batch` completions of MAX_COMPLETION_LEN with their prompts.
    `share_prompts`: the completions of a prompt share one copy of it."""
    prompts = -(-micro_batch // settings.NUM_GENERATIONS) if share_prompts else micro_batch
    return prompts * prompt_len + micro_batch * settings.MAX_COMPLETION_LEN
