# SPDX-License-Identifier: Apache-2.0
"""A merged model beside its base and adapter: in stock transformers, and where there is a GPU in vLLM."""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

from grpo.evaluate.export import export
from grpo.evaluate.standalone import VllmModel
from grpo.measure.forks import fresh_folder
from grpo.measure.record import figure, write
from grpo.model.load import in_working_type, load_model
from grpo.plan.hub import find_model
from grpo.plan.machine import read_machine
from grpo.plan.targets import expected_shapes
from grpo.preflight.adapter import CONFIG, lora_options
from grpo.run.folder import ADAPTER
from grpo.settings import Problems, Settings

ROWS, TOKENS = 4, 512
SIZE = 0.03  # standard deviation of A and B: an update of a tenth of weights of gpt-oss's own deviation


def write_adapter(folder: Path, model: str, config: dict) -> None:
    """A random adapter of rank 4 on all of the attention, whose update matters."""
    s, generator = Settings(LORA_R=4, LORA_ALPHA=4.0), torch.Generator().manual_seed(1)
    shapes = expected_shapes(config, s.LORA_R, s.LORA_TARGETS)
    save_file({name: torch.randn(of, generator=generator) * SIZE for name, of in shapes.items()}, folder / ADAPTER)
    options = lora_options(s) | {"peft_type": "LORA", "base_model_name_or_path": model}
    (folder / CONFIG).write_text(json.dumps(options), encoding="utf-8")


@torch.no_grad()
def log_probs(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Of the tokens 1.. of each row, (B, T - 1); a row at a time, as logits of all would take gigabytes."""
    with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
        rows = [model(input_ids=row[None].to(model.device)).logits[0, :-1].float() for row in ids]
    return torch.stack([row.log_softmax(-1).gather(1, one[1:, None].to(row.device))[:, 0].cpu() for row, one in zip(rows, ids, strict=True)])  # fmt: skip


def bench_export(options: argparse.Namespace) -> int:
    """Export a random adapter on `--model` to MXFP4, load it and compare log-probs. Exit code 1 where what is left of a
    difference is not small beside what the adapter does."""
    problems, folder = Problems(), fresh_folder(Path(options.run))
    files = find_model(options.model, problems)
    if problems:
        print(*problems, sep="\n")
        return 2
    adapter, merged, base = folder / "adapter", folder / "merged", str(files.folder)
    adapter.mkdir()
    write_adapter(adapter, options.model, files.config)
    started = time.perf_counter()
    share = export(argparse.Namespace(adapter=adapter, to="mxfp4", out=merged, force=False, model=options.model))
    made = [
        figure("export_s", time.perf_counter() - started, "s", "to mxfp4, the base in the same kind of folder"),
        figure("export_peak_gib", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, "GiB", "of host memory, torch's own included"),
        figure("share", share, "share", "of the adapter's update in the merged weights"),
    ]  # fmt: skip
    ids = torch.randint(files.config["vocab_size"] // 2, (ROWS, TOKENS), generator=torch.Generator().manual_seed(2))
    model = in_working_type(load_model(base, files.config, "eager", "mxfp4")).eval()
    bare = log_probs(model, ids)
    wanted = log_probs(PeftModel.from_pretrained(model, str(adapter)).eval(), ids)
    del model
    stock = AutoModelForCausalLM.from_pretrained(
        merged, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True), attn_implementation="eager"
    )
    stock = in_working_type(stock.to("cuda:0" if torch.cuda.is_available() else "cpu")).eval()
    found = {"transformers": log_probs(stock, ids)}
    del stock
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        served = find_model(str(merged), problems)
        engine = VllmModel(Settings(MODEL_ID=str(merged), EVAL_TEMPERATURE=1.0), served, str(merged), None, read_machine(), ["hello"] * ROWS).engine  # fmt: skip
        found["vllm"] = torch.tensor(engine.score(ids.tolist()))
    control, bad = (wanted - bare).abs().mean().item(), 0
    made.append(figure("adapter_nats", control, "nats", f"what the adapter does to log-probs of {ROWS} x {TOKENS} random tokens, mean"))  # fmt: skip
    for name, values in found.items():
        apart = (values - wanted).abs().mean().item()
        bad += not apart < control / 5
        made.append(
            figure(f"{name}_nats", apart, "nats", f"merged, in {name}, beside base and adapter here: mean difference")
        )
    write(Path(options.out), made, "python scripts/bench.py export --model CHECKPOINT --out JSON")
    return int(bool(bad))
