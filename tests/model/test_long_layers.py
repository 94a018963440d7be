# SPDX-License-Identifier: Apache-2.0
"""Layers in chunks of tokens: the same loss and gradients in less memory, and without computing a chunk in vain."""

import contextlib
import dataclasses
import weakref

import pytest
import torch
from expert_models import load
from helpers import run_python
from reference_kernel import REFERENCE
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainers import apart, batch, loss_and_gradients, make, plain_float32, sample_with, step_of

from grpo.model import attention, experts
from grpo.model.attention import Kernel, hidden_states, install_attention, unwrap_peft
from grpo.model.experts import quantized_experts
from grpo.model.long_layers import chunk_layers, in_chunks, joined_memory
from grpo.model.packing import pack_batch
from grpo.plan.memory import chunked_bytes

pytestmark = pytest.mark.numeric
CHUNK = 5  # The micro-batches have rows of 32 tokens: the last chunk is a shorter one.


def trainer_with(tiny, folder, monkeypatch, experts, **settings):
    """A trainer in float32 whose model has `experts`."""
    monkeypatch.setattr("trainers.load", lambda path: load(path, experts))
    return plain_float32(make(tiny, folder, BETA=0.1, **settings))


def use_kernel(trainer, kernel, monkeypatch):
    """Lets the trainer's model compute attention with the flash `kernel`, over a single row."""
    monkeypatch.setitem(attention.KERNELS, "torch_flash", lambda: kernel)
    trainer.run.resolved.settings = dataclasses.replace(trainer.run.settings, ATTN_IMPL="torch_flash")
    unwrap_peft(trainer.model).set_attn_implementation(install_attention("torch_flash"))


@pytest.mark.parametrize("kernel", [None, REFERENCE])
@pytest.mark.parametrize(("experts", "parts"), [("bf16", 1), ("mxfp4", 1), ("mxfp4", 2)])
@pytest.mark.parametrize("targets", ["all-linear", "q_proj,1.experts,2.experts"])
def test_chunks_change_neither_loss_nor_gradients(tiny, tmp_path, monkeypatch, experts, parts, targets, kernel):
    trainer = trainer_with(tiny, tmp_path, monkeypatch, experts, LORA_TARGETS=targets)
    inputs = batch(trainer, old=True, beta=0.1, sampled=True)
    if kernel:
        use_kernel(trainer, kernel, monkeypatch)
    base = unwrap_peft(trainer.model)
    base.disable_input_require_grads()  # The first layer's adapter learns although its input has no gradient.
    base.config.sliding_window = 6  # The tiny model's own is longer than the rows.
    for layer in base.model.layers:
        layer.self_attn.sliding_window = layer.self_attn.sliding_window and 6
    loss, gradient = loss_and_gradients(trainer, inputs, 4)
    for module in quantized_experts(base):
        module.parts, module.dequantize_again = parts, parts > 1
    chunk_layers(base, CHUNK, on_host=True)
    chunked_loss, chunked_gradient = loss_and_gradients(trainer, inputs, 4)
    assert chunked_loss == pytest.approx(loss, rel=5e-6)
    assert 0 < apart(chunked_gradient, gradient) < 5e-5, "0 would say that nothing was chunked"
    assert not any(module.dequantized for module in quantized_experts(base))


def test_autocast_is_that_of_the_forward_pass(tiny, tmp_path):
    """In BF16 as on a GPU, where a chunk's weights must not be cast once without and once with a gradient."""
    trainer = make(tiny, tmp_path)
    inputs = batch(trainer)
    trainer.accelerator.autocast = lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    _, gradient = loss_and_gradients(trainer, inputs, 4)
    base, types = unwrap_peft(trainer.model), []
    chunk_layers(base, CHUNK, on_host=False)
    base.model.layers[0].self_attn.q_proj.register_forward_hook(lambda _, inputs, queries: types.append(queries.dtype))
    assert apart(loss_and_gradients(trainer, inputs, 4)[1], gradient) < 0.06, "BF16 is 0.12 from float32"
    assert set(types) == {torch.bfloat16}


def test_short_micro_batches_are_computed_as_before(tiny, tmp_path):
    """Bit for bit, by transformers' own layer: two rows of 32 tokens."""
    trainer = make(tiny, tmp_path)
    inputs = batch(trainer)
    expected = loss_and_gradients(trainer, inputs, 4)
    chunk_layers(unwrap_peft(trainer.model), 64, on_host=False)
    loss, gradient = loss_and_gradients(trainer, inputs, 4)
    assert loss == expected[0] and torch.equal(gradient, expected[1])


