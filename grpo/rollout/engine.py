# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM beside the trainer on the same GPU; it sleeps while the trainer learns."""

from __future__ import annotations

import atexit
import contextlib
import gc
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from grpo.common import log
from grpo.output.durable import read_json, scratch_folder
from grpo.phases import LINE_S, Phase
from grpo.plan.engine_memory import BATCHED_TOKENS, EnginePlan, vllm_rank
from grpo.plan.hub import has_mxfp4
from grpo.plan.machine import GIB
from grpo.plan.targets import expert_words
from grpo.process.ending import ExitCode, RunFailure
from grpo.rollout.paged_weights import PagedWeights
from grpo.rollout.shared_weights import share_weights
from grpo.rollout.vllm_patches import close_process_group, keep_weights_asleep, patch_kernels, vllm_environment
from grpo.rollout.weight_sync import sync_merged_weights, write_adapter
from grpo.settings.table import Settings

TokenRows = Sequence[Sequence[int]]  # token ids
Generated = tuple[list[list[int]], list[list[float | None]]]  # token ids of completions, the log-prob of each token


class EngineError(RunFailure):
    """vLLM failed in a way from which this process cannot recover. A new one can continue from the last checkpoint."""

    code = ExitCode.VLLM
    label = "vLLM"


RESTART = "Run the same command again: it continues"


def completion_of(output: Any, with_logps: bool) -> tuple[list[int], list[float | None] | None]:
    """The token ids of a request's completion, and the log-prob of each (None for NaN), or None without log-probs."""
    completion = output.outputs[0]
    ids = list(completion.token_ids)
    if not with_logps:
        return ids, None
    values = [None if math.isnan(value) else value for value in completion.logprobs.logprobs]
    if len(ids) != len(values):
        raise RuntimeError("the engine gave another number of log-probs than of tokens")
    return ids, values


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """A rollout makes millions of small objects that live on, and each garbage collection meanwhile visits all objects
    of all libraries, for up to half a second."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def engine_faults(action: str, advice: str) -> Iterator[None]:
    """Turns any exception into an EngineError with the failed `action` and `advice` for the user, because a vLLM inside
    this process must not be used again after an exception."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0][:300]
        raise EngineError(f"{action} failed ({type(error).__name__}: {reason}). {advice}") from error


def gpu_used_gib() -> float:
    """GiB of the GPU that this process and all others use, by the driver's count. 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB


def vllm_modules(experts: bool) -> list[str]:
    """The modules to which vLLM applies an adapter; with `experts` also the experts of every layer. vLLM silently
    ignores an adapter's other modules. Without a list it would allocate buffers and compile kernels for the router."""
    return ["qkv_proj", "o_proj", "experts"] if experts else ["qkv_proj", "o_proj"]


def engine_arguments(
    settings: Settings, plan: EnginePlan, model_path: str, gpu_total: float, pin_experts: bool = False
) -> dict[str, Any]:
    """Arguments of `vllm.LLM`: one engine in this process, MXFP4 weights as in the checkpoint, memory as planned.
    `pin_experts`: vLLM takes Triton's MXFP4 kernels or refuses to start, where adapters leave it the choice."""
    arguments: dict[str, Any] = {
        "model": model_path,
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "generation_config": "vllm",  # Sampling and stop tokens come with each request, not from the checkpoint.
        "enable_sleep_mode": True,
        "max_model_len": plan.max_model_len,
        "max_num_seqs": plan.max_num_seqs,
        "max_num_batched_tokens": BATCHED_TOKENS,
        "kv_cache_memory_bytes": int(plan.cache * GIB),
        # kv_cache_memory_bytes is the limit, not this share; but vLLM refuses to start unless the share is free.
        "gpu_memory_utilization": max(0.01, min(0.9, plan.awake / gpu_total)),
        # Logits are not rounded to BF16, as the learner's are not: grpo/model/head.py.
        "hf_overrides": {"head_dtype": "float32"},
        "logprobs_mode": "processed_logprobs",  # After temperature, as the importance correction compares them.
        "enable_prefix_caching": True,  # the completions of a prompt share its cache
        "enable_flashinfer_autotune": False,  # Tuning takes seconds, for kernels that gpt-oss does not use.
        "enforce_eager": settings.VLLM_EAGER,
        "disable_log_stats": True,
        "seed": settings.SEED,
    }
    if not settings.VLLM_EAGER:
        in_turns, compiles = bool(settings.ENVIRONMENT), os.environ.get("TORCH_COMPILE_DISABLE") != "1"
        # CUDA graphs are captured for decoding alone, whose batch sizes repeat; prefill runs compiled without graphs.
        # Of an episode's turns some begin at almost every step, so these steps get graphs as well, but for attention.
        # Without torch.compile vLLM cannot divide its model so, and would make no graphs at all (vllm/config/vllm.py).
        # Every request carries the adapter, so no second set of graphs is needed for requests without it.
        arguments["compilation_config"] = {
            "cudagraph_mode": "FULL_AND_PIECEWISE" if in_turns and compiles else "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": list(plan.capture_sizes),
            "cudagraph_specialize_lora": False,
        }
    if settings.ROLLOUT_SYNC == "lora":
        arguments |= {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1}
        modules = vllm_modules(bool(expert_words(settings.LORA_TARGETS)))
        arguments |= {"max_lora_rank": vllm_rank(settings.LORA_R), "lora_target_modules": modules}
    elif pin_experts:
        # Where they cannot be imported, vLLM would silently take CUTLASS's, whose text was garbage elsewhere
        # (https://github.com/flashinfer-ai/flashinfer/issues/3334). With LoRA it has only Marlin's.
        arguments["moe_backend"] = "triton"
    return arguments


