"""Instruction sets that tests compile kernels for: this machine's, and older ones that it runs too.

Compiling for an older one takes longer than all the tests of a kernel, so those are left to `make proof`.
"""

from __future__ import annotations

import pytest

INSTRUCTION_SETS = ["native", *(pytest.param(name, marks=pytest.mark.repeated) for name in ("haswell", "x86-64"))]
