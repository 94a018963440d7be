# SPDX-License-Identifier: Apache-2.0
"""The proof's mid-size model and its warm-up."""

from __future__ import annotations

import argparse
import contextlib
import csv
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from grpo.measure.proof import REFERENCES, read_back
from grpo.measure.proof_data import (
    KEPT_TAIL,
    LARGEST_NUMBER,
    NEAR_KWH,
    PAD_TO,
    PROBE_SEED,
    QUANTITIES,
    WARMUP_SEED,
    Rows,
    Scale,
    Vocabulary,
    encode,
    make_rows,
    place,
    rendered,
    shared_ends,
    write_data,
)
from grpo.model.checkpoint import (
    checkpoint_bytes,
    new_directory,
    read_tokenizer,
    require_space,
    special_token_ids,
    write_checkpoint,
    write_json,
)
from grpo.model.gptoss_format import (
    GPT_OSS_20B,
    TINY,
    TINY_SYSTEM,
    ModelError,
    Shape,
    chat_template,
    config_dict,
    quantize_experts,
)
from grpo.model.tiny_warmup import ACTIONS, answer_figures, initial_heads, make_tokenizer
from grpo.preflight.hub import count_parameters
from grpo.tasks.tes.plant import Plant


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
    and `PAD_TO` keys are added, of which the mask shows the first. query ``[B, H, T, D]``, mask ``[B or 1, 1, T, T + 8]``.
    """

    batch, heads, columns, size = query.shape
    groups = heads // key.shape[1]
    # Under autocast RoPE leaves float32 behind; the mask has the type to compute in.
    query, key, value = (x.to(attention_mask.dtype) for x in (query, key, value))
    one = query.new_zeros(batch, heads, columns, 8)
    one[..., 0] = 1
    query = torch.cat((query, one), dim=-1)
    key, value = (functional.pad(x.repeat_interleave(groups, dim=1), (0, 8)) for x in (key, value))
    sinks = query.new_zeros(batch, heads, PAD_TO, size + 8)
    sinks[..., 0, size] = (s_aux / scaling).to(query.dtype)
    key = torch.cat((key, sinks), dim=2)
    value = torch.cat((value, torch.zeros_like(sinks)), dim=2)
    # The fused kernel for a GPU that takes any mask; a CPU's own.
    fused = SDPBackend.EFFICIENT_ATTENTION if query.device.type == "cuda" else SDPBackend.FLASH_ATTENTION
    with sdpa_kernel([fused, SDPBackend.MATH]):
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return out[..., :size].transpose(1, 2).contiguous(), None


def fast_experts(self: Any, hidden_states: torch.Tensor, router_indices: Any, routing_weights: Any) -> torch.Tensor:
    """All experts on all tokens in three matrix products; those that the router left out get a weight of zero.

    Half of the arithmetic is wasted with 4 of 8, and it is still faster than a loop over experts.
    """

    experts, hidden, _ = self.gate_up_proj.shape

    def project(columns: slice) -> torch.Tensor:
        matrix = self.gate_up_proj[..., columns].permute(1, 0, 2).reshape(hidden, -1)
        return torch.addmm(self.gate_up_proj_bias[..., columns].reshape(-1), hidden_states, matrix)

    gate = project(slice(0, None, 2)).clamp(max=self.limit)
    up = project(slice(1, None, 2)).clamp(min=-self.limit, max=self.limit)
    # The type of the products, BF16 under autocast: wide tensors in float32 would take twice the memory.
    weights = torch.zeros(len(hidden_states), experts, dtype=gate.dtype, device=gate.device)
    weights = weights.scatter(1, router_indices, routing_weights.to(weights.dtype))
    inner = (up + 1) * gate * torch.sigmoid(gate * self.alpha)
    inner = inner.unflatten(-1, (experts, -1)) * weights.unsqueeze(-1)
    out = inner.flatten(-2) @ self.down_proj.reshape(-1, hidden)
    return (out + weights @ self.down_proj_bias).to(hidden_states.dtype)


@contextlib.contextmanager
def fast_kernels(model: Any) -> Iterator[None]:
    """Use `fast_attention` and `fast_experts` in a gpt-oss of transformers; masks must then be given (`masks`)."""

    before, forward = model.config._attn_implementation, GptOssExperts.forward
    ALL_ATTENTION_FUNCTIONS.register("prove", fast_attention)
    model.config._attn_implementation, GptOssExperts.forward = "prove", fast_experts
    try:
        yield
    finally:
        model.config._attn_implementation, GptOssExperts.forward = before, forward


def masks(positions: torch.Tensor, window: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Additive masks of `fast_attention`, ``[B, 1, T, T + 8]``, for tokens at ascending positions ``[B, T]``.

    Padding stands behind the tokens, where the causal mask hides it.
    """

    least = torch.finfo(dtype).min
    rows, columns = positions.shape
    causal = torch.ones(columns, columns, dtype=torch.bool, device=positions.device).tril()
    near = positions.unsqueeze(2) - positions.unsqueeze(1) < window
    made = {}
    for name, allowed in (("full_attention", causal.unsqueeze(0)), ("sliding_attention", causal & near)):
        mask = torch.full((len(allowed), 1, columns, columns + PAD_TO), least, dtype=dtype, device=positions.device)
        mask[:, 0, :, :columns].masked_fill_(allowed, 0)
        mask[..., columns] = 0  # the sink
        made[name] = mask
    return made


