"""`python -m interpreted.compile_kernels CAPABILITY DTYPE HEAD_DIM`: the kernels as they are compiled for a GPU, which
need not be there. The last line says what the larger one takes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from foretoken.kernels import paged_triton
from foretoken.kernels.paged_triton import sizes_of

DTYPES = {"bf16": (tl.bfloat16, 2), "fp16": (tl.float16, 2), "fp32": (tl.float32, 4)}
NUMBERS = ("segments", "tiles", "blocks", "positions", "distances", "merged")
ALIGNED = ("query_row", "query_head", "cache_head")


def compiled(kernel: Any, capability: int, dtype: str, constants: dict[str, Any], **options: int) -> Any:
    """`kernel` for a batch whose vectors begin at multiples of 16 bytes."""

    def type_of(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in NUMBERS or name.startswith("part_"):
            return "*i32" if name in NUMBERS else "*fp32"
        if name in ("query", "keys", "values", "sinks", "out"):
            return f"*{dtype}"
        return "fp32" if name in ("scale", "softcap") else "i32"

    signature = {name: type_of(name) for name in kernel.arg_names}
    aligned = [i for i, (name, kind) in enumerate(signature.items()) if kind[0] == "*" or name in ALIGNED]
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"enable_fp_fusion": False, **options})


def resources(ptx: str) -> dict[str, int]:
    """Registers, and bytes that did not fit into them, by NVIDIA's assembler."""
    architecture = re.search(r"^\.target (\w+)", ptx, flags=re.MULTILINE)
    assert architecture
    with TemporaryDirectory() as folder:
        file = Path(folder, "kernel.ptx")
        file.write_text(ptx)
        command = [triton.knobs.nvidia.ptxas.path, "-v", f"--gpu-name={architecture[1]}", str(file)]
        done = subprocess.run([*command, "-o", "/dev/null"], capture_output=True, text=True, check=True)
    (spilled,), (registers,) = (
        re.findall(r"(\d+) bytes spill stores", done.stderr),
        re.findall(r"Used (\d+)", done.stderr),
    )
    return {"registers": int(registers), "spilled_bytes": int(spilled)}


def main(capability: int, dtype: str, head_dim: int) -> None:
    """A model of 32 heads in groups of four."""
    kind, itemsize = DTYPES[dtype]
    switches = {"HAS_SOFTCAP": False, "HAS_SINKS": True, "HAS_TREES": True, "OPERAND": kind}
    constants: dict[str, Any] = sizes_of(32, 8, head_dim, itemsize, 32) | switches
    attend = compiled(paged_triton._attend, capability, dtype, constants)
    few = {name: constants[name] for name in ("HEAD_DIM", "DIMS", "HAS_SINKS")}
    merge = compiled(paged_triton._merge_parts, capability, dtype, few, num_warps=1)
    assert attend.asm["cubin"]
    assert merge.asm["cubin"]
    print(json.dumps({"shared_bytes": attend.metadata.shared, **resources(attend.asm["ptx"])}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
