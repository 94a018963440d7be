# SPDX-License-Identifier: Apache-2.0
"""The learner's attention against float64."""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers.models.gpt_oss.modeling_gpt_oss import ALL_ATTENTION_FUNCTIONS, eager_attention_forward

from grpo.measure.record import figure, package_version, write
from grpo.model.attention import attention_masks, install_attention
from grpo.model.packing import pack_batch
from grpo.preflight.choices import ATTENTION
from grpo.preflight.machine import FLASH_PACKAGES

# Largest relative error in the 2-norm, by the type of the inputs. BF16: five times its unit roundoff (2^-8). Eager attention,
# which rounds scores and probabilities to BF16, comes to 0.006, and to 0.012 for sinks; a window that is off by one to 0.09.
ERROR_BOUNDS = {"bfloat16": 0.02, "float32": 1e-5}
PARTS = ("out", "q", "k", "v", "sinks")


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """Sizes of one comparison: a prompt and its completions in tokens, heads, and the width of the sliding window."""

    prompt: int = 930
    completions: tuple[int, ...] = (512, 401, 203, 37)
    heads: int = 64
    key_heads: int = 8
    dim: int = 64
    window: int = 128


SMALL_CASE = AttentionCase(21, (12, 7, 3, 1), 4, 2, 16, 5)


def exact_attention(case: AttentionCase, window: int | None, inputs: Any, gradient: Any) -> list[Any]:
    """Output (n, Hq, D) and gradients of q (n, Hq, D), k and v (n, Hkv, D) and sinks (Hq,), all float64, for `inputs`
    (q, k, v, sinks) and the `gradient` (n, Hq, D) of the output.

    Softmax over scores in full, with the sink as one more column; n are the tokens without padding. It shares no code
    with the learner: tokens of a completion see the prompt's and, causally, their own.
    """

    q, k, v, sinks = (x.detach().double().requires_grad_() for x in inputs)
    lengths = torch.tensor([case.prompt, *case.completions])
    segment = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(q.device)
    own = torch.cat([torch.arange(n) for n in lengths.tolist()]).to(q.device)
    position = own + case.prompt * (segment > 0)
    distance = position[:, None] - position[None]
    visible = ((segment[:, None] == segment) | (segment == 0)) & (distance >= 0)
    if window is not None:
        visible &= distance < window
    group, out = case.heads // case.key_heads, torch.zeros_like(q, requires_grad=False)
    for head in range(case.key_heads):  # the scores of all heads at once would take gigabytes
        heads = slice(head * group, (head + 1) * group)
        scores = torch.einsum("qhd,kd->hqk", q[:, heads], k[:, head]) / math.sqrt(case.dim)
        column = sinks[heads, None, None].expand(-1, len(q), 1)
        weights = torch.cat([scores.masked_fill(~visible, -torch.inf), column], 2).softmax(2)[:, :, :-1]
        part = torch.einsum("hqk,kd->qhd", weights, v[:, head])
        part.backward(gradient[:, heads].double())
        out[:, heads] = part.detach()
    return [out, *(x.grad for x in (q, k, v, sinks))]


