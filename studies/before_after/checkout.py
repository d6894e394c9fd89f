"""The parent's end of a child process: one per checkout, of which one works at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CHILD = Path(__file__).with_name("child.py")
_SETTLE_S = 0.05  # OpenMP threads spin for a few milliseconds after their last parallel region
_END_S = 10.0


class CheckoutError(Exception):
    """A checkout that cannot be used, or a child that failed."""


class Checkout:
    """A child process that imports foretoken from `folder`.

    The child gets a cache folder of its own, so that both checkouts measure what steps cost at their start and neither
    reads what the other measured. It is in a session of its own: Ctrl-C reaches the parent only.
    """

    def __init__(self, name: str, folder: Path, threads: int | None) -> None:
        if not (folder / "foretoken" / "__init__.py").is_file():
            raise CheckoutError(f"{folder} is not a checkout of foretoken")
        self.name, self.folder = name, folder.resolve()
        self.commit = _git(self.folder, "rev-parse", "--short=12", "HEAD")
        self.is_clean = _git(self.folder, "status", "--porcelain", "--untracked-files=no") == ""
        self._cache = tempfile.TemporaryDirectory(prefix="before-after-")
        environment = dict(os.environ, PYTHONPATH=str(self.folder), FORETOKEN_CACHE=self._cache.name)
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        else:
            environment.pop("OMP_NUM_THREADS", None)
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a command and wait for its reply.

        Raises:
            CheckoutError: the child failed or ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(dict(message)) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise CheckoutError(f"{self.name}: the process ended with status {self._process.poll()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise CheckoutError(f"{self.name}: {reply['error']}")
        time.sleep(_SETTLE_S)
        return reply

    def open(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Load the model, and check that it is this checkout's code which did.

        Raises:
            CheckoutError: see `ask`; or foretoken was imported from elsewhere.
        """
        about = self.ask({"do": "open", **options})
        if Path(about.pop("package")) != self.folder / "foretoken":
            raise CheckoutError(f"{self.name}: foretoken was not imported from {self.folder}")
        return about | {"commit": self.commit, "clean": self.is_clean}

    def cpu_s(self) -> float:
        """Processor seconds of the child so far; 0 where the system does not tell."""
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End the child: by the end of its input, or by a signal where it is in the middle of a turn."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(0.0 if self._process.poll() is not None else _END_S)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._cache.cleanup()


def _git(folder: Path, *words: str) -> str | None:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
