"""An exported head in llama.cpp and the same head here: are texts and accepted draft tokens the same?

    FORETOKEN_LLAMA_CPP=DIR python -m studies.exported_head --head DIR --num-draft 4 --out benchmarks

The head, an EAGLE-3 one, is written as `foretoken export --to llamacpp` does, then llama.cpp's converter makes GGUF
files of target and head, and its program answers greedily with `--spec-type draft-eagle3`. An engine that computes a
head in another way (layers counted otherwise, a norm left out) still answers rightly and accepts less: so accepted
draft tokens are compared too, in float32, where both write the same text. Counts only: nothing is timed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.backend.llama_cpp import MODEL_SIZED, Kind, LlamaRuns
from foretoken.backend.llama_programs import LlamaCpp
from foretoken.errors import ConfigError
from foretoken.export.engines import engine_of
from foretoken.export.write import export_head
from foretoken.measure.progress import Tell, progress
from foretoken.measure.report import Report, Table
from foretoken.measure.speed.plan import question_of
from foretoken.measure.workload import SLICES, Prompt, slices
from foretoken.model.names import model_folder
from studies.command import arguments, command_line, run, words

ENGINE, SPEC_TYPE = "llamacpp", "draft-eagle3"
KIND = Kind(SPEC_TYPE, MODEL_SIZED, counterpart="eagle")
EXPLAINED = (
    "Drafted and accepted tokens, greedy, float32. At the end of an answer llama.cpp drafts whole drafts too; ours "
    "are cut to what may still be emitted."
)


@dataclass(frozen=True)
class HeadRow:
    """One prompt: the same head in both engines; `is_same_text` is whether both wrote the same."""

    slice: str
    prompt: str
    num_tokens: int
    drafted: int
    accepted: int
    their_drafted: int
    their_accepted: int
    is_same_text: bool


def main() -> int:
    """Compare, and print or write the report."""
    parser = arguments("exported_head", __doc__, "exported-head", drafts=False)
    parser.add_argument("--head", required=True, help="folder of an EAGLE-3 head")
    parser.add_argument("--num-draft", type=int, default=4)
    parser.add_argument("--slices", type=words, default=SLICES)
    parser.add_argument("--prompts-per-slice", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=64)
    return run(study, parser.parse_args())


def study(given: argparse.Namespace) -> Report:
    """Both engines on the same prompts.

    Raises:
        ConfigError: no llama.cpp, or one that does not know such heads.
        ForetokenError: see `export_head`, `LlamaCpp`.
    """
    programs = _programs()
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    prompts = slices(given.slices, given.prompts_per_slice)
    with tempfile.TemporaryDirectory() as work, progress(2 * len(prompts)) as tell:
        rows = compared(programs, given, prompts, Path(work), tell)
    return Report(
        title="An exported EAGLE-3 head in llama.cpp and here",
        command=command_line("exported_head"),
        options={name: str(value) for name, value in vars(given).items() if name not in ("out", "json")},
        results={"rows": [asdict(row) for row in rows], "llama_cpp": programs.version()},
        tables=(table_of(rows),),
        explained=EXPLAINED,
    )


def _programs() -> LlamaCpp:
    named = os.environ.get("FORETOKEN_LLAMA_CPP")
    if not named:
        raise ConfigError("FORETOKEN_LLAMA_CPP", named, "set it to the folder of llama.cpp's programs")
    programs = LlamaCpp.find(Path(named))
    if SPEC_TYPE not in programs.spec_types:
        raise ConfigError(
            "FORETOKEN_LLAMA_CPP", named, f"this build does not know --spec-type {SPEC_TYPE}; build a newer one"
        )
    return programs


def compared(
    programs: LlamaCpp, given: argparse.Namespace, prompts: tuple[Prompt, ...], work: Path, tell: Tell
) -> list[HeadRow]:
    """The rows, one for each prompt; `work` holds the exported head and the GGUF files."""
    params = SamplingParams(max_tokens=given.max_tokens, temperature=0, ignore_eos=True)
    folder, head = model_folder(given.target), work / "head"
    export_head(model_folder(given.head), folder, given.target, engine_of(ENGINE, None), head, given.num_draft)
    target_file = programs.convert(folder, "f32", work / "target.gguf")
    head_file = programs.converted(head, "f32", work / "head.gguf", folder, "--target-model-dir", str(folder))
    spec = SpecConfig("eagle", head=str(head), tree="chain", num_draft=given.num_draft, draft_dtype="float32")
    rows = []
    with LLM(given.target, spec, dtype="float32", device="cpu") as llm:
        other = LlamaRuns(programs, target_file, lambda text: len(llm.encode(text)), torch.get_num_threads())
        for prompt in prompts:
            own = llm.generate([prompt.text], params)[0]
            tell(f"{prompt.name}, ours")
            theirs = other.speculative(KIND, question_of(prompt, params), given.num_draft, head_file)
            tell(f"{prompt.name}, llama.cpp")
            assert theirs.num_drafted is not None, "the program counts what it drafts"
            assert theirs.num_accepted is not None, "and what was accepted"
            counts = (own.stats.num_drafted, own.stats.num_accepted, theirs.num_drafted, theirs.num_accepted)
            rows.append(
                HeadRow(prompt.slice, prompt.name, len(own.token_ids), *counts, same_text(own.text, theirs.text))
            )
    return rows


def same_text(own: str, other: str) -> bool:
    """Whether one text begins with the other: llama.cpp ends with a whole draft."""
    shorter, longer = sorted((own.rstrip("\n"), other), key=len)
    return longer.startswith(shorter)


def table_of(rows: list[HeadRow]) -> Table:
    """A line for each slice and one for all."""
    lines = []
    for name in (*dict.fromkeys(row.slice for row in rows), "all"):
        own = [row for row in rows if name in (row.slice, "all")]
        counts = [sum(getattr(row, field) for row in own) for field in _COUNTS]
        drafted, accepted, their_drafted, their_accepted = counts
        lines.append(
            (
                *(name, str(len(own)), f"{accepted} of {drafted}", _percent(accepted, drafted)),
                *(f"{their_accepted} of {their_drafted}", _percent(their_accepted, their_drafted)),
                f"{sum(row.is_same_text for row in own)} of {len(own)}",
            )
        )
    headings = ("slice", "prompts", "accepted here", "share", "accepted in llama.cpp", "share", "same text")
    return Table("The same head in both engines", headings, tuple(lines))


_COUNTS = ("drafted", "accepted", "their_drafted", "their_accepted")


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "none"


if __name__ == "__main__":
    sys.exit(main())
