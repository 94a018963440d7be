# SPDX-License-Identifier: Apache-2.0
"""Trains a small gpt-oss to read the plant's prompts and to answer in their format, but not which action to choose."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from grpo.common import InputError
from grpo.model.write_checkpoint import new_directory, write_json
from grpo.plan.hub import TINY_PATH
from scripts.dev import gptoss_format as gptoss
from scripts.dev.warmup_days import CALL_ENDS, DayTensors, warmup_day_rows
from scripts.dev.warmup_rows import ACTIONS, PROBE_SEED, WARMUP_SEED, WarmupTensors, warmup_rows

Log = Callable[[str], None]
# Factors of 1 / sqrt(fan-in) that give the standard deviations of the initial matrices. With gpt-oss's 0.02 everywhere,
# the outputs of narrow layers almost vanish, and the tiny model's output head could never become sure of an action.
INITIAL_GAIN = {
    "q_proj": 0.5, "k_proj": 0.5, "v_proj": 1.0, "o_proj": 0.5, "router": 1.0, "gate_up_proj": 1.0, "down_proj": 0.5,
    "lm_head": 0.8,
}  # fmt: skip
# Weights of the loss's terms relative to the action's: the answer's fixed tokens, the prompt's tokens, the readings.
FORMAT_WEIGHT, TEXT_WEIGHT, READING_WEIGHT = 0.5, 0.2, 2.0
TEXT_TOKENS = 8  # tokens of each prompt in the loss, drawn anew at every step: prompts differ little


def fast_experts(module: GptOssExperts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """All experts on all tokens (N, H) in three matrix products; experts that the router did not choose have weight 0.

    With 4 of 8 experts half of the arithmetic is wasted, but it is still faster than a loop over experts."""
    experts, hidden, _ = module.gate_up_proj.shape

    def project(columns: slice) -> Tensor:
        matrix = module.gate_up_proj[..., columns].permute(1, 0, 2).reshape(hidden, -1)
        return torch.addmm(module.gate_up_proj_bias[..., columns].reshape(-1), hidden_states, matrix)

    gate = project(slice(0, None, 2)).clamp(max=module.limit)
    up = project(slice(1, None, 2)).clamp(min=-module.limit, max=module.limit)
    # The weights get the type of the products, BF16 under autocast: float32 would take twice the memory.
    weights = torch.zeros(len(hidden_states), experts, dtype=gate.dtype, device=gate.device)
    weights = weights.scatter(1, top_k_index, top_k_weights.to(weights.dtype))
    inner = (up + 1) * gate * torch.sigmoid(gate * module.alpha)
    inner = inner.unflatten(-1, (experts, -1)) * weights.unsqueeze(-1)
    out = inner.flatten(-2) @ module.down_proj.reshape(-1, hidden)
    return (out + weights @ module.down_proj_bias).to(hidden_states.dtype)


WARMUP_EXPERTS = "warmup"  # name of `fast_experts` in transformers
ALL_EXPERTS_FUNCTIONS.register(WARMUP_EXPERTS, fast_experts)


@dataclass(frozen=True)
class Recipe:
    """Everything that a warm-up depends on besides the seed: a change of any field changes the model."""

    sizes: gptoss.Sizes
    prompt: str  # full or compact, as in make_dataset.py; day: the plant's day in turns
    windows: int  # windows to learn from, with 40 rows each, or 30 turns
    probe_windows: int  # windows on which the warm-up is measured
    seconds: float  # time budget; the schedule follows this or `steps`, whichever runs out first
    steps: int
    batch: int
    lr: float
    # How many tokens back each head of each sliding layer looks. Heads of the first layer look at neighbours, so that a
    # number's state includes the word before it. Heads of the last look at their own token, where the adapter acts.
    distances: Sequence[Sequence[int]]
    most_factor: float = 1.0  # largest factor of a day's load; the smallest is its reciprocal (dataset.vary_loads)
    rounding: float = 0.2  # share of the budget after the experts were rounded to MXFP4 and frozen
    rounding_lr: float = 0.25  # learning rate in that share, as a factor of lr
    # Probability that a reasoning model answers the action that its chain planned; None for a model without a chain.
    follow: float | None = None


# The recipe of the tiny model in data/tiny.
TINY_RECIPE = Recipe(
    gptoss.TINY, "compact", windows=1200, probe_windows=20, seconds=math.inf, steps=1200, batch=32, lr=4e-3,
    distances=((1, 2, 3, 4), (0,)), most_factor=2.0,
)  # fmt: skip


def new_model(recipe: Recipe, tokenizer: Tokenizer) -> GptOssForCausalLM:
    """A gpt-oss in float32 with `fast_experts`, and initial weights from which reading is learned quickly."""
    values = gptoss.config_dict(recipe.sizes, gptoss.special_token_ids(tokenizer))
    values.pop("quantization_config")
    config = GptOssConfig.from_dict(values)
    model = GptOssForCausalLM._from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation=WARMUP_EXPERTS
    )
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0.0, 0.1)
        for name, parameter in model.named_parameters():
            *_, module, kind = name.split(".")
            gain = INITIAL_GAIN.get(kind if module == "experts" else module)
            if gain and parameter.dim() > 1 and not kind.endswith("bias"):
                fan_in = parameter.shape[-2] if module == "experts" else parameter.shape[-1]
                parameter.normal_(0.0, gain / math.sqrt(fan_in))
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_(0.0, 0.5)
            layer.self_attn.sinks.requires_grad_(False)
        init_number_embeddings(model, tokenizer)
        init_attention_heads(model, recipe.distances)
    return model


def init_number_embeddings(model: GptOssForCausalLM, tokenizer: Tokenizer) -> None:
    """Give number tokens embeddings that vary smoothly with the number, with and without a blank before it.

    A warm-up sees each number too rarely to learn by itself that 37 is close to 38."""
    texts = [f"{n:0{width}d}" for width in (1, 2, 3) for n in range(10**width)]
    numbers = {tokenizer.token_to_id(before + text): float(text) for text in texts for before in ("", "\u0120")}
    numbers.pop(None, None)  # Numbers without a token of their own have the id None.
    value = torch.tensor(list(numbers.values())).unsqueeze(1)
    fine, coarse = value / 100 * math.pi, value / 1000 * math.pi
    waves = [*(fine * k for k in range(1, 7)), *(coarse * k for k in range(1, 9))]
    # The logarithm separates 0 from 1 and 2, because whether there is a shortage matters more than its size.
    linear = [value / 1000 - 0.3, (value / 100).clamp(max=1) - 0.5, value.log1p() / 7 - 0.5]
    features = torch.cat([*linear, *(w.sin() for w in waves), *(w.cos() for w in waves)], dim=1)
    table = features @ (torch.randn(features.shape[1], model.config.hidden_size) * 0.1)
    model.model.embed_tokens.weight[list(numbers)] += table


def init_attention_heads(model: GptOssForCausalLM, distances: Sequence[Sequence[int]]) -> None:
    """Let the heads of the first sliding layers look back by `distances`: for each layer, the tokens of each head.

    Fewer distances than heads are repeated; an empty list leaves a layer unchanged. Later layers find a number by the
    word before it, so heads that join the two are needed first, but learning them from random weights takes longest.
    The biases of q and k are set in the high-frequency pairs of RoPE, the key's at angle 0, the query's turned back by
    the distance: their product peaks there."""
    rotary, size = model.model.rotary_emb, model.config.head_dim
    pairs = [n for n in range(size // 2) if rotary.inv_freq[n] > 0.08]
    turns = rotary.inv_freq[pairs].float()
    fall = (1 - turns.cos()).sum() * rotary.attention_scaling**2 / math.sqrt(size)
    length = (5.0 / fall).sqrt()  # makes the logit one token away from the peak smaller by 5
    with torch.no_grad():
        for layer, back in zip(model.model.layers[0::2], distances, strict=False):
            if not back:
                continue
            key = layer.self_attn.k_proj.bias.view(-1, size)
            query = layer.self_attn.q_proj.bias.view(-1, size)
            key[:, pairs] = length
            for n in range(len(query)):
                angle = -back[n % len(back)] * turns
                query[n, pairs] = length * angle.cos()
                query[n, [p + size // 2 for p in pairs]] = length * angle.sin()


def forward(model: GptOssForCausalLM, ids: Tensor) -> Tensor:
    """Last hidden states (B, T, H) of rows padded on the right, where the causal mask hides the padding. A model in
    float32 computes in BF16 autocast on a GPU."""
    with torch.autocast("cuda", torch.bfloat16, enabled=ids.is_cuda and model.dtype == torch.float32):
        return model.model(input_ids=ids, use_cache=False).last_hidden_state


def log_probs(model: GptOssForCausalLM, hidden: Tensor) -> Tensor:
    """Log-probs (..., V) in float32 after hidden states (..., H)."""
    return model.lm_head(hidden.to(model.lm_head.weight.dtype)).float().log_softmax(-1)


def at_answer(hidden: Tensor, lengths: Tensor, answer: int) -> Tensor:
    """The hidden states (B, answer, H) that predict the last `answer` tokens of each row."""
    index = lengths[:, None] - answer - 1 + torch.arange(answer, device=lengths.device)
    return hidden.take_along_dim(index[..., None], 1)


def answer_log_probs(
    model: GptOssForCausalLM, hidden: Tensor, ids: Tensor, lengths: Tensor, rows: WarmupTensors
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of each action at each of the answer's choices (B, choices, actions), the sum over its fixed
    tokens (B,), and the sum over its numbers (B,)."""
    logp = log_probs(model, at_answer(hidden, lengths, len(rows.answer)))
    choices = torch.stack([logp[:, n, tokens] for n, tokens in zip(rows.choices, rows.actions, strict=True)], 1)
    tokens = at_answer(ids[:, 1:, None], lengths, len(rows.answer))
    written = logp.gather(-1, tokens)[..., 0]
    return choices, written[:, rows.fixed].sum(-1), written[:, rows.numbers].sum(-1)


