# SPDX-License-Identifier: Apache-2.0
"""Loads the model, in BF16 or with MXFP4 experts, adapters and the tokenizer."""

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from grpo.common import format_exception, log
from grpo.model.attention import install_attention, unwrap_peft
from grpo.model.experts import EXPERTS_IMPLEMENTATION, QuantizedExperts, expert_weights, quantized_experts
from grpo.model.head import install_float32_head
from grpo.model.long_layers import chunk_layers
from grpo.phases import FILE_ONLY, Phase
from grpo.plan.hub import count_parameters, has_mxfp4
from grpo.plan.machine import GIB, Machine
from grpo.plan.memory import StepPlan
from grpo.plan.tensors import weight_files
from grpo.process.ending import UnloadableModel
from grpo.settings.table import Settings

MOST_ON_ONE_THREAD = 1_000_000  # parameters of a model that one thread computes fastest; `tiny` has 0.3 million
LARGEST_WEIGHT = 1e6  # limit for an adapter's weights; training keeps them far below 10
# Embeddings and output head, the weights whose rows are tokens. vLLM can lend them to the trainer, like the experts.
VOCAB_WEIGHTS = ("model.embed_tokens.weight", "lm_head.weight")


def vocab_weights(model: torch.nn.Module) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
    """(embeddings, output head) of a model with or without PEFT's wrapper."""
    embeddings, head = (unwrap_peft(model).get_parameter(name) for name in VOCAB_WEIGHTS)
    return embeddings, head


