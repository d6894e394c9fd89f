"""What does Ray Serve cost beside `foretoken serve` with as many workers on this machine?

    python -m studies.ray_overhead --turns 3 --out ray-overhead.json

Turn by turn each server is started, answers one round that is not counted, then streams to --streams clients that ask
again at once. Tokens per second, and the time from the command to the address and to the first token. Needs the extra
`ray`; OMP_NUM_THREADS holds for both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from importlib.metadata import version
from statistics import median
from typing import Any

from studies.command import record, record_file
from studies.serving_load.client import StreamAnswer, ask
from studies.serving_load.server import KEY, LoadedServer, loaded_server

SERVERS = ("serve", "ray")
_TOKENS = 64


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All turns."""
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in SERVERS}
    for turn in range(options.turns):
        for name in SERVERS if turn % 2 == 0 else reversed(SERVERS):
            turns[name].append(_turn(name, options))
            print(name, turns[name][-1], file=sys.stderr, flush=True)
    return {"ray": version("ray"), "turns": turns, **compared(turns)}


def _turn(name: str, options: argparse.Namespace) -> dict[str, float]:
    flags = ("--target", options.target, "--workers", str(options.workers), "--drafter", options.drafter)
    began_s = time.perf_counter()
    with loaded_server((*flags, "--ray") if name == "ray" else flags) as server:
        address_s = time.perf_counter() - began_s
        first = asyncio.run(ask(server.port, _body(server, 0), KEY))
        first_token_s = first.times_s[0] - began_s
        asyncio.run(_stream(server, options.streams, options.streams))
        began_s = time.perf_counter()
        answers = asyncio.run(_stream(server, options.streams, options.streams * options.rounds))
        took_s = time.perf_counter() - began_s
    if failed := [answer.error for answer in [first, *answers] if answer.error]:
        raise RuntimeError(f"requests failed: {failed}")
    num_tokens = sum(answer.num_tokens for answer in answers)
    gaps = sorted(gap for answer in answers for gap in answer.gaps_s)
    ttft_s = sorted(answer.times_s[0] - answer.sent_s for answer in answers)
    return {
        "tokens_per_s": num_tokens / took_s,
        "address_s": address_s,
        "first_token_s": first_token_s,
        "ttft_median_s": median(ttft_s),
        "gap_median_s": median(gaps),
    }


async def _stream(server: LoadedServer, num_streams: int, num_requests: int) -> list[StreamAnswer]:
    """Answers to clients that ask again at once."""
    numbers, answers = iter(range(num_requests)), list[StreamAnswer]()

    async def client() -> None:
        for number in numbers:
            answers.append(await ask(server.port, _body(server, number), KEY))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(num_streams):
            tasks.create_task(client())
    return answers


def _body(server: LoadedServer, number: int) -> dict[str, Any]:
    prompt = f"Question {number}: what is remarkable about the number {number}?\nAnswer:"
    return {"model": server.model, "prompt": prompt, "max_tokens": _TOKENS, "temperature": 0, "ignore_eos": True}


def compared(turns: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians of each server over its turns, and Ray's tokens per second as a share of the other's."""
    medians = {
        name: {figure: median(turn[figure] for turn in found) for figure in found[0]} for name, found in turns.items()
    }
    return {"median": medians, "share": medians["ray"]["tokens_per_s"] / medians["serve"]["tokens_per_s"]}


def main() -> int:
    """Run the study."""
    made = argparse.ArgumentParser(
        prog="python -m studies.ray_overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--target", default="smollm2")
    made.add_argument("--drafter", default="none")
    made.add_argument("--workers", type=int, default=2)
    made.add_argument("--streams", type=int, default=8)
    made.add_argument("--rounds", type=int, default=6, help="requests of each stream in one turn")
    made.add_argument("--turns", type=int, default=3)
    made.add_argument("--out", type=record_file, help="a JSON file for the record")
    options = made.parse_args()
    print(json.dumps(record("ray_overhead", measure(options), options.out), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
