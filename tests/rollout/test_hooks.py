# SPDX-License-Identifier: Apache-2.0
"""What this project relies on in vLLM, looked up in the source that tests/vllm_source.py has fetched, which is read and
never imported."""

import ast
import functools
import inspect
import json
import re
import shlex
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from ask import parse_args
from interpreter import cached_source
from machines import H100
from stub_vllm import SYNCS
from transformers import GptOssConfig, modeling_rope_utils
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from grpo.common import ROOT
from grpo.evaluate.ask import serve_commands
from grpo.model.experts import GATE_ALPHA, GATE_LIMIT
from grpo.plan.engine_memory import LORA_RANKS
from grpo.plan.hub import REAL_CONFIG
from grpo.plan.memory import PlanInputs, plan_memory
from grpo.plan.vllm_model import FIXED_VALUES, ROPE_READ, VLLM_ROPE, VLLM_VALUES
from grpo.preflight.choices import VLLM_COLDEST
from grpo.rollout.engine import Engine, engine_arguments
from grpo.rollout.vllm_patches import VLLM_SWITCHES
from grpo.settings.table import Settings


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def defines(node: ast.AST, name: str) -> bool:
    """Whether a statement defines a class, a function or a variable of that name."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        return node.name == name
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


def fields(node: ast.ClassDef) -> list[str]:
    """Annotated variables of a class: those of a dataclass or struct, in order."""
    return [part.target.id for part in node.body if isinstance(part, ast.AnnAssign)]


@pytest.fixture(scope="module")
def folder() -> Path:
    """vLLM's package."""
    return cached_source()


@pytest.fixture(scope="module")
def find(folder: Path) -> Callable[[str], ast.AST]:
    """A function that finds the definition at a place, as `entrypoints/llm.py:LLM.sleep`."""

    def search(place: str) -> ast.AST:
        path, _, names = place.partition(":")
        node: ast.AST = parsed(folder / path)
        for name in names.split("."):
            node = next((part for part in ast.walk(node) if defines(part, name)), None)
            assert node, f"vLLM has no {place}"
        return node

    return search


def test_vllm_has_every_name_that_is_imported(folder):
    nodes = [node for path in (ROOT / "grpo").rglob("*.py") for node in ast.walk(parsed(path))]
    imports = [n for n in nodes if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("vllm")]
    assert {"vllm", "vllm.device_allocator.cumem"} <= {node.module for node in imports}
    for node in imports:
        path = folder.joinpath(*node.module.split(".")[1:])
        text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
        assert all(re.search(rf"\b{alias.name}\b", text) for alias in node.names), ast.unparse(node)


@pytest.mark.parametrize("sync", SYNCS)
def test_vllm_takes_the_engine_arguments(find, sync):
    """`LLM` passes what it does not name itself on to EngineArgs."""
    settings = Settings(ROLLOUT_SYNC=sync)
    plan = plan_memory(settings, PlanInputs(REAL_CONFIG, H100, 930, "eager", beside_vllm=True)).engine
    arguments = engine_arguments(settings, plan, "/model", H100.gpu_total, pin_experts=True)
    init = find("entrypoints/llm.py:LLM.__init__")
    named = {argument.arg for argument in (*init.args.args, *init.args.kwonlyargs)}
    call = next(n for n in ast.walk(init) if isinstance(n, ast.Call) and ast.unparse(n.func) == "EngineArgs")
    assert None in {keyword.arg for keyword in call.keywords}, "LLM passes no **kwargs on"
    passed_on = set(fields(find("engine/arg_utils.py:EngineArgs"))) - {keyword.arg for keyword in call.keywords}
    assert not set(arguments) - named - passed_on
    compilation = arguments["compilation_config"]
    assert not set(compilation) - set(fields(find("config/compilation.py:CompilationConfig")))
    find(f"config/compilation.py:CUDAGraphMode.{compilation['cudagraph_mode']}")
    assert repr(arguments["logprobs_mode"]) in ast.unparse(find("config/model.py:LogprobsMode"))


