"""llama.cpp beside us: its programs run on the same GGUF file, or on a converted copy of the same checkpoint.

A GGUF file is read as it is. Copies of folders are made once and kept next to the checkpoints (`llama_programs`).
llama-lookup and llama-lookahead take part where they were built, and each `--spec-type` where the programs know it.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from foretoken.backend.answering import Answer, Capabilities, Drafting, Question, check_question
from foretoken.backend.llama_programs import FOLDER_VARIABLE, LLAMA_CPP, LlamaCpp, parsed, run_program
from foretoken.backend.registry import BackendOptions
from foretoken.errors import ForetokenError, InputError, StorageError
from foretoken.model.names import model_folder
from foretoken.text.tokenizer import load_tokenizer

_DEFAULT_BATCH = 2048
_TIMING = (
    "llama.cpp reads its checkpoint anew for every answer (not timed); its plain speed is llama-bench's at the same "
    "depth, its first-token time the prompt's pass and one average step; it may run past the token limit by the end of "
    "a draft, and what it emitted is what counts."
)

_COLOUR = re.compile(r"\033\[[0-9;]*m")  # lookahead prints accepted tokens in colour, asked or not

TokenCount = Callable[[str], int]


@dataclass(frozen=True)
class Kind:
    """A way of llama.cpp to speculate: which program, with which arguments at n drafted tokens (None: as the program
    comes).

    `swept` says whether n can be set. `emits_first` says that the prompt's own pass gave the first of the tokens it
    counts.
    """

    name: str
    arguments: Callable[[int | None], tuple[str, ...]]
    program: str = "llama-speculative-simple"
    counterpart: str = "ngram"
    swept: bool = True
    emits_first: bool = False


def _lookup_of(kind: str) -> Callable[[int | None], tuple[str, ...]]:
    """Swept, it looks up the last 4 tokens: its own 12 and 48 drafted ones rarely match in a short answer."""

    def arguments(n: int | None) -> tuple[str, ...]:
        return ("--spec-type", kind) + (
            () if n is None else (f"--spec-{kind}-size-n", "4", f"--spec-{kind}-size-m", str(n))
        )

    return arguments


def _hashed(n: int | None) -> tuple[str, ...]:
    """Swept, it looks up the last 16 tokens, the least that it takes without a warning, and drafts whatever it
    finds.
    """
    own = (
        ()
        if n is None
        else ("--spec-ngram-mod-n-match", "16", "--spec-ngram-mod-n-min", "0", "--spec-ngram-mod-n-max", str(n))
    )
    return ("--spec-type", "ngram-mod", *own)


def _draft_simple(n: int | None) -> tuple[str, ...]:
    own = () if n is None else ("--spec-draft-n-max", str(n), "--spec-draft-n-min", "0", "--spec-draft-p-min", "0")
    return ("--spec-type", "draft-simple", *own)


def trained_head(spec_type: str) -> Kind:
    """A trained head by its `--spec-type`; every draft token is verified, however unlikely."""

    def arguments(n: int | None) -> tuple[str, ...]:
        return ("--spec-type", spec_type, *_draft_simple(n)[2:])

    return Kind(spec_type, arguments, counterpart="eagle")


_DRAFT = "draft-simple"
_KINDS = {
    kind.name: kind
    for kind in (
        Kind(_DRAFT, _draft_simple, counterpart="draft_model"),
        *(Kind(name, _lookup_of(name)) for name in ("ngram-simple", "ngram-map-k", "ngram-map-k4v")),
        Kind("ngram-mod", _hashed),
        Kind("ngram-cache", lambda _n: ("--spec-type", "ngram-cache"), swept=False),
        Kind("lookup", lambda n: () if n is None else ("--spec-draft-n-max", str(n)), "llama-lookup", emits_first=True),
        Kind("lookahead", lambda _n: (), "llama-lookahead", counterpart="lookahead", swept=False),
    )
}
KINDS = tuple(_KINDS)


def speculation(kind: str, num_draft: int | None) -> tuple[str, ...]:
    """Arguments of llama.cpp's programs for a way to speculate that is a `--spec-type`, at `num_draft` drafted tokens
    (None: as the program comes); the server takes the same.

    Raises:
        InputError: no such way.
    """
    arguments = _KINDS[kind].arguments(num_draft) if kind in _KINDS else ()
    if "--spec-type" not in arguments:
        raise InputError("kind", kind, f"choose from {', '.join(KINDS)}, but none with a program of its own")
    return arguments


class LlamaCppBackend:
    """llama.cpp's programs on one target; `folder` is where they are."""

    name = LLAMA_CPP
    capabilities = Capabilities(
        plain=True, drafting=True, sampling=False, token_ids=False, draft_counts="total", conversations=False
    )

    def __init__(self, folder: Path, target: Path, draft: Path | None, dtype: str, threads: int | None) -> None:
        """Find the programs, and convert the target where it is no GGUF file.

        Raises:
            StorageError: programs, converter or checkpoint are missing.
            ForetokenError: the checkpoint cannot be converted.
        """
        self.programs = LlamaCpp.find(folder)
        self._draft, self._dtype, self._threads = draft, dtype, threads
        self._count = _token_count(target)
        self._target_gguf = self.programs.as_gguf(target, dtype)

    @cached_property
    def _draft_gguf(self) -> Path:
        assert self._draft is not None
        return self.programs.as_gguf(self._draft, self._dtype)

    def version(self) -> str:
        """What the programs say about themselves."""
        return self.programs.version()

    def draftings(
        self, num_drafts: Sequence[int], lookup_num_drafts: Sequence[int] | None = None
    ) -> Sequence[Drafting]:
        """Each kind that this build has, as it comes and at every number of drafted tokens."""
        found = []
        for kind in self._kinds():
            if _knows(self.programs, kind):
                numbers = num_drafts if kind.name == _DRAFT or lookup_num_drafts is None else lookup_num_drafts
                found += [
                    Drafting(kind.name, n, "", kind.counterpart, kind.name != _DRAFT)
                    for n in ((None, *numbers) if kind.swept else (None,))
                ]
        return found

    def _kinds(self) -> list[Kind]:
        return [kind for kind in _KINDS.values() if kind.name != _DRAFT or self._draft is not None]

    def notes(self) -> Sequence[str]:
        """Kinds that are not here, and how the programs time."""
        missing = [kind.name for kind in self._kinds() if not _knows(self.programs, kind)]
        without = (
            f"llama.cpp was not measured with {', '.join(missing)}: this build has no such program or --spec-type."
        )
        return (*((without,) if missing else ()), _TIMING)

    def answer(self, question: Question, drafting: Drafting) -> Answer:
        """Answer greedily; without drafting its speed alone.

        Raises:
            InputError, ForetokenError: see `AnsweringBackend.answer`.
        """
        check_question(self.name, question, drafting, self.capabilities)
        if drafting.kind is None:
            return LlamaBench(self.programs, self._target_gguf, self._count, self._threads).answer(question)
        if drafting.kind not in _KINDS or (drafting.kind == _DRAFT and self._draft is None):
            raise InputError("drafting", drafting.kind, f"choose from {', '.join(kind.name for kind in self._kinds())}")
        ggufs = (self._target_gguf, self._draft_gguf if drafting.kind == _DRAFT else None)
        one = LlamaSpeculative(_KINDS[drafting.kind], self.programs, ggufs, self._count, self._threads)
        return one.answer(question, drafting.num_draft if isinstance(drafting.num_draft, int) else None)

    def counters(self) -> None:
        """None: each answer is a process of its own."""

    def reset(self) -> None:
        """Nothing is kept from one process to the next."""

    def close(self) -> None:
        """Nothing is held between answers."""


