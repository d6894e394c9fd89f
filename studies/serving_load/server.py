"""A server in processes of its own, and what it holds: memory, file handles, blocks, requests."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.errors import UnavailableError
from studies.command import end
from studies.serving_load.client import get

KEY = "studies-admin-key"


@dataclass(frozen=True)
class Held:
    """What the front and its workers hold at one moment."""

    resident_bytes: int
    front_bytes: int  # of these, the front's
    num_files: int
    num_threads: int
    processor_s: float  # time on processors since they started


@dataclass(frozen=True)
class LoadedServer:
    """A running server; `pid` is its front."""

    port: int
    pid: int
    model: str

    async def metrics(self) -> dict[str, float]:
        """Every sample of `/metrics` by its name with labels."""
        text = (await get(self.port, "/metrics", KEY)).decode()
        samples = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    async def invariants(self) -> dict[str, Any]:
        """See `/debug/invariants`."""
        body = await get(self.port, "/debug/invariants", KEY)
        return dict(json.loads(body)) if body else {}

    async def idle(self) -> dict[str, Any]:
        """Wait until nothing runs or waits, and nothing is open; what is held then."""
        while True:
            found = await self.invariants()
            busy = found.get("num_open", 1) or any(
                worker.get("num_running", 1) or worker.get("num_waiting", 1) for worker in found.get("workers", [{}])
            )
            if not busy:
                return found
            await asyncio.sleep(0.05)

    def held(self) -> Held:
        """Memory, file handles and threads of all processes of the server."""
        found = [one for pid in (self.pid, *_children(self.pid)) if (one := _held_by(pid, self.pid)) is not None]
        return Held(
            sum(one.resident_bytes for one in found),
            sum(one.front_bytes for one in found),
            sum(one.num_files for one in found),
            sum(one.num_threads for one in found),
            sum(one.processor_s for one in found),
        )


@contextmanager
def loaded_server(options: Sequence[str], module: str = "foretoken") -> Iterator[LoadedServer]:
    """`foretoken serve` with further `options`, until the end of the block; `module` is the command.

    Raises:
        UnavailableError: it did not start; its own words are on standard error.
    """
    environment = {**os.environ, "FORETOKEN_TEST": "1"}
    command = [sys.executable, "-m", module, "serve", "--port", "0", "--json", "--admin-key", KEY]
    command += ["--request-log", "none", *options]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise UnavailableError(f"the server did not start (exit code {process.wait()})")
        facts = json.loads(line)
        port = int(re.search(r":(\d+)", facts["url"].removeprefix("http://"))[1])  # type: ignore[index]
        yield LoadedServer(port, process.pid, facts["model"])
    finally:
        end(process)
        if process.stdout is not None:
            process.stdout.close()


def kept(invariants: dict[str, Any]) -> list[str]:
    """What an idle server should not hold."""
    found = []
    for worker in invariants.get("workers", []):
        for name, pool in worker.get("pools", {}).items():
            if pool["used"] or pool["free"] != pool["total"]:
                found.append(f"worker {worker['number']}: {pool['used']} tokens of the cache {name!r}")
        if worker.get("num_calls"):
            found.append(f"worker {worker['number']}: {worker['num_calls']} calls")
    if invariants.get("num_open"):
        found.append(f"front: {invariants['num_open']} calls")
    return found


def _children(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # ended meanwhile
        if int(fields[1]) == pid:
            found.append(int(path.parent.name))
    return [*found, *(grandchild for child in found for grandchild in _children(child))]


def _held_by(pid: int, front: int) -> Held | None:
    """What one process holds; None where it has ended, as those do in which grammars are tried."""
    folder = Path(f"/proc/{pid}")
    try:
        resident = int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        processor_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        front_bytes = resident if pid == front else 0
        return Held(
            resident, front_bytes, len(os.listdir(folder / "fd")), len(os.listdir(folder / "task")), processor_s
        )
    except OSError:
        return None
