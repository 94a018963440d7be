# SPDX-License-Identifier: Apache-2.0
"""Models whose answers are evaluated: a run's own, or one in transformers or vLLM without a trainer."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.common import InputError, format_exception
from grpo.data.files import Row
from grpo.data.prepare import Tools
from grpo.environment.pool import EnvironmentPool
from grpo.evaluate.exact import BATCH_TOKENS, answer_probabilities
from grpo.learn.trainer import Trainer
from grpo.model.attention import unwrap_peft
from grpo.model.expert_lora import experts_wrapped
from grpo.model.load import in_compute_dtype, load_generation_config, load_model, load_tokenizer, stop_tokens
from grpo.output.durable import read_json
from grpo.output.layout import ADAPTER_CONFIG
from grpo.plan.engine_memory import plan_engine
from grpo.plan.hub import ModelConfig, ModelFiles, fetch_weights, has_mxfp4, weights_gib
from grpo.plan.machine import Machine
from grpo.plan.memory import GPU_SHARE, PlanInputs, generation_gib
from grpo.preflight.adapter import is_on_experts
from grpo.preflight.choices import ATTENTION, choose_attention
from grpo.process.ranks import Ranks
from grpo.reward.lookup import action_tokens
from grpo.rollout.engine import EngineError, start_engine
from grpo.rollout.episodes import EpisodePlayer
from grpo.rollout.sampler import (
    AwakeVllmSampler,
    DirectSampler,
    EndTokens,
    RankedSampler,
    Sample,
    Sampler,
    TransformersSampler,
    adapter_disabled,
    evaluation_sampling,
)
from grpo.settings.table import Settings

GENERATION_BATCHES = (64, 32, 16, 8, 4, 2, 1)  # sequences that transformers generates at the same time
MOST_AT_ONCE = 512  # sequences that vLLM generates at the same time; more wait in its queue
DIRECT_TOKENS = 16_384  # tokens of one pass that chooses answers; with eager attention it is BATCH_TOKENS


@dataclass
class EvaluatedModel:
    """A base model, with its adapter or without, that answers rendered prompts."""

    settings: Settings
    tokenizer: PreTrainedTokenizerBase
    stops: Sequence[int]  # ids of the tokens that end a completion
    sampler: RankedSampler
    player: EpisodePlayer | None = field(default=None, kw_only=True)  # with ENVIRONMENT

    @property
    def ends(self) -> EndTokens:
        """The tokens that end a completion."""
        padding: int = self.tokenizer.pad_token_id
        return EndTokens(self.stops, padding)

    def play(self, rows: Sequence[Row], step: int = 0, greedy: bool = False, base: bool = False) -> list[Sample]:
        """An episode of each row in ENVIRONMENT, drawn as `complete` draws; this process plays them alone."""
        assert self.player
        return self.player.play(rows, evaluation_sampling(self.settings, step, greedy, base))

    def complete(
        self, prompts: Sequence[str], samples: int = 1, step: int = 0, greedy: bool = False, base: bool = False
    ) -> list[list[int]]:
        """Token ids of a completion for each prompt, the token that ends it included, at EVAL_TEMPERATURE or greedily.
        `prompts` repeats each prompt `samples` times in a row. `base` turns the adapter off."""
        prompt_ids = self.tokenizer(text=list(prompts))["input_ids"]
        sampling = evaluation_sampling(self.settings, step, greedy, base)
        return [sample.ids for sample in self.sampler.answer(prompt_ids, samples, sampling)]

    def probabilities(self, prompts: Sequence[str], actions: int, greedy: bool, base: bool) -> np.ndarray:
        """(N, K): the probability of answering each of K actions to each of N prompts, at EVAL_TEMPERATURE or greedily.
        Only for models that torch holds, as vLLM does not compute it."""
        raise NotImplementedError


@dataclass
class TorchModel(EvaluatedModel):
    """A model of torch."""

    network: PreTrainedModel  # the gpt-oss into which PEFT puts the adapter
    policy: PeftModel | None  # the same with it

    def probabilities(self, prompts: Sequence[str], actions: int, greedy: bool, base: bool) -> np.ndarray:
        sampling, own = evaluation_sampling(self.settings, 0, greedy, base), self.sampler.sampler
        with adapter_disabled(self.policy, sampling):
            if not isinstance(own, DirectSampler):
                return answer_probabilities(self.network, self.tokenizer, prompts, sampling.temperature, actions)
            prompt_ids, tokens = self.tokenizer(text=list(prompts))["input_ids"], action_tokens(self.tokenizer, actions)
            _, probabilities = own.choices(prompt_ids, sampling.temperature, tokens)
            return probabilities.double().cpu().numpy()


def trained_model(trainer: Trainer) -> TorchModel:
    """The model of a run, which generates its answers like rollouts: by the same engine, with the same lengths."""
    settings, tokenizer, stops = trainer.run.settings, trainer._tokenizer, trainer.eos_token_ids
    network, player = unwrap_peft(trainer.model), trainer.player if settings.ENVIRONMENT else None
    return TorchModel(settings, tokenizer, stops, trainer.sampler, network, trainer.model, player=player)


def attach_adapter(network: PreTrainedModel, adapter: Path) -> PeftModel:
    """The model with the adapter that PEFT saved. Raises InputError for one that was trained on another model."""
    try:
        return PeftModel.from_pretrained(network, str(adapter))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:  # PEFT's, for tensors of other shapes and modules that are not there.
        fault = f"{adapter}: it is no adapter for this model ({format_exception(error)})"
        raise InputError(f"{fault}. Name the model that it was trained on with --model") from error


def load_torch_model(settings: Settings, files: ModelFiles, adapter: Path | None, attention: str) -> TorchModel:
    """A model that generates in transformers, with eager attention, which is exact at any length. With DIRECT_ANSWERS
    it chooses tokens with `attention` instead."""
    tokenizer = load_tokenizer(str(files.folder))
    network = load_model(str(files.folder), files.config, attention, settings.EXPERTS or "bf16")
    network, policy = in_compute_dtype(network).eval(), None
    stops = stop_tokens(network.generation_config, tokenizer)
    if adapter is not None:
        with experts_wrapped(network):
            policy = attach_adapter(network, adapter).eval()
    limit, at_once = BATCH_TOKENS if attention == "eager" else DIRECT_TOKENS, settings.GENERATION_BATCH
    sampler: Sampler = TransformersSampler(network, policy, tokenizer, stops, at_once or GENERATION_BATCHES[0])
    if settings.DIRECT_ANSWERS:
        sampler = DirectSampler(network, policy, tokenizer, [], attention, lambda longest: limit)
    return TorchModel(settings, tokenizer, stops, RankedSampler(sampler, Ranks()), network, policy)


def start_vllm_model(
    settings: Settings, files: ModelFiles, adapter: Path | None, machine: Machine, prompts: Sequence[str]
) -> EvaluatedModel:
    """A model that generates in vLLM: MXFP4 weights, and the adapter that vLLM loads from its folder, as with
    ROLLOUT_SYNC=lora. Without a trainer beside it, it stays awake. `prompts` are those of one batch, from a simulator
    those of its first moment. Raises EngineError if it does not fit."""
    path = str(files.folder)
    tokenizer = load_tokenizer(path)
    # Memory is planned as for a training step with these prompts, up to MOST_AT_ONCE, but without a trainer. A
    # simulator's later prompts may be longer than its first by the digits of a few numbers, hence 32 tokens more.
    s = replace(
        settings,
        ROLLOUT_SYNC="lora",
        LORA_R=read_json(adapter / ADAPTER_CONFIG)["r"] if adapter else settings.LORA_R,
        LORA_TARGETS="experts" if adapter and is_on_experts(adapter) else "all-linear",
        PROMPTS_PER_STEP=min(len(prompts), MOST_AT_ONCE),
        STEPS_PER_GENERATION=1,
        NUM_GENERATIONS=1,
        EXPERTS=None,  # No learner shares or pages its weights.
    )
    longest = max(map(len, tokenizer(text=list(dict.fromkeys(prompts)))["input_ids"])) + 32
    longest = s.MAX_PROMPT_LEN if s.ENVIRONMENT else longest  # The text of a reset comes on top.
    plan = plan_engine(s, files.config, machine, longest, 0.0)
    if plan.cache < plan.cache_least:
        need = plan.weights + plan.scratch + plan.cache_least
        raise EngineError(f"it needs {need:.1f} GiB of the GPU, {machine.gpu_memory_text}")
    stops = stop_tokens(load_generation_config(path), tokenizer)
    engine = start_engine(s, plan, path, stops)
    engine.wake()
    return EvaluatedModel(settings, tokenizer, stops, RankedSampler(AwakeVllmSampler(engine, adapter), Ranks()))


@dataclass
class ModelResponder:
    """A model in the form that simulators call (`grpo.tasks.simulator.Responder`); `base` turns its adapter off."""

    model: EvaluatedModel
    base: bool

    def texts(self, prompts: Sequence[str], moment: int, greedy: bool) -> list[str]:
        """A completion of each prompt, sampled with a seed that depends on `moment`."""
        # Step 0 seeds the answers to held-out rows, so moment 0 is step 1.
        ids = self.model.complete(prompts, 1, moment + 1, greedy, self.base)
        return self.model.tokenizer.batch_decode(ids, skip_special_tokens=False)

    def probabilities(self, prompts: Sequence[str], greedy: bool, actions: int) -> np.ndarray:
        return self.model.probabilities(prompts, actions, greedy, self.base)


def settings_alone(settings: Settings, config: ModelConfig, machine: Machine) -> Settings:
    """`settings` with the EXPERTS and GENERATION_BATCH of a model that transformers holds without vLLM or a trainer:
    the run's bf16 where that fits, and mxfp4 for all else, as `shared` and `paged` need vLLM. Both compute the same."""
    wanted = settings.EXPERTS or ("mxfp4" if machine.gpus else "bf16")
    kinds = ("bf16", "mxfp4") if wanted == "bf16" else ("mxfp4",)
    if not has_mxfp4(config):
        kinds = ("bf16",)
    batches = (settings.GENERATION_BATCH,) if settings.GENERATION_BATCH else GENERATION_BATCHES
    inputs = PlanInputs(config, machine, settings.MAX_PROMPT_LEN, "eager")
    choices = [replace(settings, EXPERTS=kind, GENERATION_BATCH=batch) for kind in kinds for batch in batches]
    if not machine.gpus:
        return choices[0]
    for choice in choices:
        generation = generation_gib(choice, inputs, choice.GENERATION_BATCH or 1)
        if weights_gib(config, choice.EXPERTS == "mxfp4") + generation <= machine.gpu_free * GPU_SHARE:
            return choice
    return choices[-1]  # It takes the least.


