"""How well an observer of packets recognises a prompt, by the sizes and times of a stream's events.

    python -m studies.side_channel --prompts 12 --repeats 8

The same prompts are answered again and again, sampled with other seeds, by an application in this process. The observer
sees the size and the time of each write and nothing else. It compares a stream with all others and names the prompt of
the most similar one (1-nearest neighbour, each stream left out in turn). By chance it is right once in `prompts` times.

The settings: none; padding; padding and an interval. What an answer's length tells is shown apart: answers of one
length, and answers that end by themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from foretoken import LLM, AsyncEngine
from foretoken.backend.local import LocalBackend
from foretoken.server.api.app import create_app
from foretoken.server.api.config import ApiConfig
from studies.command import record, record_file

SETTINGS = {
    "none": {},
    "padding": {"force_obfuscation": True},
    "padding, interval 100 ms": {"force_obfuscation": True, "granularity": "interval:100"},
}
_TEXTS = (
    "class Reader:\n    def __init__(self, path):\n",
    "def test_add(self):\n        self.assertEqual(",
    "import os\nimport sys\n\n\ndef main(",
    "for name in sorted(names):\n    print(name",
    "HTTP_STATUS = {\n    200: 'OK',\n    404: ",
    "    raise ValueError(",
    "def __repr__(self):\n        return ",
    "with open(path, 'rb') as file:\n    data = ",
    "# Copyright",
    "    try:\n        import json\n    except ImportError:\n",
    "x = [\n    1, 2, 3,\n    4, 5, 6,\n    ",
    '"""Tools for',
    "def _check(self, value):\n        if value is None:\n            return\n        if value < 0:\n",
    "class Error(Exception):\n    pass\n\n\nclass ",
    "    parser.add_argument('--verbose', action='store_true',",
    "async def handler(reader, writer):\n    while True:\n",
)


@dataclass(frozen=True)
class Observed:
    """One stream: what was sent, and when."""

    prompt: int
    sizes: tuple[int, ...]
    times_s: tuple[float, ...]

    def features(self, what: str) -> tuple[float, ...]:
        """What an observer of `what` compares."""
        gaps = tuple(after - before for before, after in pairwise(self.times_s))
        return tuple(map(float, self.sizes)) if what == "sizes" else gaps


async def observe(app: Any, prompt: int, body: dict[str, Any]) -> Observed:  # noqa: ANN401 - an ASGI application
    """Stream one answer, and note its writes."""
    sizes, times, waiting = list[int](), list[float](), [json.dumps(body).encode()]

    async def receive() -> dict[str, Any]:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return dict(await asyncio.get_running_loop().create_future())  # it never leaves

    async def send(message: dict[str, Any]) -> None:
        if message.get("body"):
            sizes.append(len(message["body"]))
            times.append(time.perf_counter())
        elif message.get("status", 200) != 200:
            raise RuntimeError(f"a request was refused with {message['status']}")

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }
    await app(scope, receive, send)
    return Observed(prompt, tuple(sizes), tuple(times))


def recognised(streams: Sequence[Observed], what: str) -> float:
    """Share of streams whose most similar other one has the same prompt."""
    features = [stream.features(what) for stream in streams]
    right = 0
    for place, stream in enumerate(streams):
        others = [other for other in range(len(streams)) if other != place]
        nearest = min(others, key=lambda other: _distance(features[place], features[other]))
        right += streams[nearest].prompt == stream.prompt
    return right / len(streams)


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Mean difference of what both have, and a fixed part for each that only one has."""
    shared = min(len(one), len(other))
    scale = max(max(one, default=1.0), max(other, default=1.0), 1e-9)
    apart = sum(abs(a - b) for a, b in zip(one, other, strict=False)) / scale
    return (apart + abs(len(one) - len(other))) / max(1, shared)


async def measure(options: argparse.Namespace, backend: LocalBackend) -> list[dict[str, Any]]:
    """A row for each setting and kind of answer."""
    rows = []
    for is_fixed in (True, False):
        for name, setting in SETTINGS.items():
            app = create_app(backend, ApiConfig(**setting))  # type: ignore[arg-type]  # texts and flags
            streams = []
            for repeat in range(options.repeats):
                for prompt, text in enumerate(_TEXTS[: options.prompts]):
                    body = {
                        "prompt": text,
                        "stream": True,
                        "max_tokens": options.tokens,
                        "ignore_eos": is_fixed,
                        "temperature": options.temperature,
                        "seed": 1000 * repeat + prompt,
                        "cache_salt": f"{name} {repeat} {prompt}",
                        "spec": {"drafter": options.drafter},
                    }
                    streams.append(await observe(app, prompt, body))
            row = {
                "setting": name,
                "answers": "one length" if is_fixed else "end by themselves",
                "by_sizes": recognised(streams, "sizes"),
                "by_times": recognised(streams, "times"),
                "bytes_per_answer": sum(sum(stream.sizes) for stream in streams) / len(streams),
            }
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=12, choices=range(2, len(_TEXTS) + 1))
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.3)
    parser.add_argument("--drafter", default="suffix")
    parser.add_argument("--out", type=record_file, help="a JSON file for the record")
    options = parser.parse_args()
    with LLM("reference:target", dtype="float32", profile="off") as llm, AsyncEngine(llm) as engine:
        rows = asyncio.run(measure(options, LocalBackend(engine, "reference")))
    found = {"chance": 1 / options.prompts, "num_streams": options.prompts * options.repeats, "rows": rows}
    print(json.dumps(record("side_channel", found, options.out), indent=1))


if __name__ == "__main__":
    main()