def open_llama_cpp(options: BackendOptions) -> LlamaCppBackend:
    """llama.cpp's programs in the folder that FORETOKEN_LLAMA_CPP names.

    Raises:
        InputError: it names none.
        StorageError, ForetokenError: see `LlamaCppBackend`.
    """
    options.check_own()
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        raise InputError("backends", options.name, f"{FOLDER_VARIABLE} must name the folder of its programs")
    draft = None if options.draft is None else model_folder(options.draft)
    return LlamaCppBackend(Path(folder), model_folder(options.model), draft, options.dtype, options.threads)


def _knows(programs: LlamaCpp, kind: Kind) -> bool:
    """Whether the kind's program was built, and knows its `--spec-type`."""
    if not programs.program(kind.program).is_file():
        return False
    arguments = kind.arguments(None)
    return not arguments or arguments[1] in programs.spec_types


class LlamaBench:
    """llama.cpp's plain decoding: `llama-bench` with as much text in the cache as the prompt has."""

    def __init__(self, programs: LlamaCpp, target: Path, count: TokenCount, threads: int | None) -> None:
        self.programs = programs
        self.target = target
        self.count = count
        self.threads = threads

    def answer(self, question: Question) -> Answer:
        """Speed alone: llama-bench decodes tokens of no meaning, whose speed does not depend on the text.

        Raises:
            ForetokenError: the program failed.
        """
        depth = self.count(question.text)
        command = [
            str(self.programs.bench),
            "-m",
            str(self.target),
            "-p",
            "0",
            "-n",
            str(question.max_tokens),
            "-d",
            str(depth),
            "-r",
            "1",
        ]
        return parse_bench(run_program([*command, *_threads("-t", self.threads), "-o", "json"])[0])


