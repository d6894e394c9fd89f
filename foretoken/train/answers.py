"""Answers of the target to the user's own prompts: what its heads are trained on.

A file of JSON lines: a header that says whose answers these are, then one line for each prompt, in the order in which
the answers ended. It is read and written line by line and continued where it ends; a line that a killed run left
unfinished is answered again.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.config import SamplingParams
from foretoken.engine.prompts import prompt_content
from foretoken.errors import CapacityError, ConfigError, ContextLengthError, InputError, MismatchError, StorageError
from foretoken.files import MAX_BYTES, hold_alone, parse_json, read_text, to_json
from foretoken.heads.formats.pairing import add_weights
from foretoken.model.names import OLDER_SETTINGS
from foretoken.option import Settings
from foretoken.params import check_whole

if TYPE_CHECKING:
    from foretoken.engine.llm import LLM
    from foretoken.engine.request import RequestState
    from foretoken.train.head_data import HeadData

ANSWERS_KIND = "foretoken answers"
_setting = Settings()
_MAX_SEED = 1 << 63
# Batches that are submitted together: a request that ends makes room for the next one, so that only the last of them
# run in a batch that empties.
_BATCHES_AT_ONCE = 8
PromptContent = str | Sequence[Mapping[str, Any]] | Sequence[int]
_Row = tuple[int | None, tuple[int, ...], tuple[int, ...]]  # place, prompt and answer


@dataclass(frozen=True)
class AnswerConfig:
    """How answers are drawn. `batch_size` prompts run at once; `chat` sends texts as a user's message."""

    max_tokens: int = _setting(256, "Tokens per answer.")
    temperature: float = _setting(0.8, "Temperature of use; 0 is greedy.")
    top_p: float = _setting(1.0, "Nucleus (top_p) at which the head will be used.")
    seed: int = _setting(0, "Seed of the answers.")
    batch_size: int = _setting(16, "Most answers that run at once.")
    chat: bool = _setting(False, "Send texts as a user's message, through the target's chat template.")

    def __post_init__(self) -> None:
        check_whole("batch_size", self.batch_size, low=1, high=4096)
        check_whole("seed", self.seed, low=0, high=_MAX_SEED - 1)
        self.params(0)  # raises where a value is not one that requests take

    def params(self, place: int) -> SamplingParams:
        """Sampling parameters of the prompt at `place`, which has a seed of its own."""
        seed = None if self.temperature == 0 else (self.seed + 1_000_003 * place) % _MAX_SEED
        return SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature, top_p=self.top_p, seed=seed)


@dataclass(frozen=True)
class AnswerCount:
    """What the file holds."""

    num_prompts: int
    num_answers: int
    num_tokens: int


def placed_prompts(path: Path) -> list[tuple[str, PromptContent]]:
    """File and line of each prompt, and the prompt, of JSON lines with `prompt` (a text), `messages` (a conversation)
    or `prompt_ids`.

    Raises:
        StorageError: the file cannot be read.
        InputError: a line that is none of these; or no prompt.
    """
    # Not `str.splitlines`, which cuts at characters that JSON's texts may hold, such as U+2028.
    lines = enumerate(read_text("prompts", path).split("\n"), start=1)
    found: list[tuple[str, PromptContent]] = []
    for where, line in ((f"{path}:{number}", line) for number, line in lines if line.strip()):
        item = parse_json("prompts", where, line)
        found.append((where, prompt_content(where, item if isinstance(item, dict) else {})))
    if not found:
        raise InputError("prompts", str(path), "holds no prompt; write one JSON object a line")
    return found


def write_answers(
    llm: LLM,
    prompts: Sequence[PromptContent],
    path: Path,
    config: AnswerConfig,
    tell: Callable[[int], None],
    sources: Sequence[str] = (),
) -> AnswerCount:
    """Answer the prompts that the file at `path` has no answer to yet; `tell` is called with the number answered.

    The answer to a prompt depends on its place, on the seed and on the prompt alone, not on where a run was resumed.
    `sources` are what errors call the prompts, such as file and line.

    Raises:
        ConfigError: the file was written under other settings or by another target.
        InputError, CapacityError: a prompt that the target cannot take; nothing was answered.
        StorageError: the file cannot be read or written; what is in it is kept.
    """
    sources = sources or [f"prompt {number}" for number in range(1, len(prompts) + 1)]
    encoded = [_encoded(llm, prompt, config, source) for prompt, source in zip(prompts, sources, strict=True)]
    prompts_digest = hashlib.sha256(to_json(encoded).encode()).hexdigest()[:16]
    header = {"kind": ANSWERS_KIND, "target": folder_fingerprint(llm.folder), "prompts": prompts_digest} | {
        name: value for name, value in asdict(config).items() if name != "batch_size"
    }
    header["end_tokens"] = sorted(llm.engine.admission.eos_token_ids)  # generation_config.json may change them
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            hold_alone("out", path, file)  # before it is read: the end of a line may still be on its way
            done = _resume(path, header)
            left = [place for place in range(len(encoded)) if place not in done]
            finished = itertools.count(len(done))
            tell(next(finished))
            size = _BATCHES_AT_ONCE * config.batch_size
            for group in (left[start : start + size] for start in range(0, len(left), size)):
                with closing(_answered(llm, encoded, group, config)) as steps:  # an interruption frees the requests
                    for ended in steps:
                        whole = [one for one in ended if one[1].error is None]
                        file.write("".join(_row(place, state) for place, state in whole))
                        file.flush()
                        for _ in whole:
                            tell(next(finished))
                        _check_whole(ended, sources)
                os.fsync(file.fileno())
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"cannot write the answers to {path}: {error}; what is in it is kept") from error
    tell(len(encoded))
    lengths = [len(answer) for _, _, answer in _read(path)[1]]
    return AnswerCount(len(encoded), len(lengths), sum(lengths))


