"""What a decode step pays when a sequence's blocks are not neighbours, as after it began with blocks of another one.

    python -m studies.gather_cost --out gather.json                       a random model of 100 M parameters
    python -m studies.gather_cost --model reference:target --contexts 512,1024,2000

An unbroken run of blocks is read as a view; anything else is gathered, the whole context, in every layer of every step.
Three layouts take turns: `adjacent`; `adopted`, the first quarter in one place and the rest in another; `scattered`, no
two blocks neighbours. Beside them stands what it costs to read tokens of a prompt, and so after how many steps
gathering has cost more than adopting saved.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

import torch

from foretoken.kv.blocks import BlockTable
from foretoken.model.architecture import ModelConfig
from foretoken.model.decoder import Decoder
from foretoken.model.interface import Segment
from foretoken.model.layers import Linear
from foretoken.model.names import model_folder
from foretoken.model.open import open_model
from foretoken.model.paged import PagedModel
from studies.command import record, record_file

LAYOUTS = ("adjacent", "adopted", "scattered")
_ADOPTED_TOKENS = (32, 64, 128, 256, 512)
_CHUNK_TOKENS = 512
_WARM_ROUNDS = 3


def random_model(cache_tokens: int) -> PagedModel:
    """A Llama of about 100 M parameters in bfloat16 with weights that mean nothing."""
    config = ModelConfig("llama", 8192, 768, 2048, 14, 12, 4, 64, 1 << 15, dtype="bfloat16")
    torch.manual_seed(0)
    decoder = Decoder(config)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.02)
    decoder = decoder.to(torch.bfloat16).eval().requires_grad_(False)
    for module in decoder.modules():
        if isinstance(module, Linear):
            module.pack()
    return PagedModel(decoder, cache_tokens)


def blocks_of(layout: str, count: int) -> list[int]:
    """Places of `count` blocks in a cache that has room for twice as many and a few."""
    if layout == "adjacent":
        return list(range(count))
    if layout == "adopted":
        return [*range(count // 4), *range(count, 2 * count - count // 4)]
    return [2 * place for place in reversed(range(count))]


def step_ms(model: PagedModel, layout: str, context: int, num_rows: int) -> float:
    """One step of `num_rows` rows behind `context` tokens."""
    count = -(-(context + num_rows) // model.block_size)
    model.tables[0] = BlockTable(
        blocks_of(layout, count), context
    )  # what stands in the blocks does not change what reading them costs
    tokens = torch.arange(num_rows)
    began_s = time.perf_counter()
    model.forward(tokens, [Segment(0, 1, tuple(range(-1, num_rows - 2)), num_rows)])
    return 1000 * (time.perf_counter() - began_s)


def read_ms(model: PagedModel, behind: int, count: int) -> float:
    """Reading `count` tokens of a prompt behind `behind` others, in one forward."""
    model.tables[0] = BlockTable(list(range(-(-(behind + count) // model.block_size))), behind)
    began_s = time.perf_counter()
    model.forward(torch.arange(count), [Segment(0, count, (), 0)])
    return 1000 * (time.perf_counter() - began_s)


def measure(model: PagedModel, context: int, num_rows: int, repeats: int) -> dict[str, object]:
    """Median milliseconds of every layout, and the steps after which adopting some tokens has cost more than it
    saved.
    """
    times: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
    for turn in range(repeats + _WARM_ROUNDS):
        for layout in LAYOUTS:  # in turns, so that drift hits all alike
            elapsed = step_ms(model, layout, context, num_rows)
            if turn >= _WARM_ROUNDS:
                times[layout].append(elapsed)
    medians = {layout: statistics.median(each) for layout, each in times.items()}
    extra = medians["adopted"] - medians["adjacent"]
    steps = {}
    for count in (count for count in _ADOPTED_TOKENS if count < context):
        rest = min(context - count, _CHUNK_TOKENS)
        saved = statistics.median(
            read_ms(model, 0, count + rest) - read_ms(model, count, rest) for _ in range(max(3, repeats // 5))
        )
        steps[count] = {"saved_ms": saved, "steps": saved / extra if extra > 0 else None}
    return {
        "context": context,
        "rows": num_rows,
        "median_ms": medians,
        "ratio": {layout: medians[layout] / medians["adjacent"] for layout in LAYOUTS},
        "extra_ms": extra,
        "steps_that_eat_up_an_adopted_prefix_of": steps,
    }


def main() -> int:
    """Measure, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder, hub id or reference:target; without it a random model")
    parser.add_argument("--contexts", default="512,1024,2048,4096")
    parser.add_argument("--rows", default="1,5")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--out", type=record_file, help="a JSON file for the record")
    options = parser.parse_args()
    contexts, rows = ([int(word) for word in words.split(",")] for words in (options.contexts, options.rows))
    cache_tokens = 2 * max(contexts) + 512
    model = (
        random_model(cache_tokens)
        if options.model is None
        else open_model(model_folder(options.model), cache_tokens=cache_tokens)
    )
    if not isinstance(model, PagedModel):
        parser.error(f"{options.model} runs through transformers, which has no blocks")
    results = []
    for context in contexts:
        for count in rows:
            results.append(measure(model, context, count, options.repeats))
            one = results[-1]
            print(
                json.dumps({name: one[name] for name in ("context", "rows", "median_ms", "ratio")}),
                file=sys.stderr,
                flush=True,
            )
    report = {
        "model": options.model or "random",
        "num_parameters": model.num_parameters,
        "block_size": model.block_size,
        "results": results,
    }
    print(json.dumps(record("gather_cost", report, options.out), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