def start_model(
    settings: Settings,
    files: ModelFiles,
    adapter: Path | None,
    machine: Machine,
    use_vllm: bool,
    prompts: Sequence[str] = (),
    tools: Tools = (),
) -> EvaluatedModel:
    """Load the base model, downloaded if necessary, with its adapter, and with ENVIRONMENT what plays its episodes with
    these `tools`. Raises InputError and EngineError."""
    if problem := fetch_weights(settings.MODEL_ID, files):
        raise InputError(problem)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    machine, attention = machine.limited(settings.GPU_MEM_LIMIT), "eager"
    if settings.DIRECT_ANSWERS:
        attention = choose_attention(settings.ATTN_IMPL, machine.gpus).value
        attention = attention if attention in ATTENTION else "eager"  # a Hub kernel takes padded rows
    model: EvaluatedModel
    if use_vllm:
        model = start_vllm_model(settings, files, adapter, machine, prompts)
    else:
        model = load_torch_model(settings_alone(settings, files.config, machine), files, adapter, attention)
    if settings.ENVIRONMENT:
        pool, ends = EnvironmentPool(settings.ENVIRONMENT, settings.ENV_TIMEOUT), model.ends
        parts = model.sampler.sampler, pool, model.tokenizer, ends, settings, tools, files.template
        model.player = EpisodePlayer(*parts, at_once=GENERATION_BATCHES[0], wants_copy=True)
    return model
