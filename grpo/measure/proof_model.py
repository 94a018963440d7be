# SPDX-License-Identifier: Apache-2.0
"""The proof's model and its warm-up."""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, GptOssConfig, GptOssForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from grpo.measure.proof_data import READINGS, Log, Rows, Scale, make_rows, write_data
from grpo.measure.record import read_json
from grpo.model import checkpoint
from grpo.model import gptoss_format as gptoss
from grpo.model.load import load_model
from grpo.model.tiny_warmup import ACTIONS, Answer, answer_figures, initial_heads, make_tokenizer
from grpo.preflight.hub import count_parameters

PAD_KEYS = 8  # kernels want sizes that are multiples of it
FAST = "prove"  # name of both fast layers in transformers
LARGEST_NUMBER = 999  # the o200k tokenizer has a token for every run of one to three digits
# Standard deviations of the initial matrices, times 1 / sqrt(fan-in). 0.02 everywhere, gpt-oss's initializer range, lets
# narrow layers pass on next to nothing.
INITIAL_GAIN = {
    "q_proj": 0.5, "k_proj": 0.5, "v_proj": 1.0, "o_proj": 0.5, "router": 1.0, "gate_up_proj": 1.0, "down_proj": 0.5,
}  # fmt: skip
# Tokens back, one for each head, in the first two sliding layers: neighbours first, then, in the second, an hour's own
# numbers and the same number an hour earlier (a line of the forecast has 26 tokens).
HEAD_DISTANCES = ((1, 2, 3, 4, 5, 6, 7, 8), (1, 8, 6, 11, 17, 26, 20, 3))
# Weights of the loss beside the action's own: the fixed tokens of the answer, the prompt's tokens, the readings.
FORMAT_WEIGHT, TEXT_WEIGHT, READING_WEIGHT = 0.5, 0.2, 2.0
TEXT_TOKENS = 8  # of each prompt, drawn again at every step: the text is always the same
EXPERT_WEIGHTS = ("experts.gate_up_proj", "experts.down_proj")  # stored in MXFP4


