"""From a configuration to a drafter: drafters are made, added by programs, loaded while requests run, and reset."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, is_dataclass
from dataclasses import fields as dataclass_fields
from pathlib import Path
from weakref import WeakSet

from foretoken.config import QUANTISED, SpecConfig
from foretoken.draft.base import AdaptableDrafter, Drafter, DrafterKey, ModelDrafter, Resets, parts_of
from foretoken.draft.group import DrafterGroup, own_drafters
from foretoken.draft.head_drafter import HeadDrafter
from foretoken.draft.hidden_states import reads_hidden_states
from foretoken.draft.ngram_table import NgramTable, table_for
from foretoken.errors import ConfigError, InputError
from foretoken.files import read_text
from foretoken.heads.kind import kind_of_head, with_head_kind
from foretoken.heads.weights import head_bytes
from foretoken.machine.modes import own_modes
from foretoken.model.interface import LanguageModel, OpenModel, QuantisedModel
from foretoken.model.loader import dtype_of
from foretoken.model.matrices.quant import drafts_at_speed
from foretoken.model.open import draft_weights, native_config, open_device, open_model
from foretoken.params import check_flag, check_number
from foretoken.registry import DRAFTERS, Traits, add_traits, load_source, traits_of
from foretoken.spec_checks import NO_TABLE, PACKAGED_TABLE
from foretoken.text.tokenizer import Tokenizer

DEFAULT_LIMIT_S = 10.0


@dataclass(frozen=True)
class ModelOptions:
    """How models are loaded: the target's own options hold for its drafts."""

    dtype: str = "auto"
    device: str = "auto"
    cache_tokens: int | None = None
    cache_dtype: str = "auto"  # "model": a draft too keeps keys and values in the format that it computes in


class DrafterFactory:
    """Makes the drafters of one target."""

    def __init__(self, folder: Path, target: LanguageModel, tokenizer: Tokenizer | None, options: ModelOptions) -> None:
        self.folder, self.target, self.tokenizer, self.options = folder, target, tokenizer, options
        self.between_steps: Callable[[], AbstractContextManager[object]] = nullcontext  # see `base.Factory`
        self._drafts: dict[tuple[Hashable, ...], WeakSet[OpenModel]] = {}  # those in use, by what their weights are
        self._num_opened = 0  # calls of `open_draft`

    def make(self, spec: SpecConfig) -> Drafter:
        """A new drafter for `spec`, whose `drafter` is set.

        Raises:
            ConfigError: something that the drafter needs is missing, what was made is no drafter, or it opened a model
                without being a `ModelDrafter`, so that its cost would not be measured, or a part of it is a
                `HiddenStateReader`.
            CheckpointError, UnsupportedModelError, MismatchError: the draft model cannot be loaded, or is not made for
                this target.
            StorageError: a file cannot be read.
        """
        assert spec.drafter is not None
        source, num_before = load_source(spec.drafter), self._num_opened
        drafter: Drafter = getattr(source, "make", source)(self, spec)
        _check_made(drafter, spec.drafter)
        members = [part for _, part in parts_of(spec, drafter)]
        if self._num_opened > num_before and not any(isinstance(part, ModelDrafter) for part in members):
            remedy = (
                "opened a draft model, but its cost cannot be measured: give it the methods models() and fresh() of "
                "draft.base.ModelDrafter"
            )
            raise ConfigError("drafter", spec.drafter, remedy)
        reader = next((part for part in members if reads_hidden_states(type(part))), None)
        if reader is not None and not reads_hidden_states(type(drafter)):
            remedy = (
                f"reads the target's hidden states, which drafter={spec.drafter!r} does not pass on: use it "
                "alone, or as a part of drafter='auto'"
            )
            raise ConfigError("parts", reader.name, remedy)
        return drafter

    def open_draft(self, folder: Path, draft_dtype: str = "auto") -> LanguageModel:
        """The draft model in `folder` with a cache of its own; weights that another drafter has in use are not loaded
        again. `draft_dtype` "auto" takes the target's number format and, where that is quantised, its bits.

        Raises:
            CheckpointError, UnsupportedModelError, ConfigError, InputError: see `open_model`.
        """
        self._num_opened += 1
        options = self.options
        dtype = options.dtype if draft_dtype in (*QUANTISED, "auto") else draft_dtype
        target_format = self.target.weight_format if isinstance(self.target, QuantisedModel) else "auto"
        weights = draft_weights(folder, draft_dtype, target_format)
        named: Hashable = dtype
        if native_config(folder) is not None:
            named = own = dtype_of(folder, dtype)
            if weights != "auto" and not drafts_at_speed(weights, own, open_device(options.device)):
                weights = "auto"
        in_use = self._drafts.setdefault((folder.resolve(), named, weights), WeakSet())
        known = next(iter(in_use), None)
        if known is not None:
            model = known.fresh()
        else:
            cache_dtype = "model" if options.cache_dtype == "model" else "auto"
            model = open_model(
                folder, dtype, options.device, options.cache_tokens, weights=weights, cache_dtype=cache_dtype
            )
        in_use.add(model)
        return model

    def corpus(self, path: str) -> list[int]:
        """Token ids of a text file to draft from."""
        if self.tokenizer is None:
            raise InputError("corpus", path, f"{self.folder} has no tokenizer to read a text with")
        return self.tokenizer.encode(read_text("corpus", Path(path)), add_special_tokens=False)

    def ngram_table(self, name: str) -> NgramTable | None:
        """The n-gram table to draft from: the file `name`, or the package's own of this tokenizer, if it has one.

        Raises:
            InputError: a file for a target without a tokenizer.
            StorageError, CheckpointError, MismatchError: see `table_for`.
        """
        if name == NO_TABLE:
            return None
        if self.tokenizer is None:
            if name == PACKAGED_TABLE:
                return None
            raise InputError("ngram_table", name, f"{self.folder} has no tokenizer to compare the table's with")
        return table_for(self.tokenizer, None if name == PACKAGED_TABLE else Path(name))


