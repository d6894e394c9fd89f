"""llama.cpp beside us: its programs run on the same GGUF file, or on a converted copy of the same checkpoint.

A GGUF file is read as it is. Copies of folders are made once and kept next to the checkpoints (`llama_programs`).
llama-lookup and llama-lookahead take part where they were built, and each `--spec-type` where the programs know it.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from foretoken.backend.answering import Answer
from foretoken.bench.llama_programs import LLAMA_CPP, LlamaCpp, parsed, run_program
from foretoken.bench.measure import Contender, SpeedSetting
from foretoken.bench.workload import Prompt
from foretoken.config import SamplingParams
from foretoken.errors import ForetokenError, InputError, StorageError

_DEFAULT_BATCH = 2048

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


def contenders(
    programs_at: Path,
    target: Path,
    draft: Path | None,
    dtype: str,
    threads: int,
    num_drafts: Sequence[int],
    lookup_num_drafts: Sequence[int],
    kinds: Sequence[str] = KINDS,
) -> tuple[list[Contender], list[str]]:
    """Plain decoding, and each kind as it comes and at every number of drafted tokens (`lookup_num_drafts` for those
    without a model); a note for kinds that are not here.

    Raises:
        StorageError: programs, converter or checkpoint are missing.
        ForetokenError: a checkpoint cannot be converted.
    """
    programs = LlamaCpp.find(programs_at)
    count = _token_count(target)
    target_gguf = programs.as_gguf(target, dtype)
    found: list[Contender] = [LlamaBench(SpeedSetting(LLAMA_CPP, LLAMA_CPP), programs, target_gguf, count, threads)]
    missing: list[str] = []
    wanted = [_KINDS[name] for name in KINDS if name in kinds and (name != _DRAFT or draft is not None)]
    for kind in wanted:
        if not _knows(programs, kind):
            missing.append(kind.name)
            continue
        draft_gguf = programs.as_gguf(draft, dtype) if kind.name == _DRAFT and draft is not None else None
        numbers = num_drafts if kind.name == _DRAFT else lookup_num_drafts
        for n in (None, *numbers) if kind.swept else (None,):
            setting = SpeedSetting(
                name=f"{LLAMA_CPP}-{kind.name}" + ("" if n is None else f"-{n}"),
                engine=LLAMA_CPP,
                drafter=kind.name,
                num_draft="auto" if n is None else n,
                counterpart=kind.counterpart,
                free=draft_gguf is None,
            )
            found.append(LlamaSpeculative(setting, kind, programs, (target_gguf, draft_gguf), count, threads))
    notes = (
        [f"llama.cpp was not measured with {', '.join(missing)}: this build has no such program or --spec-type."]
        if missing
        else []
    )
    return found, notes


def _knows(programs: LlamaCpp, kind: Kind) -> bool:
    """Whether the kind's program was built, and knows its `--spec-type`."""
    if not programs.program(kind.program).is_file():
        return False
    arguments = kind.arguments(None)
    return not arguments or arguments[1] in programs.spec_types


class LlamaBench:
    """llama.cpp's plain decoding: `llama-bench` with as much text in the cache as the prompt has."""

    def __init__(
        self, setting: SpeedSetting, programs: LlamaCpp, target: Path, count: TokenCount, threads: int
    ) -> None:
        self.setting = setting
        self.programs = programs
        self.target = target
        self.count = count
        self.threads = threads

    def answer(self, prompt: Prompt, params: SamplingParams) -> Answer:
        """Speed alone: llama-bench decodes tokens of no meaning, whose speed does not depend on the text.

        Raises:
            ForetokenError: the program failed.
        """
        depth = self.count(prompt.text)
        command = [
            str(self.programs.bench),
            "-m",
            str(self.target),
            "-p",
            "0",
            "-n",
            str(params.max_tokens),
            "-d",
            str(depth),
            "-r",
            "1",
        ]
        return parse_bench(run_program([*command, "-t", str(self.threads), "-o", "json"])[0])


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
        setting: SpeedSetting,
        kind: Kind,
        programs: LlamaCpp,
        ggufs: tuple[Path, Path | None],
        count: TokenCount,
        threads: int,
    ) -> None:
        self.setting = setting
        self.kind = kind
        self.programs = programs
        self.target, self.draft = ggufs
        self.count = count
        self.threads = threads

    def answer(self, prompt: Prompt, params: SamplingParams) -> Answer:
        """Answer greedily.

        Raises:
            ForetokenError: the program failed.
        """
        # The file, since an argument would have its escapes replaced and a text file its last line end removed.
        with tempfile.NamedTemporaryFile("wb", suffix=".txt") as file:
            file.write(prompt.text.encode())
            file.flush()
            command = [str(self.programs.program(self.kind.program)), *self._arguments(file.name, prompt, params)]
            return parsed(
                command, lambda output, log: parse_speculative(output, log, prompt.text, self.kind.emits_first)
            )

    def _arguments(self, file: str, prompt: Prompt, params: SamplingParams) -> list[str]:
        # The last draft may run past the limit.
        context = self.count(prompt.text) + params.max_tokens + 64
        arguments = ["-m", str(self.target), "-bf", file, "--no-escape", "--temp", "0", "-n", str(params.max_tokens)]
        # The program takes no prompt longer than its batch.
        arguments += ["-c", str(context), "-b", str(max(context, _DEFAULT_BATCH)), "-t", str(self.threads)]
        if params.ignore_eos:
            arguments.append("--ignore-eos")
        if self.draft is not None:
            arguments += ["-md", str(self.draft), "-td", str(self.threads)]
        return [
            *arguments,
            *self.kind.arguments(self.setting.num_draft if isinstance(self.setting.num_draft, int) else None),
        ]


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
    steps = tokens - kept - first
    return Answer(
        token_ids=(),
        text=_text_of(output, prompt),
        num_emitted=tokens,
        decode_tokens=tokens - first,
        decode_s=seconds,
        ttft_s=float(encoded.group(1)) + (0.0 if emits_first else seconds / max(1, steps)),
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
    from foretoken.text.tokenizer import load_tokenizer  # not needed for the names of the kinds, which `--help` shows

    tokenizer = load_tokenizer(checkpoint)
    if tokenizer is None:
        raise StorageError(f"{checkpoint} has no tokenizer, and llama.cpp's programs take texts")
    return lambda text: len(tokenizer.encode(text))
