"""Load on `foretoken serve`, in processes of its own on this machine.

    python -m studies.serving_load --minutes 10 --out serving.json

`soak`: requests per second of 64 clients that ask again at once, then an open loop at --share of it, with clients that
leave; then idle, and what is still held. `cost`: tokens per second at 16 streams through HTTP and through the library,
turn by turn. `slow`: gaps of quick clients beside slow ones.

Exit code 5: a request was lost, something was kept, file handles grew; and, in runs of ten minutes or more, the memory
grew by more than --max-mb-per-hour.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any

from studies.command import record, record_file, words
from studies.serving_load.cost import LibraryProcess, compare
from studies.serving_load.server import LoadedServer, loaded_server
from studies.serving_load.slow import compare_slow
from studies.serving_load.soak import WARM_SHARE, Mix, capacity, fill, soak

PARTS = ("soak", "cost", "slow")
_LONG_MINUTES = 10.0  # below it the growth of memory is what was not yet filled
_MAX_MORE_FILES = 2  # a connection to the metrics, and one that is just closing


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All parts that were asked for, on one server."""
    report: dict[str, Any] = {}
    arguments = ("--dtype", options.dtype, "--cost-profile", "off", "--cache-tokens", str(options.cache_tokens))
    models = ("--target", options.target, *(("--draft", options.draft) if options.draft else ()))
    drafting = ("--drafter", options.drafter, *(f"--drafter-option={one}" for one in options.drafter_option))
    with loaded_server((*models, *arguments, *drafting)) as server:
        if "soak" in options.parts:
            report["soak"] = asyncio.run(_soak(server, options))
        if "slow" in options.parts:
            report["slow"] = asyncio.run(compare_slow(server, options.requests, options.turns, options.seed))
        if "cost" in options.parts:
            library = LibraryProcess((options.dtype, str(options.cache_tokens)))
            try:
                report["cost"] = compare(server, library, options.turns, options.rounds, options.seed)
            finally:
                library.close()
    return report


async def _soak(server: LoadedServer, options: argparse.Namespace) -> dict[str, Any]:
    mix, filled, rate = Mix(options.tenants, structures=bool(options.fill_tokens)), {}, options.rate
    if options.fill_tokens:
        filled = await fill(server, options.fill_tokens, options.streams, mix, options.seed)
        print(f"filled: {filled}", file=sys.stderr, flush=True)
    if rate is None:
        most = await capacity(server, options.streams, 8 * options.streams, options.seed)
        print(f"capacity: {most:.1f} requests/s with {options.streams} clients", file=sys.stderr, flush=True)
        rate = options.share * most
    print(f"{rate:.1f} requests/s for {options.minutes:g} minutes", file=sys.stderr, flush=True)
    warm_share = 0.0 if filled else WARM_SHARE
    found = await soak(server, options.minutes, rate, options.seed, mix, warm_share)
    return {"filled": filled, **found} if filled else found


def failures(report: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """What must not be."""
    found = []
    one = report.get("soak")
    if one is not None:
        found += [f"{count} requests: {error}" for error, count in one["errors"].items()] + one["kept"]
        if one["files_after"] > one["files_before"] + _MAX_MORE_FILES:
            found.append(f"file handles: {one['files_before']} before, {one['files_after']} after")
        if options.minutes >= _LONG_MINUTES and one["resident_mb_per_hour"] > options.max_mb_per_hour:
            found.append(f"memory: {one['resident_mb_per_hour']:.2f} MB an hour")
    return found


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m studies.serving_load", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--parts", type=words, default=PARTS, help=f"of {', '.join(PARTS)}")
    made.add_argument("--minutes", type=float, default=10.0, help="of the soak")
    made.add_argument("--streams", type=int, default=64, help="clients that measure the capacity")
    made.add_argument("--share", type=float, default=0.8, help="of the capacity")
    made.add_argument("--rate", type=float, help="requests per second, instead of a share of the capacity")
    made.add_argument("--tenants", type=int, default=3, choices=(1, 2, 3), help="that the soak's requests belong to")
    made.add_argument(
        "--fill-tokens",
        type=int,
        default=0,
        help="of finished answers that each tenant's store takes in before the soak",
    )
    made.add_argument("--turns", type=int, default=5, help="of cost and slow")
    made.add_argument("--rounds", type=int, default=4, help="requests of each stream in one turn of cost")
    made.add_argument("--requests", type=int, default=10, help="of each quick client in one turn of slow")
    made.add_argument("--max-mb-per-hour", type=float, default=1.0)
    made.add_argument("--target", default="reference:target", help="folder, hub id or reference:target")
    made.add_argument("--draft", default="reference:draft", help="of the drafter auto; empty: none")
    made.add_argument("--drafter", default="auto", help="of requests that name none")
    made.add_argument("--drafter-option", action="append", default=[], help="NAME=VALUE, of that drafter")
    made.add_argument("--dtype", default="float32")
    made.add_argument("--cache-tokens", type=int, default=16384)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--out", type=record_file, help="a JSON file for the record")
    return made


def main() -> int:
    """Run the study; 5 if something was lost or kept."""
    options = parser().parse_args()
    report = record("serving_load", measure(options), options.out)
    report["failures"] = failures(report, options)
    print(json.dumps(report, indent=1))
    return 5 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
