"""Answers held to a JSON schema, a regular expression or a Lark grammar, exactly at every drafted position.

The grammar engine is llguidance (Earley parser over a lexer of regex derivatives). Two of its habits decide how it is
used here, both seen in version 1.9.1:

- `rollback` keeps a cached mask, which can then be served at another place of the grammar. Nothing is ever rolled back:
  a drafted path is walked on copies of the committed matcher, which cost microseconds.
- Copies share their lexer, and a lexer that ran out of fuel stays broken for all of them. A request that meets a broken
  lexer gets one of its own and walks its answer again; only what fails there too is the request's own fault.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.config import SamplingParams
from foretoken.errors import InputError
from foretoken.text.grammar import (
    DEAD_END,
    Field,
    Vocabulary,
    breakdown,
    build_matcher,
    build_vocabulary,
    given_field,
    grammar_text,
    refusal,
    try_grammar,
)
from foretoken.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    # Where a drafted token leads: a matcher that has taken it, behind the answer's end, or nowhere.
    _Behind: TypeAlias = "LLMatcher | Literal['ended', 'refused']"

_MAX_CACHED = 32  # compiled grammars; a hostile one may hold 50 MB of lexer states
_MAX_CACHED_BYTES = 4 << 20  # of their text; compiling takes up to 400 times as much memory
_MAX_RESTARTS = 4  # of one answer, each with a compilation
_RESTART_COMPILE_S = 0.25  # a grammar that compiles more slowly is not compiled again while others wait


@dataclass(frozen=True)
class _GrammarState:
    """A point in an answer: behind the committed text and perhaps some drafted tokens.

    `row` [V] bool says what may follow; `complete`, that the answer may end here and can only end. There is no matcher
    behind an end token or a refused one, and none where the grammar engine gave up.
    """

    row: NDArray[np.bool_]
    matcher: LLMatcher | None = None
    complete: bool = False


class _BrokenMatcherError(Exception):
    """llguidance gave up at the place behind `path`."""

    def __init__(self, path: tuple[int, ...], complaint: str) -> None:
        self.path, self.complaint = path, complaint
        super().__init__(complaint)


class _Compiled:
    """A grammar ready to be followed by any number of requests of one model."""

    def __init__(
        self, field: Field, value: object, text: str, tokenizer: LLTokenizer, vocab_size: int, end_ids: tuple[int, ...]
    ) -> None:
        self.field, self.value, self.text, self.vocab_size, self.end_ids = field, value, text, vocab_size, end_ids
        self.tokenizer = tokenizer
        self._lock = threading.Lock()
        start_s = time.perf_counter()
        self._template = self.fresh()
        self.complaint = self._template.get_error()
        self.compile_s = time.perf_counter() - start_s
        everything = np.ones(vocab_size, dtype=np.bool_)
        self.anywhere = _GrammarState(everything)  # where nobody comes, or nobody knows
        only_ends = ~everything
        only_ends[list(end_ids)] = True
        self.end = _GrammarState(only_ends if end_ids else everything, complete=True)

    def fresh(self) -> LLMatcher:
        """A matcher at the beginning, with a lexer that nobody else has."""
        return build_matcher(self.tokenizer, self.text)

    def copy(self) -> LLMatcher:
        """A matcher at the beginning that shares its lexer, and what it has learnt, with the other copies."""
        with self._lock:
            matcher = self._template.deep_copy()
            matcher.compute_bitmask()
            if matcher.is_error():  # some request has ruined the lexer
                self._template = self.fresh()
            return self._template.deep_copy()


class Structure:
    """The structure of one answer, and how far it has come. Only `commit` moves on: drafted paths leave no trace."""

    def __init__(self, compiled: _Compiled) -> None:
        self._compiled = compiled
        self._matcher = compiled.copy()
        self._ended = False  # an end token was committed
        self._history: list[int] = []
        # By path: the committed place and those behind it that were asked for since the last `commit`. A draft model
        # asks token by token, and the target's rows are the same places again.
        self._known: dict[tuple[int, ...], _GrammarState] = {}
        self._restarts = 0  # the first one gives the answer a lexer of its own
        # Whether `allowed` looks at drafts: not where a lexer that breaks on one is slow to replace.
        self._checks_drafts = compiled.compile_s <= _RESTART_COMPILE_S
        self._failed: dict[tuple[int, ...], InputError] = {}  # by path: where the grammar engine gives up for good
        self.error: InputError | None = None

    @property
    def finished(self) -> bool:
        """Whether the answer is complete and nothing but its end can follow."""
        return self._ended or (self.error is None and self._matcher.is_accepting() and self._places([()])[0].complete)

    def mask(self, paths: Sequence[tuple[int, ...]]) -> Tensor:
        """What may follow the committed answer and `paths[i]`: bool [n, V] on the CPU, True = allowed.

        End tokens are allowed where the answer may end; behind one, nothing but end tokens. For a model without end
        tokens all is allowed behind a complete answer: end it when `finished`. Rows behind a refused token are all
        True, as nobody comes there. So are rows at which the grammar engine gives up: `error` says why once the
        committed answer is there.
        """
        rows = np.empty((len(paths), self._compiled.vocab_size), dtype=np.bool_)  # [n, V]
        for i, place in enumerate(self._places(paths)):
            rows[i] = place.row
        return torch.from_numpy(rows)

    def commit(self, tokens: Sequence[int]) -> None:
        """Move on by emitted tokens."""
        for token in map(int, tokens):
            if self.error is not None:
                return
            self._known = {}
            self._failed = {path[1:]: error for path, error in self._failed.items() if path[:1] == (token,)}
            self.error = self._failed.get(())
            if self._ended or token in self._compiled.end_ids:
                self._ended = True
                continue
            self._history.append(token)
            if not self._matcher.consume_token(token):
                self._restart(self._matcher.get_error())

    def forced(self, most: int) -> tuple[int, ...]:
        """Up to `most` tokens that spell what the structure forces next, as the tokenizer would write it; () if nothing
        is forced.

        Other spellings may be allowed too. Last tokens that could be part of a longer one are left out, unless the
        answer is complete with them. Never an end token.
        """
        if most <= 0 or self._ended or self.error is not None:
            return ()
        text, _, _ = self._matcher.deep_copy().compute_ff_bytes().partition(b"\xff")  # it marks tokens that are no text
        tokenizer, before = self._compiled.tokenizer, self._history[-1:]
        tokens, rest = tokenizer.tokenize_partial(text, before) if text else ([], b"")
        if rest:
            whole, walker = tokens + tokenizer.tokenize_bytes(rest), self._matcher.deep_copy()
            if walker.try_consume_tokens(whole) == len(whole) and walker.is_stopped():
                tokens = whole
        return tuple(tokens[: min(most, self._matcher.deep_copy().validate_tokens(tokens))])

    def allowed(self, tokens: Sequence[int], parents: Sequence[int]) -> list[bool]:
        """For each node of a tree behind the committed answer whether it and those before it may follow (-1: the
        answer).

        The tokens are taken one by one, without the masks, which cost ten times as much and are those of the target's
        rows. True where nobody knows.
        """
        if self.error is not None or not self._checks_drafts:
            return [True] * len(tokens)
        last_child = {parent: node for node, parent in enumerate(parents)}
        behind: list[_Behind] = []
        start: _Behind = "ended" if self._ended else self._matcher.deep_copy()
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            before = start if parent < 0 else behind[parent]
            if not isinstance(before, str) and last_child[parent] != node:
                before = before.deep_copy()
            behind.append(self._behind(before, token))
        if any(not isinstance(one, str) and one.is_error() for one in (start, *behind)):
            # The fuel of a step comes with its mask, and what was left did not suffice. It is nothing that the answer
            # is to blame for, so it goes on with a new lexer, and its drafts are no longer checked.
            self._checks_drafts = False
            self._renew()
            return [True] * len(tokens)
        return [one != "refused" for one in behind]

    def _behind(self, before: _Behind, token: int) -> _Behind:
        """Where `token` leads from `before`, whose matcher it moves."""
        compiled = self._compiled
        is_end = token in compiled.end_ids
        if isinstance(before, str):
            return "ended" if before == "ended" and (is_end or not compiled.end_ids) else "refused"
        if is_end:
            return "ended" if before.is_accepting() else "refused"
        is_taken = 0 <= token < compiled.vocab_size and before.try_consume_tokens([token]) == 1
        return before if is_taken or before.is_error() else "refused"

    @property
    def max_tokens(self) -> int | None:
        """The most tokens that the answer can have from here on; None unless the structure forces all of its text."""
        text, mark, _ = self._matcher.deep_copy().compute_ff_bytes().partition(b"\xff")
        walker, whole = self._matcher.deep_copy(), self._compiled.tokenizer.tokenize_bytes(text)
        is_all = not mark and walker.try_consume_tokens(whole) == len(whole) and walker.is_stopped()
        return len(text) if is_all else None

    def _places(self, paths: Sequence[tuple[int, ...]]) -> list[_GrammarState]:
        while self.error is None:
            try:
                return self._walk(paths)
            except _BrokenMatcherError as broken:
                self._recover(broken)
        return [self._compiled.anywhere] * len(paths)

    def _walk(self, paths: Sequence[tuple[int, ...]]) -> list[_GrammarState]:
        """The places behind the given paths; every part of a path is walked once."""
        places = self._known
        if () not in places:
            places[()] = self._compiled.end if self._ended else self._place(self._matcher, ())
        for path in sorted(paths, key=len):
            known = len(path)
            while path[:known] not in places:
                known -= 1
            for length in range(known, len(path)):
                places[path[: length + 1]] = self._step(places[path[:length]], path[: length + 1])
        return [places[path] for path in paths]

    def _step(self, place: _GrammarState, path: tuple[int, ...]) -> _GrammarState:
        """The place behind `path`, from the one before its last token."""
        token, compiled = path[-1], self._compiled
        if path in self._failed or not 0 <= token < compiled.vocab_size or not place.row[token]:
            return compiled.anywhere
        if place.matcher is None:
            return compiled.end if place is compiled.end and token in compiled.end_ids else compiled.anywhere
        if token in compiled.end_ids:
            return compiled.end
        matcher = place.matcher.deep_copy()
        if not matcher.consume_token(token):
            raise _BrokenMatcherError(path, matcher.get_error())
        return self._place(matcher, path)

    def _place(self, matcher: LLMatcher, path: tuple[int, ...]) -> _GrammarState:
        """What may follow where `matcher` stands, which is behind `path`."""
        compiled = self._compiled
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():
            raise _BrokenMatcherError(path, matcher.get_error())
        row = np.unpackbits(bits, count=compiled.vocab_size, bitorder="little").view(np.bool_)  # [V]
        may_end, ends = matcher.is_accepting(), list(compiled.end_ids)
        row[ends] = False  # a token that ends answers cannot be text inside one
        if may_end and not row.any():
            return _GrammarState(compiled.end.row, matcher if ends else None, complete=True)
        row[ends] = may_end
        if not row.any():
            raise _BrokenMatcherError(path, DEAD_END)
        return _GrammarState(row, matcher)

    def _recover(self, broken: _BrokenMatcherError) -> None:
        """Go on after a failure at one place: with a lexer of our own, and without the place if we had one already."""
        dead_end = DEAD_END in broken.complaint
        if dead_end or self._restarts:
            self._failed[broken.path] = breakdown(self._compiled.field, self._compiled.value, broken.complaint)
            self.error = self._failed.get(())
        if not dead_end and self.error is None:
            self._restart(broken.complaint)

    def _restart(self, complaint: str) -> None:
        """Walk the answer again with a lexer of our own; give up where that is too much work or ends no better."""
        self._restarts += 1
        if self._restarts > _MAX_RESTARTS or not self._renew():
            self.error = breakdown(self._compiled.field, self._compiled.value, complaint)

    def _renew(self) -> bool:
        """Walk the answer again with a lexer of our own; whether that was not too much work, and worked."""
        self._known = {}
        if self._compiled.compile_s > _RESTART_COMPILE_S:
            return False
        walked, self._matcher = True, self._compiled.fresh()
        for token in self._history:
            self._matcher.compute_bitmask()  # the fuel of a step comes with its mask
            walked = walked and self._matcher.consume_token(token)
        return walked


class StructureCompiler:
    """Compiles the structures of all requests of one model, each different one once.

    Takes the model's tokenizer (None if its folder has none), its number of columns and its end tokens. May be used
    from several threads.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._end_ids = tuple(token for token in eos_token_ids if 0 <= token < vocab_size)
        self._lock = threading.Lock()
        self._columns: tuple[Vocabulary, LLTokenizer] | None = None
        # A complaint where a grammar is no good.
        self._cache: OrderedDict[tuple[Field, str], _Compiled | str] = OrderedDict()

    def warm(self) -> None:
        """Import the grammar engine and hand it the vocabulary now, where structures can be followed at all: both keep
        every thread of the process waiting, an event loop's too.
        """
        with suppress(InputError), self._lock:  # a request that needs what is missing gets the error
            self._need_columns("json_schema", None)

    def _need_columns(self, field: Field, value: object) -> None:
        if self._columns is None:
            self._columns = build_vocabulary(self._tokenizer, self._vocab_size, field, value)

    def compile(self, params: SamplingParams) -> Structure | None:
        """The structure of a new answer, None if the request asks for none.

        The first time a grammar is seen this takes some 60 ms, most of it for a process in which the grammar is tried;
        a hostile one keeps its caller waiting for `TRIAL_DEADLINE_S` once.

        Raises:
            InputError: the structure cannot be followed, here or by anybody; names the field, what is wrong and the
            remedy.
        """
        if not params.structured:
            return None
        field = given_field(params)
        value = getattr(params, field)
        with self._lock:
            self._need_columns(field, value)
        text = grammar_text(field, value)
        compiled = self._compiled(field, value, text)
        if isinstance(compiled, str):
            raise refusal(field, value, compiled)
        structure = Structure(compiled)
        if params.min_tokens and (most := structure.max_tokens) is not None and most < params.min_tokens:
            remedy = f"an answer that fits `{field}` has at most {most} tokens; ask for no more than that"
            raise InputError("min_tokens", params.min_tokens, remedy)
        return structure

    def _compiled(self, field: Field, value: object, text: str) -> _Compiled | str:
        key = (field, text)
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        compiled = self._build(field, value, text)  # two threads may both come here; one result is as good as the other
        with self._lock:
            self._cache[key] = compiled
            while len(self._cache) > _MAX_CACHED or (
                len(self._cache) > 1 and sum(len(text) for _, text in self._cache) > _MAX_CACHED_BYTES
            ):
                self._cache.popitem(last=False)
        return compiled

    def _build(self, field: Field, value: object, text: str) -> _Compiled | str:
        """The compiled grammar, or the complaint about it. One that allows nothing at all shows at the first mask."""
        assert self._columns is not None
        vocabulary, tokenizer = self._columns
        if complaint := try_grammar(vocabulary, text):
            return complaint
        compiled = _Compiled(field, value, text, tokenizer, self._vocab_size, self._end_ids)
        if complaint := compiled.complaint:
            return complaint
        try:
            Structure(compiled)._walk([()])
        except _BrokenMatcherError as broken:
            return broken.complaint
        return compiled
