"""A command on a terminal of a given width: what it shows, typed lines, Ctrl-C."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CTRL_C = "\x03"
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LONGEST_S = 120.0
# Between what is shown and what is typed. A prompt is shown before the program reads, and CPython's `input` notices a
# signal between the two only with the next key: no person types so early, a test would, and wait for ever.
_TYPING_S = 0.2


@dataclass(frozen=True)
class Shown:
    """What a terminal got, without colours and cursor movements, and how the command ended."""

    code: int
    text: str

    @property
    def lines(self) -> list[str]:
        """Its lines, as they were last overwritten."""
        return [line.rstrip("\r").rpartition("\r")[2] for line in self.text.split("\n")]


def on_terminal(
    *arguments: object, columns: int, folder: Path, typed: Mapping[str, str] | None = None, environment: object = None
) -> Shown:
    """Run `foretoken` in a pseudo-terminal; each text of `typed` is typed once its key was shown, in this order."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    changed = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", **dict(environment or {})}  # type: ignore[call-overload]
    changed.pop("COLUMNS", None)
    if CTRL_C in (typed or {}).values():
        # coverage (7.17) keeps its lock for ever when a signal raises in the middle of taking it, 1 time in 20 here
        changed.pop("COVERAGE_PROCESS_CONFIG", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "foretoken", *map(str, arguments)],
        stdin=child,
        stdout=child,
        stderr=child,
        cwd=folder,
        env=changed,
        start_new_session=True,
        preexec_fn=_take_terminal,
    )
    os.close(child)
    try:
        text = _watch(parent, process, dict(typed or {}))
        return Shown(process.wait(timeout=_LONGEST_S), text)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.close(parent)


def _take_terminal() -> None:
    """Make standard input the terminal of the new session, so that Ctrl-C reaches the command."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _watch(parent: int, process: subprocess.Popen[bytes], typed: dict[str, str]) -> str:
    """Read until the terminal is closed, and type what is due."""
    shown, seen, end_s = b"", 0, time.monotonic() + _LONGEST_S
    while time.monotonic() < end_s:
        if not select.select([parent], [], [], 0.1)[0]:
            if process.poll() is not None:
                break
            continue
        try:
            piece = os.read(parent, 65536)
        except OSError:  # Linux: the last one who had it open is gone
            break
        shown += piece
        text = plain(shown)
        if typed and (place := text.find(next(iter(typed)), seen)) >= 0:
            seen = place + len(next(iter(typed)))
            time.sleep(_TYPING_S)
            os.write(parent, typed.pop(next(iter(typed))).encode())
    return plain(shown)


def plain(shown: bytes) -> str:
    """Text without escape sequences."""
    return _ESCAPE.sub("", shown.decode("utf-8", "replace"))
