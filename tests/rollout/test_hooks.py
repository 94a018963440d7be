# SPDX-License-Identifier: Apache-2.0
"""Every name that train_grpo.py relies on in vLLM, looked up in the source of the installed vLLM or of the one that
tests/vllm_source.py has fetched. The source is read and never imported."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import inspect
import json
import os
import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import vllm_source
from ask import parse_args
from machines import H100
from stub_vllm import SYNCS

from grpo.evaluate.ask import serve_commands
from grpo.plan.hub import REAL_CONFIG
from grpo.plan.memory import LORA_RANKS, Shapes, plan_memory
from grpo.preflight.choices import VLLM_COLDEST
from grpo.rollout.engine import Engine, engine_arguments
from grpo.rollout.vllm_patches import VLLM_SWITCHES, compile_router_once, vllm_environment
from grpo.settings import ROOT, Settings


def top_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module or class, those under `if` and `try` included, not those of functions and classes."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            handlers = [statement for handler in getattr(node, "handlers", ()) for statement in handler.body]
            yield from top_level([*node.body, *handlers, *node.orelse])


def names_of(node: ast.stmt) -> list[str]:
    """The names that a statement defines: a class, a function, or variables."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


class Definition(NamedTuple):
    """A class, function or variable: the module that it stands in, and its syntax tree."""

    module: str
    node: ast.stmt

    @property
    def text(self) -> str:
        return ast.unparse(self.node)

    @property
    def fields(self) -> list[str]:
        """Annotated variables of a class: those of a dataclass or struct, in order."""
        return [node.target.id for node in self.node.body if isinstance(node, ast.AnnAssign)]

    @property
    def signature(self) -> inspect.Signature:
        """A function's, every default None."""
        arguments = ast.parse(self.text).body[0].args
        arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
        arguments.kw_defaults = [default and ast.Constant(None) for default in arguments.kw_defaults]
        scope: dict[str, Any] = {}
        exec(f"from __future__ import annotations\ndef function({ast.unparse(arguments)}): ...", scope)
        return inspect.signature(scope["function"])


class Source:
    """The package in `root`, and its copy of triton_kernels under that name."""

    def __init__(self, root: Path):
        self.root = root

    def path(self, module: str) -> Path:
        package, _, rest = module.partition(".")
        base = self.root / "third_party" / package if package == "triton_kernels" else self.root
        stem = base.joinpath(*rest.split(".")) if rest else base
        path = stem / "__init__.py" if stem.is_dir() else stem.with_name(stem.name + ".py")
        assert path.is_file(), f"vLLM has no module {module}"
        return path

    def find(self, module: str, name: str) -> Definition:
        """The definition behind `from module import name`, or that of a member (`LLM.sleep`); imports and base classes
        are followed."""
        name, _, member = name.partition(".")
        path = self.path(module)
        for node in top_level(parsed(path).body):
            if name in names_of(node):
                return self.member(module, node, member) if member else Definition(module, node)
            for alias in node.names if isinstance(node, ast.ImportFrom) else ():
                if (alias.asname or alias.name) == name:
                    keep = module.split(".")
                    keep = keep[: len(keep) - node.level + (path.name == "__init__.py")] if node.level else []
                    target = ".".join([*keep, *filter(None, [node.module])])
                    return self.find(target, f"{alias.name}.{member}" if member else alias.name)
        raise AssertionError(f"{module} has no {name}")

    def member(self, module: str, owner: ast.stmt, name: str) -> Definition:
        for node in top_level(owner.body):
            if name in names_of(node):
                return Definition(module, node)
        for base in owner.bases:
            with contextlib.suppress(AssertionError):
                return self.find(module, f"{ast.unparse(base)}.{name}")
        raise AssertionError(f"{module}.{owner.name} has no {name}")


@pytest.fixture(scope="module")
def vllm() -> Source:
    spec = importlib.util.find_spec("vllm")  # of a package without dots: nothing is imported
    # scripts/test.sh has an environment of its own without vLLM; scripts/setup.sh puts the GPU's beside it.
    beside = (ROOT / ".venv").glob("lib/python3.*/site-packages/vllm")
    for folder in [*(spec.submodule_search_locations if spec else beside), vllm_source.cached_source()]:
        if Path(folder).is_dir():
            return Source(Path(folder))
    missing = "vLLM's source is neither installed nor in the cache: `python tests/vllm_source.py` gets it (290 MiB)"
    if os.environ.get("CI"):
        pytest.fail(missing)
    pytest.skip(missing)


ENGINE = ast.parse(textwrap.dedent(inspect.getsource(Engine)))


