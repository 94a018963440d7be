# SPDX-License-Identifier: Apache-2.0
"""Direct answers: one token is chosen behind each prompt, from a packed forward pass (DIRECT_ANSWERS).

A simplification of rollouts: nothing is generated. The prompt ends in ANSWER_BEFORE, one token names the action, and
the tokens that close the answer are written behind it unasked, so that a completion reads like any other.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.harmony import ANSWER_AFTER
from grpo.model.attention import KERNELS, hidden_states
from grpo.model.load import evaluating
from grpo.model.packing import Tokens, cut_micro_batches, pack_batch
from grpo.phases import LINE_S, with_progress


@torch.no_grad()
def choose_tokens(
    base: PreTrainedModel,
    prompts: Sequence[Tokens],
    actions: Sequence[int],
    temperature: float,
    attention: str,
    token_limit: int,
    share: bool,
) -> tuple[Tensor, Tensor]:
    """(a token (N,) chosen behind each of N prompts, the probabilities (N, K) of the tokens `actions` there).

    At a temperature of 0 the likeliest token is chosen with a probability of 1. The prompts, as token ids, go through
    `base`, a gpt-oss with its adapter inside or not, in micro-batches of at most `token_limit` tokens; with `share`,
    equal prompts in a micro-batch are computed once. Logits are held for one position of each prompt of a micro-batch.
    """
    tokens = torch.zeros(len(prompts), dtype=torch.int64, device=base.device)
    probabilities = torch.zeros(len(prompts), len(actions), device=base.device)
    lengths = [(len(prompt), 1) for prompt in prompts]
    one_row = attention in KERNELS
    micro_batches = cut_micro_batches(list(map(tuple, prompts)), lengths, token_limit, share, one_row)
    with evaluating(base):
        for indices in with_progress("choosing answers", micro_batches, "micro-batch", len(micro_batches), 1, LINE_S):
            # Packing needs a completion behind each prompt. Its token changes nothing, because nothing attends to it.
            batch = [prompts[i] for i in indices]
            packed = pack_batch(batch, [[0]] * len(batch), share, one_row, base.device)
            logits = base.get_output_embeddings()(hidden_states(base, packed, attention)).float()  # (b, V)
            rows = torch.tensor(indices, device=base.device)[packed.rows]
            if temperature:
                chances = (logits / temperature).softmax(-1)
                tokens[rows] = torch.multinomial(chances, 1)[:, 0]
                probabilities[rows] = chances[:, list(actions)]
            else:
                tokens[rows] = logits.argmax(-1)
                probabilities[rows] = (tokens[rows, None] == torch.tensor(actions, device=base.device)).float()
    return tokens, probabilities


def close_answers(tokens: Tensor, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The completions, as token ids, that begin with `tokens` (N,) and end with ANSWER_AFTER."""
    (closing,) = tokenizer(text=[ANSWER_AFTER], add_special_tokens=False)["input_ids"]
    return [[token, *closing] for token in tokens.tolist()]
