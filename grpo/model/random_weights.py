# SPDX-License-Identifier: Apache-2.0
"""Writes a checkpoint with gpt-oss-20b's shapes and random weights."""

import math
from functools import partial
from pathlib import Path

import torch

from grpo.model import checkpoint
from grpo.model.gptoss_format import BLOCK, E2M1, E8M0_BIAS, Sizes

# Factors of 1 / sqrt(fan-in) that give the standard deviations of random matrices: rounding errors stay small at any
# width. With 0.02 everywhere (gpt-oss's initializer_range) two exact BF16 implementations disagree by 0.25 to 0.5 nats
# a token: rounding swaps nearly tied experts, whose outputs are as large as the residual stream (docs/models.md). So
# experts' outputs are small here, attention's larger (an adapter on it must have an effect), and router scores spread.
MATRIX_GAIN = {
    "q_proj": 0.75,  # attention scores N(0, 1), with YaRN's factor of 1.81 on them: neither flat nor one-hot
    "k_proj": 0.75,
    "v_proj": 1.0,
    "o_proj": 0.5,
    "router": 3.0,
    "gate_up_proj": 1.0,
    "down_proj": 0.1,
    "lm_head": 1.5,  # logits N(0, 1.5**2): sampled tokens vary, entropy is 1.1 nats below the uniform distribution's
}
E2M1_RMS = math.sqrt(sum(value**2 for value in E2M1) / len(E2M1))  # 2.926, of equally likely codes


def random_tensor(name: str, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A random tensor of a checkpoint with the shape of `like`; norms are ones.

    An expert's blocks are uniformly random codes. Its scales are two neighbouring powers of two, the larger one as
    often as the standard deviation of `MATRIX_GAIN` needs."""
    *_, module, last = name.split(".")
    device = generator.device
    if last.endswith("_blocks"):
        return torch.randint(0, 256, like.shape, dtype=torch.uint8, generator=generator, device=device)
    if last.endswith("_scales"):
        scale = MATRIX_GAIN[last.removesuffix("_scales")] / math.sqrt(like.shape[-1] * BLOCK) / E2M1_RMS
        exponent = math.floor(math.log2(scale))
        share = ((scale / 2.0**exponent) ** 2 - 1) / 3  # the mean of squares: (1 - share) * 1 + share * 4
        larger = torch.rand(like.shape, generator=generator, device=device) < share
        return larger.to(torch.uint8) + (E8M0_BIAS + exponent)
    if "norm" in name:
        return torch.ones(like.shape, dtype=torch.bfloat16)
    std = 1.0  # of sinks and embeddings
    if last.endswith("bias"):
        std = 0.02
    elif module in MATRIX_GAIN:
        std = MATRIX_GAIN[module] / math.sqrt(like.shape[-1])
    return torch.empty(like.shape, dtype=torch.bfloat16, device=device).normal_(0.0, std, generator=generator)


def write_full(out: Path, sizes: Sizes, tokenizer: Path, device: str) -> None:
    """Write a checkpoint to `out`: random weights, drawn on `device`, and the tokenizer in the folder `tokenizer`."""
    vocabulary, generator = checkpoint.read_tokenizer(tokenizer), torch.Generator(device).manual_seed(0)
    with checkpoint.new_directory(out) as directory:
        make = partial(random_tensor, generator=generator)
        checkpoint.write_checkpoint(directory, sizes, make, vocabulary)