def chosen_backends(model: Module) -> dict[str, str]:
    """The kernels with which vLLM's `model` computes experts and attention, by vLLM's names; empty if they moved."""
    try:
        layer: Any = model.get_submodule("model.layers.0")
        quantization, attention = layer.mlp.experts.routed_experts.quant_method, layer.attn.attn
        version = getattr(attention.impl, "vllm_flash_attn_version", None)
        kernels = getattr(getattr(quantization, "mxfp4_backend", None), "value", type(quantization).__name__)
        return {"experts": str(kernels), "attention": f"{attention.attn_backend.get_name()} {version or ''}".strip()}
    except AttributeError:
        return {}


def start_engine(
    settings: Settings, plan: EnginePlan, model_path: str, stop_token_ids: Sequence[int], policy: Module | None = None
) -> Engine:
    """Starts vLLM beside the loaded trainer and puts it to sleep. With EXPERTS=shared `policy` reads the
    engine's frozen weights; with EXPERTS=paged its own are in host memory during the start. Raises EngineError."""
    with Phase("starting vLLM") as phase:
        card = torch.cuda.get_device_properties(0)
        pages = None
        if policy is not None and settings.EXPERTS == "paged":
            advice = "Host memory may be short: free some, or set USE_VLLM=0 and EXPERTS=mxfp4"
            with engine_faults("paging the experts out", advice):
                pages = PagedWeights(policy)
                pages.offload()
        torch.cuda.empty_cache()
        advice = "`--check` prints the plan; VLLM_EAGER=1 compiles less, USE_VLLM=0 does without vLLM"
        with engine_faults("starting the engine", advice), vllm_environment():
            from vllm import LLM, SamplingParams  # vLLM is optional, and reads its variables when it is imported.
            from vllm.lora.request import LoRARequest

            patch_kernels()
            # Only Hopper's choice was compared with others; a BF16 checkpoint has no MXFP4 kernels to choose from.
            pin = card.major == 9 and has_mxfp4(read_json(Path(model_path) / "config.json"))
            llm = LLM(**engine_arguments(settings, plan, model_path, card.total_memory / GIB, pin))
            keep_weights_asleep(llm)
            atexit.register(close_process_group)
        engine = Engine(llm, SamplingParams, LoRARequest, settings, stop_token_ids)
        engine.pages = pages
        (engine.backends,) = llm.apply_model(chosen_backends)
        experts, attention = (engine.backends.get(name, "unknown kernels") for name in ("experts", "attention"))
        log.info("vLLM computes experts with %s, attention with %s", experts, attention)
        if policy is not None and settings.EXPERTS == "shared":
            engine.lend_weights(policy, whole=not plan.on_host)
        before = torch.cuda.mem_get_info()[0]
        engine.sleep()
        freed = torch.cuda.mem_get_info()[0] - before
        freed += pages.nbytes if pages else 0  # Engine.sleep has put the paged weights back on the GPU.
        phase.result = f"asleep, {freed / GIB:.1f} GiB freed"
    return engine


