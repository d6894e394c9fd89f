"""The parts that train an EAGLE-3 head on a GPU: the model's own answers, the head, and what it brings.

    benchmarks/gpu/run.sh --out gpu-results --heads --minutes 30

Training goes on where it stopped, so that a lease of minutes can be used in several calls. The checkpoint needs a chat
template: conversations are written by the model itself (`studies.smollm2_heads`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from studies.gpu.parts import TARGET, Part, Scale, study, verb


@dataclass(frozen=True)
class HeadScale:
    """How much is answered and learnt: conversations, prompts of each other kind, tokens of answers, texts at once, and
    windows of a step, the head's vocabulary, tokens seen.
    """

    openings: int
    per_kind: int
    turn_tokens: int
    answer_tokens: int
    columns: int  # of a prompt and its answer
    rows: int
    windows: int
    vocabulary: int
    tokens: int


FULL_HEAD = HeadScale(20_000, 3_000, 120, 256, 768, 1024, 32, 12_288, 40_000_000)
REHEARSED_HEAD = HeadScale(4, 2, 16, 16, 4000, 4, 2, 512, 400)


def head_parts(device: str, scale: Scale, head: HeadScale) -> list[Part]:
    """Prompts, answers, the head, and speeds of one request with it beside lookups."""
    where = ["--target", TARGET, "--device", device]
    answering = ["gpu.answers", *where, "--rows", str(head.rows)]
    settings = (
        f"head.draft_vocab_size={head.vocabulary}",
        f"train.batch_windows={head.windows}",
        "train.num_places=5",
        "train.loss.chunk_rows=8192",  # of a CPU's cache by default
    )
    options = [*(word for one in settings for word in ("--set", one)), "--tokens", str(head.tokens)]
    drafters = ["--drafters", "ngram,eagle:head=heads.eagle/head", "--num-drafts", "2,4", "--repeats", "1"]
    sizes = ["--prompts-per-slice", str(scale.num_prompts), "--max-tokens", str(scale.max_tokens)]
    return [
        _written("openings", ["smollm2_heads", "openings", "--target", TARGET, "--count", str(head.openings)], 60),
        _written(
            "turns",
            [
                *(*answering, "--prompts", "heads.openings.jsonl", "--columns", str(head.turn_tokens + 72)),
                *("--max-tokens", str(head.turn_tokens), "--temperature", "0.9"),
            ],
            120,
        ),
        _written(
            "prompts",
            [
                *("smollm2_heads", "mixed", "--target", TARGET, "--turns", "heads.turns.jsonl"),
                *("--per-kind", str(head.per_kind)),
            ],
            120,
        ),
        _written(
            "answers",
            [
                *(*answering, "--prompts", "heads.prompts.jsonl", "--columns", str(head.columns)),
                *("--max-tokens", str(head.answer_tokens), "--temperature", "0.7"),
            ],
            300,
        ),
        verb(
            "heads.eagle", ["train", "eagle", *where, "--answers", "heads.answers.jsonl", *options], 900, "heads.eagle"
        ),
        verb("heads.drafters", ["bench", "speed", *where, "--dtype", "bfloat16", *drafters, *sizes], 240),
    ]


def _written(name: str, words: Sequence[str], limit_s: float) -> Part:
    return study(f"heads.{name}", words, limit_s, f"heads.{name}.jsonl")
