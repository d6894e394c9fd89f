"""What one pass of a model costs by number of rows: the table that decides how far ahead it pays to guess.

python -m studies.step_cost --model DIR --rows 1,2,4,8,16 --context 300
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from foretoken.model.interface import LanguageModel, Segment
from foretoken.model.open import model_folder, open_model
from studies.command import record


def main() -> None:
    """Measure and print one JSON object; row counts take turns, so that drift hits all alike."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", default="1,2,4,8,16")
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model = open_model(model_folder(options.model), options.dtype, options.device)
    counts = [int(word) for word in options.rows.split(",")]
    times_ms: dict[int, list[float]] = {count: [] for count in counts}
    for count, elapsed_ms in measure(model, counts, options.context, options.repeats):
        times_ms[count].append(elapsed_ms)
    medians = {count: statistics.median(values) for count, values in times_ms.items()}
    rows = [
        {
            "rows": count,
            "median_ms": medians[count],
            "min_ms": min(values),
            "max_ms": max(values),
            "ratio_to_one": medians[count] / medians[counts[0]],
        }
        for count, values in times_ms.items()
    ]
    results = {"model": options.model, "num_parameters": model.num_parameters, "context": options.context, "rows": rows}
    print(json.dumps(record("step_cost", results, options.out)))


def measure(model: LanguageModel, counts: list[int], context: int, repeats: int) -> Iterator[tuple[int, float]]:
    """(rows, milliseconds) of single passes over a sequence of `context` tokens; the first three rounds warm up."""
    generator = torch.Generator().manual_seed(0)
    model.open(0)
    prompt = torch.randint(model.vocab_size, (context,), generator=generator).to(model.device)
    model.forward(prompt, [Segment(0, context)])
    model.commit(0, context)
    for turn in range(repeats + 3):
        for count in counts:
            tokens = torch.randint(model.vocab_size, (count,), generator=generator).to(model.device)
            began = time.perf_counter()
            logits = model.forward(tokens, [Segment(0, 1, tuple(range(-1, count - 2)), count)]).logits
            logits.argmax(-1).tolist()  # waits for the device
            elapsed_ms = (time.perf_counter() - began) * 1e3
            if turn >= 3:
                yield count, elapsed_ms


if __name__ == "__main__":
    main()