def test_vllm_has_the_limits_that_preflight_holds(find):
    assert ast.literal_eval(find("config/lora.py:MaxLoRARanks").value.slice) == LORA_RANKS
    assert ast.literal_eval(find("sampling_params.py:_MAX_TEMP").value) == VLLM_COLDEST


def read_attributes(owner: ast.AST, *names: str) -> set[str]:
    """The attributes of variables called `names` that some source reads."""
    nodes = [node for node in ast.walk(owner) if isinstance(node, ast.Attribute)]
    return {node.attr for node in nodes if ast.unparse(node.value) in names}


# Fields of GptOssConfig that change no log-prob: they are for training from scratch, generation and saving.
WITHOUT_EFFECT = {
    "initializer_range", "router_aux_loss_coef", "output_router_logits", "use_cache", "pad_token_id", "bos_token_id",
    "eos_token_id",
}  # fmt: skip


def test_every_field_of_the_config_is_read_by_vllm_or_held_by_the_preflight(find):
    """A field of transformers' GptOssConfig that vLLM does not read, and one that it begins to read, fail here."""
    model = find("model_executor/models/gpt_oss.py:GptOssForCausalLM")
    classes = [find(f"model_executor/models/gpt_oss.py:{name}") for name in ("OAIAttention", "MLPBlock")]
    classes += [find(f"model_executor/models/gpt_oss.py:{name}") for name in ("TransformerBlock", "GptOssModel")]
    read = set().union(*(read_attributes(part, "config", "self.config") for part in (*classes, model)))
    # This is read to leave out the head's weights, and not to tie it.
    assert not re.search("tie_weights", ast.unparse(model)) and "tie_word_embeddings" in read
    fields_read = read & set(GptOssConfig.__annotations__) - {"tie_word_embeddings"}
    held = {*VLLM_VALUES, *FIXED_VALUES, "layer_types"}
    assert fields_read.isdisjoint(held) and not read & set(FIXED_VALUES)
    assert set(GptOssConfig.__annotations__) - WITHOUT_EFFECT - fields_read <= held | {"model_type"}
    default = GptOssConfig(num_hidden_layers=4, num_local_experts=2)
    assert {name: getattr(default, name) for name in VLLM_VALUES} == VLLM_VALUES
    assert default.hidden_act == FIXED_VALUES["hidden_act"]


def test_every_field_of_the_rotary_embedding_is_read_by_vllm_or_held_by_the_preflight(find):
    attention = ast.unparse(find("model_executor/models/gpt_oss.py:OAIAttention.__init__"))
    needed = set(re.findall(r"rope_parameters\['(\w+)'\]", attention))
    optional = set(re.findall(r"rope_parameters\.get\('(\w+)', True\)", attention))
    defaults = {"rope_theta", "original_max_position_embeddings"}  # transformers fills these in.
    assert needed == {*ROPE_READ, *defaults} and optional == {"truncate"}
    source = inspect.getsource(modeling_rope_utils._compute_yarn_parameters)
    known = set(re.findall(r"rope_parameters(?:_dict)?(?:\.get\(|\[)\"(\w+)\"", source))
    assert known == needed | optional | set(VLLM_ROPE) - {"rope_type"}


def test_the_learner_computes_the_fixed_values():
    source = inspect.getsource(GptOssExperts)
    alpha, limit = (FIXED_VALUES[name] for name in ("swiglu_alpha", "swiglu_limit"))
    assert f"self.alpha = {alpha}" in source and f"self.limit = {limit}" in source
    assert (alpha, limit) == (GATE_ALPHA, GATE_LIMIT)


