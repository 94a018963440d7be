# SPDX-License-Identifier: Apache-2.0
"""vLLM beside the trainer, asleep while it learns."""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import math
import os
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from grpo.model.load import empty_cache
from grpo.preflight.machine import GIB
from grpo.preflight.memory import BATCHED_TOKENS, LORA_RANKS, EnginePlan
from grpo.rollout.vllm_patches import keep_weights_asleep, mend_kernels
from grpo.run.folder import ADAPTER
from grpo.settings import Settings, log

# The level of logging is what TRL sets; below it vLLM warns of every kernel that the warm-up compiles.
VLLM_SWITCHES = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
# Numbers of tokens in a prefill for which Triton compiles each kernel of gpt-oss-20b's experts and router in vLLM once (from
# 33 tokens up). It compiles anew for blocks of 16, 32, 64 and 128 rows (up to 135, 263, 519 tokens, and above), and where
# a number that it is passed turns into a multiple of 16: the tokens, four or eight times as many, the blocks.
WARM_UP_TOKENS = (
    72, 73, 101, 112, 136, 137, 160, 161, 265, 272, 301, 304, 521, 528, 912, 913, 1008, 1009,
)  # fmt: skip
# vLLM redirects these for its own compilation; the trainer's kernels must not follow.
COMPILER_VARIABLES = ("TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


class EngineError(RuntimeError):
    """vLLM failed in a way from which this process cannot recover; the last checkpoint can."""


@contextlib.contextmanager
def engine_faults(doing: str, advice: str) -> Iterator[None]:
    """Say what the engine was doing and what helps. An in-process vLLM must not be used again after an exception."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0][:300]
        raise EngineError(f"{doing} failed ({type(error).__name__}: {reason}). {advice}") from error


def engine_arguments(settings: Settings, plan: EnginePlan, model_path: str, gpu_total: float) -> dict[str, Any]:
    """Arguments of `vllm.LLM`: one engine in this process, MXFP4 weights as in the checkpoint, room as planned."""
    s = settings
    arguments: dict[str, Any] = {
        "model": model_path,
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "generation_config": "vllm",  # no sampling defaults and no stop tokens but those of each request
        "enable_sleep_mode": True,
        "max_model_len": plan.max_model_len,
        "max_num_seqs": plan.max_num_seqs,
        "max_num_batched_tokens": BATCHED_TOKENS,
        "kv_cache_memory_bytes": int(plan.cache * GIB),
        # vLLM refuses to start unless this share of the GPU is free, even where the line above replaces it.
        "gpu_memory_utilization": max(0.01, min(0.9, plan.awake / gpu_total)),
        "logprobs_mode": "processed_logprobs",  # after temperature: what the importance correction compares
        "enable_prefix_caching": True,  # the completions of a prompt share it
        "enable_flashinfer_autotune": False,  # costs seconds of start-up for kernels that gpt-oss does not use
        "enforce_eager": s.VLLM_EAGER,
        "disable_log_stats": True,
        "seed": s.SEED,
    }
    if not s.VLLM_EAGER:
        # Decoding is what repeats; prefill runs compiled without a graph. One capture per size: every request carries
        # the adapter, so no second set without it.
        arguments["compilation_config"] = {
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": list(plan.capture_sizes),
            "cudagraph_specialize_lora": False,
        }
    if s.ROLLOUT_SYNC == "lora":
        # Without the list of modules, router and every expert would get LoRA buffers and kernels too.
        rank = min((rank for rank in LORA_RANKS if rank >= s.LORA_R), default=LORA_RANKS[-1])
        arguments |= {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": rank}
        arguments["lora_target_modules"] = ["qkv_proj", "o_proj"]
    return arguments


def start_engine(settings: Settings, plan: EnginePlan, model_path: str, stop_token_ids: Sequence[int]) -> Engine:
    """Start vLLM beside the loaded trainer and put it to sleep."""

    started = time.perf_counter()
    kept = {name: os.environ.get(name) for name in COMPILER_VARIABLES}
    for name, value in VLLM_SWITCHES.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in another process neither weights nor the seed would reach it
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory / GIB
    advice = "`--check` prints the plan; VLLM_EAGER=1 compiles less, USE_VLLM=0 does without vLLM"
    try:
        with engine_faults("starting the engine", advice):
            import triton
            from vllm import LLM, SamplingParams
            from vllm.lora.request import LoRARequest

            # torch moves Triton's cache into its own, which vLLM keeps by settings, in a process that compiles but not in one
            # that loads what was compiled: https://github.com/sgl-project/sglang-omni/issues/439
            os.environ.setdefault("TRITON_CACHE_DIR", triton.knobs.cache.dir)
            mend_kernels()
            llm = LLM(**engine_arguments(settings, plan, model_path, total))
            keep_weights_asleep(llm)
            atexit.register(close_process_group)
    finally:
        for name, value in kept.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
    engine = Engine(llm, SamplingParams, LoRARequest, settings, stop_token_ids)
    engine.warm_up(plan.max_model_len)
    before = torch.cuda.mem_get_info()[0]
    engine.sleep()
    freed = (torch.cuda.mem_get_info()[0] - before) / GIB
    seconds = time.perf_counter() - started
    note = f"{freed:.1f} GiB freed; {engine.seconds['warm_up']:.1f} s of it warm-up"
    log.info("vLLM: started and asleep after %.0f s, %s", seconds, note)
    return engine


def close_process_group() -> None:
    """Close what vLLM opened, at the very end: torch warns of it otherwise."""

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def lora_layers(policy: Any) -> dict[str, Any]:
    """PEFT's name of every adapted linear layer -> the layer."""
    return {
        name: module
        for name, module in policy.named_modules()
        if "default" in getattr(module, "lora_A", {}) and hasattr(module, "get_base_layer")
    }


def adapter_tensors(policy: Any, active: bool = True) -> dict[str, Any]:
    """The adapter as vLLM reads it: BF16 on the CPU, the scale multiplied into B in float32 (one rounding); B is zero
    where the adapter is not `active`."""

    tensors = {}
    for name, layer in lora_layers(policy).items():
        b = layer.lora_B["default"].weight.detach().float() * (layer.scaling["default"] if active else 0.0)
        a = layer.lora_A["default"].weight.detach()
        tensors[f"{name}.lora_A.weight"] = a.to("cpu", torch.bfloat16).contiguous()
        tensors[f"{name}.lora_B.weight"] = b.to("cpu", torch.bfloat16).contiguous()
    return tensors


def merged_weights(policy: Any, active: bool = True) -> Iterator[tuple[str, Any]]:
    """(name in the checkpoint, W + scale * B @ A) of every adapted layer, out of place in float32, rounded once.

    The base is only read: PEFT's merge_adapter works in place and drifts (https://github.com/huggingface/trl/issues/6688).
    """

    with torch.no_grad():
        for name, layer in lora_layers(policy).items():
            weight = layer.get_base_layer().weight
            merged = weight
            if active:
                a, b = layer.lora_A["default"].weight.float(), layer.lora_B["default"].weight.float()
                merged = torch.addmm(weight.float(), b, a, alpha=layer.scaling["default"]).to(weight.dtype)
            yield name.removeprefix("base_model.model.") + ".weight", merged


def push_weights(model: Any, merged: Iterable[tuple[str, Any]]) -> None:
    """Copy merged attention weights into vLLM's GptOss: q, k, v are the rows of `attn.qkv_proj.weight`, in that order."""
    parameters = {name.replace(".base_layer.", "."): value for name, value in model.named_parameters()}
    for name, weight in merged:
        stem, _, kind = name.removesuffix(".weight").rpartition(".")
        stem = stem.replace(".self_attn", ".attn")
        if kind == "o_proj":
            target = parameters[f"{stem}.o_proj.weight"].data
        else:  # query rows first, then as many key rows as value rows
            packed, rows = parameters[f"{stem}.qkv_proj.weight"].data, weight.shape[0]
            start = {"q_proj": 0, "k_proj": len(packed) - 2 * rows, "v_proj": len(packed) - rows}[kind]
            target = packed[start : start + rows]
        if target.shape != weight.shape:
            raise ValueError(f"{name}: {tuple(weight.shape)} does not fit the engine's {tuple(target.shape)}")
        target.copy_(weight)


class Engine:
    """One vLLM in this process: awake for rollouts, asleep (level 1) while the trainer learns.

    It holds no state of the adapter that could be stale: `rollout` wakes it, hands the current adapter over, generates
    and lets it sleep, every time. `sampling` and `lora_request` are vLLM's SamplingParams and LoRARequest, passed in so
    that tests can put a stub in vLLM's place.
    """

    def __init__(self, llm: Any, sampling: Any, lora_request: Any, settings: Settings, stop_token_ids: Sequence[int]):
        self.llm, self.sampling, self.lora_request, self.settings = llm, sampling, lora_request, settings
        self.stop_token_ids = list(stop_token_ids)
        shared = Path("/dev/shm")
        self.folder = (
            shared if shared.is_dir() else Path(os.environ.get("TMPDIR", "/tmp"))
        ) / f"train_grpo-{os.getpid()}"
        self.handovers = 0
        self.request: Any = None  # the native adapter that the engine holds
        self.current = False  # whether an adapter was handed over since the engine woke
        self.asleep = False
        self.seconds = dict.fromkeys(("warm_up", "wake", "handover", "generate", "sleep"), 0.0)

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started

    def warm_up(self, max_model_len: int) -> None:
        """Meet what a prefill of gpt-oss-20b compiles before the first rollout does: WARM_UP_TOKENS at a time, with the base
        weights. Triton keeps it on disk for the next start. A native adapter takes other kernels (Marlin's), which are
        not compiled by number of tokens."""
        if self.settings.ROLLOUT_SYNC == "lora":
            return
        with self.timed("warm_up"), engine_faults("warming up", "USE_VLLM=0 needs no vLLM"):
            once = self.sampling(temperature=0.0, max_tokens=1, detokenize=False)
            for tokens in WARM_UP_TOKENS:
                # Tokens of any vocabulary, and no prefix of one size that is cached for the next.
                row = random.Random(tokens).choices(range(500), k=tokens)
                rows = [row[i : i + max_model_len - 1] for i in range(0, tokens, max_model_len - 1)]
                self._run(rows, [once] * len(rows))

    def wake(self) -> None:
        """Weights and cache back onto the GPU. torch gives its free blocks back first: the engine maps memory past its
        allocator and gets no second try (https://github.com/vllm-project/vllm/issues/15254)."""
        if not self.asleep:
            return
        advice = "The GPU is too full beside the trainer: lower MICRO_BATCH or VLLM_GPU_MEM, or set EXPERTS=mxfp4"
        with self.timed("wake"), engine_faults("waking the engine", advice):
            empty_cache()
            self.llm.wake_up()
        self.asleep, self.current = False, False

    def sleep(self) -> None:
        """Weights to host memory, the cache dropped (and with it the prefix cache)."""
        if self.asleep:
            return
        advice = "Host memory may be short: the engine keeps its weights there"
        with self.timed("sleep"), engine_faults("putting the engine to sleep", advice):
            self.llm.sleep(level=1)
        self.asleep, self.current = True, False

    def hand_over(self, policy: Any, active: bool = True) -> None:
        """Give the awake engine the adapter as it is now (or one of zeros). A native adapter gets an id and a name that
        were never used: vLLM loads an id once, and keys its prefix cache by the name."""
        if self.asleep:
            raise EngineError("the adapter was handed to a sleeping engine, whose buffers are not there")
        self.current = False
        with self.timed("handover"), engine_faults("handing the adapter over", "Try the other ROLLOUT_SYNC"):
            if self.settings.ROLLOUT_SYNC == "lora":
                self.handovers += 1
                path = self.write_adapter(policy, active)
                self.request = self.lora_request(f"adapter-{self.handovers}", self.handovers, str(path))
                if not self.llm.llm_engine.add_lora(self.request):
                    raise RuntimeError(f"the engine did not take {path}")
            else:
                # Called in the worker, which is this process: tensors pass by reference.
                self.llm.apply_model(lambda model: push_weights(model, merged_weights(policy, active)))
                self.llm.reset_prefix_cache()  # it was computed with other weights
        self.current = True

    def use_adapter(self, folder: Path | None) -> None:
        """Generate with an adapter that PEFT saved, or with none, until the engine sleeps; needs ROLLOUT_SYNC=lora."""
        self.request = self.lora_request("adapter", 1, str(folder.resolve())) if folder else None
        self.current = True

    def write_adapter(self, policy: Any, active: bool) -> Path:
        """Write the adapter as PEFT would, with alpha = r because B carries the scale."""

        tensors = adapter_tensors(policy, active)
        modules = sorted({name.split(".")[-3] for name in tensors})
        rank = self.settings.LORA_R
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules, "bias": "none"}
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file(tensors, self.folder / ADAPTER)
        return self.folder

    def generate(
        self,
        prompt_ids: Sequence[Sequence[int]],
        seed: int,
        max_tokens: int | Sequence[int] | None = None,
        top_p: float | None = None,
    ) -> tuple[list[list[int]], list[list[float | None]]]:
        """One completion for each row (a prompt stands there once for each of its completions), in order.

        Returns completion ids, a stop token included, and the log-prob of each sampled token after temperature. `seed`
        sets torch's generator, from which vLLM draws in this process: a generator for each request would cost a kernel
        for each sequence and token.
        """

        if self.asleep or not self.current:
            raise EngineError("generating needs the engine awake and the current adapter handed over")
        s, most = self.settings, max_tokens or self.settings.MAX_COMPLETION_LEN
        parameters = [
            self.sampling(
                n=1, temperature=s.TEMPERATURE, top_p=top_p or s.TOP_P, max_tokens=tokens, logprobs=0, flat_logprobs=True,
                stop_token_ids=self.stop_token_ids, detokenize=False,
            )
            for tokens in ([most] * len(prompt_ids) if isinstance(most, int) else most)
        ]  # fmt: skip
        advice = "Run the same command again: it continues"
        with self.timed("generate"), engine_faults("generating", advice), no_collection():
            torch.manual_seed(seed)
            outputs = [output.outputs[0] for output in self._run(prompt_ids, parameters)]
            ids = [list(output.token_ids) for output in outputs]
            values = [[None if math.isnan(v) else v for v in output.logprobs.logprobs] for output in outputs]
            if [len(row) for row in ids] != [len(row) for row in values]:
                raise RuntimeError("the engine gave another number of log-probs than of tokens")
        return ids, values

    def score(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of tokens 1..N-1 of each row, at temperature 1 whatever TEMPERATURE is. Keep rows short: vLLM holds
        float32 logits of a whole row."""
        parameters = self.sampling(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        with engine_faults("scoring", "PARITY=off skips the gate"):
            outputs = self._run(rows, parameters)
            return [
                [position[token].logprob for token, position in zip(row[1:], output.prompt_logprobs[1:], strict=True)]
                for row, output in zip(rows, outputs, strict=True)
            ]

    def _run(self, rows: Sequence[Sequence[int]], parameters: Any) -> list[Any]:
        prompts = [{"prompt_token_ids": list(row)} for row in rows]
        outputs = self.llm.generate(prompts, parameters, use_tqdm=False, lora_request=self.request)
        if len(outputs) != len(prompts):
            raise RuntimeError(f"the engine returned {len(outputs)} of {len(prompts)} requests")
        return outputs

    def rollout(
        self, policy: Any, prompt_ids: Sequence[Sequence[int]], seed: int, active: bool = True
    ) -> tuple[list[list[int]], list[list[float | None]]]:
        """Wake, hand the current adapter over, generate, sleep."""
        self.wake()
        self.hand_over(policy, active)
        result = self.generate(prompt_ids, seed)
        self.sleep()
        return result


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Python's garbage collector waits: a rollout makes millions of small objects, none of them garbage yet, and a
    collection visits every object of every library, up to half a second each."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
