"""The parts that train an EAGLE-3 head on a GPU: the model's own answers, the head, and what it brings.

    benchmarks/gpu/run.sh --out gpu-results --heads --minutes 30

Answers and training go on where they stopped, so that a lease of minutes can be used in several calls. The
checkpoint needs a chat template: conversations are written by the model itself (`studies.smollm2_heads`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from studies.gpu.parts import TARGET, Part, Scale, study, verb


@dataclass(frozen=True)
class HeadScale:
    """How much is answered and learnt: conversations, prompts of each other kind, tokens of answers, tokens seen."""

    openings: int
    per_kind: int
    turn_tokens: int
    answer_tokens: int
    batch: int
    vocabulary: int
    tokens: int


FULL_HEAD = HeadScale(20_000, 3_000, 120, 256, 256, 8192, 20_000_000)
REHEARSED_HEAD = HeadScale(4, 2, 16, 16, 4, 512, 400)


def head_parts(device: str, scale: Scale, head: HeadScale) -> list[Part]:
    """Prompts, answers, the head, and speeds of one request with it beside lookups."""
    where = ["--target", TARGET, "--device", device]
    answering = [*where, "--dtype", "bfloat16", "--batch-size", str(head.batch)]
    options = ["--set", f"head.draft_vocab_size={head.vocabulary}", "--tokens", str(head.tokens)]
    drafters = ["--drafters", "ngram,eagle:head=heads.eagle/head", "--num-drafts", "2,4", "--repeats", "1"]
    sizes = ["--prompts-per-slice", str(scale.num_prompts), "--max-tokens", str(scale.max_tokens)]
    return [
        _written(
            study, "openings", ["smollm2_heads", "openings", "--target", TARGET, "--count", str(head.openings)], 60
        ),
        _written(
            verb,
            "turns",
            [
                *("train", "answers", *answering, "--prompts", "heads.openings.jsonl"),
                *("--max-tokens", str(head.turn_tokens), "--temperature", "0.9"),
            ],
            300,
        ),
        _written(
            study,
            "prompts",
            [
                *("smollm2_heads", "mixed", "--target", TARGET, "--turns", "heads.turns.jsonl"),
                *("--per-kind", str(head.per_kind)),
            ],
            120,
        ),
        _written(
            verb,
            "answers",
            [
                *("train", "answers", *answering, "--prompts", "heads.prompts.jsonl"),
                *("--max-tokens", str(head.answer_tokens), "--temperature", "0.7"),
            ],
            600,
        ),
        verb(
            "heads.eagle", ["train", "eagle", *where, "--answers", "heads.answers.jsonl", *options], 900, "heads.eagle"
        ),
        verb("heads.drafters", ["bench", "speed", *where, "--dtype", "bfloat16", *drafters, *sizes], 240),
    ]


def _written(make: Callable[..., Part], name: str, words: Sequence[str], limit_s: float) -> Part:
    return make(f"heads.{name}", words, limit_s, f"heads.{name}.jsonl")
