"""A trial of a model that transformers has loaded: is it causal, does its cache say the same as no cache, how far do
its positions reach?

Nothing here goes by the family's name. A handful of forwards over at most 12 tokens show what a family's code does with
token ids alone. What only shows in a long text (a window of 4096 tokens) they cannot see: `hf` knows that from the
kinds of cache layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foretoken.errors import UnsupportedModelError

_Foreign: TypeAlias = Any  # objects of transformers, which has no types

_NUM_TOKENS = 12
_CHANGED = 5  # the row whose token is exchanged
_SHORTER = 8  # the length of the same text read alone
# Rows from, to, and how many are kept: prompt, token, drafts cut back, ...
_PIECES = ((0, 4, 4), (4, 5, 5), (5, 10, 7), (7, 8, 8), (8, 12, 12))
# What a family's own code raises when it is given less than it wants.
_FOREIGN_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
# The largest difference that counts as rounding, in parts of what the exchange of one token does. 16-bit rounding may
# choose other experts.
_EXACT = (torch.float32, torch.float64)
_CAUSAL_NOISE, _COARSE_CAUSAL_NOISE = 1e-4, 0.05
_CACHE_NOISE, _COARSE_CACHE_NOISE = 1e-2, 0.3
_ROUNDING_STEPS = 16  # fewer rounding steps of the largest logit than this mean nothing


@dataclass(frozen=True)
class Findings:
    """`uses_cache`: its cache may be used; `num_columns` of its logits; `num_layers` that report hidden states (None:
    they are not reported); `num_positions` that its tables of learned positions hold (None: it has none)."""

    uses_cache: bool
    num_columns: int
    num_layers: int | None
    num_positions: int | None


def try_out(
    model: _Foreign, vocab_size: int, context_tokens: int, new_cache: Callable[[], _Foreign] | None
) -> Findings:
    """Run `model` over a few tokens in several ways; `new_cache` makes an empty cache, None if it has none that can be
    cut back.

    Raises:
        UnsupportedModelError: it cannot run on token ids alone, gives no logits for every token, reads later tokens, or
        does not give
            the same logits for the same text.
    """
    trial = _Trial(model, vocab_size, min(_NUM_TOKENS, context_tokens))
    with _PositionTables(model, len(trial.ids)) as tables:
        num_layers = trial.read_whole()
    trial.check_unchanged()
    trial.check_causal()
    return Findings(
        uses_cache=new_cache is not None and trial.cache_agrees(new_cache),
        num_columns=trial.logits.shape[-1],
        num_layers=num_layers,
        num_positions=tables.num_positions,
    )


class _Trial:
    """One text, and the same text with another token in row 5, a padding token if there is one."""

    def __init__(self, model: _Foreign, vocab_size: int, num_tokens: int) -> None:
        self._model, self._name = model, model.config.model_type
        self._place = min(_CHANGED, num_tokens - 1)
        # Irregular, so that ids cannot be taken for positions.
        self.ids = [(7 * place * place + 3 * place + 11) % vocab_size for place in range(num_tokens)]
        # Some families take masks or positions from padding tokens, which a model may well generate: the other text has
        # one.
        pad = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
        usual = (self.ids[self._place] + vocab_size // 2) % vocab_size
        other = pad if isinstance(pad, int) and 0 <= pad < vocab_size and pad != self.ids[self._place] else usual
        self._others = [*self.ids[: self._place], other, *self.ids[self._place + 1 :]]
        self._modes = _modes(model)
        self.logits = torch.empty(0, dtype=torch.float32)  # [T, V] of the text without a cache
        self._other_logits = torch.empty(0, dtype=torch.float32)  # [T, V] of the other one

    def read_whole(self) -> int | None:
        """Read the whole text without a cache; the number of layers that report hidden states."""
        output = self._forward(self.ids, output_hidden_states=True)
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != (1, len(self.ids)):
            shape = list(logits.shape) if isinstance(logits, Tensor) else None
            self._refuse(f"gives logits of shape {shape} for {len(self.ids)} tokens, not one row for each")
        self.logits = logits[0].float()
        hidden_states = getattr(output, "hidden_states", None)
        return len(hidden_states) - 1 if hidden_states else None

    def check_unchanged(self) -> None:
        """A model that switches to another kind of attention because a text is short reads long ones in another way."""
        for (module, name), value in _modes(self._model).items():
            if self._modes.get((module, name), value) != value:
                self._refuse(f"turns from {name}={self._modes[module, name]!r} to {value!r} when it reads a short text")

    def check_causal(self) -> None:
        """A row may depend on its own token and those before it, and on nothing else."""
        place = self._place
        self._other_logits = self._read(self._others)
        moved = _difference(self._other_logits, self.logits)
        noise = (_CAUSAL_NOISE if self._model.dtype in _EXACT else _COARSE_CAUSAL_NOISE) * float(moved[place])
        if place and float(moved[:place].max()) > noise:
            if float(_difference(self._read(self.ids), self.logits).max()) > noise:
                self._refuse("does not give the same logits for the same text twice")
            self._refuse("reads later tokens too")
        length = min(_SHORTER, len(self.ids))
        if float(_difference(self._read(self._others[:length]), self._other_logits[:length]).max()) > noise:
            self._refuse("gives a text other logits when more text follows it")

    def cache_agrees(self, new_cache: Callable[[], _Foreign]) -> bool:
        """Whether the other text in pieces behind a cache, drafts cut back in between, has the logits of the whole."""
        if len(self.ids) < _NUM_TOKENS:
            return False  # a context of a few tokens needs no cache
        try:
            far = self._behind(new_cache())
        except _FOREIGN_ERRORS:
            return False
        rounding = _ROUNDING_STEPS * torch.finfo(self._model.dtype).eps * float(self.logits.abs().max())
        reach = _difference(self._other_logits, self.logits)[_CHANGED + 1 :]
        if self._model.dtype in _EXACT:
            return float(far.max()) <= max(rounding, _CACHE_NOISE * float(reach.max()))
        # One row in 16 bit may choose another expert; a cache that is not read shows in most rows.
        return float(far.median()) <= max(rounding, _COARSE_CACHE_NOISE * float(reach.median()))

    def _behind(self, cache: _Foreign) -> Tensor:
        """How far each row that has something in the cache is from the whole text's."""
        found = []
        for start, stop, kept in _PIECES:
            logits = self._forward(self._others[start:stop], past_key_values=cache, use_cache=True).logits[0].float()
            if start:
                found.append(_difference(logits, self._other_logits[start:stop]))
            if kept < stop:
                cache.crop(kept - stop)
        return torch.cat(found)

    def _read(self, ids: list[int]) -> Tensor:
        logits: Tensor = self._forward(ids).logits[0].float()
        return logits

    def _forward(self, ids: list[int], **options: object) -> _Foreign:
        try:
            return self._model(torch.tensor([ids], device=self._model.device), **({"use_cache": False} | options))
        except torch.OutOfMemoryError:
            raise
        except _FOREIGN_ERRORS as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            self._refuse(f"cannot run on token ids alone ({type(error).__name__}: {reason})", error)

    def _refuse(self, reason: str, error: Exception | None = None) -> NoReturn:
        raise UnsupportedModelError(
            f"model_type={self._name!r} {reason}: foretoken runs decoder-only causal language models"
        ) from error


