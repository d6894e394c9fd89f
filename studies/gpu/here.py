"""What this machine has: the device, and the packages that the parts import, each missing one by name."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import sys
from typing import Any

import torch

from foretoken.errors import InputError
from foretoken.model.open import open_device
from foretoken.printing.console import Console
from studies.command import exit_code_of, record, record_file

_PACKAGES = {
    "every part": (
        *("torch", "safetensors", "tokenizers", "numpy", "jinja2", "typer", "rich", "huggingface_hub"),
        *("httpx2", "filelock"),
    ),
    "the tests": ("pytest", "transformers", "hypothesis", "scipy"),
    "kernels of a GPU": ("triton",),
}


def main() -> int:
    """Write what is here; an error names what is missing for every part."""
    parser = argparse.ArgumentParser(prog="python -m studies.gpu.here", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=record_file, help="a JSON file for the record")
    options = parser.parse_args()
    return exit_code_of(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    missing = {
        what: [name for name in names if importlib.util.find_spec(name) is None] for what, names in _PACKAGES.items()
    }
    for what, names in missing.items():
        if names:
            Console(stderr=True).line(f"missing for {what}: {', '.join(names)}")
    device = open_device(options.device)
    found = {"packages": {name: _version(name) for names in _PACKAGES.values() for name in names}, "missing": missing}
    record("gpu.here", {**found, "device": _device(device)}, options.out)
    if missing["every part"]:
        remedy = "carry them along in a folder on PYTHONPATH"
        raise InputError("packages", ", ".join(missing["every part"]), f"are not installed here; {remedy}")
    return 0


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device(device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        return {"name": "cpu"}
    about = torch.cuda.get_device_properties(device)
    return {
        "name": about.name,
        "memory_bytes": about.total_memory,
        "multiprocessors": about.multi_processor_count,
        "capability": f"{about.major}.{about.minor}",
        "cuda": torch.version.cuda,
    }


if __name__ == "__main__":
    sys.exit(main())
