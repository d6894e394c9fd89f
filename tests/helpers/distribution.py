"""The exact distribution of a tiny engine's answers, by enumeration of every text with transformers, and how to test
answers against it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from transformers import AutoModelForCausalLM
from transformers.generation import logits_process as hf

from foretoken import SamplingParams, SpecConfig
from foretoken.config import QUANTISED
from foretoken.draft.base import Drafter
from foretoken.draft.cascade import CascadeDrafter
from foretoken.draft.draft_model import DraftModelDrafter
from foretoken.draft.eagle import EagleDrafter, MtpDrafter
from foretoken.draft.early_exit import EarlyExitDrafter
from foretoken.draft.group import DrafterGroup, drafter_key
from foretoken.draft.lookahead import LookaheadDrafter
from foretoken.draft.mix import MixDrafter
from foretoken.draft.ngram import NgramDrafter
from foretoken.draft.predicted import PredictedDrafter
from foretoken.draft.recycling import RecyclingDrafter
from foretoken.draft.suffix import SuffixDrafter
from foretoken.engine.engine import Engine
from foretoken.engine.scheduler import SchedulerConfig
from foretoken.heads.eagle import EagleHead
from foretoken.heads.eagle_cache import CachedEagle
from foretoken.heads.weights import pack
from foretoken.model.decoder import Decoder
from foretoken.model.layers import Linear
from foretoken.model.loader import load_decoder
from foretoken.model.matrices.grouped_kernel import GroupedWeight
from foretoken.model.paged import PagedModel
from foretoken.registry import HEADS
from tests.helpers.checkpoints import tiny_checkpoint
from tests.helpers.mtp_checkpoints import random_mtp
from tests.helpers.random_heads import head_drafter, random_head
from tests.helpers.specs import key_of, predicting
from tests.helpers.tiny_heads import eagle_head, exit_adapter

VOCAB, LENGTH = 5, 5
EOS = 4  # only ever banned (min_tokens): the answers go on after it
TWO_LEVELS = SpecConfig(
    "cascade", parts=(SpecConfig("draft_model", draft="reverse"), SpecConfig("draft_model", draft="middle"))
)
EAGLE_1 = SpecConfig("eagle", head="eagle-1")  # a name that tells its drafter from that of EAGLE-3
ADAPTED = SpecConfig("early_exit", head="adapter")
PROMPT = [1, 2, 3, 1, 2]  # repeats, so that the lookup drafts
WINDOWS = ((1, 2), (2, 3), (3, 4))  # places of neighbouring tokens; place 0 ends the prompt and is never drafted
ALARM = 1e-5  # p-value below which one test fails
# A step of models this small costs little more for more requests.
_BATCH_SIZE = 512
NUM_SLOTS = 32 * _BATCH_SIZE  # of a cache that holds them all


def narrow_models(folder: Path, num_layers: int = 1) -> SimpleNamespace:
    """A five-token target, a draft that ranks tokens in reverse, one that takes each for the next, one in low bits;
    logits after short texts.
    """
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 2,
    }
    tiny_checkpoint(folder, "llama", **shape, num_key_value_heads=1)
    target, reverse, middle = load_decoder(folder), load_decoder(folder), load_decoder(folder)
    with torch.no_grad():
        reverse.lm_head.weight.neg_()
        middle.lm_head.weight.copy_(middle.lm_head.weight.roll(1, 0))
    other = tiny_checkpoint(
        folder / "other",
        "llama",
        seed=1,
        **(shape | {"hidden_size": 32, "intermediate_size": 32}),
        num_key_value_heads=1,
    )
    low_bits = {kind: load_decoder(other, quant=kind) for kind in QUANTISED}
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    texts = torch.tensor(list(itertools.product(range(VOCAB), repeat=LENGTH - 1)))
    contexts = torch.cat((torch.tensor(PROMPT).expand(len(texts), -1), texts), dim=1)
    with torch.no_grad():
        logits = oracle(contexts).logits.double()[:, len(PROMPT) - 1 :]  # [625, 5, V]
    return SimpleNamespace(
        target=target, reverse=reverse, middle=middle, low_bits=low_bits, contexts=contexts, logits=logits
    )


def exact_law(narrow: SimpleNamespace, params: SamplingParams) -> NDArray[np.float64]:
    """Probability of every five-token answer, `[V] * 5`, with transformers' processors at every position."""
    texts = narrow.contexts[:, len(PROMPT) :]
    distribution = torch.ones(len(texts), VOCAB, dtype=torch.float64)
    for place in range(LENGTH):
        now = _warped(narrow.contexts[:, : len(PROMPT) + place], narrow.logits[:, place].clone(), params).softmax(
            -1
        )  # [625, V]
        distribution = distribution * (now[range(len(texts)), texts[:, place], None] if place < LENGTH - 1 else now)
    return distribution.reshape([VOCAB] * LENGTH).numpy()


def _warped(contexts: torch.Tensor, scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    if params.logit_bias:
        scores = hf.SequenceBiasLogitsProcessor([[[token], value] for token, value in params.logit_bias.items()])(
            contexts, scores
        )
    if params.repetition_penalty != 1:
        scores = hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(contexts, scores)
    for row, text in enumerate(contexts[:, len(PROMPT) :].tolist()):
        for token in set(text):
            scores[row, token] -= params.presence_penalty + text.count(token) * params.frequency_penalty
    if params.bad_words:
        scores = hf.NoBadWordsLogitsProcessor([list(word) for word in params.bad_words], eos_token_id=-1)(
            contexts, scores
        )
    if params.min_tokens:
        scores = hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), params.min_tokens, EOS)(contexts, scores)
    scores = hf.TemperatureLogitsWarper(params.temperature)(contexts, scores)
    if params.top_k:
        scores = hf.TopKLogitsWarper(params.top_k)(contexts, scores)
    if params.top_p < 1:
        scores = hf.TopPLogitsWarper(params.top_p)(contexts, scores)
    if params.min_p:
        scores = hf.MinPLogitsWarper(params.min_p)(contexts, scores)
    return scores


