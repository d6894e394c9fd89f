"""A language model that is a table: what follows each context is written down by the test."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from foretoken.errors import CapacityError
from foretoken.model.interface import EarlySegment, ForwardOutput, Segment

Context = tuple[int, ...]
Script = Callable[[Context], "int | Sequence[float]"]  # the next token, or the logits


def recite(tokens: Sequence[int], prompt_length: int = 1, after: int = 0) -> Script:
    """After a prompt of `prompt_length` tokens say `tokens`, then `after` for ever."""
    return lambda context: tokens[len(context) - prompt_length] if len(context) - prompt_length < len(tokens) else after


class ScriptedModel:
    """A `LanguageModel` without weights; `sequences` holds the committed tokens of every open sequence."""

    num_layers = 2
    device = torch.device("cpu")

    def __init__(
        self,
        script: Script,
        vocab_size: int,
        eos: Sequence[int] = (),
        max_context: int = 10_000,
        capacity: int = 100_000,
        num_parameters: int = 1,
    ) -> None:
        self.script, self.vocab_size, self.eos_token_ids = script, vocab_size, tuple(eos)
        self.max_context_tokens, self.capacity_tokens, self.num_parameters = max_context, capacity, num_parameters
        self.weight_bytes = self.step_bytes = 4 * num_parameters
        self.sequences: dict[int, list[int]] = {}
        self._rows: dict[int, list[int]] = {}  # of each sequence's last forward, held ones included
        self._early: dict[int, tuple[int, ...]] = {}  # rows of the last `forward_early` calls
        self.num_forwards = 0

    @property
    def kv_bytes_per_token(self) -> int:
        return 0

    @property
    def numerics(self) -> str:
        return "default"

    def open(self, sequence: int) -> None:
        assert sequence not in self.sequences
        self.sequences[sequence] = []

    def close(self, sequence: int) -> None:
        del self.sequences[sequence]

    def length(self, sequence: int) -> int:
        return len(self.sequences[sequence])

    def num_free_tokens(self) -> int:
        return self.capacity_tokens - sum(len(tokens) for tokens in self.sequences.values())

    def footprint_tokens(self, num_tokens: int) -> int:
        return num_tokens

    def reserve(self, sequence: int, num_rows: int) -> bool:
        return num_rows <= self.num_free_tokens()

    def forward(self, tokens: Tensor, segments: Sequence[Segment], taps: Sequence[int] = ()) -> ForwardOutput:
        self.num_forwards += 1
        flat, rows, logits = tokens.tolist(), [], []
        for segment in segments:
            if not self.reserve(segment.sequence, segment.num_held + segment.num_rows):
                raise CapacityError("the script has no room")
            held = self._rows[segment.sequence][: segment.num_held] if segment.num_held else []
            own, flat = held + flat[: segment.num_rows], flat[segment.num_rows :]
            rows.append(own)
            contexts: list[Context] = []
            for row, token in enumerate(own):
                node = row - segment.num_pending
                above = row - 1 if node < 0 else segment.num_pending + segment.parents[node]
                before = contexts[above] if above >= 0 else tuple(self.sequences[segment.sequence])
                contexts.append((*before, token))
            logits.extend(self._logits(context) for context in contexts[len(contexts) - segment.num_logits :])
        assert not flat, "tokens that belong to no segment"
        self._rows |= {segment.sequence: own for segment, own in zip(segments, rows, strict=True)}
        return ForwardOutput(torch.stack(logits) if logits else torch.empty(0, self.vocab_size), {})

    def forward_early(
        self,
        tokens: Tensor,
        segments: Sequence[EarlySegment],
        layers: Sequence[int],
        adapter: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """The first layers know the script too."""
        flat, logits = tokens.tolist(), []
        for segment in segments:
            own, flat = flat[: segment.num_rows], flat[segment.num_rows :]
            before = (*self.sequences[segment.sequence], *self._early.get(segment.sequence, ())[: segment.offset])
            self._early[segment.sequence] = (*before[self.length(segment.sequence) :], *own)
            logits += [self._logits((*before, *own[: i + 1])) for i in range(segment.num_rows)][
                segment.num_rows - segment.num_logits :
            ]
        return torch.stack(logits)

    def head_cost(self) -> float:
        return 1.0

    def fork(self, sequence: int, child: int) -> None:
        self.sequences[child] = list(self.sequences[sequence])

    def commit(self, sequence: int, num_pending: int, path: Sequence[int] = ()) -> None:
        self._early.pop(sequence, None)
        rows = self._rows[sequence]
        self.sequences[sequence].extend([*rows[:num_pending], *(rows[num_pending + node] for node in path)])

    def rollback(self, sequence: int, length: int) -> None:
        assert 0 <= length <= self.length(sequence)
        del self.sequences[sequence][length:]

    def _logits(self, context: Context) -> Tensor:
        answer = self.script(context)
        if isinstance(answer, int):
            row = torch.full((self.vocab_size,), -10.0)
            row[answer] = 10.0
            return row
        return torch.tensor(answer, dtype=torch.float32)
