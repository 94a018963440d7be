# SPDX-License-Identifier: Apache-2.0
"""The learner's attention against float64."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.utils.benchmark import Timer
from transformers.models.gpt_oss.modeling_gpt_oss import ALL_ATTENTION_FUNCTIONS, eager_attention_forward

from grpo.measure.record import figure, write
from grpo.model.attention import attention_masks, install_attention
from grpo.model.packing import pack_batch
from grpo.plan.machine import FLASH_PACKAGES, installed_versions
from grpo.preflight.choices import ATTENTION
from grpo.settings import described

# Largest relative error in the 2-norm, by the type of the inputs. BF16: five times its unit roundoff (2^-8). Eager attention,
# which rounds scores and probabilities to BF16, comes to 0.006, and to 0.012 for sinks; a window that is off by one to 0.09.
ERROR_BOUNDS = {torch.bfloat16: 0.02, torch.float32: 1e-5}
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

    @property
    def tokens(self) -> int:
        return self.prompt + sum(self.completions)


SMALL_CASE = AttentionCase(21, (12, 7, 3, 1), 4, 2, 16, 5)


def exact_attention(
    case: AttentionCase, window: int | None, inputs: Sequence[torch.Tensor], gradient: torch.Tensor
) -> list[torch.Tensor]:
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
    k_of_q, v_of_q = (x.repeat_interleave(case.heads // case.key_heads, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k_of_q) / math.sqrt(case.dim)
    column = sinks[:, None, None].expand(-1, len(q), 1)
    weights = torch.cat([scores.masked_fill(~visible, -torch.inf), column], 2).softmax(2)[:, :, :-1]
    out = torch.einsum("hqk,khd->qhd", weights, v_of_q)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v, sinks), gradient.double())]


class Inputs:
    """Random queries, keys, values and sinks for an attention of the learner: `given` (q (1, Hq, T, D), k and v
    (1, Hkv, T, D), sinks (Hq,)), `gradient` (1, T, Hq, D) of the output, and the exact results of both kinds of layers."""

    def __init__(self, case: AttentionCase, dtype: torch.dtype, device: torch.device) -> None:
        self.case, generator = case, torch.Generator().manual_seed(0)
        self.windows = {"full": None, "window": case.window}  # of both kinds of layers
        # Which tokens they are does not matter here: what attends to what is a matter of places.
        prompts = [list(range(case.prompt))] * len(case.completions)
        self.batch = pack_batch(prompts, [list(range(n)) for n in case.completions], True, True, device)
        width, tokens = self.batch.ids.shape[1], case.tokens

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        # Sinks about as large as the log-sum-exp of a window's scores, so that leaving them out shows in every part.
        sinks = (5 + torch.randn(case.heads, generator=generator)).to(device, dtype)
        rows = [normal(width, n, case.dim) for n in (case.heads, case.key_heads, case.key_heads)]
        self.given = [x.transpose(0, 1)[None].contiguous().requires_grad_() for x in rows] + [sinks.requires_grad_()]
        self.gradient = normal(1, width, case.heads, case.dim)
        self.gradient[:, tokens:] = 0  # nothing depends on padding
        real = [*(x[:tokens] for x in rows), sinks]
        self.exact = {k: exact_attention(case, n, real, self.gradient[0, :tokens]) for k, n in self.windows.items()}

    def call(self, attention: str, kind: str) -> Callable[[], list[torch.Tensor]]:
        """A call that returns what GptOssAttention gets from `attention`, (1, T, Hq, D), and the gradients of `given`."""
        function = ALL_ATTENTION_FUNCTIONS.get_interface(install_attention(attention), eager_attention_forward)
        case, (q, k, v, sinks) = self.case, self.given
        masks = attention_masks(self.batch, attention, case.window, q.dtype)
        mask = masks["full_attention" if kind == "full" else "sliding_attention"]
        module = SimpleNamespace(num_key_value_groups=case.heads // case.key_heads, sinks=sinks, training=True)
        rest = {"scaling": 1 / math.sqrt(case.dim), "sliding_window": self.windows[kind], "s_aux": sinks}

        def both() -> list[torch.Tensor]:
            out = function(module, q, k, v, mask, dropout=0.0, **rest)[0]
            return [out, *torch.autograd.grad(out, self.given, self.gradient)]

        return both

    def errors(self, kind: str, found: Sequence[torch.Tensor]) -> dict[str, float]:
        """Relative errors of what `call` returned; what padding got counts as error, but for its output."""
        out, *gradients, sinks = (x.detach().double() for x in found)
        rows, errors = [out[0, : self.case.tokens], *(g[0].transpose(0, 1) for g in gradients), sinks], {}
        for part, ours, true in zip(PARTS, rows, self.exact[kind], strict=True):
            difference = ours.clone()
            difference[: len(true)] -= true
            errors[part] = (difference.norm() / true.norm()).item()
        return errors


def measure(attention: str, inputs: Inputs, bound: float, figures: list[dict], failed: list[str]) -> None:
    """Add the figures of one attention, and what of it is out of bounds. It raises whatever the attention does."""
    for kind in inputs.windows:
        seen = "full attention" if kind == "full" else f"sliding window of {inputs.case.window}"
        call = inputs.call(attention, kind)
        for part, error in inputs.errors(kind, call()).items():
            what = f"{'output' if part == 'out' else f'gradient of {part}'}, {seen}"
            figures.append(figure(f"{attention}_{kind}_{part}_error", error, "relative", what))
            if not error <= bound:  # NaN is out of bounds
                failed.append(f"{attention}: {what}: error {error:.3g} exceeds {bound:.3g}")
        took = 1000 * Timer("call()", globals={"call": call}).blocked_autorange(min_run_time=0.5).median
        figures.append(figure(f"{attention}_{kind}_ms", took, "ms", f"forward and backward, {seen}"))
    package, _ = FLASH_PACKAGES.get(attention, ("transformers" if attention == "eager" else "torch", ""))
    version = installed_versions([package])[package] or "of unknown version"
    figures.append(figure(f"{attention}_usable", 1, "", f"{package} {version}"))


def bench_attention(options: argparse.Namespace) -> int:
    """Error and time of every attention of the learner. Exit code 1 where one is out of bounds or raises, or none ran."""
    cpu = options.device == "cpu"
    if not (cpu or torch.cuda.is_available()):
        print("bench: no GPU here; use --device cpu", file=sys.stderr)
        return 2
    # Packages last: one that breaks the CUDA context takes what follows with it.
    here = sorted(ATTENTION, key=lambda name: name in FLASH_PACKAGES)
    case, dtype = (SMALL_CASE, torch.float32) if cpu else (AttentionCase(), torch.bfloat16)
    bound, inputs = ERROR_BOUNDS[dtype], Inputs(case, dtype, torch.device(options.device))
    sizes = f"a prompt of {case.prompt} and completions of {', '.join(map(str, case.completions))}"
    heads = f"{case.heads} heads over {case.key_heads} of {case.dim}, {dtype}"
    figures = [
        figure("tokens", case.tokens, "tokens", f"{case.tokens} tokens: {sizes}; {heads}"),
        figure("error_bound", bound, "relative", "largest error: 2-norm of the difference to float64 by the 2-norm of float64"),
    ]  # fmt: skip
    flags = ["--device cpu"] * cpu + (["--only", *options.only] if options.only else [])
    failed: list[str] = []
    for attention in options.only or (["eager"] if cpu else here):
        try:
            measure(attention, inputs, bound, figures, failed)
        except Exception as error:  # one that fails must not take the others' figures with it
            reason = described(error)
            figures.append(figure(f"{attention}_usable", 0, "", reason))
            if not isinstance(error, ImportError):  # a package that is not here is no failure
                failed.append(f"{attention}: {reason}")
        # After each: what was measured is not lost when a kernel takes the process with it. The command without --out,
        # which is a path of this machine.
        write(Path(options.out), figures, " ".join(["python scripts/bench.py attention", *flags]))
    if not any(one["value"] for one in figures if one["name"].endswith("_usable")):
        failed.append("no implementation could be measured")
    for line in failed:
        print(f"FAILED {line}", file=sys.stderr)
    return int(bool(failed))
