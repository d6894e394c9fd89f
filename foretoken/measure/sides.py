"""The two backends of a comparison: which ones, how each drafts, and both of them open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass, field, fields

from foretoken.backend.answering import SERVED, AnsweringBackend, Drafting, Question
from foretoken.backend.registry import check_address, check_backends, is_address
from foretoken.config import SpecConfig
from foretoken.engine_config import THREADS, EngineConfig
from foretoken.errors import ConfigError, InputError
from foretoken.measure.asked import BackendSource, chosen_draftings, drafting_name
from foretoken.measure.options import PLAIN, setting
from foretoken.measure.prompts import check_room
from foretoken.measure.report import Table
from foretoken.option import option, same_option
from foretoken.params import check_whole

_SIDE = (
    "{}: the address of an OpenAI-compatible server, or an engine in this process: local, llama.cpp, transformers, "
    "openvino."
)
_DRAFTER = (
    "How {} drafts: plain, or the name of one of its drafting methods. Without it a server drafts as it was started; "
    "an engine in this process decodes plainly."
)
_OF_ENGINES = ("target", "draft", "dtype", "device", "threads")  # in this process


@dataclass(frozen=True)
class SideOptions:
    """Two backends, `a` as it is and `b` what might replace it, and how each drafts.

    `target`, `draft`, `dtype`, `device` and `threads` are those of an engine in this process.
    """

    a: str = field(metadata=option(_SIDE.format("A, what there is now")))
    b: str = field(metadata=option(_SIDE.format("B, what might replace it")))
    _: KW_ONLY
    a_drafter: str | None = setting(None, _DRAFTER.format("A"))
    b_drafter: str | None = setting(None, _DRAFTER.format("B"))
    a_model: str | None = setting(None, "Name of the model at A's address; else its first.")
    b_model: str | None = setting(None, "Name of the model at B's address; else its first.")
    target: str | None = field(default=None, metadata=same_option(EngineConfig, "model"))
    draft: str | None = field(default=None, metadata=same_option(SpecConfig, "draft"))
    num_draft: int = setting(5, "Draft tokens per round of a named drafting method, if it has this setting.")
    dtype: str = field(default="auto", metadata=same_option(EngineConfig, "dtype"))
    device: str = field(default="auto", metadata=same_option(EngineConfig, "device"))
    threads: int | None = field(default=None, metadata=THREADS)

    def check_sides(self) -> None:
        """Refuse sides that cannot be opened.

        Raises:
            InputError, ConfigError: names the field.
        """
        check_whole("num_draft", self.num_draft, 1, 256)
        for side in ("a", "b"):
            backend: str = getattr(self, side)
            if is_address(backend):
                check_address(side, backend)
                continue
            try:
                check_backends((backend,))
            except InputError as error:
                raise InputError(side, backend, error.remedy) from error
            if self.target is None:
                remedy = f"{side}={backend} runs in this process: name the model that it loads"
                raise ConfigError("target", None, remedy)
            if getattr(self, f"{side}_model") is not None:
                remedy = f"names a model at an address, and {side} is {backend}; leave it out"
                raise ConfigError(f"{side}_model", getattr(self, f"{side}_model"), remedy)
        if is_address(self.a) and is_address(self.b):
            for one in fields(self):
                given = getattr(self, one.name)
                if one.name in _OF_ENGINES and given != one.default:
                    remedy = "is of an engine in this process, and both are servers; leave it out"
                    raise ConfigError(one.name, given, remedy)


@dataclass(frozen=True)
class OpenSide:
    """An open backend under a letter, and how it drafts; `identity` is what a report says of it."""

    label: str
    backend: AnsweringBackend
    drafting: Drafting
    identity: dict[str, str]

    @property
    def title(self) -> str:
        """Its letter and the backend's name."""
        return f"{self.label} ({self.backend.name})"

    def check_room(self, field: str, name: str, question: Question) -> None:
        """Refuse a question without room in the context, as far as that is known.

        Raises:
            InputError: names it.
        """
        if (found := self.backend.room(question)) is not None:
            check_room(field, name, *found)


@contextmanager
def open_sides(options: SideOptions) -> Iterator[tuple[OpenSide, OpenSide]]:
    """A and B, closed at the end; one engine in this process that both name is opened once.

    Raises:
        InputError: a way to draft that a backend does not have.
        ForetokenError: see `BackendSource.open`.
    """
    sources = {side: _source(options, side) for side in ("a", "b")}
    with ExitStack() as stack:
        opened: dict[BackendSource, AnsweringBackend] = {}
        found = []
        for side, source in sources.items():
            if source not in opened:
                opened[source] = stack.enter_context(source.open())
            backend = opened[source]
            drafting = _drafting(options, side, backend)
            about = source.identity_of(backend) | {"drafter": drafting_name(drafting)}
            found.append(OpenSide(side.upper(), backend, drafting, about))
        yield found[0], found[1]


def side_table(about: Mapping[str, Mapping[str, str]]) -> Table:
    """What the sides are, by letter: their `OpenSide.identity`."""
    names = ("name", "version", "model", "drafter")
    lines = tuple((label, *(own[name] for name in names)) for label, own in about.items())
    return Table("Compared", ("", "backend", "version", "model", "drafter"), lines, justify="l")


def _source(options: SideOptions, side: str) -> BackendSource:
    backend: str = getattr(options, side)
    if is_address(backend):
        return BackendSource(backend, served_model=getattr(options, f"{side}_model"), model_option=f"--{side}-model")
    return BackendSource(
        backend, options.target, options.draft, dtype=options.dtype, device=options.device, threads=options.threads
    )


def _drafting(options: SideOptions, side: str, backend: AnsweringBackend) -> Drafting:
    name: str | None = getattr(options, f"{side}_drafter")
    field_name = f"{side}_drafter"
    if name is None:
        return Drafting(SERVED) if is_address(backend.name) else Drafting()
    if name == PLAIN:
        if not backend.capabilities.plain:
            remedy = f"{backend.name} cannot be asked to leave out drafting: start it without"
            raise ConfigError(field_name, name, f"{remedy}, and leave this option out")
        return Drafting()
    return chosen_draftings(backend, field_name, (name,), options.num_draft)[0]