def _answered(
    llm: LLM, encoded: Sequence[Sequence[int]], places: Sequence[int], config: AnswerConfig
) -> Generator[list[tuple[int, RequestState]]]:
    """Answer prompts at these places: yields those that ended with each step, so that an interruption loses none."""
    running: list[tuple[int, RequestState]] = []
    try:
        for place in places:
            running.append((place, llm.submit(encoded[place], config.params(place), llm.spec)))
        while running:
            llm.step()
            ended = [one for one in running if one[1].finish_reason is not None]
            if ended:
                running = [one for one in running if one[1].finish_reason is None]
                yield ended
    finally:
        for _, state in running:
            llm.engine.abort(state.request_id)


def _row(place: int, state: RequestState) -> str:
    row = {"place": place, "prompt_ids": state.request.prompt_ids, "answer_ids": state.output_ids}
    return to_json(row | {"finish_reason": state.finish_reason}) + "\n"


def _check_whole(ended: Sequence[tuple[int, RequestState]], sources: Sequence[str]) -> None:
    """Raise the error of an answer that failed, with the name of its prompt."""
    for place, state in ended:
        if state.error is not None:
            state.error.add_note(sources[place])
            raise state.error


@dataclass(frozen=True)
class AnswerFile:
    """Prompts with their answers as token ids, and whose they are."""

    header: Mapping[str, Any]
    pairs: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


def read_answers(path: Path) -> AnswerFile:
    """What `write_answers` wrote; a last line without an end is left out.

    Raises:
        StorageError: the file cannot be read.
        InputError: not a file of answers.
    """
    header, rows = _read(path)
    found = list(rows)
    if None not in (place for place, _, _ in found):  # by the prompts, whichever answer ended first
        found.sort(key=lambda row: row[0] or 0)
    return AnswerFile(header, tuple((prompt, answer) for _, prompt, answer in found))


def _read(path: Path) -> tuple[Mapping[str, Any], Iterator[_Row]]:
    """The header, and the rows as they are read."""
    lines = _whole_lines("answers", path)
    where, text, _ = next(lines, (str(path), "null", 0))
    header = parse_json("answers", where, text)
    if not isinstance(header, dict) or header.get("kind") != ANSWERS_KIND:
        raise InputError("answers", str(path), "is no file of answers; make one with `foretoken train answers`")
    return header, (_parsed(where, text) for where, text, _ in lines)


def _parsed(where: str, line: str) -> _Row:
    row = parse_json("answers", where, line)
    try:
        place = row.get("place")
        prompt, answer = (tuple(row[name]) for name in ("prompt_ids", "answer_ids"))
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError("answers", where, f"the line has no prompt_ids and answer_ids ({error})") from error
    if not all(type(token) is int and token >= 0 for token in prompt + answer):
        raise InputError("answers", where, "prompt_ids and answer_ids must be lists of token ids, from 0 on")
    return place if isinstance(place, int) else None, prompt, answer


def answered_data(path: Path, target: Path, vocab_size: int, held_out_share: float) -> HeadData:
    """Prompts and answers of a file as training data for heads of the target in the folder `target`.

    Raises:
        MismatchError: another target's answers.
        InputError: see `read_answers`; or too few answers.
    """
    from foretoken.train.head_data import split_documents

    file = answers_of(path, target)
    if max((token for pair in file.pairs for part in pair for token in part), default=0) >= vocab_size:
        raise _of_another(path, target)
    return split_documents(file.pairs, str(path), held_out_share)