class Engine:
    """One vLLM in this process: awake for rollouts, asleep (level 1) while the trainer learns. Its adapter cannot
    be stale, because the sampler syncs the weights for every session. `sampling` and `lora_request` are vLLM's
    SamplingParams and LoRARequest, passed in so that tests can put a stub in vLLM's place. Methods that call vLLM raise
    EngineError."""

    def __init__(self, llm: Any, sampling: Any, lora_request: Any, settings: Settings, stop_token_ids: Sequence[int]):
        self.llm, self.sampling, self.lora_request, self.settings = llm, sampling, lora_request, settings
        self.stop_token_ids = list(stop_token_ids)
        self.folder: Path | None = None  # The folder of the adapter's files with ROLLOUT_SYNC=lora, once there is one.
        self.syncs = 0
        self.request = None  # The LoRARequest of the adapter that vLLM holds, with ROLLOUT_SYNC=lora.
        # The share of the adapter's update that arrived in vLLM's weights at the last merge, and its standard error.
        self.sync_share: tuple[float, float] | None = None
        self.pages: PagedWeights | None = None  # the learner's weights, on the GPU only while the engine sleeps
        self.backends: dict[str, str] = {}  # The kernels that vLLM chose, by `chosen_backends`.
        self.used_gib = 0.0  # GPU memory that all processes held when the last rollout was generated.
        self.seconds = dict.fromkeys(("wake", "handover", "generate", "sleep"), 0.0)

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Sets `seconds[name]` to the time that the block takes."""
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started

    def lend_weights(self, policy: Module, whole: bool = False) -> None:
        """Lets `policy`, which was loaded without experts, embeddings and head, read those of the awake engine. They
        stay on the GPU from then on; with `whole` all of the engine's weights do."""
        with engine_faults("lending the weights", "Set EXPERTS=paged"):
            from grpo.rollout.sleep_backend import lend  # This module imports vLLM.

            (pointers,) = self.llm.apply_model(lambda model: share_weights(policy, model))
            lend(None if whole else pointers)

    def wake(self) -> None:
        """Brings the weights and the cache of the sleeping engine back onto the GPU. torch's free blocks are released
        first: the engine allocates outside torch's allocator and does not retry
        (https://github.com/vllm-project/vllm/issues/15254)."""
        advice = "The GPU is too full beside the trainer: lower MICRO_BATCH or VLLM_GPU_MEM"
        if self.settings.EXPERTS in ("bf16", "mxfp4"):
            advice += f", or set EXPERTS={'mxfp4' if self.settings.EXPERTS == 'bf16' else 'paged'}"
        with self.timed("wake"), engine_faults("waking the engine", advice):
            if self.pages:
                self.pages.offload()
            torch.cuda.empty_cache()
            self.llm.wake_up()

    def sleep(self) -> None:
        """Moves the weights that are not lent to host memory, and drops the KV cache with its prefixes."""
        # vLLM also raises if the GPU holds more after falling asleep than before, even because of another process.
        advice = "Host memory may be short, where its weights go, or another process took GPU memory meanwhile"
        if self.pages:
            advice += "; a lower MICRO_BATCH leaves more for paged weights"
        with self.timed("sleep"), engine_faults("putting the engine to sleep", advice):
            self.llm.sleep(level=1)
            if self.pages:
                self.pages.reload()

    def sync_weights(self, policy: Module, active: bool = True, seed: int | None = None) -> None:
        """Gives the awake engine the adapter as it is now, or one of zeros if not `active`, and sets `sync_share`
        to the share of it that arrived. `seed` (default: SEED) is that of the stochastic rounding. A native adapter
        gets an id and a name that were never used: vLLM loads an id once, and keys its prefix cache by the name."""
        self.sync_share, s = None, self.settings
        with self.timed("handover"), engine_faults("the weight sync", "Try the other ROLLOUT_SYNC (experts need lora)"):
            if s.ROLLOUT_SYNC == "lora":
                self.syncs += 1
                # Other users can neither read this folder nor foresee its name and put a link there.
                self.folder = self.folder or scratch_folder()
                write_adapter(policy, self.folder, s.LORA_R, active)
                self.request = self.lora_request(f"adapter-{self.syncs}", self.syncs, str(self.folder))
                self.llm.llm_engine.add_lora(self.request)
            else:
                # vLLM's worker is this process, so tensors pass by reference.
                seed = s.SEED if seed is None else seed
                (self.sync_share,) = self.llm.apply_model(lambda vllm: sync_merged_weights(vllm, policy, seed, active))
                self.llm.reset_prefix_cache()  # The cache was computed with other weights.

    def use_adapter(self, folder: Path | None) -> None:
        """Generates with an adapter that PEFT saved, or with none, until the engine sleeps; needs ROLLOUT_SYNC=lora."""
        self.request = self.lora_request("adapter", 1, str(folder.resolve())) if folder else None

    def generate(
        self, prompt_ids: TokenRows, seed: int, max_tokens: int, top_p: float, temperature: float | None
    ) -> Generated:
        """One completion for each row, in order; a prompt is repeated for each of its completions. Returns token ids,
        the stop token included, and the log-prob of each token after temperature (None for NaN). If `temperature` is
        not None (0: greedy) the log-probs are [], as they would not be TEMPERATURE's. Raises EngineError, after which
        the engine cannot be used. `seed` is for torch's global generator, from which vLLM draws: a generator for each
        request would cost a kernel per sequence and token."""
        parameters = self.parameters(max_tokens, top_p, temperature)
        with self.timed("generate"), engine_faults("generating", RESTART), without_collection():
            torch.manual_seed(seed)
            outputs = [completion_of(output, temperature is None) for output in self._run(prompt_ids, parameters)]
        return [ids for ids, _ in outputs], [logps for _, logps in outputs if logps is not None]

    def parameters(self, max_tokens: int, top_p: float, temperature: float | None) -> Any:
        """vLLM's SamplingParams, see `generate`."""
        is_rollout = temperature is None
        return self.sampling(
            n=1,
            temperature=self.settings.TEMPERATURE if is_rollout else temperature,
            top_p=top_p,
            max_tokens=max_tokens,
            logprobs=0 if is_rollout else None,
            flat_logprobs=is_rollout,
            stop_token_ids=self.stop_token_ids,
            detokenize=False,
        )

    @contextlib.contextmanager
    def stepping(self, seed: int) -> Iterator[None]:
        """Inside the block `add` and `step` may be called: vLLM's own loop, which prompts may join at any step."""
        with self.timed("generate"), without_collection():
            torch.manual_seed(seed)
            yield

    def add(self, prompt: Sequence[int], max_tokens: int, top_p: float, temperature: float | None) -> str:
        """Adds a prompt to the engine's queue; the arguments are those of `generate`. Returns the request's id."""
        parameters = self.parameters(max_tokens, top_p, temperature)
        with engine_faults("adding a prompt", RESTART):
            prompts = [{"prompt_token_ids": list(prompt)}]
            (request,) = self.llm.enqueue(prompts, parameters, lora_request=self.request, use_tqdm=False)
        # vLLM adds random characters to the id that it works with; its outputs have the id without them.
        return str(request).partition("-")[0]

    def step(self) -> list[tuple[str, list[int], list[float | None] | None]]:
        """Makes one step of the engine. Returns (request, ids, log-probs) of each completion that it finished; without
        log-probs they are None."""
        with engine_faults("generating", RESTART):
            finished = [output for output in self.llm.llm_engine.step() if output.finished]
            completions = [(output, output.outputs[0].logprobs is not None) for output in finished]
            return [(str(output.request_id), *completion_of(output, known)) for output, known in completions]

    def score(self, rows: TokenRows) -> list[list[float]]:
        """Log-probs of tokens 1..N-1 of each row, at temperature 1 whatever TEMPERATURE is. Rows must be short: vLLM
        holds the float32 logits of a whole row."""
        parameters = self.sampling(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        with engine_faults("scoring", "PARITY=off skips the mismatch check"):
            outputs = self._run(rows, parameters)
            return [
                [position[token].logprob for token, position in zip(row[1:], output.prompt_logprobs[1:], strict=True)]
                for row, output in zip(rows, outputs, strict=True)
            ]

    def _run(self, rows: TokenRows, parameters: Any) -> list[Any]:
        prompts = [{"prompt_token_ids": list(row)} for row in rows]
        with Phase("generating", first_s=LINE_S):
            outputs = self.llm.generate(prompts, parameters, use_tqdm=False, lora_request=self.request)
        if len(outputs) != len(prompts):
            raise RuntimeError(f"the engine returned {len(outputs)} of {len(prompts)} requests")
        return outputs