def engine_calls(prefix: str) -> dict[str, list[tuple[int, set[str]]]]:
    """The calls of Engine under `prefix`: name -> (number of positional arguments, names of the others) of each."""
    calls: dict[str, list[tuple[int, set[str]]]] = {}
    for node in ast.walk(ENGINE):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(prefix):
            form = len(node.args), {keyword.arg for keyword in node.keywords}
            calls.setdefault(ast.unparse(node.func), []).append(form)
    return calls


def test_vllm_has_every_name_that_is_imported(vllm):
    nodes = [node for path in (ROOT / "grpo").rglob("*.py") for node in ast.walk(parsed(path))]
    imports = [n for n in nodes if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("vllm")]
    names = {(n.module, alias.name) for n in imports for alias in n.names}
    assert {("vllm", "LLM"), ("vllm.device_allocator.cumem", "libcudart")} < names
    for module, name in names:
        vllm.find(module, name)


@pytest.mark.parametrize("sync", SYNCS)
def test_vllm_takes_the_engine_arguments(vllm, sync):
    """`LLM` passes what it does not name itself on to EngineArgs."""
    settings = Settings(ROLLOUT_SYNC=sync)
    plan = plan_memory(settings, Shapes(REAL_CONFIG, H100, 930, "eager", checkpoint=12.9)).engine
    arguments = engine_arguments(settings, plan, "/model", H100.gpu_total)
    init = vllm.find("vllm", "LLM.__init__")
    named = {name for name, p in init.signature.parameters.items() if p.kind != p.VAR_KEYWORD}
    call = next(n for n in ast.walk(init.node) if isinstance(n, ast.Call) and ast.unparse(n.func) == "EngineArgs")
    assert None in {keyword.arg for keyword in call.keywords}, "LLM passes no **kwargs on"
    passed_on = set(vllm.find("vllm", "EngineArgs").fields) - {keyword.arg for keyword in call.keywords}
    assert not set(arguments) - named - passed_on
    compilation = arguments["compilation_config"]
    assert not set(compilation) - set(vllm.find("vllm.config.compilation", "CompilationConfig").fields)
    vllm.find("vllm.config.compilation", f"CUDAGraphMode.{compilation['cudagraph_mode']}")
    assert repr(arguments["logprobs_mode"]) in vllm.find("vllm.config.model", "LogprobsMode").text


def test_vllm_has_the_limits_that_preflight_holds(vllm):
    assert ast.literal_eval(vllm.find("vllm.config.lora", "MaxLoRARanks").node.value.slice) == LORA_RANKS
    assert ast.literal_eval(vllm.find("vllm.sampling_params", "_MAX_TEMP").node.value) == VLLM_COLDEST


def test_vllm_takes_the_commands_that_serve_an_adapter(vllm, saved_adapter):
    """scripts/ask.py --serve: options, their values, and the fields of the request."""
    serve, curl = serve_commands(parse_args([str(saved_adapter), "--serve"])).replace("\\\n", "").split("\n\n")
    words = shlex.split(serve)
    assert words[:2] == ["vllm", "serve"] and "--enable-lora" in words and f"saved={saved_adapter.resolve()}" in words
    assert words[words.index("--max-lora-rank") + 1] == "8", "the least that vLLM takes for a rank of 3"
    known = set(re.findall(r"'(--[a-z-]+)'", vllm.find("vllm.engine.arg_utils", "EngineArgs").text))
    frontend = vllm.find("vllm.entrypoints.openai.cli_args", "BaseFrontendArgs").fields
    known |= {"--" + name.replace("_", "-") for name in frontend}
    assert {word for word in words if word.startswith("--")} <= known
    words = shlex.split(curl)
    body = json.loads(words[words.index("-d") + 1])
    assert set(body) <= set(vllm.find("vllm.entrypoints.openai.completion.protocol", "CompletionRequest").fields)
    assert body["model"] == "saved" and body["prompt"].endswith("<|start|>assistant")
    routes = vllm.path("vllm.entrypoints.openai.completion.api_router").read_text(encoding="utf-8")
    assert f'"{words[1].removeprefix("http://localhost:8000")}"' in routes


def test_vllm_reads_the_variables_that_are_set_for_it(vllm):
    read = {node.value for node in ast.walk(parsed(vllm.path("vllm.envs"))) if isinstance(node, ast.Constant)}
    assert read >= {*VLLM_SWITCHES, "VLLM_ENABLE_V1_MULTIPROCESSING"}
    assert '"VLLM_ENABLE_V1_MULTIPROCESSING"' in inspect.getsource(vllm_environment)


