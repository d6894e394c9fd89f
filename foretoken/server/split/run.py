"""`run_live`: the proxy on a port, from its start until it is interrupted."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from foretoken.measure.ab.live import LiveOptions, fails_more, live_outcome, turn_at
from foretoken.measure.ab.live_report import live_report
from foretoken.measure.ab.live_sums import LiveRequest, LiveSums, LiveTurn
from foretoken.measure.report import Report
from foretoken.server.run import listening_socket, url_of
from foretoken.server.split.proxy import Splitter

_LOOK_S = 1.0


class Comparison:
    """Whose turn it is, and why it is A's for good once that was decided."""

    def __init__(self, options: LiveOptions, clock: Callable[[], float] = time.perf_counter) -> None:
        self.options, self.sums = options, LiveSums()
        self.ended = ""  # why traffic goes to A for good
        self._clock, self._began_s, self._judged_block = clock, clock(), 0

    def turn(self) -> LiveTurn:
        """Whose turn it is now."""
        now = turn_at(self.options, self._clock() - self._began_s)
        return now if not self.ended else LiveTurn(now.block, "a", is_counted=False)

    def seen(self, request: LiveRequest) -> None:
        """Take in a request; what ended after the decision is not counted."""
        if not self.ended:
            self.sums.add(request)
            if request.error and fails_more(self.sums.sides):
                self.ended = "B fails more requests than A"

    def look(self) -> None:
        """Judge the whole pairs of blocks, once when each is over."""
        block = turn_at(self.options, self._clock() - self._began_s).block // 2 * 2
        if self.ended or block == self._judged_block:
            return
        self._judged_block = block
        verdict = live_outcome(self.sums.blocks(block), self.options.margin).verdict
        if verdict != "go on":
            self.ended = f"B is {verdict}" if verdict != "equivalent" else "the two are equivalent"

    def report(self, command: str) -> Report:
        """What was found so far."""
        return live_report(self.options, self.sums.blocks(self._judged_block), self.sums, self.ended, command)


def run_live(options: LiveOptions, command: str, tell: Callable[[str], None]) -> Report:
    """Divide traffic until Ctrl-C, and report. `tell` hears the address and each decision.

    Raises:
        ConfigError, StorageError: an address or a port that cannot be used.
    """
    comparison = Comparison(options)
    listener = listening_socket(options.host, options.port)
    try:
        tell(f"{url_of(listener, is_tls=False)} passes requests on to A ({options.a}) and B ({options.b}) in turns")
        asyncio.run(_serve(comparison, listener, tell))
    finally:
        listener.close()
    return comparison.report(command)


class _Server(uvicorn.Server):
    """uvicorn that ends at a signal and leaves what comes then to us; at a second one it waits for no answer."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a signal handler
        """SIGINT or SIGTERM came."""
        self.force_exit, self.should_exit = self.should_exit, True


async def _serve(comparison: Comparison, listener: socket.socket, tell: Callable[[str], None]) -> None:
    options = comparison.options
    splitter = Splitter({"a": options.a, "b": options.b}, comparison.turn, comparison.seen)
    server = _Server(uvicorn.Config(splitter, lifespan="off", log_config=None, access_log=False))
    looking = asyncio.create_task(_look(comparison, tell))
    try:
        await server.serve(sockets=[listener])
    finally:
        looking.cancel()
        await splitter.close()


async def _look(comparison: Comparison, tell: Callable[[str], None]) -> None:
    while not comparison.ended:
        await asyncio.sleep(_LOOK_S)
        comparison.look()
    tell(f"{comparison.ended}: all requests go to A from now on; Ctrl-C ends the proxy and reports")
