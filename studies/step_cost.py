"""What one pass of a model costs by number of rows: the table that decides how far ahead it pays to draft.

    python -m studies.step_cost --models DIR,DIR@int4,FILE.gguf --rows 1,2,4,8,16 --context 300

A model is a folder, a hub id, a reference model or a GGUF file; `@int8` and `@int4` are its quantised `weights`,
another format behind the `@` is its `dtype`. `random:8b:MODEL` has random weights, made on the device, and the shape to
which `studies.widen` would enlarge the model: the cost of a pass depends on no number of it. `random:30b-a3b` has the
shape of Qwen3-30B-A3B, a mixture of experts, whose random tokens meet more experts than a text. `--settings` opens each
model several times over the same weights: as by default, with keys gathered by torch (`batched`), with the Triton
kernel (`triton`), and with CUDA graphs beside it (`graphs`). Models, settings and row counts take turns, so that drift
hits all alike.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch

from foretoken.config import QUANTISED
from foretoken.errors import InputError
from foretoken.model.architecture import ModelConfig
from foretoken.model.attention.choice import ATTENTION_VARIABLE
from foretoken.model.config_json import config_from_hf
from foretoken.model.decoder import Decoder
from foretoken.model.graphs.choice import GRAPHS_VARIABLE
from foretoken.model.interface import LanguageModel, OpenModel, Segment
from foretoken.model.loader import parse_dtype, read_config
from foretoken.model.names import model_folder
from foretoken.model.open import open_device, open_model
from foretoken.model.paged import PagedModel
from foretoken.model.paged_cache import DEFAULT_BLOCK_SIZE
from foretoken.printing.console import Console
from studies.command import exit_code_of, record, record_file, whole_numbers, words
from studies.widen.plan import plan

_WARM_UP_TURNS = 3  # graphs are captured in the first
_TRITON = {ATTENTION_VARIABLE: "triton", GRAPHS_VARIABLE: "off"}
SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "batched": {ATTENTION_VARIABLE: "batched"},
    "triton": _TRITON,
    "graphs": {**_TRITON, GRAPHS_VARIABLE: "on"},
}

SHAPES: dict[str, dict[str, Any]] = {
    "30b-a3b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e7,
        "tie_word_embeddings": False,
    }
}


def main() -> int:
    """Measure, print the table, and with `--out` write the record."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.step_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", type=words, required=True, help="MODEL or MODEL@FORMAT, separated by commas")
    parser.add_argument("--rows", type=whole_numbers, default=(1, 2, 4, 8, 16))
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--settings", type=words, default=("default",), help=f"some of {', '.join(SETTINGS)}")
    parser.add_argument("--out", type=record_file, help="a JSON file for the record")
    options = parser.parse_args()
    return exit_code_of(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    console, models = Console(stderr=True), dict[str, OpenModel]()
    for name in options.models:
        console.line(f"loading {name}")
        models |= opened_as(name, options.settings, options.device, options.context + max(options.rows))
    times_ms: dict[tuple[str, int], list[float]] = defaultdict(list)
    for name, count, elapsed_ms in measure(models, options.rows, options.context, options.repeats):
        times_ms[name, count].append(elapsed_ms)
    found = [summary(name, models[name], options.rows, times_ms) for name in models]
    about = {"context": options.context, "repeats": options.repeats, "threads": torch.get_num_threads()}
    record("step_cost", {**about, "models": found}, options.out)
    for one in found:
        cells = " | ".join(f"{row['median_ms']:.1f}" for row in one["rows"])
        Console().line(f"| {one['model']} | {one['step_bytes'] / 1e6:.0f} MB | {cells} |")
    return 0


def opened(name: str, device: str, num_tokens: int) -> OpenModel:
    """The model that `name` names, with room for `num_tokens`.

    Raises:
        ForetokenError: see `open_model`.
    """
    place, _, kind = name.partition("@")
    if place.startswith("random:"):
        _, size, *source = place.split(":", 2)
        config = plan(read_config(model_folder(source[0])), size).config if source else _shape(size)
        return _random(config, kind, open_device(device), num_tokens)
    weights, dtype = (kind, "auto") if kind in QUANTISED else ("auto", kind or "auto")
    return open_model(model_folder(place), dtype, device, 2 * num_tokens + DEFAULT_BLOCK_SIZE, weights=weights)


def _shape(size: str) -> ModelConfig:
    if size not in SHAPES:
        remedy = f"choose one of {', '.join(SHAPES)}, or name a model to widen behind it"
        raise InputError("models", f"random:{size}", remedy)
    return config_from_hf(SHAPES[size])


def _random(config: ModelConfig, dtype: str, device: torch.device, num_tokens: int) -> PagedModel:
    """A model with random weights of `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(parse_dtype(dtype, torch.bfloat16))
    try:
        with device:
            decoder = Decoder(config).requires_grad_(False)
    finally:
        torch.set_default_dtype(before)
    for parameter in decoder.parameters():
        if parameter.dim() == 2:
            parameter.normal_(0.0, 0.02)
    return PagedModel(decoder, 2 * num_tokens + DEFAULT_BLOCK_SIZE)


def opened_as(name: str, settings: Sequence[str], device: str, num_tokens: int) -> dict[str, OpenModel]:
    """The model under each of `settings`, over the same weights: its name and a setting that is not the default.

    Raises:
        ForetokenError: see `opened`; no such setting.
    """
    models: dict[str, OpenModel] = {}
    for setting in settings:
        if setting not in SETTINGS:
            raise InputError("settings", setting, f"choose some of {', '.join(SETTINGS)}")
        with _variables(SETTINGS[setting]):
            first = next(iter(models.values()), None)
            model = opened(name, device, num_tokens) if first is None else first.fresh()
        models[name if setting == "default" else f"{name} {setting}"] = model
    return models


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({} if value is None else {name: value})


def summary(
    name: str, model: OpenModel, counts: Sequence[int], times_ms: dict[tuple[str, int], list[float]]
) -> dict[str, Any]:
    """Medians of one model by rows, and over one row."""
    medians = {count: statistics.median(times_ms[name, count]) for count in counts}
    rows = [
        {
            "rows": count,
            "median_ms": medians[count],
            "min_ms": min(times_ms[name, count]),
            "max_ms": max(times_ms[name, count]),
            "over_first": medians[count] / medians[counts[0]],
        }
        for count in counts
    ]
    graphs = model.graphs if isinstance(model, PagedModel) else None
    return {
        "model": name,
        "num_parameters": model.num_parameters,
        "step_bytes": model.step_bytes,
        "steps": None if graphs is None else dict(graphs.steps),  # replayed, or not and why
        "rows": rows,
    }


def measure(
    models: dict[str, OpenModel], counts: Sequence[int], context: int, repeats: int
) -> Iterator[tuple[str, int, float]]:
    """(model, rows, milliseconds) of single passes over a sequence of `context` tokens; the first turns warm up."""
    generator = torch.Generator().manual_seed(0)
    for model in models.values():
        model.open(0)
        _pass(model, torch.randint(model.vocab_size, (context,), generator=generator), Segment(0, context))
        model.commit(0, context)
    for turn in range(repeats + _WARM_UP_TURNS):
        for (name, model), count in product(models.items(), counts):
            tokens = torch.randint(model.vocab_size, (count,), generator=generator)
            began = time.perf_counter()
            _pass(model, tokens, Segment(0, 1, tuple(range(-1, count - 2)), count))
            elapsed_ms = (time.perf_counter() - began) * 1e3
            if turn >= _WARM_UP_TURNS:
                yield name, count, elapsed_ms


def _pass(model: LanguageModel, tokens: torch.Tensor, segment: Segment) -> None:
    logits = model.forward(tokens.to(model.device), [segment]).logits
    logits.argmax(-1).tolist()  # waits for the device


if __name__ == "__main__":
    sys.exit(main())