def test_vllm_takes_the_commands_that_serve_an_adapter(folder, find, saved_adapter):
    """scripts/ask.py --serve: options, their values, and the fields of the request."""
    serve, curl = serve_commands(parse_args([str(saved_adapter), "--serve"])).replace("\\\n", "").split("\n\n")
    words = shlex.split(serve)
    assert words[:2] == ["vllm", "serve"] and "--enable-lora" in words and f"saved={saved_adapter.resolve()}" in words
    assert words[words.index("--max-lora-rank") + 1] == "8", "the least that vLLM takes for a rank of 3"
    known = set(re.findall(r"'(--[a-z-]+)'", ast.unparse(find("engine/arg_utils.py:EngineArgs"))))
    known |= {"--" + n.replace("_", "-") for n in fields(find("entrypoints/openai/cli_args.py:BaseFrontendArgs"))}
    assert {word for word in words if word.startswith("--")} <= known
    words = shlex.split(curl)
    body, api = json.loads(words[words.index("-d") + 1]), "entrypoints/openai/completion"
    assert set(body) <= set(fields(find(f"{api}/protocol.py:CompletionRequest")))
    assert body["model"] == "saved" and body["prompt"].endswith("<|start|>assistant")
    routes = (folder / api / "api_router.py").read_text(encoding="utf-8")
    assert f'"{words[1].removeprefix("http://localhost:8000")}"' in routes


def test_vllm_reads_the_variables_that_are_set_for_it(folder):
    read = {node.value for node in ast.walk(parsed(folder / "envs.py")) if isinstance(node, ast.Constant)}
    assert read >= {*VLLM_SWITCHES, "VLLM_ENABLE_V1_MULTIPROCESSING"}


def test_vllm_takes_the_calls_of_the_engine(find):
    """Every call that Engine makes, as it stands in its source."""
    places = {name: "entrypoints/llm.py:LLM" for name in ("generate", "enqueue", "apply_model", "sleep", "wake_up")}
    places |= {"reset_prefix_cache": "entrypoints/llm.py:LLM"}
    places |= {name: "v1/engine/llm_engine.py:LLMEngine" for name in ("add_lora", "step")}
    checked = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(Engine)))):
        if not isinstance(node, ast.Call):
            continue
        owner, _, name = ast.unparse(node.func).rpartition(".")
        keywords = [keyword.arg for keyword in node.keywords]
        if owner.startswith("self.llm"):
            method = find(f"{places[name]}.{name}").args
            names, first = [argument.arg for argument in method.args], 1 + len(node.args)  # with `self`
            needed = set(names[first : len(names) - len(method.defaults)])
            assert first <= len(names), name
            assert needed <= set(keywords) <= {*names[first:], *(a.arg for a in method.kwonlyargs)}, name
            checked.add(name)
        elif name == "sampling":
            assert not node.args and set(keywords) <= set(fields(find("sampling_params.py:SamplingParams")))
        elif name == "lora_request":
            assert len(node.args) == 3 and not keywords
    assert checked == set(places)
    assert fields(find("lora/request.py:LoRARequest"))[:3] == ["lora_name", "lora_int_id", "lora_path"]


