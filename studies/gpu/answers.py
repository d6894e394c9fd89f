"""Answers of a small target, a thousand at once: text for a head, written in the seconds of a GPU that is lent.

    python -m studies.gpu.answers --target models/as-is --prompts prompts.jsonl --out answers.jsonl --rows 1024

`foretoken train answers` writes the same file through the engine, whose scheduler takes longer for a thousand requests
than a small target takes for a step. Here a step is one CUDA graph over rows that each have a text of their own: dense
keys and values, no drafts, no penalties. A row whose text has ended takes the next prompt. Every answer follows the
target's distribution at the temperature, or is greedy for an even `--greedy-share` of the prompts; which one is drawn
depends on the device and on the number of rows. Every step reads all columns, so that with several `--columns` each
prompt runs in the fewest that hold it and its answer, beside as many more rows. Prompts that fit in none are left out,
and counted.
"""

from __future__ import annotations

import argparse
import bisect
import hashlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from foretoken import LLM
from foretoken.files import to_json
from foretoken.model.architecture import ModelConfig
from foretoken.model.attention.paged import PackedAttention
from foretoken.model.decoder import Decoder
from foretoken.model.graphs.cache import CudaCapture, Step
from foretoken.model.loader import load_decoder
from foretoken.model.names import model_folder
from foretoken.printing.console import Console
from foretoken.train.answers import ANSWERS_KIND, folder_fingerprint, placed_prompts
from studies.command import exit_code_of

_STEPS_AT_ONCE = 16  # between two looks at which texts have ended
_PREFILL_TOKENS = 1 << 15  # of prompts that are read together
_REPORT_S = 5.0


def main() -> int:
    """Write the answers; print how many tokens per second they took."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.gpu.answers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, help="a folder with plain weights, of our own decoder")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, default=1024, help="texts at once, in the most columns")
    parser.add_argument("--columns", default="640", help="tokens of a prompt and its answer; several, with commas")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--greedy-share", type=float, default=0.0, help="of the prompts, whose answers are greedy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="prompts that are left then have no answer")
    options = parser.parse_args()
    return exit_code_of(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    folder, console = model_folder(options.target), Console(stderr=True)
    prompts = _encoded(options)
    columns = sorted(map(int, options.columns.split(",")))
    fitting = [prompt for prompt in prompts if len(prompt) + options.max_tokens <= columns[-1]]
    decoder = load_decoder(folder, dtype=options.dtype, device=options.device, pack=False)
    settings = ("max_tokens", "temperature", "greedy_share", "seed", "rows", "columns")
    header = {
        "kind": ANSWERS_KIND,
        "target": folder_fingerprint(folder),
        "prompts": hashlib.sha256(to_json(fitting).encode()).hexdigest()[:16],
        **{name: getattr(options, name) for name in settings},
    }
    began = shown = time.monotonic()
    num_answers = num_tokens = 0
    with options.out.open("w", encoding="utf-8") as file:
        file.write(to_json(header) + "\n")
        for place, answer in _answers(decoder, fitting, columns, options):
            row = {"place": place, "prompt_ids": fitting[place], "answer_ids": answer}
            file.write(to_json(row) + "\n")
            num_answers, num_tokens = num_answers + 1, num_tokens + len(answer)
            if time.monotonic() - shown > _REPORT_S:
                shown = time.monotonic()
                console.line(f"{num_answers} answers, {num_tokens / (shown - began):.0f} tokens/s")
    took_s = time.monotonic() - began
    console.line(
        f"{options.out}: {num_answers} answers of {len(prompts)} prompts ({len(prompts) - len(fitting)} too long), "
        f"{num_tokens} tokens in {took_s:.1f} s"
    )
    return 0


def _answers(
    decoder: Decoder, prompts: Sequence[Sequence[int]], columns: Sequence[int], options: argparse.Namespace
) -> Iterator[tuple[int, list[int]]]:
    """(place, tokens) of every prompt, those of the fewest `columns` first; each number of columns has its part of the
    seconds.
    """
    parts: list[list[int]] = [[] for _ in columns]
    for place, prompt in enumerate(prompts):
        parts[bisect.bisect_left(columns, len(prompt) + options.max_tokens)].append(place)
    costs = [len(part) * width for part, width in zip(parts, columns, strict=True)]
    began = time.monotonic()
    for number, (part, width) in enumerate(zip(parts, columns, strict=True)):
        if not part:
            continue
        rows = max(1, options.rows * columns[-1] // width)
        batch = StaticBatch(decoder, rows, width, options.max_tokens, options.temperature, options.seed)
        is_greedy = [_is_greedy(place, options.greedy_share) for place in part]
        ends_s = began + options.seconds * sum(costs[: number + 1]) / sum(costs)
        for place, answer in batch.answers([prompts[place] for place in part], is_greedy, ends_s):
            yield part[place], answer


def _is_greedy(place: int, share: float) -> bool:
    """Whether the place is one of those that are spread evenly and make up `share` of all."""
    return int((place + 1) * share) > int(place * share)


def _encoded(options: argparse.Namespace) -> list[list[int]]:
    """The prompts as token ids, through the target's chat template where they are conversations."""
    found = [prompt for _, prompt in placed_prompts(options.prompts)]
    if all(not isinstance(prompt, str) and isinstance(prompt[0], int) for prompt in found):
        return [[token for token in prompt if isinstance(token, int)] for prompt in found]
    encoded: list[list[int]] = []
    with LLM(options.target, device=options.device, dtype=options.dtype, profile="off") as llm:
        for prompt in found:
            if isinstance(prompt, str):
                encoded.append(llm.encode(prompt))
            else:
                encoded.append(llm.encode_chat([one for one in prompt if isinstance(one, Mapping)]))
    return encoded