def parse_bench(output: str) -> Answer:
    """The answer that `llama-bench -o json` reports.

    Raises:
        ForetokenError: no result in the output.
    """
    try:
        result = json.loads(output[output.index("[") :])[0]
        tokens, seconds = int(result["n_gen"]), float(result["avg_ns"]) / 1e9
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ForetokenError(f"llama-bench gave no result: {output[-200:]!r}") from error
    return Answer((), "", tokens, tokens, seconds, num_steps=tokens, decode_steps=tokens, num_drafted=0, num_accepted=0)


class LlamaSpeculative:
    """One of llama.cpp's ways to speculate."""

    def __init__(
        self,
        kind: Kind,
        programs: LlamaCpp,
        ggufs: tuple[Path, Path | None],
        count: TokenCount,
        threads: int | None,
    ) -> None:
        self.kind = kind
        self.programs = programs
        self.target, self.draft = ggufs
        self.count = count
        self.threads = threads

    def answer(self, question: Question, num_draft: int | None) -> Answer:
        """Answer greedily with `num_draft` drafted tokens (None: as the program comes).

        Raises:
            ForetokenError: the program failed.
        """
        # The file, since an argument would have its escapes replaced and a text file its last line end removed.
        with tempfile.NamedTemporaryFile("wb", suffix=".txt") as file:
            file.write(question.text.encode())
            file.flush()
            command = [str(self.programs.program(self.kind.program)), *self._arguments(file.name, question, num_draft)]
            return parsed(
                command, lambda output, log: parse_speculative(output, log, question.text, self.kind.emits_first)
            )

    def _arguments(self, file: str, question: Question, num_draft: int | None) -> list[str]:
        # The last draft may run past the limit.
        context = self.count(question.text) + question.max_tokens + 64
        arguments = ["-m", str(self.target), "-bf", file, "--no-escape", "--temp", "0", "-n", str(question.max_tokens)]
        # The program takes no prompt longer than its batch.
        arguments += ["-c", str(context), "-b", str(max(context, _DEFAULT_BATCH)), *_threads("-t", self.threads)]
        if question.ignore_eos:
            arguments.append("--ignore-eos")
        if self.draft is not None:
            arguments += ["-md", str(self.draft), *_threads("-td", self.threads)]
        return [*arguments, *self.kind.arguments(num_draft)]


def _threads(option: str, threads: int | None) -> tuple[str, ...]:
    return () if threads is None else (option, str(threads))


def parse_speculative(output: str, log: str, prompt: str, emits_first: bool = False) -> Answer:
    """The answer that a speculating program prints, with the counts of its log (the error stream); lookahead drafts no
    fixed number.

    Raises:
        ForetokenError: no result in the output.
    """
    encoded = re.search(r"encoded\s+\d+ tokens in\s+([\d.]+) seconds", log)
    decoded = re.search(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds", log)
    drafted, accepted = re.search(r"n_drafted\s*=\s*(\d+)", log), re.search(r"n_accept\s*=\s*(\d+)", log)
    if not (encoded and decoded and accepted):
        raise ForetokenError(f"llama.cpp gave no result: {log[-200:]!r}")
    tokens, seconds, kept = int(decoded.group(1)), float(decoded.group(2)), int(accepted.group(1))
    first = int(emits_first)
    steps, prompt_s = tokens - kept - first, float(encoded.group(1))
    return Answer(
        token_ids=(),
        text=_text_of(output, prompt),
        num_emitted=tokens,
        decode_tokens=tokens - first,
        decode_s=seconds,
        ttft_s=prompt_s + (0.0 if emits_first else seconds / max(1, steps)),
        e2e_s=prompt_s + seconds,
        num_steps=steps + first,
        decode_steps=steps,
        num_drafted=None if drafted is None else int(drafted.group(1)),
        num_accepted=kept,
    )


def _text_of(output: str, prompt: str) -> str:
    """What follows the echo of the prompt, less the empty lines at the end; empty if there is no echo."""
    _, echo, answer = _COLOUR.sub("", output).partition(prompt)
    return answer.rstrip("\n") if echo else ""


def _token_count(checkpoint: Path) -> TokenCount:
    tokenizer = load_tokenizer(checkpoint)
    if tokenizer is None:
        raise StorageError(f"{checkpoint} has no tokenizer, and llama.cpp's programs take texts")
    return lambda text: len(tokenizer.encode(text))