def figures(model: GptOssForCausalLM, rows: WarmupTensors, limit: int | None = None) -> dict[str, float]:
    """The expected figures of sampling at temperature 1 on up to `limit` rows, from the four answers' probabilities.

    `parse_rate` is the probability of an answer `[k]` in the final channel; `reward` the mean reward, where an
    unparseable answer counts 0; `greedy` that of the likeliest action; `random`, `best_constant` and `oracle`
    those of reference policies on the same rows. For a reasoning model they are sums over chains with the right numbers
    and any of the four plans; `numbers` is the probability of these numbers, `follows` that of the planned action."""
    stride = max(1, len(rows) // limit) if limit else 1
    indices, parts, chains = torch.arange(0, len(rows), stride)[:limit], [], []
    reasons = len(rows.choices) > 1
    with torch.no_grad():
        for batch in indices.split(64):
            ids, lengths = rows.batch(batch.to(rows.ids.device))
            p = torch.zeros(len(batch), ACTIONS, device=ids.device)
            for plan in range(ACTIONS if reasons else 1):
                if reasons:
                    rows.write_actions(ids, lengths, 0, torch.full_like(lengths, plan))
                choices, format_logp, numbers = answer_log_probs(model, forward(model, ids), ids, lengths, rows)
                p += (choices[:, :-1, plan].sum(1, keepdim=True) + choices[:, -1] + format_logp.unsqueeze(-1)).exp()
                chains.append(torch.stack([numbers, choices[:, -1, plan]]).exp().mean(1).cpu())
            parts.append(p.cpu())
    p, rewards = torch.cat(parts), rows.rewards[indices].cpu()
    chain_figures = zip(("numbers", "follows"), torch.stack(chains).mean(0).tolist(), strict=True)
    return {
        "parse_rate": p.sum(-1).mean().item(),
        "reward": (p * rewards).sum(-1).mean().item(),
        "greedy": rewards.gather(1, p.argmax(-1, keepdim=True)).mean().item(),
        "random": rewards.mean().item(),
        "best_constant": rewards.mean(0).max().item(),
        "oracle": rewards.amax(-1).mean().item(),
        **(dict(chain_figures) if reasons else {}),
    }


class WarmUp:
    """Supervised training, in which the model learns to read prompts but not which action is better.

    It learns well-formed answers that name each action with the same probability for every prompt; the plans of a
    reasoning model are as uniform, and an answer follows its plan with the probability `follow`. A linear `probe`,
    discarded afterwards, predicts the rows' readings from a middle layer's state at the first action's token."""

    def __init__(self, model: GptOssForCausalLM, rows: WarmupTensors, recipe: Recipe, seed: int) -> None:
        self.model, self.rows, self.recipe = model, rows, recipe
        self.device = rows.ids.device
        self.generator = torch.Generator(device=self.device).manual_seed(seed)
        self.probe = torch.nn.Linear(model.config.hidden_size, rows.readings.shape[-1]).to(self.device)
        depth = 3 * len(model.model.layers) // 4
        self.middle = model.model.layers[depth if depth % 2 else depth - 1]  # This layer attends to the whole prompt.
        self.step, self.started = 0, time.perf_counter()

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    @property
    def progress(self) -> float:
        """The share of the warm-up that is done, 0 to 1, by seconds or by steps, whichever is larger."""
        return min(1.0, max(self.elapsed / self.recipe.seconds, self.step / self.recipe.steps))

    def losses(self, picked: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of the `picked` rows (B,) without readings, and the readings (B, R) that the probe predicts."""
        rows, size = self.rows, len(picked)
        ids, lengths = rows.batch(picked)
        before = lengths - len(rows.answer)
        # Tokens behind action and plan attend to these, so action and plan are drawn from all four actions.
        wanted = torch.ones(size, len(rows.choices), ACTIONS, device=self.device)  # probabilities times ACTIONS
        for choice in range(len(rows.choices)):
            shown = torch.randint(ACTIONS, (size,), device=self.device, generator=self.generator)
            rows.write_actions(ids, lengths, choice, shown)
            if choice == 0 and self.recipe.follow is not None:
                wanted[:, -1] = ACTIONS * (1 - self.recipe.follow) / (ACTIONS - 1)
                wanted[:, -1].scatter_(1, shown[:, None], ACTIONS * self.recipe.follow)
        with self.reading_middle() as middle:
            hidden = forward(self.model, ids)
        choices, format_logp, numbers = answer_log_probs(self.model, hidden, ids, lengths, rows)
        text = self.text_loss(hidden, ids, before)
        state = at_answer(middle[0], lengths, len(rows.answer))[:, rows.choices[0]].float()
        loss = -(wanted * choices).sum(1).mean() - FORMAT_WEIGHT * format_logp.mean() + TEXT_WEIGHT * text
        if rows.numbers:
            loss = loss - TEXT_WEIGHT * numbers.mean()
        return loss, self.probe(functional.rms_norm(state, state.shape[-1:]))

    @contextlib.contextmanager
    def reading_middle(self) -> Iterator[list[Tensor]]:
        """Inside the block the middle layer's states (B, T, H) are added to a list."""
        states: list[Tensor] = []
        hook = self.middle.register_forward_hook(lambda module, inputs, output: states.append(output))
        yield states
        hook.remove()

    def text_loss(self, hidden: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
        """The mean loss of TEXT_TOKENS random tokens among the first `lengths` (B,) of each row."""
        at = torch.rand(len(ids), TEXT_TOKENS, device=self.device, generator=self.generator)
        at = (at * (lengths - 1)[:, None]).long()
        logp = log_probs(self.model, hidden.take_along_dim(at[..., None], 1))
        return -logp.gather(-1, ids.gather(1, at + 1).unsqueeze(-1)).mean()

    def train_until(self, end: float, lr: float, log: Log) -> None:
        """Train until `progress` is `end`; `lr` decays to 5%. Raises InputError if a logged loss is not finite."""
        trained = [p for p in (*self.model.parameters(), *self.probe.parameters()) if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
        first_step, begin, logged = self.step, self.progress, self.elapsed
        while self.progress < end:
            done = (self.progress - begin) / max(end - begin, 1e-9)
            rise = min(1.0, (self.step - first_step + 1) / 30)
            optimizer.param_groups[0]["lr"] = lr * rise * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)
            picked = torch.randint(len(self.rows), (self.recipe.batch,), device=self.device, generator=self.generator)
            loss, readings = self.losses(picked)
            loss = loss + READING_WEIGHT * functional.smooth_l1_loss(readings, self.rows.readings[picked])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            self.step += 1
            if self.elapsed - logged > min(20.0, self.recipe.seconds / 12):
                logged = self.elapsed
                log(f"{logged:5.0f} s, step {self.step}: loss {loss.item():.3f}")
                if not loss.isfinite():
                    raise InputError("the warm-up's loss is not finite")


class DayWarmUp(WarmUp):
    """The warm-up on whole days: a day teaches as many readings as it has hours, and the form of one of its calls."""

    rows: DayTensors

    def losses(self, picked: Tensor) -> tuple[Tensor, Tensor]:
        """Those of `WarmUp`, but the readings are (B, hours, R)."""
        rows, levels = self.rows, self.rows.levels[picked]
        ids, lengths = rows.batch(picked)
        with self.reading_middle() as middle:
            hidden = forward(self.model, ids)
        before = (levels - 1)[..., None]
        choices = log_probs(self.model, hidden.take_along_dim(before, 1))[..., rows.actions[0]]
        turn = torch.randint(levels.shape[1], (len(picked), 1), device=self.device, generator=self.generator)
        ends = levels.gather(1, turn)[:, 0] - rows.choices[0] + len(rows.answer)
        _, format_logp, _ = answer_log_probs(self.model, hidden, ids, ends, rows)
        text = self.text_loss(hidden, ids, lengths)
        loss = -choices.mean() - FORMAT_WEIGHT * format_logp.mean() + TEXT_WEIGHT * text
        state = middle[0].take_along_dim(before, 1).float()
        return loss, self.probe(functional.rms_norm(state, state.shape[-1:]))


def read_rows(recipe: Recipe, first_seed: int, windows: int, tokenizer: Tokenizer, device: str) -> WarmupTensors:
    """The rows of so many windows, in the form of the recipe's prompts."""
    if recipe.prompt == "day":
        rows = warmup_day_rows(first_seed, windows, recipe.most_factor)
        return WarmupTensors(rows, tokenizer, device, ends=CALL_ENDS)
    rows = warmup_rows(first_seed, windows, recipe.prompt, recipe.most_factor)
    return WarmupTensors(rows, tokenizer, device, recipe.follow is not None)


def write_warmed_up(
    directory: Path, recipe: Recipe, tokenizer: Tokenizer, device: str, seed: int, log: Log
) -> tuple[dict[str, dict[str, float]], WarmupTensors]:
    """Make a model on `device`, warm it up by the `recipe` and write its checkpoint into `directory`.

    Returns its `figures` after reading, right after the experts were rounded to MXFP4, and as stored, then the rows
    that they were measured on. Raises InputError for a tokenizer that does not fit."""
    probe = read_rows(recipe, PROBE_SEED, recipe.probe_windows, tokenizer, device)
    rows = (
        DayTensors(warmup_day_rows(WARMUP_SEED, recipe.windows, recipe.most_factor), tokenizer, device)
        if recipe.prompt == "day"
        else read_rows(recipe, WARMUP_SEED, recipe.windows, tokenizer, device)
    )
    log(f"{len(rows)} + {len(probe)} rows of up to {rows.ids.shape[1]} tokens")
    torch.manual_seed(seed)
    model = new_model(recipe, tokenizer).to(device)  # type: ignore[arg-type]  # the wrapper loses `self`
    if device.startswith("cuda") and recipe.prompt != "compact":
        model.set_attn_implementation("flex_attention")  # It is faster, but refuses rows of fewer than 128 tokens.
    training = (DayWarmUp if recipe.prompt == "day" else WarmUp)(model, rows, recipe, seed)
    stages: dict[str, dict[str, float]] = {}

    def measure(stage: str) -> None:
        stages[stage] = figures(model, probe)
        shown = " ".join(f"{name} {value:.3f}" for name, value in stages[stage].items())
        log(f"{training.elapsed:5.0f} s, step {training.step}, {stage}: {shown}")

    training.train_until(1 - recipe.rounding, recipe.lr, log)
    measure("read")
    tensors = gptoss.quantize_experts(model)
    measure("rounded")
    training.train_until(1.0, recipe.lr * recipe.rounding_lr, log)
    for name, parameter in model.named_parameters():
        if f"{name}_blocks" not in tensors:
            parameter.data = parameter.data.bfloat16().float()  # as the checkpoint holds it
            tensors[name] = parameter.detach().to("cpu", torch.bfloat16)
    measure("stored")
    gptoss.write_checkpoint(directory, recipe.sizes, lambda name, like: tensors[name], tokenizer)
    return stages, probe


def write_small(
    out: Path,
    recipe: Recipe = TINY_RECIPE,
    seed: int = 0,
    log: Log = print,
    tokenizer: Path = TINY_PATH,
    device: str = "cpu",
) -> None:
    """Warm up the recipe's model and write its checkpoint, with figures in warmup.json, to the folder `out`.

    In the tokenizer of data/tiny every integer from 0 to 200 is a token of its own, with and without the space before,
    so that prompts are short and numbers are easy to read. The same seed gives the same model on the same machine.
    Raises InputError before training, as `new_directory` does."""
    with new_directory(out) as directory, torch.random.fork_rng([]):
        stages, _ = write_warmed_up(directory, recipe, gptoss.read_tokenizer(tokenizer), device, seed, log)
        write_json(directory / "warmup.json", {"seed": seed, "steps": recipe.steps, **stages["stored"]})
