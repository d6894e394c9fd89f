"""Answers of the target to the user's own prompts: what its heads are trained on.

A file of JSON lines: a header that says whose answers these are, then one line for each prompt. It is written line by
line and continued where it ends; a line that a killed run left unfinished is answered again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.config import SamplingParams
from foretoken.engine.prompts import prompt_content
from foretoken.errors import ConfigError, InputError, MismatchError, StorageError
from foretoken.files import parse_json, read_text, to_json
from foretoken.model.gguf.parts import part_files
from foretoken.option import option
from foretoken.params import check_whole

if TYPE_CHECKING:
    from foretoken.core import StepOutput
    from foretoken.engine.llm import LLM
    from foretoken.train.head_data import HeadData

ANSWERS_KIND = "foretoken answers"
_MAX_SEED = 1 << 63
# Batches that are submitted together: a request that ends makes room for the next one, so that only the last of them
# run in a batch that empties. An interruption loses at most so many.
_BATCHES_AT_ONCE = 8


@dataclass(frozen=True)
class AnswerConfig:
    """How answers are drawn. `batch_size` prompts run at once; `chat` sends texts as a user's message."""

    max_tokens: int = field(default=256, metadata=option("Tokens per answer."))
    temperature: float = field(default=0.8, metadata=option("Temperature of use; 0 is greedy."))
    top_p: float = field(default=1.0, metadata=option("Nucleus of use."))
    seed: int = field(default=0, metadata=option("Another number gives other answers."))
    batch_size: int = field(default=16, metadata=option("Answers that run at once."))
    chat: bool = field(
        default=False, metadata=option("Send texts as a user's message, through the target's chat template.")
    )

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


PromptContent = str | Sequence[Mapping[str, Any]] | Sequence[int]


def read_user_prompts(path: Path) -> list[PromptContent]:
    """JSON lines with `prompt` (a text), `messages` (a conversation) or `prompt_ids`.

    Raises:
        StorageError: the file cannot be read.
        InputError: a line that is none of these; or no prompt.
    """
    found = [
        _prompt(f"{path}:{number}", line)
        for number, line in enumerate(read_text("prompts", path).splitlines(), start=1)
        if line.strip()
    ]
    if not found:
        raise InputError("prompts", str(path), "holds no prompt; write one JSON object a line")
    return found


def _prompt(where: str, line: str) -> PromptContent:
    item = parse_json("prompts", where, line)
    return prompt_content(where, item if isinstance(item, dict) else {})


def write_answers(
    llm: LLM,
    prompts: Sequence[PromptContent],
    path: Path,
    config: AnswerConfig,
    tell: Callable[[int], None],
) -> AnswerCount:
    """Answer the prompts that the file at `path` has no answer to yet; `tell` is called with the number answered.

    The answer to a prompt depends on its place, on the seed and on the prompt alone, not on where a run was resumed.

    Raises:
        ConfigError: the file was written under other settings or by another target.
        InputError: a prompt that the target cannot take.
        StorageError: the file cannot be read or written; what is in it is kept.
    """
    encoded = [_encode(llm, prompt, config) for prompt in prompts]
    header = {"kind": ANSWERS_KIND, "target": _fingerprint(llm), "prompts": _digest(encoded)} | {
        name: value for name, value in asdict(config).items() if name != "batch_size"
    }
    done = _resume(path, header)
    left = [place for place in range(len(encoded)) if place not in done]
    try:
        at_once = _BATCHES_AT_ONCE * config.batch_size
        for start in range(0, len(left), at_once):
            places = left[start : start + at_once]
            finished = itertools.count(len(done) + start)
            tell(next(finished))

            def count(step: Sequence[StepOutput], finished: Iterator[int] = finished) -> None:
                for _ in filter(None, (one.finish_reason for one in step)):
                    tell(next(finished))

            params = [config.params(place) for place in places]
            outputs = llm.generate([encoded[place] for place in places], params, on_step=count)
            with path.open("a", encoding="utf-8") as file:
                for place, output in zip(places, outputs, strict=True):
                    if output.error is not None:
                        raise output.error
                    row = {"place": place, "prompt_ids": output.prompt_ids, "answer_ids": output.token_ids}
                    file.write(to_json(row | {"finish_reason": output.finish_reason}) + "\n")
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        raise StorageError(f"cannot write the answers to {path}: {error}; what is in it is kept") from error
    tell(len(encoded))
    pairs = read_answers(path).pairs
    return AnswerCount(len(encoded), len(pairs), sum(len(answer) for _, answer in pairs))


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
    lines = _whole_lines(read_text("answers", path))
    header = parse_json("answers", f"{path}:1", lines[0]) if lines else None
    if not isinstance(header, dict) or header.get("kind") != ANSWERS_KIND:
        raise InputError("answers", str(path), "is no file of answers; make one with `foretoken train answers`")
    rows = [parse_json("answers", f"{path}:{number}", line) for number, line in enumerate(lines[1:], start=2)]
    try:
        pairs = tuple((tuple(map(int, row["prompt_ids"])), tuple(map(int, row["answer_ids"]))) for row in rows)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError("answers", str(path), f"a line has no prompt_ids and answer_ids ({error})") from error
    return AnswerFile(header, pairs)


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
    """A name of the checkpoint in `folder`: its configuration, tokenizer, chat template and first weights."""
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (folder / name).is_file():
            digest.update(name.encode() + (folder / name).read_bytes())
    # A GGUF file, or its first part, has it all.
    for path in part_files(folder)[:1] if folder.is_file() else sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:  # header and first weights
            digest.update(f"{path.name} {path.stat().st_size}".encode() + file.read(1 << 20))
    return digest.hexdigest()[:16]


def _fingerprint(llm: LLM) -> str:
    return folder_fingerprint(llm.folder)


def _encode(llm: LLM, prompt: PromptContent, config: AnswerConfig) -> list[int]:
    if isinstance(prompt, str):
        return llm.encode_chat([{"role": "user", "content": prompt}]) if config.chat else llm.encode(prompt)
    if isinstance(prompt[0], int):
        return [token for token in prompt if isinstance(token, int)]
    return llm.encode_chat([message for message in prompt if isinstance(message, Mapping)])


def _resume(path: Path, header: Mapping[str, Any]) -> set[int]:
    """Places that are answered; writes the header of a new file, and drops a line that was not finished."""
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(to_json(header) + "\n", encoding="utf-8")
            return set()
        lines = _whole_lines(read_text("out", path))
        before = parse_json("out", f"{path}:1", lines[0]) if lines else {}
        for name, value in header.items():
            if before.get(name) != value:
                raise ConfigError(
                    "out" if name in ("kind", "target", "prompts") else name,
                    str(path) if name in ("kind", "target", "prompts") else value,
                    f"the answers in {path} were made with {name}={before.get(name)!r}; use that, or another file",
                )
        partial = path.with_name(path.name + ".partial")
        partial.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        partial.replace(path)
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"cannot write the answers to {path}: {error}") from error
    return {int(json.loads(line)["place"]) for line in lines[1:]}


def _whole_lines(text: str) -> list[str]:
    """Lines that have an end."""
    return text.split("\n")[:-1]


def _digest(encoded: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(to_json(encoded).encode()).hexdigest()[:16]
