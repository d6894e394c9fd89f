"""Which machine this is: its processor, the instructions that matter for inference, and the versions that run on it."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foretoken.errors import warn
from foretoken.machine.linux import text_of
from foretoken.machine.memory import physical_bytes
from foretoken.machine.neighbours import usable_cores

_INFO = Path("/proc/cpuinfo")
# What is shown, by the flags of which any means it; x86 and `aarch64`.
_MEANING: dict[str, tuple[str, ...]] = {
    "avx2": ("avx2",),
    "avx512": ("avx512f",),
    "vnni": ("avx512_vnni", "avx_vnni", "asimddp", "i8mm"),
    "bf16": ("avx512_bf16", "amx_bf16", "bf16"),
    "fp16": ("avx512_fp16", "asimdhp"),
    "amx_int8": ("amx_int8",),
    "amx_bf16": ("amx_bf16",),
}


def flags(info: Path = _INFO) -> frozenset[str]:
    """The processor's features as the system names them; none where it does not say (outside Linux)."""
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text_of(info), re.MULTILINE)
    return frozenset() if found is None else frozenset(found.group(1).split())


def features(info: Path = _INFO) -> dict[str, bool] | None:
    """By name whether the processor has it; None where the system does not say (outside Linux)."""
    own = flags(info)
    return {name: not own.isdisjoint(words) for name, words in _MEANING.items()} if own else None


def processor(info: Path = _INFO) -> str:
    """The processor's name."""
    found = re.search(r"^model name\s*:\s*(.+)$", text_of(info), re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine() or "unknown"


def stepping() -> str | None:
    """The processor's family, model and stepping, where the system says them: processors of one name differ."""
    names, text = ("cpu family", "model", "stepping", "CPU part"), text_of(_INFO)  # the last on aarch64
    found = [re.search(rf"^{name}\s*:\s*(\S+)$", text, re.MULTILINE) for name in names]
    return ", ".join(f"{name} {one[1]}" for name, one in zip(names, found, strict=True) if one is not None) or None


class PrecisionWarning(UserWarning):
    """Weights are in a format for which this processor has no arithmetic; the message ends with a remedy."""


def has_slow_bf16(found: dict[str, bool] | None) -> bool:
    """Whether products in bfloat16 are emulated, as far as the system says which instructions there are."""
    return found is not None and not found["bf16"]


@functools.cache
def warn_of_slow_bf16(info: Path = _INFO) -> None:
    """Warn, once in a process, where a model is in bfloat16 and the processor has no arithmetic for it."""
    if has_slow_bf16(features(info)):
        warn(
            PrecisionWarning(
                f"{processor(info)} has no bfloat16 arithmetic, so a bfloat16 model runs slowly: take dtype='float32', "
                "or weights='int8'"
            ),
            stacklevel=3,
        )


def precision_advice(found: dict[str, bool] | None) -> str:
    """Which formats of weights suit the processor."""
    if found is None:
        return "unknown instructions: compare dtypes with `foretoken bench`"
    if found["amx_bf16"]:
        return "bfloat16 (AMX): many rows cost little more than one"
    if found["bf16"]:
        return "bfloat16 has arithmetic of its own" + (", int8 too (VNNI)" if found["vnni"] else "")
    if found["vnni"]:
        return "no bfloat16 arithmetic: float32, or int8 (VNNI) for drafts"
    return "no bfloat16 arithmetic: float32"


def machine() -> dict[str, Any]:
    """Processor, cores, memory and accelerator of this machine."""
    import torch  # takes seconds, and options of measurements are read without it

    found: dict[str, Any] = {
        "cpu": processor(),
        "cores": len(usable_cores()),
    }
    kind, known = stepping(), features()
    if kind is not None:
        found["processor"] = kind
    if known is not None:
        found["instructions"] = ", ".join(name for name, has in known.items() if has)
    if (memory := physical_bytes()) is not None:
        found["memory_gib"] = round(memory / 2**30, 1)
    if torch.cuda.is_available():
        found["gpu"] = gpus([torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())])
    found["system"] = f"{platform.system()} {platform.machine()}"
    return found


def gpus(names: Sequence[str]) -> str:
    """Equal ones by their number, and different ones in the order of `cuda:N`: which of them ran is another field."""
    if len({*names}) == 1:
        return names[0] if len(names) == 1 else f"{len(names)} x {names[0]}"
    return ", ".join(names)


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    import torch

    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    try:
        return {"foretoken": importlib.metadata.version("foretoken"), **found}
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return found
