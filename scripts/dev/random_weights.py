# SPDX-License-Identifier: Apache-2.0
"""Writes a checkpoint with gpt-oss-20b's shapes and random weights."""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from grpo.model import write_checkpoint as checkpoint
from scripts.dev.gptoss_format import BLOCK, E2M1, E8M0_BIAS, Sizes, read_tokenizer, write_checkpoint

# Factors of 1 / sqrt(fan-in) that give the standard deviations of random matrices: rounding errors stay small at any
# width. With 0.02 everywhere (gpt-oss's initializer_range) two exact BF16 implementations disagree by 0.25 to 0.5 nats
# a token: rounding swaps nearly tied experts, whose outputs are as large as the residual stream. So experts' outputs
# are small here, attention's larger (an adapter on it must have an effect), and router scores spread.
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
# The same with a trained model's statistics: each comment says what SmolLM2-135M-Instruct's are over 1,024 tokens of
# English. Do not adjust them until two implementations agree: how much these differ is a result.
REALISTIC_GAIN = {
    "q_proj": 1.45,  # attention beside the sink has an entropy of 2.9 nats over up to 256 keys and a top weight of 0.3
    "k_proj": 1.45,
    "v_proj": 1.0,
    "o_proj": 0.8,  # a layer's attention adds 0.25 of the residual stream's rms, massive channels left out
    "router": 3.0,  # as above, where the best of four experts weighs a half: SmolLM2 has no router
    "gate_up_proj": 1.2,  # gates have an rms of 0.4 to 1.2, and of 0.9 in the middle layers
    "down_proj": 0.75,  # a layer's MLP adds 0.37 of the residual stream's rms
    "lm_head": 3.5,  # the distribution's entropy is 3.5 nats (here 4.3, over four times as many tokens)
}
RESIDUAL_GROWTH = 1.1  # the residual stream grows 9.4 times over 24 layers, so that late layers matter like early ones
NORM_SPREAD = 0.25  # standard deviation of a layer's norm weights over their mean
FINAL_NORM = 1.8  # mean weight of the norm in front of the head
MASSIVE = (17, 39)  # two channels hold half of the residual stream's squared norm, at every token (which two: any)
MASSIVE_NORM = 0.4  # norm weights there over the median: 0.5 and 0.25
MASSIVE_TOKENS, MASSIVE_TOKEN = 1 / 256, 4096.0  # a text's first token has 24,894 where others have an rms of 6.4
SINK = 6.5  # the first token, SmolLM2's sink, takes 0.1 to 0.7 of a head's attention; sinks' deviation is 1
LOGIT_MEAN = 5.5  # the largest logit is 25.4, where BF16's step is 0.125, because the mean of all is 8.8
E2M1_RMS = math.sqrt(sum(value**2 for value in E2M1) / len(E2M1))  # 2.926, of equally likely codes


def random_tensor(
    name: str, like: torch.Tensor, generator: torch.Generator, gains: Mapping[str, float] = MATRIX_GAIN
) -> torch.Tensor:
    """A random tensor of a checkpoint with the shape of `like`; norms are ones.

    An expert's blocks are uniformly random codes. Its scales are two neighbouring powers of two, the larger one as
    often as the standard deviation of `gains` needs."""
    *_, module, last = name.split(".")
    device = generator.device
    if last.endswith("_blocks"):
        return torch.randint(0, 256, like.shape, dtype=torch.uint8, generator=generator, device=device)
    if last.endswith("_scales"):
        scale = gains[last.removesuffix("_scales")] / math.sqrt(like.shape[-1] * BLOCK) / E2M1_RMS
        exponent = math.floor(math.log2(scale))
        share = ((scale / 2.0**exponent) ** 2 - 1) / 3  # the mean of squares: (1 - share) * 1 + share * 4
        larger = torch.rand(like.shape, generator=generator, device=device) < share
        return larger.to(torch.uint8) + (E8M0_BIAS + exponent)
    if "norm" in name:
        return torch.ones(like.shape, dtype=torch.bfloat16)
    std = 1.0  # of sinks and embeddings
    if last.endswith("bias"):
        std = 0.02
    elif module in gains:
        std = gains[module] / math.sqrt(like.shape[-1])
    return torch.empty(like.shape, dtype=torch.bfloat16, device=device).normal_(0.0, std, generator=generator)


def realistic_tensor(name: str, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A tensor as of `random_tensor`, with the statistics of a trained model's weights."""
    path = name.split(".")
    growth = RESIDUAL_GROWTH ** int(path[2]) if path[1] == "layers" else 1.0
    gains = REALISTIC_GAIN | {module: REALISTIC_GAIN[module] * growth for module in ("o_proj", "down_proj")}
    tensor = random_tensor(name, like, generator, gains)
    channels, size = list(MASSIVE), math.sqrt(like.shape[-1] / 2)  # size of a massive channel where the others have 1
    if "norm" in name:
        mean = FINAL_NORM if name == "model.norm.weight" else 1.0
        tensor = tensor.to(generator.device).normal_(mean, NORM_SPREAD * mean, generator=generator)
        tensor[channels] = MASSIVE_NORM * mean
    elif name == "model.embed_tokens.weight":
        tensor[:, channels] = size
        rows = torch.rand(len(tensor), generator=generator, device=tensor.device) < MASSIVE_TOKENS
        tensor[rows, channels[0]] = MASSIVE_TOKEN
    elif name.endswith("o_proj.bias"):
        tensor[channels] = size * growth * (RESIDUAL_GROWTH - 1)  # Massive channels grow with the others.
    elif name.endswith("sinks"):
        tensor += SINK
    elif name == "lm_head.weight":
        tensor[:, channels[0]] = LOGIT_MEAN / (math.sqrt(like.shape[-1]) / 2 * MASSIVE_NORM * FINAL_NORM)
    return tensor


def write_full(out: Path, sizes: Sizes, tokenizer: Path, device: str, realistic: bool = False) -> None:
    """Write a checkpoint to `out`: random weights, drawn on `device`, and the tokenizer in the folder `tokenizer`."""
    vocabulary, generator = read_tokenizer(tokenizer), torch.Generator(device).manual_seed(0)
    with checkpoint.new_directory(out) as directory:
        make = partial(realistic_tensor if realistic else random_tensor, generator=generator)
        write_checkpoint(directory, sizes, make, vocabulary)
