"""The parts of a run on a GPU: the command of each, what it writes, and how long it may take."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

# Tests that a GPU runs beside those of every machine; the rest of the files have nothing for one.
_TESTS = (
    "tests/model/test_gpu.py",
    "tests/heads/test_eagle_graphs.py",
    "tests/engine/test_graphs.py",
    "tests/verify/test_device.py",
    "tests/text/test_processors.py",
    "tests/engine/test_exactness.py",
    "tests/engine/test_strict.py",
)
AS_IS = "as-is"  # the source itself, in bf16
TARGET = f"models/{AS_IS}"


@dataclass(frozen=True)
class Scale:
    """How large a run is: the machine's own, or a rehearsal's, whose numbers mean nothing."""

    sizes: tuple[str, ...]  # of models with random weights, beside the model itself
    rows: str  # nodes of a round
    context_tokens: int
    repeats: int
    batches: str
    max_tokens: int
    num_prompts: int  # answers of each audit, prompts of each slice
    mebibytes: int  # of the memory that is copied
    drafters: str


FULL = Scale(
    sizes=("8b",),
    rows="1,2,4,8,16,32,64,128",
    context_tokens=300,
    repeats=20,
    batches="1,2,4,8,16,32,64",
    max_tokens=64,
    num_prompts=6,
    mebibytes=2048,
    drafters="ngram,suffix,recycling,lookahead,early_exit",
)
REHEARSAL = Scale((), "1,4", 16, 1, "1,2", 4, 1, 8, "ngram")


@dataclass(frozen=True)
class Part:
    """A command that runs for at most `limit_s`; `out` is the file or folder that it writes in the folder of the run.

    It is started there, so that no result names a folder of this machine, or in the checkout (`from_checkout`). A line
    of its output that ends with `means_nothing_ran` says that it measured nothing. A command that knows no devices sees
    `only_gpu` alone.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    out: str | None = None
    from_checkout: bool = False
    means_nothing_ran: str | None = None
    only_gpu: int | None = None


def parts_of(source: str, device: str, scale: Scale) -> list[Part]:
    """What is run with the checkpoint `source`, in order: what is right, then how fast it is."""
    skipped = None if device == "cpu" else "no CUDA device"
    # Each test has a line: of those that do not end in their time, the log says how far they came.
    pytest = (sys.executable, "-m", "pytest", "-v", "-rs", "-m", "gpu", *_TESTS)
    _, _, number = device.partition(":")
    only_gpu = int(number) if number else None
    found = [
        study("machine", ["gpu.here", "--device", device], 60),
        Part("tests", pytest, 300, from_checkout=True, means_nothing_ran=skipped, only_gpu=only_gpu),
        study("copy", ["gpu.copy_bandwidth", "--device", device, "--mebibytes", str(scale.mebibytes)], 60),
    ]
    checkpoint = ("studies.gpu.checkpoint", "--source", source, "--to", AS_IS, "--out", TARGET)
    found.append(Part(f"{AS_IS}.checkpoint", (sys.executable, "-m", *checkpoint), 120, TARGET))
    found += [_rounds(size, f"random:{size}:{TARGET}", device, scale) for size in scale.sizes]
    return [*found, *_parts_of_model(device, scale)]


def _rounds(name: str, model: str, device: str, scale: Scale) -> Part:
    """Passes over some nodes, under every setting that the device has; one node is a plain step."""
    words = ["step_cost", "--models", f"{model}@bfloat16", "--context", str(scale.context_tokens), "--device", device]
    settings = "default" if device == "cpu" else "batched,triton,graphs"
    sizes = ["--rows", scale.rows, "--repeats", str(scale.repeats)]
    return study(f"{name}.rounds", [*words, *sizes, "--settings", settings], 120)


def _parts_of_model(device: str, scale: Scale) -> list[Part]:
    """Equality and law under a few drafters, then rounds, every drafter, batches."""
    shared = ["--target", TARGET, "--dtype", "bfloat16", "--device", device]
    tokens, prompts = ["--max-tokens", str(scale.max_tokens)], str(scale.num_prompts)
    audit = ["audit", *shared, "--num-draft", "4", "--num-prompts", prompts, *tokens]
    drafters = ["--drafters", scale.drafters, "--num-drafts", "4", "--repeats", "1", "--prompts-per-slice", prompts]
    kept = ["--resume", f"{AS_IS}.drafters.jsonl"]
    batches = ["gpu.batches", "--target", TARGET, "--device", device, "--batches", scale.batches]
    return [
        *(verb(f"{AS_IS}.audit.{name}", [*audit, "--drafter", name], 90) for name in ("ngram", "early_exit")),
        _rounds(AS_IS, TARGET, device, scale),
        verb(f"{AS_IS}.drafters", ["bench", "speed", *shared, *drafters, *tokens, *kept], 180),
        study(f"{AS_IS}.batches", [*batches, *tokens], 120),
    ]


def study(name: str, words: Sequence[str], limit_s: float, out: str | None = None) -> Part:
    """A study that writes `out`, by default a result of the part's name."""
    out = out or f"{name}.result.json"
    return Part(name, (sys.executable, "-m", f"studies.{words[0]}", *words[1:], "--out", out), limit_s, out)


def verb(name: str, words: Sequence[str], limit_s: float, out: str | None = None) -> Part:
    """The same of a verb of the command line."""
    out = out or f"{name}.result.json"
    return Part(name, (sys.executable, "-m", "foretoken", *words, "--out", out), limit_s, out)
