"""Which attention a device takes. CPUs must keep what they compute; no device is needed to ask."""

import pytest
import torch

from foretoken.model.attention.batched import BatchedAttention
from foretoken.model.attention.choice import IMPLEMENTATIONS, choose
from foretoken.model.attention.paged import KernelAttention, PagedAttention


@pytest.mark.parametrize(
    ("device", "exact_rows", "kind"),
    [
        ("cpu", False, PagedAttention),
        ("cpu", True, KernelAttention),
        ("cuda", False, BatchedAttention),
        ("meta", False, BatchedAttention),
    ],
)
def test_each_device_takes_its_implementation(device: str, exact_rows: bool, kind: type) -> None:
    assert choose(torch.device(device), exact_rows).kind is kind


def test_names_are_unique_and_the_last_line_takes_what_is_left() -> None:
    assert len({one.name for one in IMPLEMENTATIONS}) == len(IMPLEMENTATIONS)
    assert IMPLEMENTATIONS[-1].fits(torch.device("xpu"), False)
