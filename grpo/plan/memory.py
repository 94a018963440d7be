# SPDX-License-Identifier: Apache-2.0
"""Plans the memory of a run and, from it, its batch sizes."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from grpo.plan.engine_memory import SWIZZLED, SWIZZLED_AT_ONCE, EnginePlan, plan_engine
from grpo.plan.hub import (
    ORIGINALS,
    DraftModel,
    ModelConfig,
    count_parameters,
    expert_elements,
    has_mxfp4,
    packed_gib,
)
from grpo.plan.machine import GIB, Machine
from grpo.plan.targets import adapter_parameters, expert_words, target_matrices
from grpo.settings.parsing import show
from grpo.settings.table import Settings

Changes = Mapping[str, str | bool | None]  # New values of some settings, by name.


@dataclass(frozen=True)
class Plan:
    """The memory that a run needs, in GiB, and the sizes of its batches."""

    weights: float
    adapter: float
    generation: float
    learning: float
    micro_batch: int
    micro_batch_reason: str
    generation_batch: int
    generation_batch_reason: str
    engine: EnginePlan | None = None
    prompt_len: int = 0  # Tokens of the longest prompt.
    paged: float = 0.0  # The learner's weights that are in host memory while vLLM is awake.
    nccl: float = 0.0  # NCCL's buffers for sums over several GPUs.
    expert_parts: int = 1  # Parts in which a layer's packed experts are dequantized, one after the other.

    @property
    def beside_rollout(self) -> float:
        """What the learner keeps on the GPU while vLLM starts or is awake."""
        return self.weights - self.paged + self.adapter + self.nccl

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
        asleep = self.engine.asleep if self.engine else 0.0
        return self.weights + self.adapter + self.nccl + self.learning + asleep

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
    draft: DraftModel | None = None  # vLLM's draft model, if it has one.

    @property
    def share_prompts(self) -> bool:
        """Whether a prompt is computed once for all its completions."""
        return self.packing == "prefix"

    def expert_kinds(self, settings: Settings) -> tuple[str, ...]:
        """The values of EXPERTS that work with these settings, in the order in which `auto` tries them."""
        if not has_mxfp4(self.config):
            return ("bf16",)
        if not self.machine.gpus:
            return ("bf16", "mxfp4")
        if not self.beside_vllm or settings.USE_VLLM is False:
            return ("mxfp4", "bf16")
        if unshared_reason(settings.ROLLOUT_SYNC, self.config, self.machine):
            return ("bf16", "paged")
        return ("shared", "bf16", "paged")

    def fits(self, settings: Settings, changes: Changes) -> bool:
        """Whether a run with these settings and `changes` fits into the memory of GPU and host."""
        changed = dataclasses.replace(settings, **changes)  # type: ignore[arg-type]
        plan = plan_memory(changed, self)
        return not (memory_shortfall(plan, self.machine) or host_shortfall(plan, self.machine))


def unshared_reason(sync: str | None, config: ModelConfig | None, machine: Machine) -> str:
    """Why the learner cannot read vLLM's weights (EXPERTS=shared); '' if it can."""
    if sync == "lora":
        return "with ROLLOUT_SYNC=lora vLLM lays its experts out for other kernels"
    if not 9 <= machine.capability < 10:
        card = f"{machine.gpu} has {machine.capability}"
        return f"shared needs a Hopper card (capability 9.0), {card}"
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
BESIDE_VLLM = ("shared", "paged")  # Values of EXPERTS that make room for vLLM.
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


def dequantized_gib(settings: Settings, config: ModelConfig, parts: int) -> float:
    """GiB of packed experts that are dequantized at a time: those of a layer, or one of `parts` parts of its larger
    matrix, which has two thirds of them. Nothing of it is left while vLLM is awake."""
    layer = 0.0 if settings.EXPERTS in ("bf16", None) else expert_elements(config) * 2 / GIB
    return layer if parts == 1 else layer * 2 / 3 / parts


def learning_gib(settings: Settings, inputs: PlanInputs, completions: int, parts: int = 1) -> float:
    """GiB beside the weights for learning from a micro-batch of `completions`; `parts` as in `dequantized_gib`."""
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
    saved = tokens * hidden * 2 * layers
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
    apart = tokens * top * 2 * config["intermediate_size"] * 2
    return layer + (saved + max(tokens * per_token + scores, head) + apart) / GIB + 0.1


