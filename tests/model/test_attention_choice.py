"""Which attention a device takes. CPUs must keep what they compute; no device is needed to ask."""

import pytest
import torch

from foretoken.errors import ConfigError
from foretoken.model.attention.batched import BatchedAttention
from foretoken.model.attention.choice import ATTENTION_VARIABLE, IMPLEMENTATIONS, choose, chosen
from foretoken.model.attention.fused import FusedAttention
from foretoken.model.attention.paged import KernelAttention, PagedAttention

HAS_TRITON = "foretoken.model.attention.choice.has_triton"


@pytest.mark.parametrize(
    ("device", "exact_rows", "kind"),
    [
        ("cpu", False, PagedAttention),
        ("cpu", True, KernelAttention),
        ("cuda", False, FusedAttention),
        ("meta", False, BatchedAttention),
    ],
)
def test_each_device_takes_its_implementation(
    device: str, exact_rows: bool, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HAS_TRITON, lambda: True)
    assert choose(torch.device(device), torch.bfloat16, exact_rows).kind is kind


@pytest.mark.parametrize(("has_triton", "dtype"), [(False, torch.bfloat16), (True, torch.float64)])
def test_a_gpu_that_cannot_run_the_kernel_gathers(
    has_triton: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HAS_TRITON, lambda: has_triton)
    assert choose(torch.device("cuda"), dtype).kind is BatchedAttention


def test_names_are_unique_and_every_device_has_a_default() -> None:
    assert len({one.name for one in IMPLEMENTATIONS}) == len(IMPLEMENTATIONS)
    assert choose(torch.device("xpu"), torch.float64).name == "batched"


@pytest.mark.parametrize(
    ("device", "dtype", "name", "kind"),
    [
        ("cuda", torch.bfloat16, "triton", FusedAttention),
        ("cuda", torch.float16, "segments", PagedAttention),
        ("cpu", torch.float64, "batched", BatchedAttention),
    ],
)
def test_another_one_is_taken_by_name(
    device: str, dtype: torch.dtype, name: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HAS_TRITON, lambda: True)
    monkeypatch.setenv(ATTENTION_VARIABLE, name)
    assert chosen(torch.device(device), dtype) is kind
    monkeypatch.setenv(ATTENTION_VARIABLE, "")
    assert chosen(torch.device("cpu"), dtype) is PagedAttention


@pytest.mark.parametrize(
    ("device", "dtype", "exact_rows", "has_triton", "name", "said"),
    [
        ("cpu", torch.bfloat16, False, True, "triton", "a CUDA device"),
        ("cuda", torch.float64, False, True, "triton", "this is cuda, float64"),
        ("cuda", torch.float8_e4m3fn, False, True, "triton", "float16, bfloat16 or float32"),
        ("cuda", torch.bfloat16, False, False, "triton", r"foretoken\[triton\]"),
        ("cpu", torch.bfloat16, True, True, "batched", "exact rows"),
        ("cuda", torch.bfloat16, False, True, "exact", "compiled kernels of a CPU"),
        ("cuda", torch.bfloat16, False, True, "flash", "choose one of exact, segments, triton, batched"),
    ],
)
def test_what_does_not_run_there_is_refused(
    device: str,
    dtype: torch.dtype,
    exact_rows: bool,
    has_triton: bool,
    name: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HAS_TRITON, lambda: has_triton)
    monkeypatch.setenv(ATTENTION_VARIABLE, name)
    with pytest.raises(ConfigError, match=said):
        chosen(torch.device(device), dtype, exact_rows)