def paged_tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The tensors that EXPERTS=paged moves: packed experts, embeddings and output head. Attention stays, because the
    weight sync reads it."""
    for module in quantized_experts(model):
        yield from module.buffers(recurse=False)
    yield from dict.fromkeys(vocab_weights(model))  # dict.fromkeys yields them once if they are tied


# torch's allocator frees only whole segments. Requests of OWN_SEGMENT bytes and more get a segment, whose size is a
# multiple of SEGMENT_STEP; others may use a remainder above 1 MiB (c10/cuda/CUDACachingAllocator.cpp, should_split).
OWN_SEGMENT, SEGMENT_STEP = 10 * 2**20, 2 * 2**20


def copy_to_own_segment(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on `device` that is alone in its segment of torch's allocator: any small tensor in the segment of a
    layer's experts would keep all of their memory from being freed."""
    size = max(OWN_SEGMENT, -(-tensor.nbytes // SEGMENT_STEP) * SEGMENT_STEP)
    segment = torch.empty(size, dtype=torch.uint8, device=device)[: tensor.nbytes]
    return segment.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)


def load_checkpoint(model_path: str, attention: str, device: str, packed: bool = True) -> PreTrainedModel:
    """The model of a checkpoint, frozen and in BF16. QuantizedExperts hold MXFP4 experts as they are stored, because
    transformers' own MXFP4 kernels have no backward pass. If not `packed`, vLLM is to lend experts, embeddings and
    head: until then the experts have no weights, and embeddings and head are a single NaN, expanded.

    Raises ValueError if the checkpoint's tensors do not match the model: `from_pretrained` warns of missing ones, fills
    them with random numbers and goes on."""
    config = AutoConfig.from_pretrained(model_path)
    is_quantized = has_mxfp4(config.to_dict())
    if is_quantized:
        del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
        for layer in model.model.layers if is_quantized else ():
            layer.mlp.experts = QuantizedExperts(config, packed)
    expected, tensors = model.state_dict(), {}
    lent: tuple[str, ...] = () if packed else ("_blocks", "_scales", *VOCAB_WEIGHTS)
    for name in VOCAB_WEIGHTS if lent else ():
        nan = torch.full((), math.nan, dtype=expected[name].dtype, device=device)
        tensors[name] = nan.expand(expected[name].shape)
    for shard in (Path(model_path) / name for name in weight_files(Path(model_path))):
        try:
            with safe_open(shard, "pt", device=device) as file:
                names = (name for name in file.keys() if not name.endswith(lent))  # noqa: SIM118
                loaded = {name: file.get_tensor(name) for name in names}
        except (SafetensorError, FileNotFoundError) as error:
            raise ValueError(f"{shard}: {error}. Download the model again") from error
        tensors |= {name: tensor.to(expected.get(name, tensor).dtype) for name, tensor in loaded.items()}
    embeddings, head = VOCAB_WEIGHTS
    if config.tie_word_embeddings and embeddings in tensors:  # Such a checkpoint need not hold the head.
        tensors.setdefault(head, tensors[embeddings])
    try:
        model.load_state_dict(tensors, assign=True)
    except RuntimeError as error:  # It names every missing, unexpected or misshapen tensor.
        raise ValueError(f"{model_path}: {' '.join(str(error).split())[:500]} ... Download the model again") from error
    if config.tie_word_embeddings:
        model.tie_weights()  # `assign` made two parameters of one.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(device)
    model.generation_config = load_generation_config(model_path)
    return model.eval().requires_grad_(False)


def load_generation_config(model_path: str) -> GenerationConfig:
    """The stop tokens of the checkpoint's generation_config.json, or without it of config.json, and nothing else of it,
    such as a penalty for repetitions: as with vLLM, completions are drawn from the probabilities that are learned."""
    try:
        config = GenerationConfig.from_pretrained(model_path)
    except OSError:
        config = GenerationConfig.from_model_config(AutoConfig.from_pretrained(model_path))
    return GenerationConfig(eos_token_id=config.eos_token_id)


def stop_tokens(config: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of the tokens that end a completion, in training and evaluation: those of the generation config and the
    tokenizer's own, by TRL's rule."""
    eos = config.eos_token_id
    ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    return ids if tokenizer.eos_token_id in ids else [tokenizer.eos_token_id, *ids]


def dequantize_experts(model: PreTrainedModel) -> None:
    """Dequantize the experts of `load_checkpoint` to BF16, layer by layer, into transformers' own GptOssExperts.

    The values equal those of `Mxfp4Config(dequantize=True)`, which however fragments torch's allocator: some 8 GiB of
    an H100 would be unavailable to vLLM as long as the trainer exists. On a GPU the weights are transposed views."""
    for layer in model.model.layers:
        quantized = layer.mlp.experts
        with torch.device("meta"):
            wide = GptOssExperts(model.config)
        for name in ("gate_up_proj", "down_proj"):
            setattr(wide, name, torch.nn.Parameter(expert_weights(quantized, name), requires_grad=False))
            setattr(wide, f"{name}_bias", getattr(quantized, f"{name}_bias"))
        layer.mlp.experts = wide.eval()
        del quantized
        torch.cuda.empty_cache()


def choose_threads(parameters: int, cores: int, load: float) -> tuple[int, str]:
    """(threads of torch for a model of this size, reason). `load`: processes that run on the `cores` already."""
    if parameters <= MOST_ON_ONE_THREAD:
        return 1, "its operations are too short to be split"
    if (busy := round(load)) > 0 and cores > 1:
        # All threads wait at the end of each operation, for ever longer where one of them has no core: with two
        # threads on two busy cores SmolLM2 takes twice as long as with one.
        return max(1, cores - busy), f"of {cores} cores {busy} are busy"
    return cores, "all cores"


def load_model(model_path: str, config: Mapping[str, Any], attention: str, experts: str = "bf16") -> PreTrainedModel:
    """The base model in BF16 on the GPU, or on the CPU where there is none, with this project's attention and experts.

    With `experts` = `bf16` MXFP4 experts are dequantized, with `mxfp4` and `paged` they stay quantized, and with
    `shared` neither they nor embeddings and head are loaded, because vLLM lends its own."""
    name, device = install_attention(attention), "cuda:0" if torch.cuda.is_available() else "cpu"
    if not torch.cuda.is_available() and not os.environ.get("OMP_NUM_THREADS"):
        threads, reason = choose_threads(count_parameters(config)["total"], torch.get_num_threads(), os.getloadavg()[0])
        torch.set_num_threads(threads)
        log.info("threads of the CPU: %d, %s", threads, reason)
    model = load_checkpoint(model_path, name, device, packed=experts != "shared")
    if quantized_experts(model):
        if experts == "paged":  # Done before the adapter is allocated, which would take the rest of their segments.
            for tensor in paged_tensors(model):
                tensor.data = copy_to_own_segment(tensor.data, tensor.device)
                torch.cuda.empty_cache()  # Each time, or a smaller tensor would get a part of the freed segment.
        if experts != "bf16":
            return model
        dequantize_experts(model)
    model.set_experts_implementation(EXPERTS_IMPLEMENTATION)
    return model


def in_compute_dtype(model: PreTrainedModel) -> PreTrainedModel:
    """A BF16 model, of which on a GPU only the logits become float32; on a CPU it is cast in place to float32 with the
    same values, because many CPUs only emulate BF16, which is several times slower."""
    if model.device.type == "cpu":
        return model.float()
    install_float32_head(model)
    return model


def load_base(
    settings: Settings, model_path: str, config: Mapping[str, Any], attention: str, plan: StepPlan
) -> PreTrainedModel:
    """The base model to train an adapter on, which computes in the parts and chunks of the `plan`. PEFT writes its
    `name_or_path` into adapter_config.json."""
    model = in_compute_dtype(load_model(model_path, config, attention, settings.EXPERTS or "bf16"))
    model.name_or_path = model_path if settings.MODEL_ID == "tiny" else settings.MODEL_ID
    for module in quantized_experts(model):
        module.parts = plan.expert_parts
        module.dequantize_again = plan.expert_parts > 1 or settings.GRADIENT_CHECKPOINTING is False
    if plan.layer_chunk:
        chunk_layers(model, plan.layer_chunk, on_host=plan.checkpoints > 0)
    return model


def load_to_train(
    settings: Settings, model_path: str, config: Mapping[str, Any], attention: str, plan: StepPlan
) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """The tokenizer and `load_base` for a run. Raises UnloadableModel, whose message is one line; the traceback goes to
    training.log."""
    try:
        with Phase("loading the model") as phase:
            tokenizer = load_tokenizer(model_path)
            model = load_base(settings, model_path, config, attention, plan)
            phase.result = f"{model.num_parameters() / 1e6:.2f}M parameters on {model.device}"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # The libraries raise many types for damage that the preflight cannot see.
        log.info("the model cannot be loaded", exc_info=error, extra=FILE_ONLY)
        raise UnloadableModel(str(error) if isinstance(error, ValueError) else format_exception(error)) from error
    return tokenizer, model


def load_adapter(policy: PeftModel, folder: str | Path) -> None:
    """Replace the weights of the policy's adapter by those in `folder`, which has the same rank and targets, and
    continue training from them. Raises UnloadableModel if a weight is not finite, or LARGEST_WEIGHT and more."""
    policy.load_adapter(str(folder), "default", is_trainable=True)
    for name, parameter in policy.named_parameters():
        if parameter.requires_grad and not parameter.detach().abs().max() < LARGEST_WEIGHT:  # Also true of NaN.
            fault = f"its weight {name} is not finite, or {LARGEST_WEIGHT:.0e} and more"
            raise UnloadableModel(f"INIT_ADAPTER={folder}: {fault}. Name another adapter (a run's best/, a checkpoint)")


def load_tokenizer(model_path: str) -> PreTrainedTokenizerBase:
    """The model's tokenizer, padding on the left for generation. Raises ValueError for one without a stop token."""
    tokenizer = AutoTokenizer.from_pretrained(model_path, padding_side="left")
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{model_path}: tokenizer_config.json names no stop token (eos_token)")
    return tokenizer


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Put `model` into evaluation mode, without dropout, inside the block."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def unseen_gpu(machine: Machine) -> str | None:
    """Why torch cannot use the machine's GPU as it is planned; None if it can or if there is no GPU. nvidia-smi tells
    the memory of a whole one where torch has a part of it (MIG)."""
    if not machine.gpus:
        return None
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory / GIB
        if total > 0.95 * machine.gpu_free:  # The two count what the driver keeps differently.
            return None
        fault = f"torch finds {total:.1f} GiB where {machine.gpu_memory_text}, as on a part of a GPU (MIG)"
        return f"GPU {machine.gpu}: {fault}. Set GPU_MEM_LIMIT={max(1, int(total))}, which plans the run for that"
    problem = f"{machine.gpu} is there, but torch {torch.__version__} does not see it"
    remedy = "Older drivers need a library on LD_LIBRARY_PATH (docs/install.md#older-drivers)"
    return f"torch: {problem}. It needs driver 580 and a build for CUDA: bash scripts/setup.sh. {remedy}"
