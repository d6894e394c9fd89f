"""A step as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Step = Callable[[], None]  # reads and writes tensors that stay where they are
Capture = Callable[[Step], Step]


class CudaCapture:
    """Captures steps that share the memory of what lies between their operations: they must not run side by side."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shared: tuple[Any, torch.cuda.Stream] | None = None  # handle of the memory, and its stream

    def __call__(self, step: Step) -> Step:
        """Run `step` to warm up, and capture it: what replays it.

        Raises:
            torch.OutOfMemoryError: no memory for what lies between its operations.
        """
        with torch.cuda.device(self._device):
            if self._shared is None:
                self._shared = torch.cuda.graph_pool_handle(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
            (pool, stream), current = self._shared, torch.cuda.current_stream()
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                step()  # what is compiled or allocated at a first run is not part of a graph
            current.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # Memory is shared by captures on one stream. Other threads may call what a capture forbids.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                step()
        return graph.replay