def generation_gib(settings: Settings, inputs: PlanInputs, completions: int, parts: int = 1) -> float:
    """GiB that one process needs beside the weights to generate its part of `completions` with transformers: the
    key-value cache, which on a GPU is allocated in full from the start, and the larger of prefill and decoding step."""
    config, prompt_len, gpu = inputs.config, inputs.prompt_len, inputs.machine.gpus
    completions = -(-completions // inputs.machine.ranks)
    layers, hidden, heads = config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"]
    length = prompt_len + settings.MAX_COMPLETION_LEN
    window = min(length, config.get("sliding_window") or length)
    cache = completions * 2 * config["num_key_value_heads"] * config["head_dim"] * 2 * (length + window) * layers / 2
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


def plan_memory(settings: Settings, inputs: PlanInputs) -> Plan:
    """The memory of a run and, from it, MICRO_BATCH and GENERATION_BATCH if they are `auto`.

    The estimate adds up BF16 weights, a float32 adapter with gradients and two AdamW moments, and the larger of rollout
    and learning. EXPERTS=mxfp4 stores experts in 4.25 bits; one layer at a time is dequantized. With `shared`,
    vLLM holds experts, embeddings and head on the GPU even while it sleeps, and the learner has none of its own; with
    `paged` the learner's leave the GPU while vLLM is awake."""
    config, machine, layers = inputs.config, inputs.machine, inputs.config["num_hidden_layers"]
    counts = count_parameters(config)
    weights, embeddings = counts["total"] * 2 / GIB, counts["embeddings"] * 2 / GIB
    packed = packed_gib(config)
    if settings.EXPERTS not in ("bf16", None):
        weights += packed - expert_elements(config) * layers * 2 / GIB
    matrices = target_matrices(settings.LORA_TARGETS, layers)
    adapter = adapter_parameters(config, settings.LORA_R, matrices) * 16 / GIB
    nccl = NCCL_GIB if machine.gpus and machine.ranks > 1 else 0.0
    engine, paged, lent = None, 0.0, 0.0
    if inputs.beside_vllm and settings.USE_VLLM is not False:
        if settings.EXPERTS == "shared":
            weights -= packed + embeddings
            lent = packed * SWIZZLED + embeddings
        if settings.EXPERTS == "paged":
            paged = packed + embeddings
        trainer = weights - paged + adapter + nccl
        engine = plan_engine(settings, config, machine, inputs.prompt_len, trainer, inputs.draft)
        engine = dataclasses.replace(engine, asleep=engine.asleep + lent, lent=lent)

    free = machine.gpu_free if machine.gpus else machine.ram_share
    where = f"{free:.1f} GiB free on the GPU" if machine.gpus else f"{free:.1f} GiB of free memory"
    share = learning_share = GPU_SHARE if machine.gpus else CPU_SHARE
    if machine.gpus and settings.GRADIENT_CHECKPOINTING is False:
        learning_share = KEPT_SHARE
    held = weights + adapter + nccl + (engine.asleep if engine else 0.0)
    room, learning_room = free * share - held, free * learning_share - held
    total = settings.completions_per_rollout
    rank_completions = -(-settings.PROMPTS_PER_STEP // machine.ranks) * settings.NUM_GENERATIONS
    useful = [n for n in divisors(rank_completions) if gains_speed(settings, inputs, n)] or [1]
    parts = choose_expert_parts(settings, inputs, [settings.MICRO_BATCH] if settings.MICRO_BATCH else useful, room)
    micro, micro_reason = settings.MICRO_BATCH, "set by MICRO_BATCH"
    if micro is None:
        micro = largest_micro_batch(settings, inputs, useful, parts, learning_room) or 1
        size = learning_gib(settings, inputs, micro, parts)
        micro_reason = f"largest divisor of {rank_completions} up to {useful[-1]} whose {size:.1f} GiB fit"
        if size > learning_room:
            micro_reason = f"the smallest, whose {size:.1f} GiB do not fit"
        micro_reason += f" beside the weights in {learning_share:.0%} of {where}"
    micro = min(micro, rank_completions)
    batch, batch_reason = settings.GENERATION_BATCH, "set by GENERATION_BATCH"
    if settings.DIRECT_ANSWERS:
        batch, batch_reason = micro, "nothing is generated: the learner's micro-batches choose one token a prompt"
    elif batch is None:
        batch = max((n for n in divisors(total) if generation_gib(settings, inputs, n, parts) <= room), default=1)
        size = generation_gib(settings, inputs, batch, parts)
        choice, fit = (f"largest divisor of {total}", "fit") if size <= room else ("the smallest,", "do not fit")
        batch_reason = f"{choice} whose cache and prefill ({size:.1f} GiB) {fit} in {share:.0%} of {where}"
    # Choosing tokens (DIRECT_ANSWERS) takes less memory than learning.
    generation = 0.0 if settings.DIRECT_ANSWERS else generation_gib(settings, inputs, batch, parts)
    learning = learning_gib(settings, inputs, micro, parts)
    # If there is room, all of the engine's weights stay on the GPU, so that sleeping and waking copy nothing.
    if engine and lent and learning <= learning_room - engine.on_host:
        engine = dataclasses.replace(engine, asleep=engine.asleep + engine.on_host, lent=engine.weights)
    batches = micro, micro_reason, batch, batch_reason
    return Plan(weights, adapter, generation, learning, *batches, engine, inputs.prompt_len, paged, nccl, parts)


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
    """Why host memory has no room for a plan's weights beside the 2 GiB that a process takes; '' if it has."""
    if not plan.on_host or plan.on_host + 2 <= machine.ram_share:
        return ""
    engine = f"each of {machine.here} sleeping engines" if machine.here > 1 else "the sleeping engine"
    if plan.paged:
        engine += ", with paged weights,"
    return f"{engine} needs {plan.on_host + 2:.1f} GiB of host memory, {machine.ram_free:.1f} GiB are free"


def without_vllm(settings: Settings) -> Changes:
    """The changes that turn vLLM off; EXPERTS changes too if its value makes sense only beside vLLM."""
    return {"EXPERTS": "mxfp4", "USE_VLLM": False} if settings.EXPERTS in BESIDE_VLLM else {"USE_VLLM": False}


def format_changes(changes: Changes) -> str:
    """The changes as a user would set them: `NAME=VALUE and NAME=VALUE`."""
    return " and ".join(f"{name}={show(value)}" for name, value in changes.items())


def fitting_original(settings: Settings, inputs: PlanInputs) -> str | None:
    """The model with MXFP4 experts that fits, if this one has its shape and no packed experts; None otherwise."""
    config = inputs.config
    if has_mxfp4(config):
        return None
    packed = dataclasses.replace(inputs, config={**config, "quantization_config": {"quant_method": "mxfp4"}})
    kinds = packed.expert_kinds(settings)
    fits = any(packed.fits(settings, {"EXPERTS": kind}) for kind in kinds)
    return ORIGINALS.get((config["num_hidden_layers"], config["num_local_experts"])) if fits else None


def memory_advice(settings: Settings, inputs: PlanInputs) -> str:
    """Advice for a run that does not fit the GPU: the model that a BF16 checkpoint may be a copy of if that fits, and
    every single change of the settings that makes it fit, or else all of them."""
    changes = settings_advice(settings, inputs)
    if original := fitting_original(settings, inputs):
        return f"If this is a BF16 copy of it, set MODEL_ID={original}: its MXFP4 experts fit. {changes}"
    return changes


def settings_advice(settings: Settings, inputs: PlanInputs) -> str:
    """The part of `memory_advice` about settings."""
    trials: list[Changes] = [{"VLLM_GPU_MEM": None}, {"GRADIENT_CHECKPOINTING": True}]
    trials += [{"GENERATION_BATCH": None}, {"MICRO_BATCH": None}]
    if packed := [kind for kind in inputs.expert_kinds(settings) if kind != "bf16"]:
        fitting = [kind for kind in packed if inputs.fits(settings, {"EXPERTS": kind})]
        trials.append({"EXPERTS": fitting[0] if fitting else "mxfp4"})
    trials.append(without_vllm(settings))
    trials = [trial for trial in trials if any(value != getattr(settings, name) for name, value in trial.items())]
    together = {name: value for trial in trials for name, value in trial.items()}
    beside_vllm = {name: value for trial in trials[:-1] for name, value in trial.items()}
    for candidates in (trials, [beside_vllm], [together]):
        if remedies := [format_changes(trial) for trial in candidates if inputs.fits(settings, trial)]:
            return f"With all else as set, {' or '.join(remedies)} fits"
    return "Free some memory (nvidia-smi names its users), lower MAX_COMPLETION_LEN, or rent a larger GPU"


def bucket(length: int) -> int:
    """`length` rounded up to one of a few sizes, an eighth or 32 apart, so that torch's allocator reuses its blocks."""
    step = max(32, 2 ** (max(length - 1, 1).bit_length() - 4))
    return -(-length // step) * step


def micro_batch_tokens(settings: Settings, micro_batch: int, prompt_len: int, share_prompts: bool) -> int:
    """Tokens of the largest micro-batch: `micro_batch` completions of MAX_COMPLETION_LEN with their prompts.
    `share_prompts`: the completions of a prompt share one copy of it."""
    prompts = -(-micro_batch // settings.NUM_GENERATIONS) if share_prompts else micro_batch
    return prompts * prompt_len + micro_batch * settings.MAX_COMPLETION_LEN
