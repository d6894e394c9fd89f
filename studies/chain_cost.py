"""What a chain of an EAGLE-3 head costs beside a step of its target: in one compiled call, and with a call for each
draft token.

    python -m studies.chain_cost --target smollm2 --requests 1,16 --num-draft 3 --draft-vocab 8192 --out FILE.json

The head is untrained: what it drafts is wrong, and takes as long as if it were right. In every round all requests
draft, the two ways in turns, and the target runs a step of a token each between them, so that weights and code are as
cold as in an engine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace

import torch
from torch import Tensor

from foretoken.config import SamplingParams, SpecConfig
from foretoken.core import Batch, BatchEntry, Request
from foretoken.draft.base import HiddenRows
from foretoken.draft.eagle import EagleDrafter
from foretoken.heads.base import DraftVocabulary
from foretoken.heads.config import EagleConfig, default_taps
from foretoken.heads.eagle import EagleHead
from foretoken.heads.eagle_cache import CachedEagle
from foretoken.heads.weights import pack
from foretoken.model.interface import Segment
from foretoken.model.matrices.quant import head_format
from foretoken.model.names import model_folder
from foretoken.model.open import open_model
from foretoken.model.paged import PagedModel
from studies.command import record, record_file, setting_of, whole_numbers

_WAYS = ("one call", "a call for each token")
_WARM_ROUNDS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="reference:target")
    parser.add_argument("--weights", default="auto", help="auto, int8 or int4: as the target's matrices are held")
    parser.add_argument("--requests", type=whole_numbers, default=(1, 16))
    parser.add_argument("--num-draft", type=int, default=3)
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--context", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--out", type=record_file, help="a JSON file for the record")
    options = parser.parse_args()
    tokens = options.context + 2 * options.rounds + _WARM_ROUNDS + options.num_draft + 64
    folder, num_slots = model_folder(options.target), max(options.requests) * tokens
    target = open_model(folder, cache_tokens=num_slots, weights=options.weights)
    if not isinstance(target, PagedModel):
        raise SystemExit("the target runs through transformers: heads have no compiled chain beside it")
    costs = {}
    for count in options.requests:
        rounds = Rounds(target, untrained_head(target, options.draft_vocab), count, options.context, options.num_draft)
        costs[count] = found = rounds.costs(options.rounds)
        print(f"{count:3d} requests: " + ", ".join(f"{name} {number:.2f}" for name, number in found.items()))
    print(json.dumps(record("chain_cost", {"setting": setting_of(options), "costs": costs}, options.out)))


def untrained_head(target: PagedModel, draft_vocab: int) -> EagleHead:
    """A random EAGLE-3 head for the first tokens of the vocabulary, in the format that a trained one would have."""
    config = target.config
    num_tokens = min(draft_vocab, config.vocab_size - 1)
    layer = replace(config, num_layers=1, sliding_window=(), experts=None)
    taps = default_taps(config.num_layers)
    head = EagleHead(
        EagleConfig(3, layer, config.hidden_size, config.num_layers, taps, num_tokens),
        DraftVocabulary(torch.arange(num_tokens), config.vocab_size),
    )
    head.initialise(1)
    dtype = target.decoder.norm.weight.dtype
    head.to(dtype).requires_grad_(False)
    pack(head, head_format(target.weight_format, dtype.itemsize, target.device))
    return head


class Rounds:
    """`count` requests of random tokens that draft `num_draft` tokens in every round."""

    def __init__(self, target: PagedModel, head: EagleHead, count: int, context: int, num_draft: int) -> None:
        self._target, self._head, self._num_draft = target, head, num_draft
        self._drafter = EagleDrafter(CachedEagle(head, target))
        self._compiled = self._drafter.runner.draft
        self._generator = torch.Generator().manual_seed(count)
        shape = (count, context)
        texts = torch.randint(target.vocab_size, shape, generator=self._generator).tolist()
        spec, params = SpecConfig("eagle", head="unread", num_draft=num_draft), SamplingParams(temperature=0.0)
        self._requests = [Request(number, tuple(text), params, spec, number) for number, text in enumerate(texts)]
        self._texts: list[list[int]] = texts
        self._times: dict[str, list[float]] = {name: [] for name in (*_WAYS, "step")}

    def costs(self, num_rounds: int) -> dict[str, float]:
        """Medians in milliseconds of both ways and of the target's step, and the share of a step of the first."""
        for request in self._requests:
            self._drafter.start(request)
            self._target.open(request.request_id)
            self._read(request.request_id, 0)
        self._step(range(len(self._texts)), 0)
        for number in range(_WARM_ROUNDS + 2 * num_rounds):
            if number == _WARM_ROUNDS:
                for times in self._times.values():
                    times.clear()
            self._round(_WAYS[number % 2])
        for request in self._requests:
            self._drafter.finish(request.request_id)
            self._target.close(request.request_id)
        found = {f"{name} ms": 1e3 * statistics.median(times) for name, times in self._times.items()}
        return {**found, "of a step": found[f"{_WAYS[0]} ms"] / found["step ms"]}

    def _round(self, way: str) -> None:
        entries = [
            BatchEntry(request, len(text) - 1, (text[-1],), True, self._num_draft)
            for request, text in zip(self._requests, self._texts, strict=True)
        ]
        runner = self._drafter.runner
        runner.draft = self._compiled if way == _WAYS[0] else _no_chain  # type: ignore[assignment, method-assign]
        start = time.perf_counter()
        draft = self._drafter.propose(Batch(tuple(entries)))
        self._times[way].append(time.perf_counter() - start)
        if way == _WAYS[0] and runner._compiled_chain() is None:
            raise SystemExit("this head has no compiled chain here: see heads/eagle_chain.py")
        start = time.perf_counter()
        self._step(range(len(self._texts)), len(self._texts[0]) - 1)
        self._times["step"].append(time.perf_counter() - start)
        for number, text in enumerate(self._texts):
            text.append(int(draft.tokens[draft.offsets[number]]))
            self._read(number, len(text) - 2)

    def _step(self, sequences: range, start: int) -> None:
        """The target runs what it has not run of the texts: all but the last token at first, then that one."""
        stop = len(self._texts[0]) - (start == 0)
        tokens = [token for number in sequences for token in self._texts[number][start:stop]]
        self._target.forward(torch.tensor(tokens), [Segment(number, stop - start) for number in sequences])
        for number in sequences:
            self._target.commit(number, stop - start)

    def _read(self, number: int, start: int) -> None:
        """Made-up states of a text but its last token."""
        text, width = self._texts[number], self._target.config.hidden_size
        shape = (len(text) - 1 - start, width)
        states = {
            layer: torch.randn(shape, generator=self._generator).to(self._head.norm_dtype)
            for layer in self._head.hidden_layers()
        }
        self._drafter.read_hidden([HiddenRows(number, start, tuple(text[start:-1]), text[-1], states)])


def _no_chain(*_: object) -> Tensor | None:
    """As where no compiled code drafts."""
    return None


if __name__ == "__main__":
    main()