def fast_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    s_aux: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention with sinks by PyTorch's fused kernels: the sink is one more key whose value is zero.

    Kernels want sizes that are multiples of 8: the heads get 8 dimensions more, of which one carries the sink's logit,
    and `PAD_KEYS` keys are added, of which the mask (1, 1, T, T + 8) shows the first. query (B, H, T, D).
    """
    batch, heads, columns, size = query.shape
    groups = heads // key.shape[1]
    # Under autocast RoPE leaves float32 behind; the mask has the type to compute in.
    query, key, value = (x.to(attention_mask.dtype) for x in (query, key, value))
    one = query.new_zeros(batch, heads, columns, 8)
    one[..., 0] = 1
    query = torch.cat((query, one), dim=-1)
    key, value = (functional.pad(x.repeat_interleave(groups, dim=1), (0, 8)) for x in (key, value))
    sinks = query.new_zeros(batch, heads, PAD_KEYS, size + 8)
    sinks[..., 0, size] = (s_aux / scaling).to(query.dtype)
    key = torch.cat((key, sinks), dim=2)
    value = torch.cat((value, torch.zeros_like(sinks)), dim=2)
    # The fused kernel for a GPU that takes any mask; a CPU's own.
    fused = SDPBackend.EFFICIENT_ATTENTION if query.device.type == "cuda" else SDPBackend.FLASH_ATTENTION
    with sdpa_kernel([fused, SDPBackend.MATH]):
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return out[..., :size].transpose(1, 2).contiguous(), None


def fast_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """All experts on all tokens (N, H) in three matrix products; those that the router left out get a weight of zero.

    Half of the arithmetic is wasted with 4 of 8, and it is still faster than a loop over experts.
    """
    experts, hidden, _ = module.gate_up_proj.shape

    def project(columns: slice) -> torch.Tensor:
        matrix = module.gate_up_proj[..., columns].permute(1, 0, 2).reshape(hidden, -1)
        return torch.addmm(module.gate_up_proj_bias[..., columns].reshape(-1), hidden_states, matrix)

    gate = project(slice(0, None, 2)).clamp(max=module.limit)
    up = project(slice(1, None, 2)).clamp(min=-module.limit, max=module.limit)
    # The type of the products, BF16 under autocast: wide tensors in float32 would take twice the memory.
    weights = torch.zeros(len(hidden_states), experts, dtype=gate.dtype, device=gate.device)
    weights = weights.scatter(1, top_k_index, top_k_weights.to(weights.dtype))
    inner = (up + 1) * gate * torch.sigmoid(gate * module.alpha)
    inner = inner.unflatten(-1, (experts, -1)) * weights.unsqueeze(-1)
    out = inner.flatten(-2) @ module.down_proj.reshape(-1, hidden)
    return (out + weights @ module.down_proj_bias).to(hidden_states.dtype)


def masks(columns: int, window: int, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """Additive masks of `fast_attention`, (1, 1, T, T + 8). Padding stands behind the tokens: causality hides it."""
    visible = torch.ones(columns, columns, dtype=torch.bool, device=device).tril()
    made = {}
    for name, allowed in (("full_attention", visible), ("sliding_attention", visible.triu(1 - window))):
        mask = torch.full((1, 1, columns, columns + PAD_KEYS), torch.finfo(dtype).min, dtype=dtype, device=device)
        mask[0, 0, :, :columns].masked_fill_(allowed, 0)
        mask[..., columns] = 0  # the sink
        made[name] = mask
    return made


def new_model(shape: gptoss.Shape, tokenizer: Tokenizer, token_ids: Mapping[str, int]) -> GptOssForCausalLM:
    """A gpt-oss in float32 with the fast layers, and initial weights from which reading is learned quickly."""
    AttentionInterface.register(FAST, fast_attention)
    ALL_EXPERTS_FUNCTIONS.register(FAST, fast_experts)
    config = gptoss.config_dict(shape, token_ids)
    config.pop("quantization_config")
    model = GptOssForCausalLM._from_config(
        GptOssConfig.from_dict(config), dtype=torch.float32, attn_implementation=FAST, experts_implementation=FAST
    )
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0.0, 0.1)
        for name, parameter in model.model.layers.named_parameters():
            *_, module, kind = name.split(".")
            gain = INITIAL_GAIN.get(kind if module == "experts" else module)
            if gain and parameter.dim() > 1 and not kind.endswith("bias"):
                fan_in = parameter.shape[-2] if module == "experts" else parameter.shape[-1]
                parameter.normal_(0.0, gain / math.sqrt(fan_in))
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_(0.0, 0.5)
            layer.self_attn.sinks.requires_grad_(False)
        initial_numbers(model, tokenizer)
        initial_heads(model, HEAD_DISTANCES)
    return model


def initial_numbers(model: GptOssForCausalLM, tokenizer: Tokenizer) -> None:
    """Give number tokens embeddings that vary smoothly with the number: 358 begins near 357, as in the tiny model."""
    texts = [f"{n:0{width}d}" for width in (1, 2, 3) for n in range(10**width)]
    found = {tokenizer.token_to_id(before + text): float(text) for text in texts for before in ("", "\u0120")}
    found.pop(None, None)  # not every number has a token with a blank before it
    value = torch.tensor(list(found.values())).unsqueeze(1)
    fine, coarse = value / 100 * math.pi, value / (LARGEST_NUMBER + 1) * math.pi
    waves = [fine * k for k in range(1, 5)] + [coarse * k for k in range(1, 9)]
    linear = [value / 1000 - 0.3, (value / 100).clamp(max=1) - 0.5, value.log1p() / 7 - 0.5]
    features = torch.cat([*linear, *(w.sin() for w in waves), *(w.cos() for w in waves)], dim=1)
    table = features @ (torch.randn(features.shape[1], model.config.hidden_size) * 0.1)
    model.model.embed_tokens.weight[list(found)] += table


def forward(model: GptOssForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Last hidden states (B, T, H) of rows padded on the right; with the fast layers in BF16 autocast on a GPU."""
    fast, cuda = model.config._attn_implementation == FAST, ids.device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    mask = masks(ids.shape[1], model.config.sliding_window, dtype, ids.device) if fast else None
    with torch.autocast("cuda", torch.bfloat16, enabled=fast and cuda):
        return model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state


def log_probs(model: GptOssForCausalLM, hidden: torch.Tensor) -> torch.Tensor:
    """Log-probs (..., V) in float32 after hidden states (..., H)."""
    return model.lm_head(hidden.to(model.lm_head.weight.dtype)).float().log_softmax(-1)


def at_answer(hidden: torch.Tensor, lengths: torch.Tensor, answer: int) -> torch.Tensor:
    """Hidden states (B, answer, H) that predict the last `answer` tokens of each row."""
    index = lengths[:, None] - answer - 1 + torch.arange(answer, device=lengths.device)
    return hidden.gather(1, index.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))


