# SPDX-License-Identifier: Apache-2.0
"""What a step must not hold in memory nor compute twice, and packed experts from the logits to a resumed run."""

import math
import re
from unittest import mock

import pytest
import torch
from helpers import run_script
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainers import batch, loss_and_gradients, make, sample_with, step_of

from grpo.model.attention import unwrap_peft

pytestmark = pytest.mark.numeric

TILE = 101  # of the tiny model's 792 tokens: seven tiles and a smaller one; equal to no other size of the model


class Shapes(TorchDispatchMode):
    """Shapes of all tensors that operations return, those of the backward pass included."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        self.seen |= {tuple(tensor.shape) for tensor in tree_leaves(result) if torch.is_tensor(tensor)}
        return result


def full_logits(shapes, trainer):
    """Those which hold the whole vocabulary for some tokens, flattened ones too; the head's own weight is none."""
    vocabulary, hidden = unwrap_peft(trainer.model).get_output_embeddings().weight.shape
    sizes = {shape: math.prod(shape) for shape in shapes.seen if sorted(shape) != sorted((vocabulary, hidden))}
    return [shape for shape, size in sizes.items() if size and size % vocabulary == 0]


def test_learning_never_holds_the_logits_of_the_whole_vocabulary(tiny, tmp_path, monkeypatch):
    """In the forward nor in the backward pass, with autocast as a run has it."""
    trainer = make(tiny, tmp_path, BETA=0.1, TEMPERATURE=0.8)
    inputs = batch(trainer, old=True, beta=0.1, sampled=True)
    with Shapes() as shapes:
        loss_and_gradients(trainer, inputs, 2)
    assert full_logits(shapes, trainer), "one tile holds the tiny vocabulary: it sees them where they are"
    monkeypatch.setattr("grpo.learn.log_probs.HEAD_TILE", TILE)
    with Shapes() as shapes:
        loss_and_gradients(trainer, inputs)
    assert not full_logits(shapes, trainer)


@pytest.mark.parametrize(("beta", "checkpointing"), [(0.0, False), (0.1, True)])
def test_a_step_computes_each_micro_batch_once(tiny, tmp_path, beta, checkpointing):
    """One forward pass of the model for each micro-batch, and with a KL term the reference's before them. A layer is
    computed once more where it is checkpointed, and not a third time."""
    trainer = make(tiny, tmp_path, BETA=beta, GRADIENT_CHECKPOINTING=checkpointing, TOTAL_STEPS=1, MICRO_BATCH=1)
    sample_with(trainer, lambda: step_of(trainer, 4))
    base, forwards, layers = unwrap_peft(trainer.model), [], []  # by call: whether it is for a gradient
    base.model.register_forward_pre_hook(lambda *_: forwards.append(torch.is_grad_enabled()))
    base.model.layers[0].register_forward_pre_hook(lambda *_: layers.append(torch.is_grad_enabled()))
    with mock.patch.object(trainer, "learn", wraps=trainer.learn) as learn:
        trainer.train()
    count = len(list(trainer.micro_batches(learn.call_args.args[1])))
    reference = [False] * (count if beta else 0)
    assert count > 1 and forwards == reference + [True] * count
    assert layers == reference + [True] * count * (2 if checkpointing else 1)


@pytest.mark.slow
def test_packed_experts_train_save_and_resume_as_unpacked_ones(tmp_path):
    """Three steps in BF16 against two in MXFP4 and a last one resumed in BF16. Every checkpoint and every completion is
    the same, byte for byte."""
    settings = {
        "MODEL_ID": "tiny", "SAVE_STEPS": 1, "PROMPTS_PER_STEP": 2, "NUM_GENERATIONS": 4, "EVAL_SAMPLES": 0,
        "DATA": "data/tes_heldout_compact.csv", "SEED": 5, "LR_SCHEDULER": "constant",  # no function of TOTAL_STEPS
        "PYTHONHASHSEED": 0,  # PEFT writes a set into adapter_config.json
    }  # fmt: skip
    whole, parts, sizes = tmp_path / "whole", tmp_path / "parts", []
    for folder, experts, steps in ((whole, "bf16", 3), (parts, "mxfp4", 2), (parts, "bf16", 3)):
        done = run_script(**settings | {"OUTPUT_DIR": folder, "EXPERTS": experts, "TOTAL_STEPS": steps})
        sizes.append(re.search(r"model: ([\d.]+M) parameters", done.stdout)[1])
    assert "continuing from step 2" in done.stdout
    assert sizes[0] == sizes[2] != sizes[1], "packed experts are buffers"
    adapters = []
    for name in ("checkpoint-1", "checkpoint-2", "checkpoint-3", "."):
        files = ["adapter_model.safetensors", "adapter_config.json"]
        files += [] if name == "." else ["optimizer.pt"]
        for file in files:
            assert (parts / name / file).read_bytes() == (whole / name / file).read_bytes(), f"{name}/{file}"
        adapters.append((whole / name / "adapter_model.safetensors").read_bytes())
    assert len(set(adapters)) == 3, "each step moves the adapter"
    assert (parts / "completions.csv").read_bytes() == (whole / "completions.csv").read_bytes()
