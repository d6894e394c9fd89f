"""The modes of torch that a thread of the caller is in, and that are none of an engine's concern.

A program may compute inside `torch.inference_mode`, `torch.autocast` or another default device. Tensors that live
longer than such a block, like a cache, would carry it on: one that was made in inference mode cannot be written to
outside of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_AUTOCASTING = ("cpu", "cuda")


@contextmanager
def own_modes() -> Iterator[None]:
    """Run the body as in a thread that has set nothing: no inference mode, no autocast, the CPU where no device is
    named.
    """
    kinds = [kind for kind in _AUTOCASTING if torch.is_autocast_enabled(kind)]
    elsewhere = torch.empty(0, dtype=torch.uint8).device.type != "cpu"
    if not (kinds or elsewhere or torch.is_inference_mode_enabled()):
        yield
        return
    with ExitStack() as modes:
        modes.enter_context(torch.inference_mode(False))
        for kind in kinds:
            modes.enter_context(torch.autocast(kind, enabled=False))
        if elsewhere:
            modes.enter_context(torch.device("cpu"))
        yield
