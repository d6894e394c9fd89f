"""The source as a folder in bf16, as it is or widened without changing its function (`studies.widen`)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from foretoken.cli.common import fetch_models
from foretoken.model.loader import read_config
from foretoken.model.names import model_folder
from studies.command import exit_code_of
from studies.widen.checkpoint import widen


def main() -> int:
    """Write the folder."""
    parser = argparse.ArgumentParser(prog="python -m studies.gpu.checkpoint", description=__doc__)
    parser.add_argument("--source", required=True)
    parser.add_argument("--to", required=True, help="as-is, or a size of studies.widen")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    return exit_code_of(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    fetch_models(options.source)
    source = model_folder(options.source)
    widen(source, options.out, _own_size(source) if options.to == "as-is" else options.to)
    return 0


def _own_size(source: Path) -> str:
    """The size of a checkpoint in the words of `studies.widen`."""
    config = read_config(source)
    sizes = {
        "hidden": config.hidden_size,
        "intermediate": config.intermediate_size,
        "layers": config.num_layers,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
    }
    return ",".join(f"{name}={size}" for name, size in sizes.items())


if __name__ == "__main__":
    sys.exit(main())
