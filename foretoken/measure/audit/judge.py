"""The target in this process, whose logits judge what another engine answered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from foretoken.backend.answering import Answer, Question
from foretoken.config import SamplingParams, SpecConfig
from foretoken.engine.llm import LLM
from foretoken.engine.shadow.rescoring import ScoredRows, rescore
from foretoken.errors import InputError
from foretoken.measure.audit.options import BackendAuditOptions
from foretoken.measure.audit.session import CHUNK_TOKENS, scored_place
from foretoken.measure.prompts import check_room
from foretoken.text.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
_MAX_RESPELLED = 32  # places of an answer that the target spells otherwise than its tokenizer
_HALF = "\ufffd"  # what a part of a character is decoded as


class Judge:
    """An open target without drafting; a context manager."""

    def __init__(self, options: BackendAuditOptions) -> None:
        """Load it.

        Raises:
            InputError: it has no tokenizer, without which no text can be judged.
            ModelError: it cannot be loaded.
        """
        assert options.target is not None
        self._name = options.target
        self.llm = LLM(
            options.target,
            SpecConfig(),
            dtype=options.dtype,
            device=options.device,
            cache_tokens=options.cache_tokens,
            weights=options.weights,
            profile="off",
        )
        if self.llm.tokenizer is None:
            self.llm.close()
            raise InputError("target", options.target, "has no tokenizer, so it cannot judge texts; leave it out")
        self.tokenizer: Tokenizer = self.llm.tokenizer
        self._texts: dict[int, tuple[dict[str, int], Tensor]] = {}  # by the last token of the prompt

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.close()

    def prompt_ids(self, name: str, question: Question) -> list[int]:
        """Token ids of what is asked, called `name`.

        Raises:
            InputError: no room for it and its answer.
        """
        messages = [{"role": role, "content": content} for role, content in question.messages]
        ids = self.llm.encode_chat(messages) if messages else self.llm.encode(question.text)
        room = self.llm.target.max_context_tokens - question.max_tokens
        check_room("prompts", name, len(ids), room)
        return ids

    def check(self, answer: Answer) -> Answer:
        """An answer whose tokens the target has.

        Raises:
            InputError: another model answered, with other tokens.
        """
        size = self.llm.target.vocab_size
        if max(answer.token_ids, default=0) >= size:
            held = f"has {size} tokens, and an answer holds token {max(answer.token_ids)}"
            raise InputError("target", self._name, f"{held}: name the model that answers")
        return answer

    def answer_ids(self, prompt_ids: Sequence[int], answer: Answer) -> tuple[int, ...] | None:
        """Token ids of an answer: its own, or where only its text is known those that the target would write it with;
        None where its tokenizer does not write this text.

        A text has several spellings. The tokenizer's is taken, and wherever the target prefers a token that spells the
        same text, that one.
        """
        if answer.token_ids:
            return answer.token_ids
        text = answer.text.rstrip(_HALF)
        ids = self._spelled(prompt_ids, (), text)
        for _ in range(_MAX_RESPELLED):
            if not ids:
                return ids
            better = self._respelled(prompt_ids, ids, text)
            if better is None:
                return ids
            ids = better
        return ids

    def rows(self, prompt_ids: Sequence[int], ids: Sequence[int], params: SamplingParams) -> Iterator[ScoredRows]:
        """An answer scored by the target."""
        return rescore(self.llm.target, prompt_ids, ids, params, chunk_tokens=CHUNK_TOKENS)

    def row(self, prompt_ids: Sequence[int], ids: Sequence[int], place: int) -> tuple[Tensor, float]:
        """Logits `[V]` of one place of an answer, and the difference between two of them that rounding explains."""
        return scored_place(self.rows(prompt_ids, ids, GREEDY), place)

    def first_distribution(self, prompt_ids: Sequence[int], params: SamplingParams) -> Tensor:
        """The distribution `[V]` of the first token of an answer."""
        (rows,) = self.rows(prompt_ids, [0], params)
        return rows.distributions[0]

    def by_text(self, prompt_ids: Sequence[int], distribution: Tensor, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """A distribution `[V]` of first tokens as one of the texts that they write `[T]`, and the numbers of `texts` in
        it `[n]`.

        Tokens that write nothing, or a part of a character, are one text. The last number is that of texts that no
        token writes, of probability 0.
        """
        if prompt_ids[-1] not in self._texts:
            self._texts[prompt_ids[-1]] = self._first_texts(prompt_ids)
        numbers, of_token = self._texts[prompt_ids[-1]]
        found = torch.zeros(len(numbers) + 1, dtype=distribution.dtype, device=distribution.device)
        found.index_add_(0, of_token, distribution)
        chosen = [numbers.get(_whole(text), len(numbers)) for text in texts]
        return found, torch.tensor(chosen, device=distribution.device)

    def _first_texts(self, prompt_ids: Sequence[int]) -> tuple[dict[str, int], Tensor]:
        """The number of each text that a first token writes, and of each token `[V]` the number of its text."""
        numbers = {"": 0}
        written = (_whole(self._written(prompt_ids, [token])) for token in range(self.llm.target.vocab_size))
        of_token = [numbers.setdefault(text, len(numbers)) for text in written]
        return numbers, torch.tensor(of_token, device=self.llm.target.device)

    def _written(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> str:
        """What tokens write behind a prompt."""
        anchor = list(prompt_ids[-1:])
        return self.tokenizer.decode([*anchor, *ids])[len(self.tokenizer.decode(anchor)) :]

    def _spelled(self, prompt_ids: Sequence[int], begun: Sequence[int], text: str) -> tuple[int, ...] | None:
        """The tokens `begun`, and behind them those of the rest of a text; None where they do not write it."""
        rest = text[len(self._written(prompt_ids, begun)) :]
        for part in (rest, rest.removeprefix(" ")):  # SentencePiece writes the space in front by itself
            ids = (*begun, *self.tokenizer.encode(part, add_special_tokens=False))
            if self._written(prompt_ids, ids) == text:
                return ids
        return None

    def _respelled(self, prompt_ids: Sequence[int], ids: Sequence[int], text: str) -> tuple[int, ...] | None:
        """The answer with another spelling from the first place on where the target prefers a token that writes the
        same text; None where there is no such place.
        """
        for rows in self.rows(prompt_ids, ids, GREEDY):
            best = rows.logits.argmax(-1)
            for i in (best != rows.tokens).nonzero()[:, 0].tolist():
                place = rows.first + i
                begun = (*ids[:place], int(best[i]))
                written = self._written(prompt_ids, begun)
                if len(written) > len(self._written(prompt_ids, ids[:place])) and text.startswith(written):
                    found = self._spelled(prompt_ids, begun, text)
                    if found is not None:
                        return found
        return None


def _whole(text: str) -> str:
    """A text, or the empty one for a part of a character."""
    return "" if _HALF in text else text
