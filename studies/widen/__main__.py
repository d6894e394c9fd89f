"""Enlarge a small checkpoint without changing its function, to measure real acceptance at a realistic cost.

    python -m studies.widen --to 1b --out out/wide/target
    python -m studies.widen --to 1b --out out/wide/target --head out/head --head-out out/wide/head

The result is an ordinary Hugging Face folder. Say that it is widened beside every number that uses it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from foretoken.cli.common import DEFAULT_MODEL, fetch_models, print_json
from foretoken.errors import ConfigError
from foretoken.model.names import model_folder
from foretoken.printing.console import Console
from studies.command import exit_code_of
from studies.widen.checkpoint import widen
from studies.widen.head import widen_head


def main() -> int:
    """Widen a checkpoint, with `--head` a head of it too, and say how much of the result is real."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.widen", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write; it must not exist, or be empty")
    parser.add_argument(
        "--to",
        required=True,
        help="approximate number of parameters: 25m, 50m, 150m, 500m, 1b, 3b, 8b; or "
        "hidden=..,intermediate=..,layers=..,heads=..,kv_heads=..",
    )
    parser.add_argument("--source", default=DEFAULT_MODEL, help="the checkpoint: a folder, a hub id, or smollm2")
    parser.add_argument("--dtype", default="bfloat16", help="number format of the result")
    parser.add_argument("--seed", type=int, default=0, help="seed of the added weights")
    parser.add_argument("--head", help="a trained head of the source, to be widened with it: a folder or a hub id")
    parser.add_argument("--head-out", type=Path, help="folder to write the widened head to")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    given = parser.parse_args()
    return exit_code_of(lambda: _widened(given))


def _widened(given: argparse.Namespace) -> int:
    """Write what was asked for.

    Raises:
        ForetokenError: see `widen` and `widen_head`.
    """
    if (given.head is None) != (given.head_out is None):
        raise ConfigError("head", given.head, "give --head and --head-out together")
    fetch_models(given.source)
    source = model_folder(given.source)
    with Console(stderr=True).bar("writing parameters", None) as bar:
        result = widen(
            source,
            given.out,
            given.to,
            given.seed,
            lambda done, total: bar.update(completed=done, total=total),
            given.dtype,
        )
    if given.head is not None:
        widen_head(model_folder(given.head), given.head_out, source, given.to)
    if given.json:
        names = ("num_parameters", "dead_share", "nonzero_share")
        print_json({"folder": str(given.out), **{name: getattr(result, name) for name in names}})
        return 0
    Console().line(
        f"{given.out}: {result.num_parameters / 1e6:,.0f} M parameters, {result.dead_share:.1%} of them dead, "
        f"{result.nonzero_share:.1%} not zero"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
