"""What strict numerics cost: passes of a decoding sequence over some rows, and a prompt, against the default path.

python -m studies.strict_cost --target DIR --rows 1,4,8,16 --prompt 512 --out strict.json

Both paths share one set of weights and take turns, so that drift hits them alike; the figures are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor

from foretoken.model.interface import Segment
from foretoken.model.loader import load_decoder
from foretoken.model.names import model_folder
from foretoken.model.paged import PagedModel
from foretoken.model.paged_cache import DEFAULT_BLOCK_SIZE
from foretoken.model.strict import StrictModel, strict_kind
from studies.command import record, record_file

_WARM_UP = 2


def main() -> None:
    """Measure, print a table, and with `--out` write the raw times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder, hub id or reference:target")
    parser.add_argument(
        "--rows", default="1,4,8,16", help="rows of a decoding pass: the anchor and a chain of draft tokens"
    )
    parser.add_argument("--context", type=int, default=300, help="tokens before a decoding pass")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt run in one pass")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=record_file, help="a JSON file for the record")
    options = parser.parse_args()
    decoder = load_decoder(model_folder(options.target), options.dtype, options.device)
    num_slots = 2 * DEFAULT_BLOCK_SIZE + 2 * (options.context + options.prompt)
    default = PagedModel(decoder, num_slots)
    began = time.perf_counter()
    strict = strict_kind(decoder)(decoder, num_slots)
    proof_s = time.perf_counter() - began
    counts = [int(word) for word in options.rows.split(",")]
    times_ms = measure({"default": default, "strict": strict}, counts, options.context, options.prompt, options.repeats)
    print(
        f"{options.target}, {default.num_parameters / 1e6:.0f} M parameters, {default.dtype}, "
        f"{torch.get_num_threads()} threads"
    )
    if isinstance(strict, StrictModel):
        print(
            f"strict: tiles of {strict.proven.sizes} rows, {strict.proven.positions_per_call} positions to a "
            f"call, proven in {proof_s:.1f} s"
        )
    else:
        print("strict: compiled kernels compute a row the same way whatever is beside it")
    print(f"{'pass':>12} {'default ms':>12} {'strict ms':>12} {'ratio':>7}")
    for name, sides in times_ms.items():
        plain, same = (statistics.median(sides[side]) for side in ("default", "strict"))
        print(f"{name:>12} {plain:12.2f} {same:12.2f} {same / plain:7.2f}")
    if options.out is not None:
        settings = {name: str(value) for name, value in vars(options).items() if name != "out"}
        proven = None
        if isinstance(strict, StrictModel):
            proven = {
                "sizes": strict.proven.sizes,
                "positions_per_call": strict.proven.positions_per_call,
                "proof_s": proof_s,
            }
        results = settings | {
            "num_parameters": default.num_parameters,
            "num_threads": torch.get_num_threads(),
            "proven": proven,
            "times_ms": times_ms,
        }
        record("strict_cost", results, options.out)


def measure(
    models: dict[str, PagedModel], counts: list[int], context: int, prompt: int, repeats: int
) -> dict[str, dict[str, list[float]]]:
    """Milliseconds by pass and by side, `repeats` each."""
    generator = torch.Generator().manual_seed(0)
    vocab_size = next(iter(models.values())).vocab_size

    def tokens(count: int) -> Tensor:
        return torch.randint(vocab_size, (count,), generator=generator)

    past = tokens(context)
    for model in models.values():
        model.open(0)
        model.forward(past.to(model.device), [Segment(0, context)])
        model.commit(0, context)
    passes = {f"{count} rows": Segment(0, 1, tuple(range(-1, count - 2)), count) for count in counts}
    passes[f"prompt {prompt}"] = Segment(1, prompt)
    times_ms: dict[str, dict[str, list[float]]] = {name: {side: [] for side in models} for name in passes}
    for turn in range(_WARM_UP + repeats):
        for name, segment in passes.items():
            run = tokens(segment.num_rows)
            for side in sorted(models, reverse=bool(turn % 2)):
                elapsed_ms = _time_ms(models[side], run.to(models[side].device), segment)
                if turn >= _WARM_UP:
                    times_ms[name][side].append(elapsed_ms)
    return times_ms


def _time_ms(model: PagedModel, tokens: Tensor, segment: Segment) -> float:
    """One pass whose rows are forgotten; a sequence that is not open yet is opened for it."""
    fresh = segment.sequence not in model.tables
    if fresh:
        model.open(segment.sequence)
    began = time.perf_counter()
    model.forward(tokens, [segment]).logits.argmax(-1).tolist()  # waits for the device
    elapsed_ms = (time.perf_counter() - began) * 1e3
    if fresh:
        model.close(segment.sequence)
    return elapsed_ms


if __name__ == "__main__":
    main()
