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

from foretoken.backend.answering import Answer, AnsweringBackend, Capabilities, Drafting, Question, check_question
from foretoken.backend.llama_programs import FOLDER_VARIABLE, LLAMA_CPP, LlamaCpp, parsed, run_program
from foretoken.backend.registry import BackendOptions
from foretoken.errors import ForetokenError, InputError, StorageError
from foretoken.model.names import model_folder
from foretoken.text.tokenizer import load_tokenizer

_DEFAULT_BATCH = 2048
_TIMING = (
    "llama.cpp reads its checkpoint anew for every answer (not timed); its plain speed is llama-bench's for as many "
    "tokens, its first-token time the prompt's pass and one average step; it may run past the token limit by the end "
    "of a draft, and what it emitted is what counts."
)

_COLOUR = re.compile(r"\033\[[0-9;]*m")  # lookahead prints accepted tokens in colour, asked or not

TokenCount = Callable[[str], int]
_WITH_TYPES = "llama-speculative-simple"  # the program that takes a `--spec-type`


@dataclass(frozen=True)
class Kind:
    """A way of llama.cpp to speculate: by which program, and with which arguments at {n} drafted tokens (`sized`; ()
    where their number cannot be set).

    `emits_first` says that the prompt's own pass gave the first of the tokens it counts.
    """

    name: str
    sized: tuple[str, ...] = ()
    program: str = _WITH_TYPES
    counterpart: str = "ngram"
    emits_first: bool = False

    def arguments(self, num_draft: int | None) -> tuple[str, ...]:
        """The program's arguments at `num_draft` drafted tokens; None: as the program comes."""
        own = ("--spec-type", self.name) if self.program == _WITH_TYPES else ()
        return own if num_draft is None else (*own, *(part.format(n=num_draft) for part in self.sized))

    def is_known(self, programs: LlamaCpp) -> bool:
        """Whether the program was built, and knows its `--spec-type`."""
        has_program = programs.program(self.program).is_file()
        return has_program and (self.program != _WITH_TYPES or self.name in programs.spec_types)


# Every draft token of a model is verified, however unlikely.
MODEL_SIZED = ("--spec-draft-n-max", "{n}", "--spec-draft-n-min", "0", "--spec-draft-p-min", "0")
_DRAFT = "draft-simple"
KINDS = {
    kind.name: kind
    for kind in (
        Kind(_DRAFT, MODEL_SIZED, counterpart="draft_model"),
        # Sized, they look up the last 4 tokens: their own 12 and 48 drafted ones rarely match in a short answer.
        *(
            Kind(name, (f"--spec-{name}-size-n", "4", f"--spec-{name}-size-m", "{n}"))
            for name in ("ngram-simple", "ngram-map-k", "ngram-map-k4v")
        ),
        # Sized, it looks up the last 16 tokens, the least that it takes without a warning, and drafts what it finds.
        Kind(
            "ngram-mod",
            (*("--spec-ngram-mod-n-match", "16"), *("--spec-ngram-mod-n-min", "0"), *("--spec-ngram-mod-n-max", "{n}")),
        ),
        Kind("ngram-cache"),
        Kind("lookup", ("--spec-draft-n-max", "{n}"), "llama-lookup", emits_first=True),
        Kind("lookahead", (), "llama-lookahead", counterpart="lookahead"),
    )
}


class LlamaCppBackend(AnsweringBackend):
    """llama.cpp's programs on one target; `folder` is where they are."""

    name = LLAMA_CPP
    capabilities = Capabilities(
        plain=True,
        drafting=True,
        sampling=False,
        token_ids=False,
        draft_counts="total",
        conversations=False,
        plain_texts=False,
    )

    def __init__(self, folder: Path, target: Path, draft: Path | None, dtype: str, threads: int | None) -> None:
        """Find the programs, and convert the target where it is no GGUF file.

        Raises:
            StorageError: programs, converter or checkpoint are missing; ForetokenError: the checkpoint cannot be
                converted.
        """
        self.programs = LlamaCpp.find(folder)
        self._draft, self._dtype = draft, dtype
        count = _token_count(target)
        self._runs = LlamaRuns(self.programs, self.programs.as_gguf(target, dtype), count, threads)

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
            if kind.is_known(self.programs):
                numbers = num_drafts if kind.name == _DRAFT or lookup_num_drafts is None else lookup_num_drafts
                found += [
                    Drafting(kind.name, n, "", kind.counterpart, kind.name != _DRAFT)
                    for n in ((None, *numbers) if kind.sized else (None,))
                ]
        return found

    def _kinds(self) -> list[Kind]:
        return [kind for kind in KINDS.values() if kind.name != _DRAFT or self._draft is not None]

    def notes(self) -> Sequence[str]:
        """Kinds that are not here, and how the programs time."""
        missing = [kind.name for kind in self._kinds() if not kind.is_known(self.programs)]
        without = (
            f"llama.cpp was not measured with {', '.join(missing)}: this build has no such program or --spec-type."
        )
        return (*((without,) if missing else ()), _TIMING)

    def answer(self, question: Question, drafting: Drafting) -> Answer:
        """Answer greedily; without drafting its speed alone. Raises as `AnsweringBackend.answer`."""
        check_question(self.name, question, drafting, self.capabilities)
        if drafting.kind is None:
            return self._runs.plain(question)
        if drafting.kind not in KINDS or (drafting.kind == _DRAFT and self._draft is None):
            raise InputError("drafting", drafting.kind, f"choose from {', '.join(kind.name for kind in self._kinds())}")
        num_draft = drafting.num_draft if isinstance(drafting.num_draft, int) else None
        draft = self._draft_gguf if drafting.kind == _DRAFT else None
        return self._runs.speculative(KINDS[drafting.kind], question, num_draft, draft)