Maker = Callable[[DrafterFactory, SpecConfig], Drafter]


def add_drafter(
    name: str,
    make: Maker | type,
    limit_s: float = DEFAULT_LIMIT_S,
    *,
    samples: bool = False,
    options: type | None = None,
    fields: Sequence[str] = (),
) -> None:
    """Register a drafter under `name`, for `SpecConfig` and every `LLM` of this process.

    `make(factory, spec)` gives a new drafter for one target (see `draft.base.Factory`); a class is asked for its
    classmethod `make`. It is called once per `LLM` and kind of `spec`; adding a name again replaces the maker for what
    is made from then on. A call of the drafter that takes longer than `limit_s` is interrupted and counts as failed,
    like one that raises; reading a long prompt counts too. `samples` says that draft tokens are drawn from a
    distribution, `options` is the dataclass of its own options (a class: its attribute `Options`), and `fields` are
    those of `SpecConfig` that it reads, such as "draft".

    Raises:
        ConfigError: the name is one of foretoken's own drafters, or not an identifier; `make` cannot be called,
            `options` are no dataclass, or `SpecConfig` has no such fields.
        InputError: `limit_s` is not a positive number, `samples` not a truth value.
    """
    check_number("limit_s", limit_s, low=0.001, high=86_400.0)
    check_flag("samples", samples)
    if not callable(make):
        raise ConfigError("make", make, "give a function of (factory, spec), or a class with a classmethod make")
    own = getattr(make, "Options", None) if options is None else options
    if own is not None and not (isinstance(own, type) and is_dataclass(own)):
        raise ConfigError("options", own, "give a dataclass, whose fields have defaults")
    known = {field.name for field in dataclass_fields(SpecConfig)}
    if isinstance(fields, str) or not known.issuperset(fields):
        raise ConfigError("fields", fields, "give a list of fields of SpecConfig, such as ['draft']")
    add_traits(name, Traits(make, samples=samples, fields=tuple(fields), options=options, limit_s=limit_s))


def _check_made(drafter: object, name: str) -> None:
    """Refuse what is no drafter, before a request is started with it."""
    needed = ["start", "propose", "finish", *([] if getattr(drafter, "only_follows", False) else ["commit"])]
    missing = [method for method in needed if not callable(getattr(drafter, method, None))]
    if missing or isinstance(drafter, type) or not isinstance(getattr(drafter, "name", None), str):
        made = f"the class {drafter.__name__}" if isinstance(drafter, type) else type(drafter).__name__
        lack = f" without {', '.join(missing)}" if missing else ""
        remedy = f"its maker returned {made}{lack}: return an object with a name, a text, and {', '.join(needed)}"
        raise ConfigError("drafter", name, f"{remedy} (docs/adding-a-drafter.md)")


