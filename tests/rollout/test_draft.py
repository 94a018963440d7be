# SPDX-License-Identifier: Apache-2.0
"""Beside a draft model samples and log-probs stay the model's: vLLM's own rejection sampler in Triton's interpreter."""

from helpers import ROOT
from interpreter import cached_source, interpreted

REJECTION = """
import dataclasses, importlib.util, sys, types
from unittest.mock import MagicMock
import torch, triton, triton.language

B, K, V, TEMPERATURE = 48, 3, 29, 0.7  # sequences, guesses of each, tokens


class Imports:  # Of vLLM the sampler's file needs only Triton, which comes through a module of vLLM's own.
    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, self, is_package=True) if name.startswith("vllm") else None

    def create_module(self, spec):
        return MagicMock(__path__=[], __spec__=spec)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Imports())
sys.modules["vllm.triton_utils"] = types.SimpleNamespace(tl=triton.language, triton=triton)
spec = importlib.util.spec_from_file_location("rejection_sampler", sys.argv[1])
module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.apply_top_k_top_p = lambda logits, k, p: logits
module.MinTokensLogitsProcessor = types.NoneType
module.SamplerOutput = lambda sampled_token_ids, logprobs_tensors: (sampled_token_ids, logprobs_tensors)


class Sampler(torch.nn.Module):  # The part of v1/sample/sampler.py that samples the token behind kept guesses.
    logprobs_mode = "processed_logprobs"

    def forward(self, logits, sampling_metadata, predict_bonus_token, logprobs_mode_override):
        logprobs = (logits / sampling_metadata.temperature[:, None]).log_softmax(-1)
        tensors, tokens = types.SimpleNamespace(logprobs=logprobs), logprobs.exp().multinomial(1).int()
        return types.SimpleNamespace(sampled_token_ids=tokens, logprobs_tensors=tensors)

    compute_logprobs = staticmethod(lambda logits: logits.log_softmax(-1))
    gather_logprobs = staticmethod(lambda logprobs, count, tokens: logprobs.gather(1, tokens[:, None])[:, 0])


@dataclasses.dataclass
class Metadata:
    temperature: torch.Tensor
    max_num_logprobs: int = 0
    all_greedy = False
    all_random = no_penalties = True
    top_k = top_p = bad_words_token_ids = allowed_token_ids_mask = spec_token_ids = thinking_budget_state_holder = None
    output_token_ids, generators = [], {}
    logitsprocs = types.SimpleNamespace(non_argmax_invariant=[])


torch.manual_seed(0)
guesses = torch.randint(K + 1, (B,))  # Of some sequences there are fewer than K, of some none.
ends, firsts = (guesses + 1).cumsum(0), (guesses + 1).cumsum(0) - guesses - 1
logits = 2 * torch.randn(int(ends[-1]), V)  # of every guess and of the token behind the last one
checked = torch.tensor([n for n in range(len(logits)) if n not in set((ends - 1).tolist())])
expected = (logits.double() / TEMPERATURE).log_softmax(-1)
sampler, metadata = module.RejectionSampler(Sampler()), Metadata(torch.full((B,), TEMPERATURE))
rows, columns = (torch.arange(K) < guesses[:, None]).nonzero(as_tuple=True)
places, tokens, guessed, error = [], [], [], 0.0
for _ in range(12):
    # The likeliest token, any token, and vLLM's sign for no token.
    kinds = torch.randint(3, (1, len(checked)))
    drafts = torch.stack((logits[checked].argmax(1), torch.randint(V, checked.shape), torch.full_like(checked, -1)))
    drafts = drafts.gather(0, kinds)[0]
    batch = types.SimpleNamespace(
        max_spec_len=K, num_draft_tokens=guesses.tolist(), cu_num_draft_tokens=guesses.cumsum(0).int(),
        cu_num_sampled_tokens=ends.int(), bonus_logits_indices=ends - 1, target_logits_indices=checked,
        draft_token_ids=drafts.int(),
    )
    sampled, logprobs = sampler(batch, None, logits.clone(), metadata)
    table = torch.full((B, K + 1), -1).index_put((rows, columns), drafts)
    kept = ((sampled == table) & (table >= 0)).cumprod(1)  # up to the first guess that was replaced
    emitted = torch.cat((torch.ones(B, 1), kept[:, :-1]), 1).bool()
    assert torch.equal(sampled >= 0, emitted), "no token stands behind a replaced one"
    place, token = (firsts[:, None] + torch.arange(K + 1))[emitted], sampled[emitted].long()
    error = max(error, float((logprobs.view(B, K + 1)[emitted] - expected[place, token]).abs().max()))
    places.append(place), tokens.append(token), guessed.append(table[emitted])
places, tokens, guessed = torch.cat(places), torch.cat(tokens), torch.cat(guessed)
assert len(tokens) > 12 * B * 1.2, "hardly a guess was kept"
# A guess is the sampled token as often as the model says.
p, real = expected.exp()[places], guessed >= 0
likely = p.gather(1, guessed.clamp(0)[:, None])[:, 0][real]
surplus = float(((tokens == guessed)[real].double() - likely).sum() / (likely * (1 - likely)).sum().sqrt())
# The probability integral transform of all sampled tokens is uniform (Kolmogorov-Smirnov).
uniform = (p.cumsum(1) - torch.rand(len(p), 1) * p).gather(1, tokens[:, None])[:, 0].sort().values
distance = float((uniform - (torch.arange(len(p)) + 0.5) / len(p)).abs().max()) * len(p) ** 0.5
# Both limits are at a level of 1 in 1,000.
assert abs(surplus) < 3.3 and distance < 1.95 and error < 1e-5, (surplus, distance, error)
print("all equal")
"""


def test_kept_and_replaced_guesses_are_samples_of_the_model_with_its_log_probs():
    """After temperature, whether a guess is good, bad or missing."""
    interpreted(REJECTION, ROOT, cached_source() / "v1/sample/rejection_sampler.py")
