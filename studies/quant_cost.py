"""What a model costs in 16, 8 and 4 bits: time to load, memory of the weights, and passes over some rows.

python -m studies.quant_cost --model DIR --rows 1,2,4,8,16 --prompt 256 --out quant.json

All formats are in memory at once and take turns, so that drift hits them alike; the figures are medians. `--prompt 0`
leaves out the pass over a prompt. Each format is loaded `--loads` times, the first time with the file's pages perhaps
not in memory yet.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from foretoken.config import QUANTISED
from foretoken.model.interface import LanguageModel, Segment
from foretoken.model.names import model_folder
from foretoken.model.open import open_model
from studies.command import record

FORMATS = ("plain", *QUANTISED)  # plain: the 16 bits (or more) that --dtype says
_WARM_UP = 3


def main() -> None:
    """Measure, print a table and one JSON object, and with `--out` write that object into a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reference:target", help="folder, hub id or reference:NAME")
    parser.add_argument("--formats", default=",".join(FORMATS), help=f"some of {', '.join(FORMATS)}")
    parser.add_argument("--rows", default="1,2,4,8,16", help="rows of a pass: one token and a chain behind it")
    parser.add_argument("--context", type=int, default=300, help="tokens before a pass")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt run in one pass")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--loads", type=int, default=2)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    formats, counts = options.formats.split(","), [int(word) for word in options.rows.split(",")]
    counts += [options.prompt] if options.prompt else []
    folder = model_folder(options.model)
    load_s = {name: [load(folder, options.dtype, name)[1] for _ in range(options.loads - 1)] for name in formats}
    models: dict[str, LanguageModel] = {}
    for name in formats:
        models[name], elapsed_s = load(folder, options.dtype, name)
        load_s[name].append(elapsed_s)
    times_ms = measure(models, counts, options.context, options.repeats)
    plain = times_ms[formats[0]]
    rows = [
        {
            "format": name,
            "weight_bytes": model.weight_bytes,
            "step_bytes": model.step_bytes,
            "load_s": load_s[name],
            "ms_by_rows": {
                str(count): summary(times_ms[name][count], statistics.median(plain[count])) for count in counts
            },
        }
        for name, model in models.items()
    ]
    print_table(rows, counts)
    settings = {
        "model": options.model,
        "dtype": options.dtype,
        "context": options.context,
        "num_threads": torch.get_num_threads(),
    }
    results = settings | {"num_parameters": models[formats[0]].num_parameters, "formats": rows}
    print(json.dumps(record("quant_cost", results, options.out)))


def load(folder: Path, dtype: str, name: str) -> tuple[LanguageModel, float]:
    """The model in one format, and the seconds that took."""
    gc.collect()
    began = time.perf_counter()
    model = open_model(folder, dtype, "cpu", weights="auto" if name == "plain" else name)
    return model, time.perf_counter() - began


def measure(
    models: dict[str, LanguageModel], counts: Sequence[int], context: int, repeats: int
) -> dict[str, dict[int, list[float]]]:
    """Milliseconds of single passes behind `context` tokens, by format and rows; the first rounds only warm up."""
    generator = torch.Generator().manual_seed(0)
    times_ms: dict[str, dict[int, list[float]]] = {name: {count: [] for count in counts} for name in models}
    for model in models.values():
        prompt = torch.randint(model.vocab_size, (context,), generator=generator)
        model.open(0)
        model.forward(prompt, [Segment(0, context)])
        model.commit(0, context)
    for turn in range(repeats + _WARM_UP):
        for count in counts:
            for name, model in models.items():
                tokens = torch.randint(model.vocab_size, (count,), generator=generator)
                began = time.perf_counter()
                model.forward(tokens, [Segment(0, 1, tuple(range(-1, count - 2)), count)])
                if turn >= _WARM_UP:
                    times_ms[name][count].append((time.perf_counter() - began) * 1e3)
    return times_ms


def summary(values: Sequence[float], baseline_ms: float) -> dict[str, float]:
    """Median and spread, and the ratio to the first format."""
    median = statistics.median(values)
    return {"median_ms": median, "min_ms": min(values), "max_ms": max(values), "ratio": median / baseline_ms}


def print_table(rows: Sequence[dict[str, Any]], counts: Sequence[int]) -> None:
    """One line per format: memory, load time, milliseconds by number of rows."""
    print(
        f"{'format':>8} {'weights':>10} {'a step':>10} {'load':>7} "
        + " ".join(f"{f'{count} rows':>9}" for count in counts)
    )
    for row in rows:
        load_s = statistics.median(row["load_s"])
        sizes = f"{row['weight_bytes'] / 1e6:7.1f} MB {row['step_bytes'] / 1e6:7.1f} MB {load_s:5.2f} s"
        print(
            f"{row['format']:>8} {sizes} "
            + " ".join(f"{row['ms_by_rows'][str(count)]['median_ms']:6.2f} ms" for count in counts)
        )


if __name__ == "__main__":
    main()
