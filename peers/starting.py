"""A server of vLLM for a test: started, asked, stopped."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2

_START_S = 900
# float32 and plain kernels: equal texts are the oracle. Reading a prompt in parts ends seeded requests of this version.
_OWN = ("--dtype", "float32", "--max-model-len", "1024", "--enforce-eager", "--no-enable-prefix-caching")
_WHOLE_PROMPTS = ("--no-enable-chunked-prefill",)
_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "NUMBA_NUM_THREADS": "1"}


@contextmanager
def started(argv: Sequence[str], log: Path) -> Iterator[str]:
    """The address of the server that `argv` starts; it is stopped at the end."""
    program = os.environ.get("FORETOKEN_VLLM")
    assert program, "FORETOKEN_VLLM must name the program `vllm` of a vLLM 0.32; `make peers` installs one"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [program, *argv[1:], "--port", str(port), *_OWN, *_WHOLE_PROMPTS]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | _CPU)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + _START_S
    try:
        while not _is_ready(url):
            assert process.poll() is None, f"{' '.join(argv)} ended: {log.read_text()[-3000:]}"
            assert time.monotonic() < deadline, f"{' '.join(argv)} did not start: {log.read_text()[-3000:]}"
            time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _is_ready(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx2.HTTPError:
        return False