# Standard deviations of the initial matrices, times 1 / sqrt(fan-in). 0.02 everywhere, gpt-oss's initializer range, lets
# narrow layers pass on next to nothing.
INITIAL_GAIN = {
    "q_proj": 0.5, "k_proj": 0.5, "v_proj": 1.0, "o_proj": 0.5, "router": 1.0, "gate_up_proj": 1.0, "down_proj": 0.5,
}  # fmt: skip


def new_model(shape: Shape, vocabulary: Vocabulary) -> Any:
    """A gpt-oss in float32 with the vocabulary's size, and initial weights from which reading is learned quickly."""

    size = vocabulary.rest + 1
    config = config_dict(replace(shape, vocab=size))
    config.pop("quantization_config")
    config |= {"pad_token_id": None, "eos_token_id": None}
    model = GptOssForCausalLM._from_config(
        GptOssConfig.from_dict(config), dtype=torch.float32, attn_implementation="eager"
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
        initial_numbers(model, vocabulary)
        initial_heads(model, HEAD_DISTANCES)
    return model


def initial_numbers(model: Any, vocabulary: Vocabulary) -> None:
    """Give number tokens embeddings that vary smoothly with the number: 358 begins near 357, as in the tiny model."""

    numbers = torch.tensor([vocabulary.number[i] for i in vocabulary.values])
    value = torch.tensor([float(v) for v in vocabulary.values.values()]).unsqueeze(1)
    fine, coarse = value / 100 * math.pi, value / (LARGEST_NUMBER + 1) * math.pi
    waves = [fine * k for k in range(1, 5)] + [coarse * k for k in range(1, 9)]
    linear = [value / 1000 - 0.3, (value / 100).clamp(max=1) - 0.5, value.log1p() / 7 - 0.5]
    features = torch.cat([*linear, *(w.sin() for w in waves), *(w.cos() for w in waves)], dim=1)
    table = features @ (torch.randn(features.shape[1], model.config.hidden_size) * 0.1)
    weight = model.model.embed_tokens.weight
    weight[numbers] += table.to(weight.device)


# Tokens back, one for each head, in the first two sliding layers: neighbours first, then, in the second, an hour's own
# numbers and the same number an hour earlier (a line of the forecast has 26 tokens).
HEAD_DISTANCES = ((1, 2, 3, 4, 5, 6, 7, 8), (1, 8, 6, 11, 17, 26, 20, 3))


def forward(model: Any, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Last hidden states ``[B, T, hidden]``; BF16 autocast on a GPU, float32 elsewhere. Under `fast_kernels`."""

    cuda = ids.device.type == "cuda"
    dtype = torch.bfloat16 if cuda else next(model.parameters()).dtype
    # Whole rows share their positions, and with them the masks.
    first = positions[:1] if bool((positions == positions[:1]).all()) else positions
    mask = masks(first, model.config.sliding_window, dtype)
    with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
        return model.model(
            input_ids=ids.long(), attention_mask=mask, position_ids=positions, use_cache=False
        ).last_hidden_state


def log_probs(model: Any, hidden: torch.Tensor, others: int) -> torch.Tensor:
    """Log-probs in float32 over the small vocabulary; the last one is that of all other tokens together."""
    logits = model.lm_head(hidden.to(model.lm_head.weight.dtype)).float()
    offset = logits.new_zeros(logits.shape[-1])
    offset[-1] = math.log(others) if others else -math.inf
    return (logits + offset).log_softmax(-1)


def at_answer(hidden: torch.Tensor, valid: torch.Tensor, answer: int) -> torch.Tensor:
    """Hidden states ``[B, answer, hidden]`` that predict the last `answer` tokens of each row."""

    index = valid[:, None] - answer - 1 + torch.arange(answer, device=valid.device)
    return hidden.gather(1, index.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))


def figures(
    model: Any, rows: Rows, vocabulary: Vocabulary, focus: bool = False, limit: int | None = None
) -> dict[str, float]:
    """What sampling at temperature 1 gives in expectation, from probabilities; the keys are those of make_model.py.

    ``parse_rate``, ``reward`` (an unparseable answer counts 0), ``greedy``, ``random``, ``best_constant``, ``oracle``;
    with full prompts also ``unserved``, the probability of an action that leaves load unserved, in hours that have one.
    """

    fixed = vocabulary.fixed
    wanted = torch.tensor(vocabulary.answer, device=rows.ids.device)[fixed]
    chosen = []
    count = min(len(rows), limit or len(rows))
    with torch.no_grad(), fast_kernels(model):
        for start in range(0, count, 64):
            picked = torch.arange(start, min(start + 64, count), device=rows.ids.device)
            ids, positions, valid = rows.batch(picked, len(vocabulary.answer), focus)
            hidden = at_answer(forward(model, ids, positions), valid, len(vocabulary.answer))
            logp = log_probs(model, hidden, vocabulary.others)
            around = logp[:, fixed, wanted].sum(-1)
            chosen.append((logp[:, vocabulary.place, vocabulary.actions] + around.unsqueeze(-1)).exp())
    p, rewards = torch.cat(chosen), rows.rewards[:count]
    bad = torch.tensor(Plant().outputs_kw, device=p.device) < rows.deficit[:count, None]
    found = {"unserved": ((p * bad).sum() / bad.any(-1).sum()).item()} if bad.any() else {}
    return found | answer_figures(p, rewards)


def describe(found: Mapping[str, float]) -> str:
    return (
        f"reward {found['reward']:.3f} greedy {found['greedy']:.3f} parse {found['parse_rate']:.3f} (random "
        f"{found['random']:.3f} constant {found['best_constant']:.3f} oracle {found['oracle']:.3f})"
    ) + (f" unserved {found['unserved']:.3f}" if "unserved" in found else "")


class Clock:
    """How far the warm-up is, 0 to 1: by the seconds or by the steps, whichever is further."""

    def __init__(self, seconds: float, steps: int) -> None:
        self.seconds, self.steps, self.step, self.started = seconds, steps, 0, time.perf_counter()

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    @property
    def progress(self) -> float:
        return min(1.0, max(self.elapsed / self.seconds, self.step / self.steps))


def draw_weights(deficit: torch.Tensor, scale: Scale) -> torch.Tensor:
    """How often each row is drawn, relative to others; `deficit` as `Rows.deficit`, ``[N]``."""

    return torch.where((deficit > -NEAR_KWH) & (deficit <= 0), scale.near_weight, 1.0)


def warm_up(
    model: Any, rows: Rows, probe: Rows, vocabulary: Vocabulary, scale: Scale, seed: int, log: Callable[[str], None]
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, float]]]:
    """Train in two phases, read and soften, as make_model.py's tiny model; docs/proof.md says what and why.

    Returns:
        the experts' blocks and scales by their names in the checkpoint, and `figures` after each phase and right after
        the experts were rounded to MXFP4.
    """

    device, answer = rows.ids.device, len(vocabulary.answer)
    generator = torch.Generator(device=device).manual_seed(seed)
    fixed, actions = vocabulary.fixed, torch.tensor(vocabulary.actions, device=device)
    wanted_fixed = torch.tensor(vocabulary.answer, device=device)[fixed]
    middle: dict[str, torch.Tensor] = {}
    depth = 3 * len(model.model.layers) // 4
    tap = model.model.layers[depth if depth % 2 else depth - 1]  # a layer that attends to everything
    hook = tap.register_forward_hook(lambda module, inputs, output: middle.update(hidden=output))
    probe_head = None
    if rows.readings is not None:
        mean, deviation = rows.readings.mean(0), rows.readings.std(0).clamp(min=1e-6)
        probe_head = torch.nn.Linear(model.config.hidden_size, len(QUANTITIES)).to(device)
    clock = Clock(scale.seconds, scale.steps)
    seen = {"tokens": 0, "rows": 0, "said": 0.0}
    chance = draw_weights(rows.deficit, scale)

    def phase(name: str, end: float, lr: float, targets: torch.Tensor, focus_until: float) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        trained = parameters + (list(probe_head.parameters()) if probe_head else [])
        optimizer = torch.optim.AdamW(
            trained, lr=lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True if device.type == "cuda" else None
        )
        first_step, begin = clock.step, clock.progress
        while clock.progress < end:
            done = (clock.progress - begin) / max(end - begin, 1e-9)
            rise = min(1.0, (clock.step - first_step + 1) / 30)
            for group in optimizer.param_groups:
                group["lr"] = lr * rise * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)
            focus = clock.progress < focus_until
            picked = torch.multinomial(chance, scale.batch, replacement=True, generator=generator)
            ids, positions, valid = rows.batch(picked, answer, focus)
            ids = ids.long()
            # The action's token is visible to the tokens behind it: show them all four.
            shown = actions[torch.randint(ACTIONS, (scale.batch,), device=device, generator=generator)]
            ids.scatter_(1, (valid - answer + vocabulary.place)[:, None], shown[:, None])

            hidden = forward(model, ids, positions)
            logp = log_probs(model, at_answer(hidden, valid, answer), vocabulary.others)
            wanted = targets[picked]
            action_loss = -(wanted * logp[:, vocabulary.place, actions]).sum(-1).mean()
            loss = action_loss - scale.format_weight * logp[:, fixed, wanted_fixed].sum(-1).mean()
            text_loss = reading_loss = torch.zeros((), device=device)
            if scale.text_weight:
                # Next tokens of the prompt, except across a gap; one row in four is enough, the text is always the same.
                some = slice(0, max(1, scale.batch // 4))
                column = torch.arange(ids.shape[1] - 1, device=device)
                follows = positions[some, 1:] == positions[some, :-1] + 1
                scored = follows & (column < (valid[some] - answer - 1)[:, None])
                text = log_probs(model, hidden[some, :-1], vocabulary.others)
                text = text.gather(-1, ids[some, 1:, None])[..., 0]
                text_loss = -(text * scored).sum() / scored.sum()
                loss = loss + scale.text_weight * text_loss
            if probe_head is not None and scale.reading_weight:
                state = at_answer(middle["hidden"], valid, answer)[:, vocabulary.place].float()
                state = torch.nn.functional.rms_norm(state, state.shape[-1:])
                truth = (rows.readings[picked] - mean) / deviation
                reading_loss = torch.nn.functional.smooth_l1_loss(probe_head(state), truth)
                loss = loss + scale.reading_weight * reading_loss
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            clock.step += 1
            seen["tokens"] += ids.numel()
            seen["rows"] += len(ids)
            if clock.elapsed - seen["said"] > min(20.0, clock.seconds / 12):
                span = clock.elapsed - seen["said"]
                entropy = -(wanted * wanted.clamp(min=1e-9).log()).sum(-1).mean()
                found = figures(model, probe, vocabulary, limit=256)
                focused = figures(model, probe, vocabulary, True, 256)["reward"] if focus else math.nan
                log(
                    f"{clock.elapsed:5.0f} s {name}{' focused' * focus} step {clock.step} rows {seen['rows']}: KL "
                    f"{(action_loss - entropy).item():.3f} text {text_loss.item():.2f} reading {reading_loss.item():.3f} "
                    + describe(found)
                    + (f" focused {focused:.3f}" if focus else "")
                    + f" {seen['tokens'] / span:,.0f} tokens/s"
                )
                seen["tokens"], seen["said"] = 0, clock.elapsed
                if not math.isfinite(loss.item()):
                    raise ModelError("the warm-up's loss is not finite: try a smaller --lr")

    stages = {}
    try:
        with fast_kernels(model):
            phase("read", 1 - scale.soften, scale.lr, rows.rewards, scale.focus)
            stages["read"] = figures(model, probe, vocabulary)
            log(f"after reading:  {describe(stages['read'])}")
            packed = quantize_experts(model)
            stages["rounded"] = figures(model, probe, vocabulary)
            log(f"after rounding: {describe(stages['rounded'])}")
            soft = rows.rewards.clamp(min=1e-30) ** scale.sharpness
            soft = (1 - scale.uniform) * soft / soft.sum(-1, keepdim=True) + scale.uniform / ACTIONS
            phase("soften", 1.0, scale.soften_lr, soft, 0.0)
    finally:
        hook.remove()
    # What the checkpoint holds: everything but the experts in BF16.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                parameter.copy_(parameter.to(torch.bfloat16))
    stages["stored"] = figures(model, probe, vocabulary)
    log(f"as stored:      {describe(stages['stored'])}; {clock.step} steps, {seen['rows']} rows, {clock.elapsed:.0f} s")
    return packed, stages


def checkpoint_tensors(
    model: Any, packed: Mapping[str, torch.Tensor], vocabulary: Vocabulary, vocab: int, seed: int
) -> dict[str, torch.Tensor]:
    """Tensors as the checkpoint stores them: the small vocabulary's rows go back to their ids.

    Other tokens get random embeddings, and as output rows the one that stood for them all, with a little noise.
    """

    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor(vocabulary.ids)
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16)
        for name, tensor in model.state_dict().items()
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    }
    for name, std in (("model.embed_tokens.weight", 0.1), ("lm_head.weight", 0.002)):
        trained = tensors[name].float()
        table = torch.randn(vocab, trained.shape[1], generator=generator) * std
        if name.startswith("lm_head"):
            table += trained[-1]
        table[ids] = trained[:-1]
        tensors[name] = table.to(torch.bfloat16)
    return tensors | dict(packed)


def load_tokenizer(folder: Path | None) -> Tokenizer:
    """The tokenizer in `folder`, or the tiny model's own."""
    return read_tokenizer(folder) if folder else make_tokenizer(TINY.vocab)


def make(options: argparse.Namespace, scale: Scale, log: Callable[[str], None]) -> None:
    """Write OUT/data and OUT/model; figures of the warm-up are kept in OUT/model/warmup.json."""

    started = time.perf_counter()
    model_dir = options.out / "model"
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError("--device cuda: PyTorch sees no GPU here; choose --device cpu --scale small")
    write_data(options.out / "data", scale)
    if options.tokenizer is None and scale.prompt == "full":
        raise ModelError("full prompts need --tokenizer DIR with tokenizer.json (o200k with Harmony's tokens)")
    tokenizer = load_tokenizer(options.tokenizer)
    shape = replace(scale.shape, vocab=(TINY if options.tokenizer is None else GPT_OSS_20B).vocab)
    token_ids = special_token_ids(tokenizer, shape.vocab)
    require_space(model_dir, checkpoint_bytes(shape) + 64 * 2**20)

    # Workers start before CUDA does, and before the tokenizer's threads.
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    train_rows = make_rows(WARMUP_SEED, scale.windows, scale.prompt)
    probe_rows = make_rows(PROBE_SEED, scale.probe_windows, scale.prompt)
    log(f"{len(train_rows)} + {len(probe_rows)} rows made, {time.perf_counter() - started:.0f} s")
    encoded, probe_encoded = encode(tokenizer, train_rows), encode(tokenizer, probe_rows)
    with (options.out / "data" / "tes_train.csv").open(newline="", encoding="utf-8") as file:
        own = [(rendered(row, n), None, None) for n, row in enumerate(csv.DictReader(file))]
    used = {
        int(i) for rows in (encoded, probe_encoded, encode(tokenizer, own)) for i in np.unique(np.concatenate(rows))
    }
    vocabulary = Vocabulary(tokenizer, used, shape.vocab)
    rows = place(encoded, train_rows, vocabulary, options.device)
    probe = place(probe_encoded, probe_rows, vocabulary, options.device)
    answer = len(vocabulary.answer)
    head, tail = shared_ends([row[:-answer] for row in encoded[:3000]])
    rows.head = probe.head = head
    rows.tail = probe.tail = tail
    widest = int(rows.lengths.max())
    saved = (head + tail - 3 * KEPT_TAIL) / widest
    if scale.focus and saved < 0.2:  # nothing worth leaving out
        scale = replace(scale, focus=0.0)
    log(
        f"{widest} tokens at most, the first {head} and the last {tail} of a prompt never change; {vocabulary.rest} of "
        f"{shape.vocab} tokens occur; {time.perf_counter() - started:.0f} s"
    )
    torch.manual_seed(options.seed)
    model = new_model(shape, vocabulary).to(options.device)
    total = count_parameters(config_dict(shape))["total"]
    body = total - 2 * shape.vocab * shape.hidden
    log(f"{total:,} parameters, {body:,} besides the embeddings")
    packed, stages = warm_up(model, rows, probe, vocabulary, scale, options.seed, log)
    if stages["rounded"]["reward"] < stages["rounded"]["best_constant"]:
        log("WARNING: the warm-up reads hardly anything: GRPO will have little to choose by (more --warmup-seconds?)")
    if stages["rounded"].get("unserved", 0.0) > 0.05:
        log(
            "WARNING: the model does not tell hours with too little storage from others: GRPO would make the plant worse"
        )

    tensors = checkpoint_tensors(model, packed, vocabulary, shape.vocab, options.seed)
    with new_directory(model_dir, force=True) as directory:
        template = chat_template() if scale.prompt == "full" else chat_template(*TINY_SYSTEM)
        write_checkpoint(directory, shape, token_ids, lambda name, like: tensors[name], tokenizer, template)
        seconds = time.perf_counter() - started
        record = {
            "parameters": total,
            "besides_embeddings": body,
            "seconds": round(seconds, 1),
            "stages": stages,
            "scale": asdict(scale),
        }
        del model, rows
        if options.device.startswith("cuda"):
            torch.cuda.empty_cache()
        record["loaded"] = read_back(directory, probe_rows, encode(tokenizer, probe_rows), vocabulary, options.device)
        write_json(directory / "warmup.json", record)
    log(f"loaded again:   {describe(record['loaded'] | {k: stages['stored'][k] for k in REFERENCES})}")
    log(
        "prompt tokens as the parity gate scores them (nats): mean -log p {text_nll:.3f}, BF16 against float32 "
        "{rounding_nats:.4f}, effect of a random adapter {adapter_nats:.4f}".format(**record["loaded"])
    )
    log(f"{model_dir} written and checked, {time.perf_counter() - started:.0f} s")