def test_vllm_takes_the_calls_of_the_engine(vllm):
    """Every call that Engine makes, as it stands in its source."""
    calls = engine_calls("self.llm.")
    used = {name.removeprefix("self.llm.") for name in calls}
    assert used == {"generate", "apply_model", "sleep", "wake_up", "reset_prefix_cache", "llm_engine.add_lora"}
    for name, forms in calls.items():
        *owner, method = name.removeprefix("self.llm.").split(".")
        whole = ("vllm.v1.engine.llm_engine", f"LLMEngine.{method}") if owner else ("vllm", f"LLM.{method}")
        for positional, keywords in forms:  # TypeError: it does not fit
            vllm.find(*whole).signature.bind(*[None] * (positional + 1), **dict.fromkeys(keywords))


def test_vllm_has_the_sampling_parameters_and_requests_of_the_engine(vllm):
    (forms,) = engine_calls("self.sampling").values()
    assert all(positional == 0 for positional, _ in forms)
    names = set().union(*(keywords for _, keywords in forms))
    assert {"n", "temperature", "top_p", "logprobs", "flat_logprobs", "prompt_logprobs", "stop_token_ids"} < names
    assert not names - set(vllm.find("vllm", "SamplingParams").fields)
    (forms,) = engine_calls("self.lora_request").values()
    assert forms and all(form == (3, set()) for form in forms)
    assert vllm.find("vllm.lora.request", "LoRARequest").fields[:3] == ["lora_name", "lora_int_id", "lora_path"]


ALLOCATOR, BACKENDS = "vllm.device_allocator", "vllm.device_allocator.sleep_mode_backend"
GPT_OSS, WORKER = "vllm.model_executor.models.gpt_oss", "vllm.v1.worker.gpu_worker"
QUANTIZATION = "vllm.model_executor.layers.quantization"
FIELDS = {  # read of prompts and outputs, of the configuration, of the allocator
    ("vllm", "TokensPrompt"): {"prompt_token_ids"}, ("vllm", "CompletionOutput"): {"token_ids", "logprobs"},
    ("vllm.logprobs", "FlatLogprobs"): {"logprobs"}, ("vllm.logprobs", "Logprob"): {"logprob"},
    ("triton_kernels.matmul_ogs", "PrecisionConfig"): {"weight_scale"},
    ("triton_kernels.tensor", "Tensor"): {"storage"}, ("triton_kernels.tensor", "Storage"): {"data", "layout"},
    ("vllm.config", "ModelConfig"): {"sleep_mode_backend"}, ("vllm.config", "VllmConfig"): {"model_config"},
    (ALLOCATOR, "AllocationData"): {"handle", "tag", "cpu_backup_tensor", "is_asleep"},
}  # fmt: skip
TEXTS = {  # excerpts of the source of a class or one of its members
    ("vllm", "RequestOutput"): ["self.outputs", "self.prompt_logprobs"],
    ("vllm.entrypoints.offline_utils", "OfflineInferenceMixin._run_engine"): [  # RequestBar is filled by it
        "tqdm_func = use_tqdm if callable(use_tqdm) else tqdm", "tqdm_func(total=num_requests,", "pbar.update(n)",
    ],
    ("vllm.v1.engine.llm_engine", "LLMEngine"): ["self.vllm_config"],
    (BACKENDS, "SleepModeBackend"): ["self._state"], (BACKENDS, "CuMemBackend.resume"): [".wake_up(tags)"],
    (BACKENDS, "SleepModeBackendFactory.create_backend"): ["model_config.sleep_mode_backend"],
    (WORKER, "Worker._get_sleep_mode_backend"): ["is None", "create_backend("],  # at the first sleep
    (WORKER, "Worker.sleep"): ["_get_sleep_mode_backend().suspend(level)"],
    (WORKER, "Worker.wake_up"): ["_get_sleep_mode_backend().resume(tags)"],
    (WORKER, "Worker.load_model"): ["tag='weights'"],  # the tag of what is copied
    (f"{ALLOCATOR}.cumem", "CuMemAllocator"): ["self.pointer_to_data", "size_in_bytes = handle[1]"],
    (f"{ALLOCATOR}.cumem", "CuMemAllocator.wake_up"): [  # whatever has a backup comes back
        "create_and_map(handle)", "is_asleep = False", "data.cpu_backup_tensor = None",
        "if tags is None or data.tag in tags:",  # mapped or not
    ],
    # Pushed weights: model.layers.N.attn.qkv_proj.weight, attn.o_proj.weight; with LoRA, base_layer in between.
    (GPT_OSS, "OAIAttention"): ["self.qkv_proj = QKVParallelLinear(", "self.o_proj ="],
    ("vllm.lora.layers.base_linear", "BaseLinearLayerWithLoRA"): ["self.base_layer ="],
    (GPT_OSS, "GptOssForCausalLM.packed_modules_mapping"): ["{'qkv_proj': ['q_proj', 'k_proj', 'v_proj']}"],
    (GPT_OSS, "GptOssForCausalLM.hf_to_vllm_mapper"): ["'.self_attn.': '.attn.'"],
    # Lent weights: model.layers.N.mlp.experts.routed_experts.w13_weight and ...quant_method.w13_precision_config;
    # model.embedding.weight and lm_head.weight.
    (GPT_OSS, "GptOssModel"): ["self.layers =", "self.embedding = VocabParallelEmbedding("],
    (GPT_OSS, "GptOssForCausalLM.__init__"): ["self.model =", "self.lm_head = ParallelLMHead("],
    (GPT_OSS, "MLPBlock"): ["self.experts = FusedMoE("],
    ("vllm.model_executor.layers.fused_moe.runner.moe_runner", "MoERunner"): ["self.routed_experts = routed_experts"],
    (f"{QUANTIZATION}.mxfp4", "GptOssMxfp4MoEMethod._setup_kernel"): [
        "layer.w13_weight = w13", "self.w13_precision_config = w13_scale",
        "layer.w2_weight = w2", "self.w2_precision_config = w2_scale",
    ],
    (f"{QUANTIZATION}.utils.mxfp4_utils", "_swizzle_mxfp4"): ["num_warps=8", "(mx_axis=1)", "pad_k = -K % 4"],
}  # fmt: skip


