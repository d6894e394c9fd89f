"""How near a quantised target stays to its own weights in float64, with keys and values in float32 and in float16.

    python -m studies.cache_quality --answers answers.jsonl --documents 50 --out cache-quality.json

Answers of the target (`foretoken train answers`) are read again by the target in float64, whose weights are the file's
numbers and whose activations are not coded, and by the kernels with either cache: the share of positions with the same
likeliest token, and the mean Kullback-Leibler divergence of the distributions, in nats.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from foretoken.model.interface import Segment
from foretoken.model.names import model_folder
from foretoken.model.open import open_model
from foretoken.printing.console import Console
from foretoken.train.answers import read_answers
from studies.command import exit_code_of, record, record_file

_MAX_TOKENS = 700  # of a document
_KINDS = {"float64": ("float64", "model"), "float32 cache": ("auto", "model"), "float16 cache": ("auto", "float16")}


def main() -> int:
    """Measure, print, and with `--out` write the record."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.cache_quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=50, help="evenly spread over the file")
    parser.add_argument("--out", type=record_file, help="a JSON file for the record")
    options = parser.parse_args()
    return exit_code_of(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    pairs = read_answers(options.answers).pairs
    some = pairs[:: max(1, len(pairs) // options.documents)][: options.documents]
    found = {kind: _log_probs(options.target, *how, some) for kind, how in _KINDS.items()}
    exact, wide, narrow = found.values()
    rows = [
        _compared("float32 cache", "float64", wide, exact),
        _compared("float16 cache", "float64", narrow, exact),
        _compared("float16 cache", "float32 cache", narrow, wide),
    ]
    for row in rows:
        Console().line(
            f"{row['of']} beside {row['beside']}: {row['equal_argmax']:.2%} equal, {row['divergence_nats']:.5f} nats"
        )
    about = {"target": options.target, "documents": len(some), "positions": len(exact)}
    record("cache_quality", about | {"rows": rows}, options.out)
    return 0


def _log_probs(
    target: str, dtype: str, cache_dtype: str, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> Tensor:
    """Log-probabilities at every token of the answers, [R, V] float64."""
    model = open_model(model_folder(target), dtype, "cpu", 4096, cache_dtype=cache_dtype)
    rows = []
    for prompt, answer in pairs:
        tokens = [*prompt, *answer][:_MAX_TOKENS]
        model.open(0)
        logits = model.forward(torch.tensor(tokens), [Segment(0, len(tokens), (), len(tokens))]).logits
        model.close(0)
        rows.append(logits[len(prompt) - 1 : -1].double().log_softmax(-1))
    return torch.cat(rows)


def _compared(of: str, beside: str, one: Tensor, other: Tensor) -> dict[str, str | float]:
    same = (one.argmax(-1) == other.argmax(-1)).double().mean()
    divergence = (other.exp() * (other - one)).sum(-1).mean()
    return {"of": of, "beside": beside, "equal_argmax": float(same), "divergence_nats": float(divergence)}


if __name__ == "__main__":
    sys.exit(main())
