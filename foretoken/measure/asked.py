"""Which backend a measurement asks, on what model, and with which ways to draft."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

from foretoken.backend.answering import SERVED, AnsweringBackend, Drafting
from foretoken.backend.http import HttpBackend
from foretoken.backend.registry import BackendOptions, is_address, open_backend
from foretoken.errors import ConfigError
from foretoken.measure.options import PLAIN
from foretoken.model.names import model_folder


@dataclass(frozen=True)
class BackendSource:
    """A backend of the registry by its name or its address, and what it is to answer with.

    `model` and `draft` are models that an engine in this process loads; `served_model` is the name of a model at an
    address (None: the first that the server names), which the user gives with `model_option`.
    """

    backend: str
    model: str | None = None
    draft: str | None = None
    served_model: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    model_option: str = field(default="--model", compare=False)

    @property
    def is_address(self) -> bool:
        """Whether it is a server, which has loaded its model and takes several questions at once."""
        return is_address(self.backend)

    @contextmanager
    def open(self) -> Iterator[AnsweringBackend]:
        """The backend, closed at the end; raises as `open_backend` does."""
        model = "" if self.model is None else str(model_folder(self.model))
        draft = None if self.draft is None else str(model_folder(self.draft))
        server = (self.served_model or "", self.model_option)
        found = open_backend(BackendOptions(self.backend, model, draft, self.dtype, self.device, self.threads, *server))
        with closing(found):
            yield found

    def identity_of(self, opened: AnsweringBackend) -> dict[str, str]:
        """Name, version and model of the opened backend: what a report says it measured."""
        served = opened.model if isinstance(opened, HttpBackend) else self.model
        return {"name": opened.name, "version": opened.version(), "model": served or ""}


def chosen_draftings(
    backend: AnsweringBackend, field: str, kinds: Sequence[str] | None, num_draft: int
) -> tuple[Drafting, ...]:
    """The ways to draft of these kinds, which the field `field` names (None: every one), with `num_draft` draft tokens
    where that can be chosen.

    Raises:
        ConfigError: a kind that the backend does not have here, or it has none at all.
    """
    offered = backend.draftings((num_draft,))
    known = list(dict.fromkeys(str(one.kind) for one in offered))
    if not known:
        raise ConfigError(field, backend.name, f"{backend.name} has no way to draft here; give --draft, or another one")
    for kind in kinds or ():
        if kind not in known:
            only = "drafts as it was started" if known == [SERVED] else "drafts otherwise"
            raise ConfigError(field, kind, f"{backend.name} {only}; choose from {', '.join(known)}")
    numbered = {one.kind for one in offered if one.num_draft is not None}
    wanted = [one for one in offered if kinds is None or one.kind in kinds]
    return tuple(one for one in wanted if one.num_draft is not None or one.kind not in numbered)


def drafting_name(drafting: Drafting) -> str:
    """What a way to draft is called in results: `plain`, `draft-simple-5`, or `served`."""
    if drafting.kind is None:
        return PLAIN
    number = "" if drafting.num_draft is None else f"-{drafting.num_draft}"
    return f"{drafting.kind}{number}" + (f" {drafting.options}" if drafting.options else "")