def test_the_tokens_of_all_rows_count(tiny, tmp_path):
    """Eager attention has a row for each completion: many short ones take as much memory as a long one."""
    trainer, sizes = make(tiny, tmp_path), []
    inputs, base = batch(trainer), unwrap_peft(trainer.model)
    chunk_layers(base, 32, on_host=False)
    base.model.layers[0].mlp.register_forward_pre_hook(lambda _, x: sizes.append(x[0].shape[:2].numel()))
    loss_and_gradients(trainer, inputs, 4, packing="none")
    assert max(sizes) == 32


@pytest.mark.parametrize("on_host", [False, True])
def test_layers_inputs_wait_in_host_memory_where_the_plan_says_so(tiny, tmp_path, monkeypatch, on_host):
    trainer, pinned, save_on_cpu = make(tiny, tmp_path), [], torch.autograd.graph.save_on_cpu
    inputs, base = batch(trainer), unwrap_peft(trainer.model)
    chunk_layers(base, CHUNK, on_host)
    counting = lambda pin_memory: pinned.append(pin_memory) or save_on_cpu(pin_memory)  # noqa: E731
    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", counting)
    loss_and_gradients(trainer, inputs, 4)
    assert pinned == [True for _ in base.model.layers if on_host]


def test_each_chunk_of_experts_is_computed_once_in_each_pass(tiny, tmp_path, monkeypatch):
    """And a layer's two matrices are dequantized once for all chunks of a pass."""
    trainer = trainer_with(tiny, tmp_path, monkeypatch, "mxfp4")
    inputs, base, calls = batch(trainer), unwrap_peft(trainer.model), []
    matrices, dequantize = [], experts.dequantize_mxfp4
    monkeypatch.setattr(experts, "dequantize_mxfp4", lambda *packed: matrices.append(0) or dequantize(*packed))
    chunk_layers(base, CHUNK, on_host=False)
    base.model.layers[0].mlp.register_forward_pre_hook(lambda _, x: calls.append((torch.is_grad_enabled(), x[0].shape)))
    loss_and_gradients(trainer, inputs, 4, packing="none")
    (passes,) = {sum(x[1][1] for x in calls if x[0] is gradient) for gradient in (False, True)}
    assert passes == 32 and max(x[1][0] * x[1][1] for x in calls) <= CHUNK
    assert len(matrices) == 2 * 2 * len(base.model.layers)


class PeakBytes(TorchDispatchMode):
    """The most bytes that the tensors which operations returned took at a time."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for tensor in tree_leaves(result):
            if torch.is_tensor(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.alive:
                    weakref.finalize(storage, self.alive.pop, storage._cdata, None)
                self.alive[storage._cdata] = storage.nbytes()
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


FLAT = Kernel(  # No attention at all: its own memory is not what this measures.
    lambda q, k, v, **_: (q + v[: len(q)].mean(), q.new_zeros(q.shape[1], len(q), dtype=torch.float32)),
    lambda dout, q, k, v, out, lse, **_: (dout * q, k * dout.mean(), v * dout.mean()),
)


def peak_of_learning(model, tokens):
    """Peak bytes of forward and backward pass of a prompt with its completion."""
    packed = pack_batch([[5] * 8], [[7] * (tokens - 8)], True, True, "cpu")
    with PeakBytes() as memory:
        states = hidden_states(model, packed, "torch_flash")
        states.backward(torch.ones_like(states))
    return memory.peak


@pytest.mark.parametrize("experts", ["bf16", "mxfp4"])
def test_memory_of_a_token_is_that_of_attention(tiny, tmp_path, monkeypatch, experts):
    """What grows with the length is what the plan says, in numbers: layers' inputs and a few of attention's tensors."""
    trainer = trainer_with(tiny, tmp_path, monkeypatch, experts)
    use_kernel(trainer, FLAT, monkeypatch)
    model = unwrap_peft(trainer.model).train()
    config = model.config.to_dict()

    def growth():
        """Numbers of float32 that a token takes at the peak."""
        short, long = (peak_of_learning(model, tokens) for tokens in (512, 1024))
        return (long - short) / 512 / 4

    planned = chunked_bytes(config)[1] / 2 + config["num_hidden_layers"] * config["hidden_size"]
    assert growth() > 2 * planned
    chunk_layers(model, 64, on_host=False)
    assert 0.6 * planned < growth() < planned


def test_no_chunk_is_kept_until_the_last():
    """torch's allocator would divide blocks for them that the next layer needs whole."""
    hidden = torch.arange(64.0).view(1, 64, 1)
    with PeakBytes() as memory:
        (doubled,) = in_chunks(CHUNK, lambda part, x: (x * 2,), hidden)
    assert doubled.equal(hidden * 2) and memory.peak < hidden.nbytes + 1.5 * doubled.nbytes