def learners_attention(attention: str, case: AttentionCase, layout: Any, inputs: Any, sliding: bool) -> Any:
    """A call without arguments that returns what GptOssAttention gets from `attention` for `inputs` (q (1, Hq, T, D), k and
    v (1, Hkv, T, D), sinks (Hq,)): (1, T, Hq, D)."""

    name = install_attention(attention)
    function = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
    q, k, v, sinks = inputs
    masks = attention_masks(layout, attention, case.window, q.dtype)
    mask = masks["sliding_attention" if sliding else "full_attention"]
    module = SimpleNamespace(num_key_value_groups=case.heads // case.key_heads, sinks=sinks, training=True)
    rest = {"scaling": 1 / math.sqrt(case.dim), "sliding_window": case.window if sliding else None, "s_aux": sinks}
    return lambda: function(module, q, k, v, mask, dropout=0.0, **rest)[0]


def milliseconds(call: Any, repeats: int = 9, passes: int = 5) -> float:
    """Median over `repeats` of the time of one of `passes` calls in a row; the caller has warmed up."""

    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    seconds = []
    for _ in range(repeats):
        wait()
        started = time.perf_counter()
        for _ in range(passes):
            call()
        wait()
        seconds.append((time.perf_counter() - started) / passes)
    return 1000 * statistics.median(seconds)


def bench_attention(options: argparse.Namespace) -> int:
    """Error and time of every attention of the learner. Exit code 1 where one is out of bounds or raises, or none ran."""

    case, device = SMALL_CASE if options.small else AttentionCase(), torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("bench: no GPU here; use --device cpu --small", file=sys.stderr)
        return 2
    # Packages last: one that breaks the CUDA context takes what follows with it.
    here = sorted(ATTENTION, key=lambda name: name in FLASH_PACKAGES)
    chosen = options.only or (here if device.type == "cuda" else ["eager"])
    if unknown := [name for name in chosen if name not in ATTENTION]:
        print(f"bench: --only: no {', '.join(unknown)}; use {', '.join(ATTENTION)}", file=sys.stderr)
        return 2
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    bound = ERROR_BOUNDS[str(dtype).removeprefix("torch.")]
    generator = torch.Generator().manual_seed(0)
    # Which tokens they are does not matter here: what attends to what is a matter of places.
    prompts = [list(range(case.prompt))] * len(case.completions)
    layout = pack_batch(prompts, [list(range(n)) for n in case.completions], True, True, device)
    tokens, width = case.prompt + sum(case.completions), layout.ids.shape[1]

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=generator).to(device, dtype)

    # Sinks about as large as the log-sum-exp of a window's scores, so that leaving them out shows in every part.
    sinks = (5 + torch.randn(case.heads, generator=generator)).to(device, dtype)
    leaves = [normal(width, n, case.dim) for n in (case.heads, case.key_heads, case.key_heads)]
    inputs = [x.transpose(0, 1)[None].contiguous().requires_grad_() for x in leaves] + [sinks.requires_grad_()]
    gradient = normal(1, width, case.heads, case.dim)
    gradient[:, tokens:] = 0  # nothing depends on padding
    kinds = {"full": None, "window": case.window}
    exact = {
        kind: exact_attention(case, size, [*(x[:tokens] for x in leaves), sinks], gradient[0, :tokens])
        for kind, size in kinds.items()
    }
    shape = f"{tokens} tokens: a prompt of {case.prompt} and completions of {', '.join(map(str, case.completions))}"
    figures = [
        figure("tokens", tokens, "tokens", f"{shape}; {case.heads} heads over {case.key_heads} of {case.dim}, {dtype}"),
        figure("error_bound", bound, "relative", "largest error: 2-norm of the difference to float64 by the 2-norm of float64"),
    ]  # fmt: skip
    failed, measured = [], []
    flags = [*(["--device cpu"] * (device.type == "cpu")), *(["--small"] * options.small)]
    flags += ["--only", *options.only] if options.only else []
    command = " ".join(["python scripts/bench.py attention", *flags])  # without --out: a path of this machine
    packages = {name: package for name, (package, _) in FLASH_PACKAGES.items()} | {"eager": "transformers"}
    for attention in chosen:
        distribution = packages.get(attention, "torch")
        try:
            for kind in kinds:
                seen = "full attention" if kind == "full" else f"sliding window of {case.window}"
                call = learners_attention(attention, case, layout, inputs, kind == "window")

                def both(call: Any = call) -> Any:
                    out = call()
                    return [out, *torch.autograd.grad(out, inputs, gradient)]

                out, *gradients = (x.detach().double() for x in both())
                # Rows (T, H, D) as float64 has them; what padding got counts as error, but for its output.
                found = [out[0, :tokens], *(g[0].transpose(0, 1) for g in gradients[:3]), gradients[3]]
                for part, ours, true in zip(PARTS, found, exact[kind], strict=True):
                    norm = true.norm()
                    if len(ours) > len(true):
                        true = torch.cat([true, true.new_zeros(len(ours) - len(true), *true.shape[1:])])
                    error = ((ours - true).norm() / norm).item()
                    what = "output" if part == "out" else f"gradient of {part}"
                    figures.append(figure(f"{attention}_{kind}_{part}_error", error, "relative", f"{what}, {seen}"))
                    if not error <= bound:  # NaN is out of bounds
                        failed.append(f"{attention}: {what}, {seen}: error {error:.3g} exceeds {bound:.3g}")
                took = milliseconds(both)
                figures.append(figure(f"{attention}_{kind}_ms", took, "ms", f"forward and backward, {seen}"))
            figures.append(figure(f"{attention}_usable", 1, "", f"{distribution} {package_version(distribution)}"))
            measured.append(attention)
        except ImportError as error:
            note = f"cannot be imported here: {error}"
            figures.append(figure(f"{attention}_usable", 0, "", note))
        except Exception as error:  # one that fails must not take the others' figures with it
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            figures.append(figure(f"{attention}_usable", 0, "", reason))
            failed.append(f"{attention}: {reason}")
        # After each: what was measured is not lost when a kernel takes the process with it.
        write(Path(options.out), figures, command)
    if not measured:
        failed.append("no implementation could be measured")
    for line in failed:
        print(f"FAILED {line}", file=sys.stderr)
    return int(bool(failed))