def test_vllm_has_what_is_read_and_relied_on(vllm):
    for (module, name), fields in FIELDS.items():
        assert not fields - set(vllm.find(module, name).fields), name
    for (module, name), texts in TEXTS.items():
        assert all(excerpt in vllm.find(module, name).text for excerpt in texts), name


def test_vllm_takes_a_sleep_backend(vllm):
    """Signatures of what KeepBackend overrides, of the registry, of the allocator's functions."""
    vllm.find(BACKENDS, "CuMemBackend.suspend").signature.bind(None, 1)
    vllm.find(BACKENDS, "CuMemBackend.resume").signature.bind(None, None)
    register = vllm.find(BACKENDS, "SleepModeBackendFactory.register_backend").signature
    assert list(register.parameters)[1:] == ["name", "module_path", "class_name"]
    vllm.find(ALLOCATOR, "get_mem_allocator_instance").signature.bind()
    vllm.find(f"{ALLOCATOR}.cumem", "unmap_and_release").signature.bind("handle")
    copy = vllm.find("vllm.distributed.device_communicators.cuda_wrapper", "CudaRTLibrary.cudaMemcpy").signature
    assert list(copy.parameters)[1:] == ["dst", "src", "count"]


ROUTER = [
    ("topk", "topk_forward", "_topk_forward", "stride_rn"),
    ("tensor", "sum_bitmatrix_rows", "_sum_bitmatrix_rows", "stride_bn"),
]


@pytest.mark.parametrize("module, launcher, kernel, stride", ROUTER)
def test_vllm_has_the_router_kernels_that_are_patched(vllm, module, launcher, kernel, stride):
    """The kernel is in the globals of the function that launches it, and the stride a constant. It is none in a newer
    triton_kernels, with which `compile_router_once` can go."""
    patched = inspect.getsource(compile_router_once)
    assert all(name in patched for name in (f'"triton_kernels.{module}"', f'"{kernel}"', f'"{stride}"'))
    assert f"{module}.{launcher}," in patched
    function = vllm.find(f"triton_kernels.{module}", launcher)
    assert f"{kernel}[" in function.text
    arguments = vllm.find(function.module, kernel).node.args.args
    assert "constexpr" in next(ast.unparse(a.annotation) for a in arguments if a.arg == stride)
    vllm.find("vllm.utils.import_utils", "has_triton_kernels").signature.bind()


def test_vllm_has_the_expert_flags_that_are_patched(vllm):
    """`make_opt_flags` in the globals of `matmul_ogs`, which calls it by that name, and the flags' fields."""
    function = vllm.find("triton_kernels.matmul_ogs", "matmul_ogs")
    assert "= make_opt_flags(" in function.text and "**opt_flags.target_kernel_kwargs" in function.text
    choose = vllm.find(function.module, "make_opt_flags")
    flags = vllm.find(choose.module, "OptFlags")
    assert {"block_m", "group_m", "target_kernel_kwargs"} <= set(flags.fields)
    assert "dataclass" in map(ast.unparse, flags.node.decorator_list), "dataclasses.replace needs one"