def test_the_last_norm_takes_little_more_than_its_input(tiny, tmp_path):
    """In float32 it took five times as much; its results stay the same bit by bit."""
    base = unwrap_peft(make(tiny, tmp_path).model)

    def normalized():
        hidden = torch.randn(1, 512, base.config.hidden_size, dtype=torch.bfloat16, generator=torch.manual_seed(1))
        with PeakBytes() as memory:
            states = base.model.norm(hidden.requires_grad_())
            states.backward(torch.ones_like(states))
        return memory.peak / hidden.nbytes, states, hidden.grad

    whole, *expected = normalized()
    chunk_layers(base, 16, on_host=False)
    chunked, *values = normalized()
    assert whole > 8 and chunked < 5
    assert all(torch.equal(value, other) for value, other in zip(values, expected, strict=True))


ON, OFF = "expandable_segments:True", "expandable_segments:False"
CUDA_CONF, CONF, SPLIT = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "max_split_size_mb:256"
ALLOCATORS = [  # the user's variables, and what is set while long layers learn, and behind them
    ({}, [ON, OFF]),
    ({CUDA_CONF: OFF}, [f"{OFF},{ON}", f"{OFF},{OFF}"]),
    ({CUDA_CONF: f"{SPLIT}, "}, [f"{SPLIT},{ON}", f"{SPLIT},{OFF}"]),
    ({CUDA_CONF: f"{SPLIT},{ON}"}, None),
    ({CONF: "expandable_segments : True"}, None),
    ({CUDA_CONF: SPLIT, CONF: ON}, [f"{SPLIT},{ON}", f"{SPLIT},{OFF}"]),
]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("chunk", "variables", "switches"), [(0, {}, None), *((CHUNK, *case) for case in ALLOCATORS)])
def test_the_allocator_joins_free_memory_while_long_layers_learn(
    tiny, tmp_path, monkeypatch, chunk, variables, switches, fails
):
    """And behind them is as the user set it, even after a fault: without a word of the user's, vLLM's sleep needs
    memory that is not joined."""
    for name in (CUDA_CONF, CONF):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    calls, trainer = [], make(tiny, tmp_path, TOTAL_STEPS=1)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", calls.append)
    trainer.run.resolved.plan = dataclasses.replace(trainer.run.plan, layer_chunk=chunk)

    def learn(*arguments):
        calls.append("learning")
        if fails:
            raise RuntimeError("out of memory")
        return torch.zeros((), requires_grad=True)

    monkeypatch.setattr(trainer, "learn", learn)
    sample_with(trainer, lambda: step_of(trainer, 4))
    inputs = [{"row": n // trainer.run.settings.NUM_GENERATIONS} for n in range(4)]
    with pytest.raises(RuntimeError, match="out of memory") if fails else contextlib.nullcontext():
        trainer.training_step(trainer.model, inputs)
    before, behind = ([switch] for switch in switches) if switches else ([], [])
    assert calls == [*before, "learning", *behind]


def test_torch_has_the_setting_of_its_allocator(monkeypatch):
    """torch has no public name for it, and forgets what it is not told again."""
    monkeypatch.setenv(CUDA_CONF, SPLIT)
    with joined_memory(True):
        assert torch.ones(2).sum() == 2
        assert torch._C._accelerator_getAllocatorSettings() == f"{SPLIT},{ON}"
    assert torch._C._accelerator_getAllocatorSettings() == f"{SPLIT},{OFF}"
    torch._C._accelerator_setAllocatorSettings("")


@pytest.mark.parametrize("variables", [{CUDA_CONF: SPLIT, CONF: ON}, {CONF: ON}])
def test_torch_reads_the_variables_in_this_order(variables):
    program = "import torch; from grpo.common import allocator_settings; "
    program += "print(torch._C._accelerator_getAllocatorSettings(), allocator_settings())"
    read, ours = run_python("-c", program, **variables).stdout.split()
    assert read == ours == variables.get(CUDA_CONF, ON)