def limit_of(spec: SpecConfig) -> float | None:
    """The longest time that one call of the drafter of `spec` may take, in seconds; None: not limited."""
    own = None if spec.drafter is None else traits_of(spec.drafter).limit_s
    limits = [own, *(limit_of(part) for part in spec.configs)]
    return max((limit for limit in limits if limit is not None), default=None)


class DrafterLoader:
    """Makes drafters in the thread that asks and adds them to `group` between two steps.

    No step runs within `between_steps()`; `check_open` raises when the engine was closed meanwhile; `on_load` is called
    with a drafter's configuration, the models of its own that it runs, and the memory of its trained heads.
    """

    def __init__(
        self,
        factory: DrafterFactory,
        group: DrafterGroup,
        between_steps: Callable[[], AbstractContextManager[object]],
        check_open: Callable[[], object],
        on_load: Callable[[SpecConfig, Sequence[LanguageModel], int], object],
    ) -> None:
        self.factory, self.group = factory, group
        self._between_steps = factory.between_steps = between_steps
        self._check_open, self._on_load = check_open, on_load
        self._head_kinds: dict[str, str] = {}  # by the head's name
        self._specs: dict[DrafterKey, SpecConfig] = {}  # of every drafter that was loaded
        self._loading = threading.Lock()  # one drafter at a time: two threads may want the same one

    def with_head_kind(self, spec: SpecConfig) -> SpecConfig:
        """`heads.kind.with_head_kind`; the files of each head are read once."""
        return with_head_kind(spec, self._kind_of)

    def _kind_of(self, head: str) -> str:
        if head not in self._head_kinds:
            self._head_kinds[head] = kind_of_head(head)
        return self._head_kinds[head]

    def has_all(self, spec: SpecConfig) -> bool:
        """Whether every drafter that `spec` names is loaded; reads no file."""
        if spec.needs_head_kind and spec.head not in self._head_kinds:
            return False
        spec = self.with_head_kind(spec)
        return all(key in self.group.drafters for key in own_drafters(spec))

    def load(self, spec: SpecConfig) -> None:
        """Load what `spec` names and is not loaded yet; only adding a drafter waits for the step that runs.

        Raises:
            InputError, ModelError, StorageError: see `DrafterFactory.make`.
        """
        if self.has_all(spec):
            return
        spec = self.with_head_kind(spec)
        with self._loading, own_modes():
            for key, own in own_drafters(spec).items():
                if key not in self.group.drafters:
                    self._specs[key], made = own, self.factory.make(own)
                    with self._between_steps():  # a step goes through all drafters
                        self._check_open()
                        self.group.add(key, made, limit_of(own))
                    parts = [part for _, part in parts_of(own, made)]
                    models = [model for part in parts if isinstance(part, ModelDrafter) for model in part.models()]
                    self._on_load(own, models, sum(map(_head_bytes, parts)))

    def loaded(self, spec: SpecConfig | None) -> dict[DrafterKey, Drafter]:
        """The drafters of `spec` that are loaded; None: all."""
        found = dict(self.group.drafters)
        if spec is None:
            return found
        return {key: found[key] for key in own_drafters(self.with_head_kind(spec)) if key in found}

    def reset(self, spec: SpecConfig | None) -> list[Drafter]:
        """Reset the loaded drafters of `spec` (None: all) while there is no request. Those that cannot be reset are
        taken out and returned: keep them until new ones are loaded, which then share the weights of draft models.
        """
        replaced: list[Drafter] = []
        with self._between_steps(), own_modes():
            for key, drafter in self.loaded(spec).items():
                if isinstance(drafter, Resets) and _resets_wholly(self._specs.get(key)):
                    drafter.reset()
                else:
                    replaced.append(self.group.drafters.pop(key))
        return replaced


def _resets_wholly(spec: SpecConfig | None) -> bool:
    """Whether `reset` of a drafter reaches all of its parts: added ones need not have it."""
    return spec is None or not spec.is_composite or spec.leaves <= DRAFTERS.keys()


def _head_bytes(drafter: Drafter) -> int:
    """Memory of a drafter's trained head and its full cache; 0 without a head."""
    if not isinstance(drafter, HeadDrafter) or not isinstance(drafter, AdaptableDrafter):
        return 0
    return head_bytes(drafter.head) + drafter.cache_bytes
