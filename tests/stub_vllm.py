# SPDX-License-Identifier: Apache-2.0
"""A stub of vLLM on the CPU that keeps its contract, so that the rollout engine is tested without a GPU.

It keeps of vLLM 0.26 (files of that version in brackets):
- a copy of the model, which changes only by `apply_model` and `add_lora`; packed attention weights under vLLM's names,
  with `.base_layer.` in them where LoRA is enabled (model_executor/models/gpt_oss.py);
- adapters: loaded once for an integer id, only one held, scale alpha / r (lora/worker_manager.py, lora/peft_helper.py);
- sampling from torch's global generator; log-probs after temperature; the stop token is part of a completion; log-probs
  of prompts ignore the temperature (v1/worker/gpu_model_runner.py);
- a prefix cache keyed by the adapter's name (v1/core/kv_cache_utils.py), emptied by sleep and `reset_prefix_cache`.
Where vLLM hangs because it is asleep, or returns wrong text because its prefix cache is stale, the stub raises.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from expert_models import load
from machines import H100
from safetensors.torch import load_file

from grpo.output.durable import read_json
from grpo.plan.machine import installed_versions
from grpo.rollout.engine import Engine, engine_arguments

SYNCS = ("merge", "lora")
PACKED = ("q_proj", "k_proj", "v_proj")


@dataclass
class StubSampling:
    """vLLM's SamplingParams with the arguments that the engine uses; an unknown one is a TypeError there too."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 16
    logprobs: int | None = None
    flat_logprobs: bool = False
    prompt_logprobs: int | None = None
    stop_token_ids: list[int] = field(default_factory=list)
    detokenize: bool = True
    ignore_eos: bool = False


@dataclass(frozen=True)
class StubLoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str