def open_llama_cpp(options: BackendOptions) -> LlamaCppBackend:
    """llama.cpp's programs in the folder that FORETOKEN_LLAMA_CPP names.

    Raises:
        InputError: it names none; StorageError, ForetokenError: see `LlamaCppBackend`.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        raise InputError("backends", options.name, f"{FOLDER_VARIABLE} must name the folder of its programs")
    draft = None if options.draft is None else model_folder(options.draft)
    return LlamaCppBackend(Path(folder), model_folder(options.model), draft, options.dtype, options.threads)


@dataclass(frozen=True)
class LlamaRuns:
    """Runs of llama.cpp's programs on one target, a GGUF file; `count` says how many tokens a text has."""

    programs: LlamaCpp
    target: Path
    count: TokenCount
    threads: int | None

    def plain(self, question: Question) -> Answer:
        """Speed alone: llama-bench reads as many tokens as the prompt has, and decodes as many as are wanted behind
        them. They have no meaning, and speed does not depend on the text.

        Raises:
            ForetokenError: the program failed.
        """
        length = max(1, self.count(question.text))
        return parse_bench(self._bench(0, question.max_tokens, length), self._bench(length, 0, 0))

    def _bench(self, num_prompt: int, num_tokens: int, depth: int) -> str:
        sizes = {"-p": num_prompt, "-n": num_tokens, "-d": depth, "-r": 1}
        command = [str(self.programs.bench), "-m", str(self.target)]
        command += [str(part) for pair in sizes.items() for part in pair]
        return run_program([*command, *self._threads("-t"), "-o", "json"])[0]

    def speculative(self, kind: Kind, question: Question, num_draft: int | None, draft: Path | None = None) -> Answer:
        """Answer greedily with `num_draft` drafted tokens (None: as the program comes) of the GGUF file `draft`, where
        the kind takes one.

        Raises:
            ForetokenError: the program failed.
        """
        # The file, since an argument would have its escapes replaced and a text file its last line end removed.
        with tempfile.NamedTemporaryFile("wb", suffix=".txt") as file:
            file.write(question.text.encode())
            file.flush()
            program = str(self.programs.program(kind.program))
            command = [program, *self._arguments(file.name, question, draft), *kind.arguments(num_draft)]
            return parsed(command, lambda output, log: parse_speculative(output, log, question.text, kind.emits_first))

    def _arguments(self, file: str, question: Question, draft: Path | None) -> list[str]:
        # The last draft may run past the limit.
        context = self.count(question.text) + question.max_tokens + 64
        arguments = ["-m", str(self.target), "-bf", file, "--no-escape", "--temp", "0", "-n", str(question.max_tokens)]
        # The program takes no prompt longer than its batch.
        arguments += ["-c", str(context), "-b", str(max(context, _DEFAULT_BATCH)), *self._threads("-t")]
        if question.ignore_eos:
            arguments.append("--ignore-eos")
        if draft is not None:
            arguments += ["-md", str(draft), *self._threads("-td")]
        return arguments

    def _threads(self, option: str) -> tuple[str, ...]:
        return () if self.threads is None else (option, str(self.threads))


def parse_bench(decoding: str, reading: str) -> Answer:
    """The answer that `llama-bench -o json` reports of decoding, behind a prompt that it reports of reading.

    Raises:
        ForetokenError: no result in an output.
    """
    (tokens, seconds), (_, prompt_s) = _bench_result(decoding), _bench_result(reading)
    return Answer(
        token_ids=(),
        text="",
        num_emitted=tokens,
        decode_tokens=tokens,
        decode_s=seconds,
        ttft_s=prompt_s + seconds / max(1, tokens),
        e2e_s=prompt_s + seconds,
        num_steps=tokens,
        decode_steps=tokens,
        num_drafted=0,
        num_accepted=0,
    )


def _bench_result(output: str) -> tuple[int, float]:
    """Generated tokens and seconds of a test of llama-bench."""
    try:
        result = json.loads(output[output.index("[") :])[0]
        return int(result["n_gen"]), float(result["avg_ns"]) / 1e9
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ForetokenError(f"llama-bench gave no result: {output[-200:]!r}") from error


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
