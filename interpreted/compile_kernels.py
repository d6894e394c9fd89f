"""`python -m interpreted.compile_kernels CAPABILITY DTYPE HEAD_DIM`: the kernels as they are compiled for a GPU, which
need not be there. The last line says what the largest one takes, and what matrices are multiplied by.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from foretoken.kernels import expert_routes_triton, experts_triton, paged_triton, product_triton
from foretoken.kernels.paged_triton import sizes_of
from foretoken.kernels.product_triton import tiling_of

DTYPES = {"bf16": (tl.bfloat16, 2), "fp16": (tl.float16, 2), "fp32": (tl.float32, 4)}
NUMBERS = ("segments", "tiles", "blocks", "positions", "distances", "merged", "places", "chosen")
FLOATS = ("scores", "weights", "gates", "parts")
TENSORS = ("query", "keys", "values", "sinks", "x", "weight", "bias", "residual", "out", "channels")
ALIGNED = ("query_row", "query_head", "cache_head", "size", "num_outputs", "row_stride")


def compiled(kernel: Any, capability: int, dtype: str, constants: dict[str, Any], **options: int) -> Any:
    """`kernel` for a batch whose vectors begin at multiples of 16 bytes."""

    def type_of(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in NUMBERS:
            return "*i32"
        if name in FLOATS or name.startswith("part_") or (name == "out" and kernel is experts_triton._outputs):
            return "*fp32"
        if name in TENSORS:
            return f"*{dtype}"
        return "fp32" if name in ("scale", "softcap", "limit", "alpha") else "i32"

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


def products(capability: int, dtype: str, kind: tl.dtype) -> list[Any]:
    """The product kernel in every tiling of a model's matrices."""
    cells = [(rows, outputs, gated) for rows in (1, 20, 40, 600) for outputs, gated in ((4096, False), (28_672, True))]
    found = []
    for tiling, gated in {(tiling_of(rows, outputs, 4096, gated), gated) for rows, outputs, gated in cells}:
        switches = {"EVEN": True, "GATE": 0 if gated else -1, "HAS_BIAS": True, "ADDS": not gated, "OPERAND": kind}
        sizes = {name.upper(): value for name, value in asdict(tiling).items() if name != "warps"}
        found.append(compiled(product_triton._multiply, capability, dtype, sizes | switches, num_warps=tiling.warps))
    return found


def experts(capability: int, dtype: str) -> list[Any]:
    """The kernels of experts; without matrix instructions that sum in another order for larger tiles."""
    kind, itemsize = DTYPES[dtype]
    routes = expert_routes_triton
    chosen = {"EXPERTS": 128, "ACTIVE": 8, "SLOTS": 8, "NORMALISES": True}
    groups = {"EXPERTS": 256, "LINES": 16, "PLACES": 1024, "TILES": 32}
    found = [
        compiled(routes._choose, capability, dtype, chosen, num_warps=1),
        compiled(routes._group, capability, dtype, groups),
    ]
    for num_places in (128, 4096, 16384):
        tiling = routes.tiling_of(num_places, 128, itemsize)
        sizes = {"LINES": tiling.lines, "OUTPUTS": tiling.outputs, "CHANNELS": tiling.channels, "OPERAND": kind}
        sizes |= {"STAGES": tiling.stages, "EVEN": True, "HAS_BIAS": True, "IS_ALL": False}
        for kernel, switches in ((experts_triton._channels, {"CLAMPS": True}), (experts_triton._outputs, {})):
            found.append(compiled(kernel, capability, dtype, sizes | switches, num_warps=tiling.warps))
            assert "wgmma" not in found[-1].asm["ptx"]
    return found


def main(capability: int, dtype: str, head_dim: int) -> None:
    """A model of 32 heads in groups of four, and one with 128 experts in tiles of every size."""
    kind, itemsize = DTYPES[dtype]
    switches = {"HAS_SOFTCAP": False, "HAS_SINKS": True, "HAS_TREES": True, "OPERAND": kind}
    constants: dict[str, Any] = sizes_of(32, 8, head_dim, itemsize, 32) | switches
    attend = compiled(paged_triton._attend, capability, dtype, constants)
    few = {name: constants[name] for name in ("HEAD_DIM", "DIMS", "HAS_SINKS")}
    merge = compiled(paged_triton._merge_parts, capability, dtype, few, num_warps=1)
    multiply = [] if dtype == "fp32" else products(capability, dtype, kind)
    assert merge.asm["cubin"]
    compiled_all = (attend, *multiply, *experts(capability, dtype))
    takes = [{"shared_bytes": one.metadata.shared, **resources(one.asm["ptx"])} for one in compiled_all]
    instructions = {found for one in multiply for found in re.findall(r"\b(?:wg)?mma\S*", one.asm["ptx"])}
    largest = {name: max(one[name] for one in takes) for name in takes[0]}
    print(json.dumps(largest | {"instructions": sorted(instructions)}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
