# SPDX-License-Identifier: Apache-2.0
"""Plans the memory of vLLM's engine beside the trainer, and its limits."""

import math
from dataclasses import dataclass

from grpo.plan.hub import ModelConfig, checkpoint_gib, has_mxfp4, packed_gib
from grpo.plan.machine import GIB, Machine
from grpo.plan.targets import EXPERT_PARAMETERS, adapter_parameters, expert_words
from grpo.plan.vllm_model import vllm_sliding_layers
from grpo.settings.table import Settings

KV_BLOCK = 16  # Tokens per block of vLLM's key-value cache.
BATCHED_TOKENS = 8192  # Tokens of one prefill step of vLLM.
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # The values that vLLM takes as max_lora_rank.
PADDED = 1.08  # Size of the experts in vLLM relative to the checkpoint's: some kernels pad them by up to a tenth.
SWIZZLED = 1.035  # The same in the only layout that the learner can read (measured: 1.032).
# vLLM lays experts out anew while it loads them, in a pool that gives nothing back until the end. Of gpt-oss-20b 4.5
# GiB stay in the pool until then (measured), of gpt-oss-120b, laid out in parts of the same size, at most 4.1 with the
# CUDA context (by the peak of docs/results/experts-120b-h100.json): the size of a part counts, not that of a layer.
LOADING_PARTS = 11.4
SWIZZLED_AT_ONCE = 32  # Experts of a matrix in a part (grpo/rollout/vllm_patches.py).
FREE_SHARE = 0.95  # Share of the free memory that vLLM may take with the trainer; the rest is a margin.
CONTEXT_GIB = 0.5  # The CUDA context of a process that has computed nothing yet.
TURN_TOKENS = 1024  # The most tokens of a step that turns join, of decoding and of joining ones, with a CUDA graph.
ASLEEP_GIB = 2.1  # GPU memory of a sleeping engine: CUDA context, graphs, workspaces and kernels (measured).


@dataclass(frozen=True)
class EnginePlan:
    """vLLM's memory and limits beside the trainer; sizes are in GiB."""

    weights: float
    loading: float  # Held beside the weights until they are loaded.
    scratch: float
    cache: float
    cache_wanted: float  # Holds a whole rollout.
    cache_least: float  # Holds one completion.
    asleep: float
    max_model_len: int
    max_num_seqs: int
    capture_sizes: tuple[int, ...]
    lent: float = 0.0  # Weights that stay on the GPU during sleep: those that the learner reads, or all if they fit.

    @property
    def on_host(self) -> float:
        return self.weights - self.lent

    @property
    def starting(self) -> float:
        return self.weights + self.loading

    @property
    def awake(self) -> float:
        return self.weights + self.scratch + self.cache


def vllm_rank(rank: int) -> int:
    """The smallest max_lora_rank with which vLLM accepts an adapter of this rank."""
    return min((limit for limit in LORA_RANKS if limit >= rank), default=LORA_RANKS[-1])


def capture_sizes(largest: int) -> tuple[int, ...]:
    """Batch sizes for which vLLM captures a CUDA graph. A decode batch is padded to the next larger one, and padding
    loads experts too: hence every size up to 16, where few experts are in use, and steps of 1/8 to 1/4 beyond."""
    sizes, size = {largest}, 1
    while size < largest:
        sizes.add(size)
        size += 1 if size < 16 else 2 ** (int(math.log2(size)) - 2)
    return tuple(sorted(sizes))