class StubLLM:
    """vLLM's LLM on the model in `folder`. `calls` lists the names of its calls in order.

    To break it: `shift` is added to the log-probs that it reports, `ignore_adapter` makes it generate with the base,
    `keeps_first_adapter` with the first adapter that it got, and `fail` maps a call's name to (number of the call from
    1, exception to raise)."""

    def __init__(
        self,
        folder: Path,
        enable_lora: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        lora_target_modules: Sequence[str] = ("qkv_proj", "o_proj", "experts"),
    ):
        # The trainer's seed must not depend on whether an engine was built.
        with torch.random.fork_rng(devices=[]):
            self.model = load(Path(folder)).to(dtype).eval().requires_grad_(False)
        self.enable_lora = enable_lora
        self.lora_target_modules = list(lora_target_modules)
        self.asleep = False
        self.calls: list[str] = []
        self.requests: list[Any] = []
        self.shift = 0.0
        self.ignore_adapter = self.keeps_first_adapter = False
        self.fail: dict[str, tuple[int, BaseException]] = {}
        self.loaded: dict[int, dict[str, tuple[Any, Any]]] = {}  # int id -> module -> (A, scaled B)
        self.active: dict[str, tuple[Any, Any]] = {}
        self.prefix_cache: dict[str | None, tuple[Any, ...]] = {}  # adapter's name -> weights that filled it
        self.queue: list[tuple[str, Any, Any, Any]] = []  # (id, prompt, parameters, adapter) of `enqueue`
        self.numbers = itertools.count()
        self.llm_engine = SimpleNamespace(add_lora=self.add_lora, step=self.step)
        self.packed: dict[str, torch.nn.Parameter] = {}
        self._pack()

    def _pack(self) -> None:
        """Put q, k and v into one tensor, of which the model's own become views, and hook LoRA into all four."""
        middle = "base_layer." if self.enable_lora else ""
        for number, layer in enumerate(self.model.model.layers):
            attention, stem = layer.self_attn, f"model.layers.{number}"
            projections = [getattr(attention, name) for name in PACKED]
            packed = torch.nn.Parameter(torch.cat([p.weight for p in projections]), requires_grad=False)
            rows = [p.weight.shape[0] for p in projections]
            for projection, part in zip(projections, packed.data.split(rows), strict=True):
                projection.weight.data = part
            self.packed[f"{stem}.attn.qkv_proj.{middle}weight"] = packed
            self.packed[f"{stem}.attn.o_proj.{middle}weight"] = attention.o_proj.weight
            for name in (*PACKED, "o_proj"):
                getattr(attention, name).register_forward_hook(self._adapt(f"{stem}.self_attn.{name}"))
            layer.mlp.experts.register_forward_pre_hook(self._adapt_experts(f"{stem}.mlp.experts"))

    def _adapt(self, module: str):
        def hook(_, inputs, output):
            if module not in self.active or self.ignore_adapter:
                return None
            a, b = self.active[module]
            return output + inputs[0] @ a.T @ b.T

        return hook

    def _adapt_experts(self, module: str):
        """Reads PEFT's format, gate_up under `base_layer`, as vLLM's `_stack_moe_lora_weights` does."""

        def hook(experts, inputs):
            experts.adapters = {}
            # As in `_match_target_modules` there, modules outside the list are silently left out.
            if module in self.active and "experts" in self.lora_target_modules and not self.ignore_adapter:
                for name, key in (("gate_up_proj", f"{module}.base_layer"), ("down_proj", module)):
                    a, b = self.active[key]
                    count = experts.num_experts
                    a, b = a.reshape(count, -1, a.shape[-1]), b.reshape(len(b), -1, count).permute(2, 0, 1)
                    experts.adapters[name] = a.transpose(1, 2).contiguous(), b.transpose(1, 2).contiguous()

        return hook

    def _called(self, name: str, awake: bool = True) -> None:
        self.calls.append(name)
        number, error = self.fail.get(name, (0, None))
        if error is not None and self.calls.count(name) == number:
            raise error
        if awake and self.asleep:
            raise RuntimeError(f"{name} on a sleeping engine")

    def sleep(self, level: int = 1) -> None:
        self._called("sleep")
        self.asleep = True
        self.prefix_cache.clear()

    def wake_up(self) -> None:
        self._called("wake_up", awake=False)
        self.asleep = False

    def apply_model(self, function: Any) -> list[Any]:
        self._called("apply_model")
        if self.ignore_adapter or (self.keeps_first_adapter and self.calls.count("apply_model") > 1):
            return [None]
        return [function(SimpleNamespace(named_parameters=self.packed.items))]

    def reset_prefix_cache(self) -> bool:
        self._called("reset_prefix_cache")
        self.prefix_cache.clear()
        return True

    def add_lora(self, request: StubLoRARequest) -> bool:
        self._called("add_lora")
        if not self.enable_lora:
            raise RuntimeError("LoRA is not enabled")
        if self.keeps_first_adapter and self.loaded:
            self.loaded[request.lora_int_id] = next(iter(self.loaded.values()))
        elif request.lora_int_id not in self.loaded:  # vLLM never reads an id twice.
            self.loaded = {request.lora_int_id: self._load(Path(request.lora_path))}
        return True

    def _load(self, folder: Path) -> dict[str, tuple[Any, Any]]:
        config = read_json(folder / "adapter_config.json")
        tensors = load_file(folder / "adapter_model.safetensors")
        adapter, dtype = {}, self.model.dtype
        for name in (name for name in tensors if "lora_A" in name):
            module, a, b = name.partition(".lora_")[0], tensors[name], tensors[name.replace("lora_A", "lora_B")]
            module = module.removeprefix("base_model.model.")
            owner = self.model.get_submodule(module.removesuffix(".base_layer"))  # AttributeError without such a module
            assert a.shape[0] == b.shape[1] == config["r"] * getattr(owner, "num_experts", 1)
            adapter[module] = a.to(dtype), (b * (config["lora_alpha"] / config["r"])).to(dtype)
        return adapter

    def generate(self, prompts: Sequence[Any], sampling_params: Any, use_tqdm: Any = True, lora_request: Any = None):
        self._called("generate")
        self.requests.append(lora_request)
        self.active = {}
        if lora_request is not None:
            if lora_request.lora_int_id not in self.loaded:
                self.add_lora(lora_request)
            self.active = self.loaded[lora_request.lora_int_id]
        name = lora_request.lora_name if lora_request else None
        weights = (id(self.active) if lora_request else 0, *(float(p.double().sum()) for p in self.packed.values()))
        if self.prefix_cache.setdefault(name, weights) != weights:
            raise RuntimeError(f"the prefix cache of {name} was filled with other weights")
        rows = [list(prompt["prompt_token_ids"]) for prompt in prompts]
        with torch.no_grad():
            is_scored = sampling_params.prompt_logprobs is not None
            return [self._score(row) for row in rows] if is_scored else self._sample(rows, sampling_params)

    def enqueue(self, prompts: Sequence[Any], sampling_params: Any, lora_request: Any = None, use_tqdm: Any = True):
        """As in vLLM, the id that it returns has random characters behind the one that outputs have."""
        self._called("enqueue")
        new = [(str(next(self.numbers)), prompt, sampling_params, lora_request) for prompt in prompts]
        self.queue += new
        return [f"{number}-5f3a" for number, *_ in new]

    def step(self) -> list[Any]:
        """A step finishes the request that came last, so that others overtake it, and reports another as unfinished."""
        if not self.queue:
            return []
        number, prompt, parameters, request = self.queue.pop()
        (output,) = self.generate([prompt], parameters, lora_request=request)
        unfinished = [SimpleNamespace(request_id=other, finished=False) for other, *_ in self.queue[:1]]
        return [*unfinished, SimpleNamespace(request_id=number, finished=True, outputs=output.outputs)]

    def _report(self, values: torch.Tensor) -> list[float]:
        return (values.float() + self.shift).tolist()

    def _score(self, row: list[int]) -> Any:
        ids = torch.tensor([row])
        logits = self.model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        values = self._report(logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0])
        positions = [{token: SimpleNamespace(logprob=v)} for token, v in zip(row[1:], values, strict=True)]
        return SimpleNamespace(prompt_logprobs=[None, *positions], outputs=[SimpleNamespace(token_ids=[0])])

    def _sample(self, rows: Sequence[list[int]], sampling: StubSampling) -> list[Any]:
        """All rows in one batch, padded on the left, by transformers' generate."""
        longest = max(map(len, rows))
        stops = [*sampling.stop_token_ids]
        if not sampling.ignore_eos:  # vLLM takes the one of the checkpoint's config besides.
            stops.append(self.model.config.eos_token_id)
        options = {"do_sample": False}
        if sampling.temperature:
            options = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        output = self.model.generate(
            torch.tensor([[0] * (longest - len(row)) + row for row in rows]),
            attention_mask=torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows]),
            max_new_tokens=sampling.max_tokens,
            eos_token_id=stops or [-1],
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
        tokens = output.sequences[:, longest:]
        logps = torch.stack(output.scores, 1).log_softmax(-1).gather(2, tokens[..., None])[..., 0]
        outputs = []
        for ids, values in zip(tokens.tolist(), self._report(logps), strict=True):
            end = next((n for n, token in enumerate(ids, 1) if token in stops), len(ids))
            logprobs = self._logprobs(values[:end]) if sampling.logprobs is not None else None
            completion = SimpleNamespace(token_ids=ids[:end], logprobs=logprobs)
            outputs.append(SimpleNamespace(prompt_logprobs=None, outputs=[completion]))
        return outputs

    def _logprobs(self, values: list[float]) -> Any:
        return SimpleNamespace(logprobs=values)  # vLLM's form with flat_logprobs


def pretend_vllm(patch, start_engine) -> None:
    """A machine with an H100 and vLLM, for the checks and the model of a run whose engine `start_engine` makes."""
    versions = installed_versions
    patch.setattr("grpo.preflight.resolve.installed_versions", lambda names: versions(names) | {"vllm": "0.26.0"})
    patch.setattr("grpo.preflight.resolve.read_machine", lambda: H100)
    patch.setattr("grpo.model.load.unseen_gpu", lambda machine: None)
    patch.setattr("grpo.rollout.engine.start_engine", start_engine)


def stub_engine(settings, plan, model_path, stop_token_ids, policy=None, prepare=lambda stub: None) -> Engine:
    """Takes the place of `start_engine`: a sleeping stub with the arguments that vLLM would get."""
    arguments = engine_arguments(settings, plan, model_path, 79.6)
    names = {"enable_lora", "lora_target_modules"} & set(arguments)
    # In float32, as the trainer on a CPU: in so narrow a model BF16 is further away than the mismatch check accepts.
    stub = StubLLM(model_path, dtype=torch.float32, **{name: arguments[name] for name in names})
    prepare(stub)
    engine = Engine(stub, StubSampling, StubLoRARequest, settings, stop_token_ids)
    engine.sleep()
    return engine