def _modes(model: _Foreign) -> dict[tuple[str, str], str]:
    """The settings of every module that are words."""
    return {
        (module, name): value
        for module, part in model.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, str)
    }


def _difference(left: Tensor, right: Tensor) -> Tensor:
    """The largest difference of two rows of logits, by row; NaN beside a number counts as one without end."""
    same = (left == right) | (left.isnan() & right.isnan())
    return (left - right).abs().nan_to_num(nan=torch.inf).masked_fill(same, 0.0).amax(-1)


class _PositionTables(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches look-ups in tables: one whose index goes up by one per token holds positions; its rows are its end."""

    def __init__(self, model: _Foreign, num_tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_tokens = num_tokens
        self._own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        self.num_positions: int | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        if func is torch.ops.aten.embedding.default:
            self._look_up(args[0], args[1])
        elif func is torch.ops.aten.index_select.default and args[1] == 0:
            self._look_up(args[0], args[2])
        elif func is torch.ops.aten.index.Tensor and len(args[1]) == 1:
            self._look_up(args[0], args[1][0])
        return func(*args, **(kwargs or {}))

    def _look_up(self, table: Tensor, index: Tensor) -> None:
        if index.numel() != self._num_tokens or self._num_tokens < 2 or index.dtype not in (torch.int64, torch.int32):
            return
        if table.untyped_storage().data_ptr() not in self._own:
            return  # of this text, not of the model
        places = index.flatten().tolist()
        if places == list(range(places[0], places[0] + self._num_tokens)):
            most = table.shape[0] - places[0]
            self.num_positions = most if self.num_positions is None else min(self.num_positions, most)