BACKENDS, CUMEM = "device_allocator/sleep_mode_backend.py", "device_allocator/cumem.py"
GPT_OSS, WORKER = "model_executor/models/gpt_oss.py", "v1/worker/gpu_worker.py"
LAYERS, TRITON = "model_executor/layers", "third_party/triton_kernels"
RELIED_ON = {  # excerpts of a definition's source
    "inputs/llm.py:TokensPrompt": ["prompt_token_ids:"],
    "outputs.py:CompletionOutput": ["token_ids:", "logprobs:"],
    "outputs.py:RequestOutput": ["self.outputs", "self.prompt_logprobs"],
    "logprobs.py:FlatLogprobs": ["logprobs:"],
    "logprobs.py:Logprob": ["logprob:"],
    # Sleeping: the backend that is made at the first sleep, and what the allocator knows of each block.
    "v1/engine/llm_engine.py:LLMEngine": ["self.vllm_config"],
    "config/model.py:ModelConfig": ["sleep_mode_backend:"],
    "config/vllm.py:VllmConfig": ["model_config:"],
    f"{BACKENDS}:SleepModeBackend": ["self._state"],
    f"{BACKENDS}:CuMemBackend": ["def suspend(self, level:", "def resume(self, tags:", ".wake_up(tags)"],
    f"{BACKENDS}:SleepModeBackendFactory.register_backend": ["name: str, module_path: str, class_name: str"],
    f"{BACKENDS}:SleepModeBackendFactory.create_backend": ["model_config.sleep_mode_backend"],
    f"{WORKER}:Worker._get_sleep_mode_backend": ["is None", "create_backend("],
    f"{WORKER}:Worker.sleep": ["_get_sleep_mode_backend().suspend(level)"],
    f"{WORKER}:Worker.wake_up": ["_get_sleep_mode_backend().resume(tags)"],
    f"{WORKER}:Worker.load_model": ["tag='weights'"],
    "device_allocator/__init__.py:AllocationData": ["handle:", "tag:", "cpu_backup_tensor:", "is_asleep:"],
    "device_allocator/__init__.py:get_mem_allocator_instance": ["get_mem_allocator_instance()"],
    f"{CUMEM}:CuMemAllocator": ["self.pointer_to_data", "size_in_bytes = handle[1]"],
    f"{CUMEM}:CuMemAllocator.wake_up": [  # Mapped already or not, and whatever has a backup comes back.
        "if tags is None or data.tag in tags:", "create_and_map(handle)", "data.cpu_backup_tensor = None",
    ],
    f"{CUMEM}:CuMemAllocator.use_memory_pool": [  # The variable and the spelling that `vllm_environment` sets.
        "os.environ.get('PYTORCH_CUDA_ALLOC_CONF', '')", "'expandable_segments:True' in conf",
        "_set_allocator_settings('expandable_segments:False')", "_set_allocator_settings('expandable_segments:True')",
    ],
    f"{CUMEM}:unmap_and_release": ["(allocation_handle:"],
    "distributed/device_communicators/cuda_wrapper.py:CudaRTLibrary.cudaMemcpy": ["(self, dst:", "src:", "count:"],
    # Pushed weights: model.layers.N.attn.qkv_proj.weight, attn.o_proj.weight; with LoRA, base_layer in between.
    f"{GPT_OSS}:OAIAttention": [
        "self.qkv_proj = QKVParallelLinear(", "self.o_proj =", "bias=True", "'rope_type': 'yarn'",
    ],
    # What vLLM computes whatever config.json says (grpo/plan/vllm_model.py).
    f"{GPT_OSS}:OAIAttention._build_attention": [
        "sliding_window = config.sliding_window if self.layer_idx % 2 == 0 else None", "cache_config=cache_config",
    ],
    f"{GPT_OSS}:TransformerBlock": [
        "self.input_layernorm = RMSNorm(config.hidden_size, eps=1e-05)",
        "self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=1e-05)",
    ],
    "transformers_utils/config.py:is_interleaved": ["return len(set(layer_types)) > 1"],
    "engine/arg_utils.py:EngineArgs.create_engine_config": [
        "if not is_interleaved(model_config.hf_text_config):", "sliding_window = model_config.get_sliding_window()",
    ],
    f"{LAYERS}/attention/attention.py:Attention.__init__": ["sliding_window = cache_config.sliding_window"],
    f"{LAYERS}/activation.py:SwigluOAIAndMul.__init__": ["alpha: float=1.702, limit: float=7.0"],
    f"{LAYERS}/quantization/mxfp4.py:GptOssMxfp4MoEMethod": ["gemm1_alpha=1.702", "swiglu_limit=7.0"],
    f"{LAYERS}/fused_moe/experts/gpt_oss_triton_kernels_moe.py:triton_kernel_fused_experts": [
        "swiglu_alpha: float=1.702", "swiglu_limit: float=7.0",
    ],
    "lora/layers/base_linear.py:BaseLinearLayerWithLoRA": ["self.base_layer ="],
    f"{GPT_OSS}:GptOssForCausalLM.packed_modules_mapping": ["{'qkv_proj': ['q_proj', 'k_proj', 'v_proj']}"],
    f"{GPT_OSS}:GptOssForCausalLM.hf_to_vllm_mapper": ["'.self_attn.': '.attn.'"],
    # Lent weights: model.layers.N.mlp.experts.routed_experts.w13_weight and ...quant_method.w13_precision_config;
    # model.embedding.weight and lm_head.weight.
    f"{GPT_OSS}:GptOssModel": [
        "self.norm = RMSNorm(self.config.hidden_size, eps=1e-05)",
        "self.layers =", "self.embedding = VocabParallelEmbedding(",
    ],
    f"{GPT_OSS}:GptOssForCausalLM": ["self.model =", "self.lm_head = ParallelLMHead("],
    f"{GPT_OSS}:MLPBlock": ["self.experts = FusedMoE(", "activation='swigluoai'", "renormalize=True"],
    f"{LAYERS}/fused_moe/runner/moe_runner.py:MoERunner": ["self.routed_experts = routed_experts"],
    f"{LAYERS}/quantization/mxfp4.py:GptOssMxfp4MoEMethod._setup_kernel": [
        "layer.w13_weight = w13", "self.w13_precision_config = w13_scale",
        "layer.w2_weight = w2", "self.w2_precision_config = w2_scale",
    ],
    f"{LAYERS}/quantization/utils/mxfp4_utils.py:_swizzle_mxfp4": ["num_warps=8", "(mx_axis=1)", "pad_k = -K % 4"],
    f"{TRITON}/matmul_ogs.py:PrecisionConfig": ["weight_scale:"],
    f"{TRITON}/tensor.py:Tensor": ["storage:"],
    f"{TRITON}/tensor.py:Storage": ["data:", "layout:"],
    f"{TRITON}/tensor_details/layout_details/hopper_value.py:HopperMXValueLayout": [
        "self.mx_axis = mx_axis", "batch = data.ndim - 2", "return data.mT",
    ],
    # The kernels that are recorded, and pinned by moe_backend: model.layers.N.attn.attn is the attention.
    "config/kernel.py:MoEBackend": ["'triton'"],
    f"{LAYERS}/quantization/mxfp4.py:GptOssMxfp4MoEMethod.__init__": ["self.mxfp4_backend, self.experts_cls ="],
    f"{LAYERS}/attention/attention.py:Attention": ["self.attn_backend =", "self.impl ="],
    "v1/attention/backends/flash_attn.py:FlashAttentionImpl": ["self.vllm_flash_attn_version ="],
    # Logits in float32 from BF16 operands: hf_overrides={"head_dtype": "float32"}.
    "config/model.py:ModelConfig.head_dtype": ["config=self.hf_config"],
    "config/model.py:_get_head_dtype": ["getattr(config, 'head_dtype', None)", "_STR_DTYPE_TO_TORCH_DTYPE[head_dtype]"],
    f"{LAYERS}/logits_processor.py:LogitsProcessor.__init__": ["self.head_dtype = model_config.head_dtype"],
    f"{LAYERS}/logits_processor.py:LogitsProcessor._apply_head": [
        "torch.mm(flat, lm_head.weight.t(), out_dtype=self.head_dtype)",
    ],
    f"{LAYERS}/logits_processor.py:LogitsProcessor._get_logits": ["self._apply_head("],
    f"{GPT_OSS}:GptOssForCausalLM.compute_logits": ["self.logits_processor(self.lm_head,"],
    # Patched kernels. In a newer triton_kernels the strides are no constants, and `compile_router_once` can go.
    f"{TRITON}/topk.py:topk_forward": ["_topk_forward["],
    f"{TRITON}/topk_details/_topk_forward.py:_topk_forward": ["stride_rn: tl.constexpr"],
    f"{TRITON}/reduction_details/reduce_bitmatrix.py:sum_bitmatrix_rows": ["_sum_bitmatrix_rows["],
    f"{TRITON}/reduction_details/reduce_bitmatrix.py:_sum_bitmatrix_rows": ["stride_bn: tl.constexpr"],
    f"{TRITON}/matmul_ogs.py:matmul_ogs": ["= make_opt_flags(", "**opt_flags.target_kernel_kwargs"],
    f"{TRITON}/matmul_ogs_details/opt_flags.py:OptFlags": [
        "@dataclass", "block_m:", "group_m:", "target_kernel_kwargs:",
    ],
}  # fmt: skip


@pytest.mark.parametrize("place", RELIED_ON)
def test_vllm_has_what_is_relied_on(find, place):
    text = ast.unparse(find(place))
    assert [excerpt for excerpt in RELIED_ON[place] if excerpt not in text] == []
