"""From a configuration to a drafter: one line per name in `_MAKERS`."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakSet

from foretoken.config import A_DRAFT, LOOKUPS, QUANTISED, SpecConfig, know_drafter
from foretoken.draft.base import Drafter
from foretoken.draft.cascade import CascadeDrafter
from foretoken.draft.draft_model import DraftModelDrafter
from foretoken.draft.early_exit import EarlyExitDrafter
from foretoken.draft.lookahead import LookaheadDrafter
from foretoken.draft.lookup_tree import Lookup
from foretoken.draft.mix import MixDrafter
from foretoken.draft.ngram import NgramDrafter
from foretoken.draft.predicted import PredictedDrafter
from foretoken.draft.recycling import RecyclingDrafter
from foretoken.draft.suffix import SuffixDrafter
from foretoken.engine.tokenizer_match import pair
from foretoken.errors import ConfigError, InputError
from foretoken.files import read_text
from foretoken.model.architecture import NATIVE_MODEL_TYPES
from foretoken.model.interface import EarlyExitModel, LanguageModel, OpenModel
from foretoken.model.loader import dtype_of
from foretoken.model.open import model_folder, native_config, open_model
from foretoken.model.tokenizer import Tokenizer, load_tokenizer
from foretoken.params import check_number


@dataclass(frozen=True)
class ModelOptions:
    """How models are loaded: the target's own options hold for its drafts."""

    dtype: str = "auto"
    device: str = "auto"
    cache_tokens: int | None = None


class DrafterFactory:
    """Makes the drafters of one target."""

    def __init__(self, folder: Path, target: LanguageModel, tokenizer: Tokenizer | None, options: ModelOptions) -> None:
        self.folder, self.target, self.tokenizer, self.options = folder, target, tokenizer, options
        self._drafts: dict[tuple[Hashable, ...], WeakSet[OpenModel]] = {}  # those in use, by what their weights are

    def make(self, spec: SpecConfig) -> Drafter:
        """A new drafter for `spec`, whose `drafter` is set.

        Raises:
            ConfigError: something that the drafter needs is missing.
            CheckpointError, UnsupportedModelError, MismatchError: the draft model cannot be loaded, or is not made for
            this target.
            StorageError: a file cannot be read.
        """
        assert spec.drafter is not None
        return _MAKERS[spec.drafter](self, spec)

    def open_draft(self, folder: Path, draft_dtype: str) -> LanguageModel:
        """The draft model in `folder` with a cache of its own; weights that another drafter has in use are not loaded
        again.

        Raises:
            CheckpointError, UnsupportedModelError, ConfigError, InputError: see `open_model`.
        """
        options, quantised = self.options, draft_dtype in QUANTISED
        dtype = options.dtype if quantised or draft_dtype == "auto" else draft_dtype
        named: Hashable = dtype_of(folder, dtype) if native_config(folder) is not None else dtype
        in_use = self._drafts.setdefault((folder.resolve(), named, draft_dtype if quantised else None), WeakSet())
        known = next(iter(in_use), None)
        if known is not None:
            model = known.fresh()
        else:
            model = open_model(
                folder, dtype, options.device, options.cache_tokens, weights=draft_dtype if quantised else "auto"
            )
        in_use.add(model)
        return model

    def corpus(self, path: str) -> list[int]:
        """Token ids of a text file to guess from."""
        if self.tokenizer is None:
            raise InputError("corpus", path, f"{self.folder} has no tokenizer to read a text with")
        return self.tokenizer.encode(read_text("corpus", Path(path)), add_special_tokens=False)


def _draft_model(factory: DrafterFactory, spec: SpecConfig) -> Drafter:
    if spec.draft is None:
        raise ConfigError("draft", None, f"drafter='draft_model' needs {A_DRAFT}")
    folder = model_folder(spec.draft)
    draft = factory.open_draft(folder, spec.draft_dtype)
    return pair(factory.target, factory.tokenizer, draft, load_tokenizer(folder), spec.draft, spec.draft_vocabulary)


def _cascade(factory: DrafterFactory, spec: SpecConfig) -> Drafter:
    models = [_level(factory, part) for part in spec.configs if part.drafter == "draft_model"]
    first = factory.make(spec.configs[0]) if spec.configs[0].drafter in LOOKUPS else None
    assert first is None or isinstance(first, Lookup)
    return CascadeDrafter(models, first)


def _level(factory: DrafterFactory, spec: SpecConfig) -> LanguageModel:
    """A model of a cascade: it must share the target's tokens."""
    drafter = _draft_model(factory, replace(spec, draft_vocabulary="same"))
    assert isinstance(drafter, DraftModelDrafter)
    return drafter.model


def _early_exit(factory: DrafterFactory, spec: SpecConfig) -> Drafter:
    if not isinstance(factory.target, EarlyExitModel):
        reason = f"{factory.folder} runs through transformers, which cannot stop between two layers"
        raise ConfigError(
            "drafter",
            spec.drafter,
            f"{reason}; choose another drafter, or a checkpoint of {', '.join(NATIVE_MODEL_TYPES)}",
        )
    return EarlyExitDrafter(factory.target)


def _suffix(factory: DrafterFactory, spec: SpecConfig) -> Drafter:
    return SuffixDrafter(() if spec.corpus is None else factory.corpus(spec.corpus))


Maker = Callable[[DrafterFactory, SpecConfig], Drafter]
_MAKERS: dict[str, Maker] = {
    "draft_model": _draft_model,
    "ngram": lambda _factory, _spec: NgramDrafter(),
    "suffix": _suffix,
    "recycling": lambda factory, _spec: RecyclingDrafter(factory.target.vocab_size),
    "predicted": lambda _factory, _spec: PredictedDrafter(),
    "early_exit": _early_exit,
    "lookahead": lambda _factory, _spec: LookaheadDrafter(),
    "cascade": _cascade,
    "mix": lambda factory, spec: MixDrafter([factory.make(part) for part in spec.configs]),
}


_LIMITS_S: dict[str, float] = {}  # of drafters from outside: the longest that one call may take
DEFAULT_LIMIT_S = 10.0


def add_drafter(name: str, make: Maker, limit_s: float = DEFAULT_LIMIT_S) -> None:
    """Make a drafter of your own known to `SpecConfig` and every `LLM` of this process, under `name`.

    `make(factory, spec)` gives a new drafter for one target: `factory.target` and `factory.tokenizer` are the target's.
    It is called once per `LLM` and kind of `spec`; adding a name again replaces the maker for what is made from then
    on. A call of the drafter that takes longer than `limit_s` is interrupted and counts as failed, like one that
    raises; reading a long prompt counts too.

    Raises:
        ConfigError: the name is one of foretoken's own drafters, or not an identifier; `limit_s` is not a positive
        number.
    """
    check_number("limit_s", limit_s, low=0.001, high=86_400.0)
    know_drafter(name)
    _MAKERS[name], _LIMITS_S[name] = make, limit_s


def limit_of(spec: SpecConfig) -> float | None:
    """The longest that one call of the drafter of `spec` may take, in seconds; None where all of it is our own, whose
    work is bounded.
    """
    limits = [_LIMITS_S.get(str(spec.drafter)), *(limit_of(part) for part in spec.configs)]
    return max((limit for limit in limits if limit is not None), default=None)