def answers_of(path: Path, target: Path) -> AnswerFile:
    """The answers of the target in the folder `target`.

    Raises:
        MismatchError: another target's answers.
        StorageError, InputError: see `read_answers`.
    """
    file = read_answers(path)
    if file.header.get("target") != folder_fingerprint(target):
        raise _of_another(path, target)
    return file


def _of_another(path: Path, target: Path) -> MismatchError:
    return MismatchError(
        f"{path} holds the answers of another target than {target}: make them again with `foretoken train answers`"
    )


def folder_fingerprint(folder: Path) -> str:
    """A name of the checkpoint in `folder`: its configuration and that of its packed matrices, tokenizer, chat template
    and samples of its weights.
    """
    digest = hashlib.sha256()
    for name in ("config.json", *OLDER_SETTINGS, "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (folder / name).is_file():
            digest.update(name.encode() + (folder / name).read_bytes())
    add_weights(digest, folder)
    return digest.hexdigest()[:16]


def _encoded(llm: LLM, prompt: PromptContent, config: AnswerConfig, source: str) -> list[int]:
    """Token ids of a prompt that the target can answer: checked here, before hours of answers to others."""
    from foretoken.engine.admission import check_request  # with torch, which help does without

    try:
        ids = _encode(llm, prompt, config)
        check_request(ids, config.params(0), llm.spec, llm.target, llm.tokenizer is not None)
    except InputError as error:
        if error.field not in ("prompt", "messages", "text"):  # of the drafter
            raise
        said = f"has {error.value}; " if isinstance(error, ContextLengthError) else ""
        raise InputError("prompts", source, said + error.remedy) from error
    except CapacityError as error:
        raise CapacityError(f"{source}: {error}") from error
    return ids


def _encode(llm: LLM, prompt: PromptContent, config: AnswerConfig) -> list[int]:
    if isinstance(prompt, str):
        return llm.encode_chat([{"role": "user", "content": prompt}]) if config.chat else llm.encode(prompt)
    if isinstance(prompt[0], int):
        return [token for token in prompt if isinstance(token, int)]
    return llm.encode_chat([message for message in prompt if isinstance(message, Mapping)])


def _resume(path: Path, header: Mapping[str, Any]) -> set[int]:
    """Places that are answered; writes the header of a new file, and drops a line that was not finished."""
    first = (to_json(header) + "\n").encode()
    try:
        # A part of the first line alone: a full disk, or a kill, came before its end.
        if path.is_file() and path.stat().st_size < len(first) and first.startswith(path.read_bytes()):
            path.write_bytes(first)
            return set()
        lines = _whole_lines("out", path)
        where, text, whole = next(lines, (str(path), "null", 0))
        _check_header(path, parse_json("out", where, text), header)
        done = set[int]()
        for where, text, end in lines:
            done.add(_place(where, text))
            whole = end
        if whole < path.stat().st_size:
            os.truncate(path, whole)
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"cannot write the answers to {path}: {error}") from error
    return done


def _check_header(path: Path, found: object, header: Mapping[str, Any]) -> None:
    before = found if isinstance(found, dict) else {}
    for name, value in header.items():
        is_new = name == "end_tokens" and name not in before  # an earlier version did not write them
        if before.get(name) != value and not is_new:
            of_file = name in ("kind", "target", "prompts", "end_tokens")
            remedy = f"the answers in {path} were made with {name}={before.get(name)!r}; use that, or another file"
            raise ConfigError("out" if of_file else name, str(path) if of_file else value, remedy)


def _place(where: str, line: str) -> int:
    row = parse_json("out", where, line)
    place = row.get("place") if isinstance(row, dict) else None
    if not isinstance(place, int):
        raise InputError("out", where, "the line has no place: another program wrote it; use another file")
    return place


def _whole_lines(field: str, path: Path) -> Iterator[tuple[str, str, int]]:
    """File and line, text, and end in bytes of each line that has an end; a file may be longer than memory."""
    end = 0
    try:
        with path.open("rb") as file:
            for number in itertools.count(1):
                line = file.readline(MAX_BYTES + 1)
                if len(line) > MAX_BYTES:
                    remedy = f"line {number} is longer than {MAX_BYTES >> 20} MiB; it is no file of answers"
                    raise StorageError(f"{field}: cannot read {path}: {remedy}")
                if not line.endswith(b"\n"):
                    return
                end += len(line)
                yield f"{path}:{number}", _decoded(field, path, number, line[:-1]), end
    except StorageError:
        raise
    except (OSError, ValueError) as error:  # a ValueError is a NUL in the path
        raise StorageError(f"{field}: cannot read {path}: {error}") from error


def _decoded(field: str, path: Path, number: int, line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        remedy = f"line {number} is not UTF-8 (byte 0x{line[error.start]:02x})"
        raise StorageError(f"{field}: cannot read {path}: {remedy}") from error