class DenseAttention:
    """One new token in each of R rows, over keys and values [R, G, C, K] of every layer; `positions` [R] are theirs."""

    def __init__(
        self, config: ModelConfig, keys: Sequence[Tensor], values: Sequence[Tensor], positions: Tensor
    ) -> None:
        self.config, self.keys, self.values = config, keys, values
        rows, _, columns, _ = keys[0].shape
        self._at = torch.arange(rows, device=positions.device), positions
        self._hidden = torch.arange(columns, device=positions.device) > positions[:, None, None, None]  # [R, 1, 1, C]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """See `decoder.Attention`."""
        assert sinks is None
        assert self.config.window(layer) is None
        assert not self.config.attention_softcap
        rows, positions = self._at
        keys, values = self.keys[layer], self.values[layer]
        keys[rows, :, positions], values[rows, :, positions] = key, value
        groups, head_dim = key.shape[1:]
        q = query.view(len(query), groups, -1, head_dim) * self.config.score_scale  # [R, G, H/G, K]
        scores = (q @ keys.transpose(-1, -2)).float().masked_fill(self._hidden, float("-inf"))
        return (scores.softmax(-1).to(values.dtype) @ values).view(query.shape)


class _PromptAttention(PackedAttention):
    """Prompts of equal padded length, whose keys and values are also written into `rows` of the cache."""

    def __init__(self, config: ModelConfig, rows: Tensor, length: int, batch: StaticBatch) -> None:
        super().__init__(config, len(rows), length)
        self._rows, self._batch = rows, batch

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        for cache, new in ((self._batch.keys, key), (self._batch.values, value)):
            cache[layer][self._rows, :, : self.length] = new.view(
                len(self._rows), self.length, *new.shape[1:]
            ).transpose(1, 2)
        return super().attend(layer, query, key, value, sinks)


