"""`foretoken doctor`: what this machine offers an engine on it, and what was chosen."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from foretoken import __version__
from foretoken.cli.common import JsonOption, print_json
from foretoken.cli.verb import signals_end
from foretoken.kernels.build import found_compiler, kernels_from
from foretoken.machine.identity import features, precision_advice, processor
from foretoken.machine.linux import meminfo
from foretoken.machine.memory import physical_bytes
from foretoken.machine.neighbours import neighbours
from foretoken.machine.threads import applied, choose, find_cores
from foretoken.printing.console import Console

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "huggingface-hub", "llguidance", "fastapi")
_COPY_BYTES = 128 << 20  # more than the caches of most processors
_COPY_S = 0.5
_MIN_COPIES = 3
_GIB = 2**30


def doctor(as_json: JsonOption = False) -> None:
    """Describe this machine: cores, instruction sets, memory bandwidth, other load, threads, versions."""
    facts = _facts()
    if as_json:
        print_json(facts)
    else:
        _show(facts)
    if not facts["torch"]["is_usable"]:
        raise typer.Exit(1)


def _facts() -> dict[str, Any]:
    """What was found; torch is imported last."""
    cores, flags = find_cores(), features()
    others = neighbours()
    taken = None if others is None else sum(one.cores for one in others)
    choice = applied() or choose(os.environ, "doctor", cores, taken)
    return {
        "foretoken": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cores": {
            "logical": cores.num_logical,
            "allowed": cores.num_allowed,
            "physical": cores.num_physical,
            "quota": cores.quota,
        },
        "instructions": flags,
        "precision": precision_advice(flags),
        "neighbours": None if others is None else [asdict(one) for one in others],
        "waiting": {"threads": choice.waiting, "why": choice.why_waiting},
        "threads": {"chosen": choice.num_threads, "why": choice.why_number},
        "memory": _memory(),
        "disk": _disk(),
        "compiler": shutil.which(compiler[0]) if (compiler := found_compiler()) else None,
        "kernels": kernels_from(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "torch": _torch(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _memory() -> dict[str, float | None]:
    """Whole and available memory, in GiB."""
    known = meminfo()
    sizes = {"total_gib": known.get("MemTotal") or physical_bytes(), "available_gib": known.get("MemAvailable")}
    return {name: None if size is None else round(size / _GIB, 1) for name, size in sizes.items()}


def _disk() -> dict[str, Any]:
    """Free space where downloaded models are kept."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE)
    there = next(one for one in (folder, *folder.parents) if one.exists())
    return {"cache_folder": str(folder), "free_gib": round(shutil.disk_usage(there).free / _GIB, 1)}


def _torch() -> dict[str, Any]:
    """What torch says: threads in force, bandwidth of a copy, accelerators."""
    try:
        with signals_end():
            import torch
    except (ImportError, OSError) as error:
        return {"is_usable": False, "error": str(error)}
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {
        "is_usable": True,
        "version": str(torch.__version__),
        "num_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "copy_gb_per_s": round(_bandwidth() / 1e9, 1),
        "gpus": gpus,
    }


def _bandwidth() -> float:
    """Bytes per second read and written by the fastest of some copies."""
    import torch

    source = torch.ones(_COPY_BYTES // 4, dtype=torch.float32)
    target = torch.empty_like(source)
    copies_s: list[float] = []
    began_s = time.perf_counter()
    # One may fall into a moment in which the machine stands still.
    while len(copies_s) < _MIN_COPIES or time.perf_counter() - began_s < _COPY_S:
        start_s = time.perf_counter()
        target.copy_(source)
        copies_s.append(time.perf_counter() - start_s)
    return 2 * _COPY_BYTES / min(copies_s)


def _show(facts: Mapping[str, Any]) -> None:
    cores, torch, waiting, threads = facts["cores"], facts["torch"], facts["waiting"], facts["threads"]
    quota = "no quota" if cores["quota"] is None else f"a quota of {cores['quota']:g} cores"
    flags = facts["instructions"]
    has = "unknown" if flags is None else ", ".join(name for name, there in flags.items() if there) or "none of note"
    others = facts["neighbours"]
    beside = ", ".join(f"{one['name']} ({one['pid']}) {one['cores']:.1f} cores" for one in others or ())
    memory, disk = facts["memory"], facts["disk"]
    rows = {
        "system": f"{facts['system']}, Python {facts['python']}, foretoken {facts['foretoken']}",
        "processor": facts["processor"],
        "cores": f"{cores['physical']} physical, {cores['allowed']} of {cores['logical']} logical allowed, {quota}",
        "instructions": has,
        "precision": facts["precision"],
        "neighbours": "unknown" if others is None else beside or "none",
        "waiting": f"threads {waiting['threads']} while they wait: {waiting['why']}",
        "threads": f"{threads['chosen'] or torch.get('num_threads', '')}: {threads['why']}",
        "memory": f"{memory['available_gib']} of {memory['total_gib']} GiB available",
        "disk": f"{disk['free_gib']} GiB free for {disk['cache_folder']}",
        "compiler": facts["compiler"] or "none: nothing can be compiled at run time",
        "kernels": facts["kernels"],
        "packages": ", ".join(f"{name} {version or 'missing'}" for name, version in facts["packages"].items()),
    }
    if torch["is_usable"]:
        rows["torch"] = f"{torch['version']}, {torch['num_threads']} threads, {torch['cpu_capability']}"
        rows["bandwidth"] = f"{torch['copy_gb_per_s']} GB/s in a copy"
        rows["accelerators"] = ", ".join(torch["gpus"]) or "none"
    else:
        rows["torch"] = f"cannot be imported: {torch['error']}"
    console = Console()
    for label, text in rows.items():
        console.line(f"{label:<13}{text}")
