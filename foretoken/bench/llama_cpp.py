"""llama.cpp beside us: its programs run on a converted copy of the same checkpoint.

It is found through two settings of the environment:

    FORETOKEN_LLAMA_CPP          folder with the programs llama-bench and llama-speculative-simple
    FORETOKEN_LLAMA_CPP_CONVERT  convert_hf_to_gguf.py; not needed where it lies in a folder above the programs

The copies (GGUF files) are made once and kept next to the checkpoints. llama-lookup and llama-lookahead take part where
they were built, and each `--spec-type` where the programs know it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from foretoken.bench.measure import Answer, Contender, SpeedSetting
from foretoken.bench.workload import Prompt
from foretoken.config import SamplingParams
from foretoken.errors import ForetokenError, StorageError

LLAMA_CPP = "llama.cpp"
_TIMEOUT_S = 1800
_GGUF_TYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
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
    outtype = _GGUF_TYPES.get(_dtype_of(target) if dtype == "auto" else dtype, "bf16")
    count = _token_count(target)
    target_gguf = programs.convert(target, outtype)
    found: list[Contender] = [LlamaBench(SpeedSetting(LLAMA_CPP, LLAMA_CPP), programs, target_gguf, count, threads)]
    missing: list[str] = []
    wanted = [_KINDS[name] for name in KINDS if name in kinds and (name != _DRAFT or draft is not None)]
    for kind in wanted:
        if not programs.has(kind):
            missing.append(kind.name)
            continue
        draft_gguf = programs.convert(draft, outtype) if kind.name == _DRAFT and draft is not None else None
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


class LlamaCpp:
    """Where llama.cpp's programs are, and its converter."""

    def __init__(self, bench: Path, speculative: Path, converter: Path | None) -> None:
        self.bench = bench
        self.speculative = speculative
        self.converter = converter

    @classmethod
    def find(cls, folder: Path) -> LlamaCpp:
        """Look for the programs in `folder`, its `bin` and its `build/bin`.

        Raises:
            StorageError: a program is missing.
        """
        for place in (folder, folder / "bin", folder / "build" / "bin"):
            bench, speculative = place / "llama-bench", place / "llama-speculative-simple"
            if bench.is_file() and speculative.is_file():
                break
        else:
            raise StorageError(
                f"FORETOKEN_LLAMA_CPP={folder}: no llama-bench and llama-speculative-simple there, in "
                "bin/ or in build/bin/"
            )
        named = os.environ.get("FORETOKEN_LLAMA_CPP_CONVERT")
        near = (
            [Path(named)]
            if named
            else [above / "convert_hf_to_gguf.py" for above in (place, *place.resolve().parents[:4])]
        )
        return cls(bench, speculative, next((path for path in near if path.is_file()), None))

    def program(self, name: str) -> Path:
        """Where a program lies, or would."""
        return self.speculative.with_name(name)

    def has(self, kind: Kind) -> bool:
        """Whether the kind's program was built, and knows its `--spec-type`."""
        if not self.program(kind.program).is_file():
            return False
        arguments = kind.arguments(None)
        return not arguments or arguments[1] in self.spec_types

    @cached_property
    def spec_types(self) -> frozenset[str]:
        """The kinds of speculation that the program names in its help."""
        listed = re.search(r"--spec-type\s+(\S+)", "\n".join(_run([str(self.speculative), "--help"])))
        return frozenset(listed.group(1).split(",")) if listed else frozenset()

    def version(self) -> str:
        """What the program says about itself."""
        found = re.search(r"version:\s*(.+)", "\n".join(_run([str(self.speculative), "--version"])))
        return found.group(1).strip() if found else "unknown"

    def convert(self, checkpoint: Path, outtype: str) -> Path:
        """The checkpoint as a GGUF file next to it, made again when the checkpoint is newer.

        Raises:
            StorageError: no converter.
            ForetokenError: the converter failed.
        """
        gguf = checkpoint.resolve().with_name(f"{checkpoint.resolve().name}-{outtype}.gguf")
        sources = [*checkpoint.glob("*.safetensors"), *checkpoint.glob("*.json")]
        if gguf.is_file() and all(gguf.stat().st_mtime >= source.stat().st_mtime for source in sources):
            return gguf
        if self.converter is None:
            raise StorageError("convert_hf_to_gguf.py was not found; name it in FORETOKEN_LLAMA_CPP_CONVERT")
        part = gguf.with_suffix(".part")
        wrapper = ["-c", _CONVERT] if _is_gpt2_style(checkpoint) else []
        _run(
            [
                sys.executable,
                *wrapper,
                str(self.converter),
                str(checkpoint),
                "--outtype",
                outtype,
                "--outfile",
                str(part),
            ]
        )
        part.replace(gguf)
        return gguf


# The converter knows a byte-level BPE by a hash of what it makes of a sample text, so any newly trained one is unknown
# to it. `_is_gpt2_style` has made sure that such a one splits text as GPT-2's does. The second change spares the
# sentencepiece package, which the converter imports only to find that the checkpoint has no such model.
_CONVERT = """
import runpy, sys
from pathlib import Path
del sys.argv[0]
folder = Path(sys.argv[0]).resolve().parent
sys.path[:0] = [str(folder), str(folder / "gguf-py")]
from conversion.base import TextModel
known = TextModel.get_vocab_base_pre
def pre(self, tokenizer):
    try:
        return known(self, tokenizer)
    except RuntimeError:  # the kind of it that the converter raises for a tokenizer it does not know
        return "gpt-2"
def no_sentencepiece(self):
    raise FileNotFoundError("tokenizer.model")
TextModel.get_vocab_base_pre = pre
TextModel._set_vocab_sentencepiece = no_sentencepiece
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def _is_gpt2_style(checkpoint: Path) -> bool:
    """Whether the tokenizer is a byte-level BPE that splits text by GPT-2's own expression and nothing else."""
    tokenizer = _read_json(checkpoint / "tokenizer.json")
    before = tokenizer.get("pre_tokenizer") or {}
    plain = (
        before.get("type") == "ByteLevel" and before.get("use_regex", True) and not before.get("add_prefix_space", True)
    )
    return bool(plain) and tokenizer.get("model", {}).get("type") == "BPE" and tokenizer.get("normalizer") is None


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
        return parse_bench(_run([*command, "-t", str(self.threads), "-o", "json"])[0])


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
            output, log = _run(
                [str(self.programs.program(self.kind.program)), *self._arguments(file.name, prompt, params)]
            )
        return parse_speculative(output, log, prompt.text, self.kind.emits_first)

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


def _run(command: list[str]) -> tuple[str, str]:
    """Standard output and error stream of a program that ended well."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ForetokenError(f"{Path(command[0]).name}: {error}") from error
    out, err = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    if done.returncode != 0:
        raise ForetokenError(
            f"{Path(command[0]).name} ended with code {done.returncode}: {' | '.join(err.strip().splitlines()[-3:])}"
        )
    return out, err


def _token_count(checkpoint: Path) -> TokenCount:
    from tokenizers import Tokenizer

    _read_json(checkpoint / "tokenizer.json")  # a missing or broken file gets the better message
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    return lambda text: len(tokenizer.encode(text).ids)


def _dtype_of(checkpoint: Path) -> str:
    config = _read_json(checkpoint / "config.json")
    return str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot read {path}: {error}") from error
    return content if isinstance(content, dict) else {}
