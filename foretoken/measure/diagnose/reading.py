"""What the files alone say about a drafter and its target, before anything runs, and what a server reports of its
drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.backend.http import HttpBackend
from foretoken.errors import CheckpointError, ConfigError, InputError, MismatchError
from foretoken.heads.checkpoint import load_head, read_fields
from foretoken.heads.formats.pairing import are_other_weights, weights_digest
from foretoken.measure.asked import BackendSource
from foretoken.measure.diagnose.options import DiagnoseOptions
from foretoken.measure.eval.options import BackendEvalOptions
from foretoken.measure.eval.prompts import EvalPrompt
from foretoken.measure.eval.result import overall
from foretoken.measure.eval.run import BackendEvalRun
from foretoken.measure.stats import ratio
from foretoken.model.fields import HEAD_NOTE, read_json
from foretoken.model.loader import load_decoder, read_config, read_raw_config
from foretoken.text.tokenizer import load_tokenizer
from foretoken.train.students import DraftStudent, Student

_NAMES = ("base_model_name_or_path", "target_name_or_path")  # under which heads name their target


@dataclass(frozen=True)
class FileFinding:
    """Something that was read: its `cause` by name, what stands where, and the remedy. `is_certain`: it cannot work."""

    cause: str
    found: str
    remedy: str
    is_certain: bool = False


def open_head_or_finding(folder: Path, target: Path, dtype: str) -> Student | FileFinding:
    """The head of a folder, or why it cannot be the head of this target.

    Raises:
        CheckpointError, UnsupportedModelError: files that cannot be read, or a kind of head that is not run here.
    """
    try:
        return load_head(folder, read_config(target), dtype, target_folder=target).requires_grad_(False)
    except (MismatchError, ConfigError) as error:
        cause = "other tokenizer" if "tokenizer" in str(error) else "other target"
        return FileFinding(cause, str(error), "take the head that was trained for this target", is_certain=True)
    except CheckpointError as error:
        if "d2t" not in str(error):
            raise
        remedy = "write d2t as offsets (the target's number minus the head's), or download the head again"
        return FileFinding("d2t table", str(error), remedy, is_certain=True)


def open_draft_or_finding(folder: Path, target: Path, dtype: str) -> Student | FileFinding:
    """The draft model of a folder, or why it cannot draft for this target with its own token ids.

    Raises:
        CheckpointError, UnsupportedModelError: a checkpoint that cannot be read or does not run in our decoder.
    """
    own, theirs = load_tokenizer(folder), load_tokenizer(target)
    difference = None if own is None or theirs is None else theirs.same_vocabulary(own)
    sizes = read_config(folder).vocab_size, read_config(target).vocab_size
    if difference is None and sizes[0] != sizes[1]:
        difference = f"{sizes[0]:,} tokens against {sizes[1]:,}"
    if difference is not None:
        remedy = "take a draft model of the target's own family; engines that compare token ids reject such drafts"
        return FileFinding("other tokenizer", f"{folder} and {target}: {difference}", remedy, is_certain=True)
    return DraftStudent(load_decoder(folder, dtype=dtype, pack=False)).requires_grad_(False)


def read_findings(head: Path, target: Path) -> Iterator[FileFinding]:
    """What makes another target likely, without being sure: other weights than in training, or another name."""
    path, remedy = head / HEAD_NOTE, "take the head of this very checkpoint, or train one (foretoken train)"
    note = read_json(path) if path.exists() else {}
    if are_other_weights(note.get("weights"), weights_digest(target)):
        found = f"{path}: the head was trained with other weights than those of {target}"
        yield FileFinding("other target", found, remedy)
    named, own = _named_target(head), read_raw_config(target).get("_name_or_path")
    if named and isinstance(own, str) and own and _last(named) not in (_last(own), target.name.lower()):
        found = f"{head / 'config.json'} names the target {named!r}, and {target} says it is {own!r}"
        yield FileFinding("other target", found, remedy)


def trained_length(head: Path) -> int | None:
    """The longest text that the head's own config.json promises; None where it does not say."""
    value = read_fields(head).raw.get("max_position_embeddings")
    return value if isinstance(value, int) and value > 0 else None


def _named_target(head: Path) -> str | None:
    raw: dict[str, Any] = read_json(head / "config.json")
    speculators = raw.get("speculators_config")
    verifier = speculators.get("verifier") if isinstance(speculators, dict) else None
    named = [raw.get(name) for name in _NAMES] + [verifier.get("name_or_path") if isinstance(verifier, dict) else None]
    return next((one for one in named if isinstance(one, str) and one), None)


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()


@dataclass(frozen=True)
class Reported:
    """Accepted tokens per draft, and by place where the server counts them; `source` says what was read.

    Without a count of drafts each is taken to have the number of tokens that was asked for.
    """

    per_draft: float
    places: tuple[float, ...]
    source: str
    server: str


def reported_from(values: Mapping[str, Any]) -> Reported:
    """What a file holds of a `Reported`, as plain values."""
    return Reported(**{**values, "places": tuple(values["places"])})


def ask_endpoint(options: DiagnoseOptions, prompts: Sequence[EvalPrompt], command: str) -> Reported:
    """Ask the server at `options.url` the prompts, one after the other; nobody else may use it meanwhile.

    Raises:
        InputError: it reports no drafts, or cannot be asked at this temperature.
        UnavailableError: it does not answer.
    """
    assert options.url is not None
    asked = BackendEvalOptions(
        BackendSource(options.url, served_model=options.model),
        num_draft=options.num_draft,
        prompts_per_slice=len(prompts),
        max_tokens=options.max_tokens,
        temperatures=(options.temperature,),
        stop_at_eos=True,
        chat=options.chat,
        seed=options.seed,
    )
    with asked.source.open() as backend:
        assert isinstance(backend, HttpBackend)
        before = backend.position_counters()
        run = BackendEvalRun(asked, prompts, command, backend)
        try:
            run.run()
        except InputError as error:
            if error.field != "backend":
                raise
            raise InputError("url", options.url, error.remedy) from error
        after, server = backend.position_counters(), backend.version()
    if before is not None and after is not None and (own := after.since(before)).num_drafts:
        if len(own.accepted) < options.num_draft:
            remedy = f"the server counts {len(own.accepted)} tokens of a draft; give that number"
            raise InputError("num_draft", options.num_draft, remedy)
        places = tuple(count / own.num_drafts for count in own.accepted[: options.num_draft])
        return Reported(sum(places), places, "accepted tokens by position of /metrics", server)
    rate = ratio(overall(run.samples))
    if rate is None:
        remedy = "drafted nothing for these prompts: is speculation on, and for this model?"
        raise InputError("url", options.url, remedy)
    return Reported(rate * options.num_draft, (), "drafted and accepted tokens of its answers", server)