def plan_engine(
    settings: Settings, config: ModelConfig, machine: Machine, prompt_len: int, trainer: float
) -> EnginePlan:
    """The memory and limits of vLLM beside a trainer of `trainer` GiB.

    The cache should hold a whole rollout. vLLM groups the layers into full and sliding ones, and both groups take
    blocks of KV_BLOCK tokens from one pool (vllm/v1/core/kv_cache_utils.py). The completions of a prompt share the
    blocks that it fills; a sliding layer keeps its window and the tokens of two prefill steps."""
    sliding = vllm_sliding_layers(config)
    layers = max(sum(sliding), len(sliding) - sum(sliding))
    block_gib = layers * KV_BLOCK * 2 * config["num_key_value_heads"] * config["head_dim"] * 2 / GIB
    length = prompt_len + settings.MAX_COMPLETION_LEN
    window = config.get("sliding_window") or length
    # Rounded up, because max_model_len is part of vLLM's compile cache key: similar prompts should not recompile.
    longest = max(length, min(-(-length // 1024) * 1024, config.get("max_position_embeddings", length)))
    # Numbers of blocks: of a prompt with its completion, of the prompt alone, of a sliding layer, of two prefill steps.
    row_blocks, prompt_blocks = -(-length // KV_BLOCK), prompt_len // KV_BLOCK
    sliding_blocks = min(row_blocks, -(-(window + 1) // KV_BLOCK) + 1)
    prefill_blocks = 2 * BATCHED_TOKENS // KV_BLOCK
    prompts = -(-settings.STEPS_PER_GENERATION * settings.PROMPTS_PER_STEP // machine.ranks)
    group = settings.NUM_GENERATIONS
    group_blocks = prompt_blocks + group * (row_blocks - prompt_blocks + sliding_blocks)
    cache_wanted = (1 + prefill_blocks + prompts * group_blocks) * block_gib
    longest_blocks = -(-longest // KV_BLOCK)
    least_blocks = 2 + longest_blocks + min(longest_blocks, -(-window // KV_BLOCK) + prefill_blocks)
    cache_least = least_blocks * block_gib
    weights = checkpoint_gib(config)
    loading = CONTEXT_GIB
    if has_mxfp4(config):
        weights += packed_gib(config) * ((SWIZZLED if settings.EXPERTS == "shared" else PADDED) - 1)
        layer = packed_gib(config) / config["num_hidden_layers"]
        loading += LOADING_PARTS * layer * min(1, SWIZZLED_AT_ONCE / config["num_local_experts"])
    # vLLM reserves memory for an adapter on the experts of every layer, even if LORA_TARGETS names single ones.
    if settings.ROLLOUT_SYNC == "lora" and expert_words(settings.LORA_TARGETS):
        experts = [(layer, name) for layer in range(config["num_hidden_layers"]) for name in EXPERT_PARAMETERS]
        weights += adapter_parameters(config, vllm_rank(settings.LORA_R), experts) * 2 / GIB
    inner = config["num_experts_per_tok"] * 3 * config["intermediate_size"] + 8 * config["hidden_size"]
    seqs = prompts * group
    # Activations of a prefill step, three float32 copies of a decode step's logits, and the rest as it was measured:
    # CUDA context, kernels and graphs.
    scratch = (BATCHED_TOKENS * inner * 2 + seqs * config["vocab_size"] * 4 * 3) / GIB + 1.4
    room = machine.gpu_free * FREE_SHARE - trainer
    if settings.VLLM_GPU_MEM is not None:
        room = machine.gpu_total * settings.VLLM_GPU_MEM
    return EnginePlan(
        weights=weights,
        loading=loading,
        scratch=scratch,
        cache=max(min(max(cache_wanted, cache_least), room - weights - scratch), 0.0),
        cache_wanted=cache_wanted,
        cache_least=cache_least,
        asleep=ASLEEP_GIB,
        max_model_len=longest,
        max_num_seqs=seqs,
        capture_sizes=capture_sizes(max(seqs, TURN_TOKENS) if settings.ENVIRONMENT else seqs),
    )


def describe_cache(settings: Settings, engine: EnginePlan, prompt_len: int) -> str:
    """Says what the cache holds, and where less than a rollout fits, what limits it."""
    prompts = engine.max_num_seqs // settings.NUM_GENERATIONS
    rollout = "one step" if settings.STEPS_PER_GENERATION == 1 else "one rollout"
    completions = f"{settings.NUM_GENERATIONS} completions of {settings.MAX_COMPLETION_LEN}"
    text = f"{rollout}: {prompts} prompts of {prompt_len} tokens x {completions}"
    if engine.cache < engine.cache_wanted:
        limit = f"{FREE_SHARE:.0%} of the free memory, beside the trainer"
        if settings.VLLM_GPU_MEM is not None:
            limit = f"VLLM_GPU_MEM={settings.VLLM_GPU_MEM:g}"
        share = engine.cache / engine.cache_wanted
        text += f"; {limit} leaves {share:.0%} of the {engine.cache_wanted:.1f} GiB they may need"
        text += ", the rest waits its turn"
    return text