def narrow_engine(narrow: SimpleNamespace) -> Engine:
    """An engine over the five-token models with every drafter."""

    def draft(decoder: Decoder) -> PagedModel:
        return PagedModel(decoder, NUM_SLOTS, 16)

    target = draft(narrow.target)
    drafters = DrafterGroup(target)
    drafters.drafters = {
        key_of("draft_model", "reverse"): DraftModelDrafter(draft(narrow.reverse)),
        **{
            key_of(f"draft_model:{kind}", "low"): DraftModelDrafter(draft(low)) for kind, low in narrow.low_bits.items()
        },
        key_of("ngram"): NgramDrafter(),
        key_of("suffix"): SuffixDrafter(),
        key_of("recycling"): RecyclingDrafter(VOCAB),
        key_of("predicted"): PredictedDrafter(),
        key_of("early_exit"): EarlyExitDrafter(target),
        key_of("lookahead"): LookaheadDrafter(),
        key_of("cascade", "reverse"): CascadeDrafter([draft(narrow.reverse)], NgramDrafter()),
        drafter_key(TWO_LEVELS): CascadeDrafter([draft(narrow.reverse), draft(narrow.middle)]),
        key_of("mix", "reverse"): MixDrafter(
            [NgramDrafter(), SuffixDrafter(), RecyclingDrafter(VOCAB), DraftModelDrafter(draft(narrow.reverse))]
        ),
        **{
            key_of(name): head_drafter(random_head(kind, narrow.target.config), target)
            for name, kind in (("medusa", "medusa:hydra"), ("block", "block:cut"))
        },
        key_of("eagle"): EagleDrafter(CachedEagle(eagle_head(narrow.target.config), target)),
        key_of("mtp"): MtpDrafter(CachedEagle(random_mtp(narrow.target.config), target)),
        drafter_key(EAGLE_1): EagleDrafter(CachedEagle(eagle_head(narrow.target.config, 1), target)),
        **{drafter_key(SpecConfig(name, draft_dtype="int4")): _low_bit_drafter(name, target) for name in HEADS},
    }
    if target.num_layers > 1:
        adapter = exit_adapter(narrow.target.config, target.num_layers - 1)
        drafters.drafters[drafter_key(ADAPTED)] = EarlyExitDrafter(target, adapter)  # type: ignore[index]
    return Engine(target, drafters, limits=SchedulerConfig(_BATCH_SIZE, 3 * _BATCH_SIZE), eos_token_ids=(EOS,))


def _low_bit_drafter(name: str, target: PagedModel) -> Drafter:
    """The drafter of a head in 4 bits; what has fewer outputs than the kernel's blocks stays as it is."""
    config = target.config
    head = eagle_head(config) if name == "eagle" else random_head("block" if name == "block" else "medusa", config)
    pack(head, "int4")
    assert any(isinstance(one.packed, GroupedWeight) for one in head.modules() if isinstance(one, Linear))
    return EagleDrafter(CachedEagle(head, target)) if isinstance(head, EagleHead) else head_drafter(head, target)


def sample_answers(narrow: SimpleNamespace, asked: Sequence[tuple[SamplingParams, SpecConfig]]) -> NDArray[np.int64]:
    """The first tokens `[n, LENGTH]` of one request each, all through one engine, batches mixed by arrival."""
    engine, states = narrow_engine(narrow), []
    for params, spec in asked:
        states.append(engine.submit(PROMPT, predicting(spec, params, (0, 1, 2, 3, 1, 2)), spec))
        while len(engine.scheduler.waiting) > _BATCH_SIZE:  # requests also arrive between steps
            engine.step()
    while engine.has_work:
        engine.step()
    for state in states:
        if state.error is not None:
            raise state.error.__cause__ or state.error
    return np.array([state.output_ids[:LENGTH] for state in states])


def p_values(answers: NDArray[np.int64], distribution: NDArray[np.float64]) -> list[float]:
    """Pearson's chi-square of each window's pair of tokens against the exact distribution; cells too rare for it are
    put together.
    """
    found = []
    for window in WINDOWS:
        expected = distribution.sum(tuple(place for place in range(LENGTH) if place not in window)).ravel() * len(
            answers
        )
        counts = np.bincount(answers[:, window[0]] * VOCAB + answers[:, window[1]], minlength=VOCAB**2).astype(float)
        assert not counts[expected == 0].any(), "a token that the distribution forbids"
        rare = expected < 5
        expected, counts = (np.append(cells[~rare], cells[rare].sum()) for cells in (expected, counts))
        if expected[-1] < 1:
            expected, counts = expected[:-1], counts[:-1]
        found.append(float(stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue))
    return found


def power(bias: float, count: int, cells: int = VOCAB**2) -> float:
    """Least probability that one window raises the alarm when its distribution is off by `bias` in total variation.

    The noncentrality is count * sum(d^2 / p) >= count * (sum |d|)^2 = 4 * count * bias^2 by Cauchy-Schwarz.
    """
    freedom = cells - 1
    return float(stats.ncx2.sf(stats.chi2.isf(ALARM, freedom), freedom, 4 * count * bias**2))
