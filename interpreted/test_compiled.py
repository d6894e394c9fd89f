"""The kernels compile for GPUs that are not here, and fit them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# By compute capability, what a program may take at most (CUDA C++ Programming Guide, technical specifications).
SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}


@pytest.mark.release  # 10 to 40 s each
@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim"),
    [(80, "bf16", 128), (86, "fp16", 64), (86, "fp32", 128), (89, "bf16", 256), (90, "bf16", 128), (90, "bf16", 80)],
)
def test_the_kernels_compile_for(capability: int, dtype: str, head_dim: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "interpreted.compile_kernels", str(capability), dtype, str(head_dim)]
    done = subprocess.run(
        command, env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    took = json.loads(done.stdout.splitlines()[-1])
    assert took["shared_bytes"] <= SHARED_BYTES[capability]
    assert took["registers"] <= 255
    assert took["spilled_bytes"] <= 64
    # One instruction for all tilings: another one may add in another order.
    assert len(took["instructions"]) == (dtype != "fp32")
    assert all(name.startswith("mma.sync") for name in took["instructions"])