def answer_log_probs(
    model: GptOssForCausalLM, hidden: torch.Tensor, lengths: torch.Tensor, answer: Answer
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of each action (B, actions), and of the answer's other tokens together (B,)."""
    logp = log_probs(model, at_answer(hidden, lengths, len(answer.ids)))
    fixed = [n for n in range(len(answer.ids)) if n != answer.action_at]
    return logp[:, answer.action_at, answer.actions], logp[:, fixed, torch.tensor(answer.ids)[fixed]].sum(-1)


def figures(model: GptOssForCausalLM, rows: Rows, answer: Answer, limit: int | None = None) -> dict[str, float]:
    """What sampling at temperature 1 gives in expectation, from probabilities: `answer_figures` of up to `limit` rows."""
    picked, found = torch.arange(len(rows))[:: max(1, len(rows) // (limit or len(rows)))][:limit], []
    with torch.no_grad():
        for some in picked.split(64):
            ids, lengths = rows.batch(some.to(rows.ids.device))
            actions, around = answer_log_probs(model, forward(model, ids), lengths, answer)
            found.append((actions + around.unsqueeze(-1)).exp().cpu())
    return answer_figures(torch.cat(found), rows.rewards[picked].cpu())


def describe(found: Mapping[str, float]) -> str:
    names = ("reward", "greedy", "parse_rate", "random", "best_constant", "oracle")
    return " ".join(f"{name} {found[name]:.3f}" for name in names)


class WarmUp:
    """Supervised training in two phases, read and soften, as the tiny model's; docs/proof.md says what and why.

    A linear `probe`, thrown away afterwards, reads the rows' readings from a middle layer.
    """

    def __init__(self, model: GptOssForCausalLM, rows: Rows, answer: Answer, scale: Scale, seed: int) -> None:
        self.model, self.rows, self.answer, self.scale = model, rows, answer, scale
        self.device = rows.ids.device
        self.generator = torch.Generator(device=self.device).manual_seed(seed)
        self.probe = torch.nn.Linear(model.config.hidden_size, READINGS).to(self.device)
        depth = 3 * len(model.model.layers) // 4
        self.middle = model.model.layers[depth if depth % 2 else depth - 1]  # it attends to everything
        self.step, self.started = 0, time.perf_counter()

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    @property
    def progress(self) -> float:
        """How far the warm-up is, 0 to 1: by the seconds or by the steps, whichever is further."""
        return min(1.0, max(self.elapsed / self.scale.seconds, self.step / self.scale.steps))

    def loss(self, targets: torch.Tensor) -> torch.Tensor:
        """Loss of some rows drawn by their weights, with `targets` (N, actions) for the action's token."""
        rows, answer, size = self.rows, self.answer, self.scale.batch
        picked = torch.multinomial(rows.weights, size, replacement=True, generator=self.generator)
        ids, lengths = rows.batch(picked)
        before = lengths - len(answer.ids)
        # The action's token is visible to the tokens behind it: show them all four.
        shown = torch.randint(ACTIONS, (size,), device=self.device, generator=self.generator)
        ids.scatter_(
            1, (before + answer.action_at)[:, None], torch.tensor(answer.actions, device=self.device)[shown, None]
        )
        middle: list[torch.Tensor] = []
        hook = self.middle.register_forward_hook(lambda module, given, output: middle.append(output))
        hidden = forward(self.model, ids)
        hook.remove()
        actions, around = answer_log_probs(self.model, hidden, lengths, answer)
        action, form = -(targets[picked] * actions).sum(-1).mean(), -around.mean()
        # Next tokens of the prompt at some places.
        at = torch.rand(size, TEXT_TOKENS, device=self.device, generator=self.generator)
        at = (at * (before - 1)[:, None]).long()
        states = hidden.gather(1, at.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
        text = -log_probs(self.model, states).gather(-1, ids.gather(1, at + 1).unsqueeze(-1)).mean()
        state = at_answer(middle[0], lengths, len(answer.ids))[:, answer.action_at].float()
        read = self.probe(functional.rms_norm(state, state.shape[-1:]))
        reading = functional.smooth_l1_loss(read, rows.readings[picked])
        return action + FORMAT_WEIGHT * form + TEXT_WEIGHT * text + READING_WEIGHT * reading

    def phase(self, end: float, lr: float, targets: torch.Tensor, log: Log) -> None:
        """Train until the progress is `end`, with a cosine of the rate.

        Raises:
            ModelError: if the loss is not finite.
        """
        trained = [p for p in (*self.model.parameters(), *self.probe.parameters()) if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
        first_step, begin, said = self.step, self.progress, self.elapsed
        while self.progress < end:
            done = (self.progress - begin) / max(end - begin, 1e-9)
            rise = min(1.0, (self.step - first_step + 1) / 30)
            optimizer.param_groups[0]["lr"] = lr * rise * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)
            loss = self.loss(targets)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            self.step += 1
            if self.elapsed - said > min(20.0, self.scale.seconds / 12):
                said = self.elapsed
                log(f"{said:5.0f} s, step {self.step}: loss {loss.item():.3f}")
                if not loss.isfinite():
                    raise gptoss.ModelError("the warm-up's loss is not finite: try a smaller --lr")


def even_targets(rewards: torch.Tensor, scale: Scale) -> torch.Tensor:
    """Phase 2's targets (N, actions): a share `uniform` spread evenly, the rest by the rewards to the power `sharpness`."""
    soft = rewards.clamp(min=1e-30) ** scale.sharpness
    return (1 - scale.uniform) * soft / soft.sum(-1, keepdim=True) + scale.uniform / ACTIONS


def warm_up(
    model: GptOssForCausalLM, rows: Rows, probe: Rows, answer: Answer, scale: Scale, seed: int, log: Log
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, float]]]:
    """Train `model`. Returns the tensors of its checkpoint by name (BF16, and uint8 for the experts), and `figures` on the
    rows of `probe` after reading, right after the experts were rounded to MXFP4, and as stored."""
    training, stages = WarmUp(model, rows, answer, scale, seed), {}

    def measure(stage: str) -> None:
        stages[stage] = figures(model, probe, answer)
        log(f"{training.elapsed:5.0f} s, step {training.step}, {stage}: {describe(stages[stage])}")

    training.phase(1 - scale.soften, scale.lr, rows.rewards, log)
    measure("read")
    stored = gptoss.quantize_experts(model)
    measure("rounded")
    if stages["rounded"]["reward"] < stages["rounded"]["best_constant"]:
        log("WARNING: the warm-up reads hardly anything: GRPO will have little to choose by (more --warmup-seconds?)")
    training.phase(1.0, scale.soften_lr, even_targets(rows.rewards, scale), log)
    for name, parameter in model.named_parameters():
        if not name.endswith(EXPERT_WEIGHTS):
            parameter.data = parameter.data.bfloat16().float()  # as the checkpoint holds it
            stored[name] = parameter.detach().to("cpu", torch.bfloat16)
    measure("stored")
    return stored, stages


def make(options: argparse.Namespace, scale: Scale, log: Log) -> None:
    """Write OUT/data and OUT/model; figures of the warm-up are kept in OUT/model/warmup.json.

    Raises:
        ModelError: where the device, the tokenizer or the space is missing.
    """
    started, model_dir = time.perf_counter(), options.out / "model"
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise gptoss.ModelError("--device cuda: PyTorch sees no GPU here; choose --device cpu --scale small")
    if options.tokenizer is None and scale.prompt == "full":
        raise gptoss.ModelError("full prompts need --tokenizer DIR with tokenizer.json (o200k with Harmony's tokens)")
    write_data(options.out / "data", scale)
    tokenizer = checkpoint.read_tokenizer(options.tokenizer) if options.tokenizer else make_tokenizer(gptoss.TINY.vocab)
    shape = replace(scale.shape, vocab=(gptoss.TINY if options.tokenizer is None else gptoss.GPT_OSS_20B).vocab)
    token_ids = checkpoint.special_token_ids(tokenizer, shape.vocab)
    checkpoint.require_space(model_dir, checkpoint.checkpoint_bytes(shape) + 64 * 2**20)
    # Workers start before CUDA does, and before the tokenizer's threads.
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    answer = Answer.of(tokenizer)
    rows, probe = (Rows(made, tokenizer, answer, options.device) for made in make_rows(scale))
    log(f"{len(rows)} + {len(probe)} rows of up to {rows.ids.shape[1]} tokens, {time.perf_counter() - started:.0f} s")
    torch.manual_seed(options.seed)
    model = new_model(shape, tokenizer, token_ids).to(options.device)
    parts = count_parameters(gptoss.config_dict(shape))
    body = parts["total"] - parts["embeddings"]
    log(f"{body:,} parameters besides the embeddings")
    tensors, stages = warm_up(model, rows, probe, answer, scale, options.seed, log)
    template = gptoss.chat_template() if scale.prompt == "full" else gptoss.chat_template(*gptoss.TINY_SYSTEM)
    with checkpoint.new_directory(model_dir, force=True) as directory:
        checkpoint.write_checkpoint(directory, shape, token_ids, lambda name, like: tensors[name], tokenizer, template)
        loaded = load_model(str(directory), read_json(directory / "config.json"), "eager").to(options.device).eval()
        record = {
            "besides_embeddings": body,
            "seconds": round(time.perf_counter() - started, 1),
            "scale": asdict(scale),
            "stages": stages,
            "loaded": figures(loaded, probe, answer, 120),
        }
        checkpoint.write_json(directory / "warmup.json", record)
    log(f"loaded again: {describe(record['loaded'])}")
    log(f"{model_dir} written and checked, {time.perf_counter() - started:.0f} s")