class StaticBatch:
    """`num_rows` texts of at most `num_columns` tokens each, one token a step in each of them."""

    def __init__(
        self, decoder: Decoder, num_rows: int, num_columns: int, max_tokens: int, temperature: float, seed: int
    ) -> None:
        config, device = decoder.config, decoder.norm.weight.device
        self.decoder, self.num_rows, self.max_tokens, self.temperature = decoder, num_rows, max_tokens, temperature
        shape = (num_rows, config.num_kv_heads, num_columns, config.head_dim)
        empty = [
            torch.zeros(shape, dtype=decoder.norm.weight.dtype, device=device) for _ in range(2 * config.num_layers)
        ]
        self.keys, self.values = empty[: config.num_layers], empty[config.num_layers :]
        self.tokens, self.positions, self.written = torch.zeros(3, num_rows, dtype=torch.int64, device=device)
        self.has_ended, self.is_greedy = torch.ones(2, num_rows, dtype=torch.bool, device=device)
        self.answer = torch.zeros(num_rows, max_tokens + 1, dtype=torch.int64, device=device)  # the last is never read
        self.ends = torch.tensor(sorted(config.eos_token_ids), device=device)
        self._last = num_columns - 1
        for table in decoder.rotaries:
            table.cover(num_columns)
        torch.manual_seed(seed)
        self._replay = self._captured(device)

    def answers(
        self, prompts: Sequence[Sequence[int]], is_greedy: Sequence[bool], ends_s: float
    ) -> Iterator[tuple[int, list[int]]]:
        """(place, tokens) of every prompt, as they end; none begins after `ends_s`."""
        texts: dict[int, int] = {}  # by row, the prompt's place
        waiting = iter(range(len(prompts)))
        wishes = [True] * self.num_rows
        while True:
            free = [row for row in range(self.num_rows) if row not in texts]
            new = list(zip(free, waiting, strict=False)) if time.monotonic() < ends_s else []
            texts |= dict(new)
            if not texts:
                return
            for row, place in new:
                wishes[row] = is_greedy[place]
            self.is_greedy.copy_(torch.tensor(wishes))
            self._begin(sorted(((row, prompts[place]) for row, place in new), key=lambda one: len(one[1])))
            for _ in range(_STEPS_AT_ONCE):
                self._replay()
            is_over = (self.has_ended | (self.written >= self.max_tokens)).tolist()
            over = [row for row in texts if is_over[row]]
            lengths, rows = self.written.tolist(), self.answer[over].tolist()
            for row, tokens in zip(over, rows, strict=True):
                yield texts.pop(row), self._cut(tokens[: min(lengths[row], self.max_tokens)])

    def _cut(self, tokens: list[int]) -> list[int]:
        """Up to the first end of text, that included."""
        ends = self.decoder.config.eos_token_ids
        return next((tokens[: place + 1] for place, token in enumerate(tokens) if token in ends), tokens)

    @torch.no_grad()
    def _begin(self, new: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Read all but the last token of prompts, which are sorted by length; that one is the first step's."""
        device, start = self.tokens.device, 0
        while start < len(new):
            stop = start + 1
            while stop < len(new) and (stop + 1 - start) * len(new[stop][1]) <= _PREFILL_TOKENS:
                stop += 1
            part, start = new[start:stop], stop
            rows = torch.tensor([row for row, _ in part], device=device)
            length = len(part[-1][1]) - 1
            padded = [[*prompt[:-1], *[0] * (length + 1 - len(prompt))] for _, prompt in part]
            if length:
                tokens = torch.tensor(padded, device=device).flatten()
                positions = torch.arange(length, device=device).repeat(len(part))
                self.decoder(tokens, positions, _PromptAttention(self.decoder.config, rows, length, self))
            self.tokens[rows] = torch.tensor([prompt[-1] for _, prompt in part], device=device)
            self.positions[rows] = torch.tensor([len(prompt) - 1 for _, prompt in part], device=device)
            self.written[rows], self.has_ended[rows] = 0, False

    @torch.no_grad()
    def _step(self) -> None:
        decoder = self.decoder
        attention = DenseAttention(decoder.config, self.keys, self.values, self.positions)
        logits = decoder.logits(decoder(self.tokens, self.positions, attention).last).float()  # [R, V]
        if self.temperature > 0:  # the largest of p / e with e exponential is a draw from p
            noise = torch.empty_like(logits).exponential_().masked_fill_(self.is_greedy[:, None], 1.0)
            logits = (logits / self.temperature).softmax(-1) / noise
        drawn = logits.argmax(-1)
        self.answer.scatter_(1, self.written.clamp(max=self.max_tokens)[:, None], drawn[:, None])
        self.has_ended |= (drawn[:, None] == self.ends).any(-1)
        self.tokens.copy_(drawn)
        self.positions.add_(1).clamp_(max=self._last)
        self.written.add_(1)

    def _captured(self, device: torch.device) -> Step:
        return CudaCapture(device)(self._step) if device.type == "cuda" else self._step


if __name__ == "__main__":
    sys.exit(main())
