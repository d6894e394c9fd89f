"""`RayBackend`: the replicas of an application as one `Backend`, for the HTTP front."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import secrets
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray
import ray.exceptions
import ray.util
from msgspec.msgpack import Decoder as MessageDecoder
from ray.serve.exceptions import BackPressureError, RayServeException

from foretoken.backend.call import Call, ModelInfo, State, TextToEncode
from foretoken.errors import EngineError, ForetokenError, OverloadedError, UnavailableError, WorkerDiedError
from foretoken.scale.decide import live_replicas
from foretoken.scale.replica import Address
from foretoken.server.config import ServerConfig
from foretoken.server.life import wire
from foretoken.server.life.remote import RemoteBackend, RemoteGeneration
from foretoken.server.life.replicas import AsyncCondition, Quarantine, fingerprint_of, merged, prefix_of
from foretoken.server.life.worker import READ_BYTES
from foretoken.server.receiving import listen

_ASK_S = 5.0  # for the statistics of one replica
_AGAIN_S = 1.0
_log = logging.getLogger("foretoken.server")
_MESSAGES = MessageDecoder(tuple[str, wire.Message])
_Result = TypeVar("_Result")
_INFO = MessageDecoder(ModelInfo)


class RayBackend:
    """`ServedBackend` over a handle of `EngineReplica`s, which took `load_s` to load."""

    failure: ForetokenError | None = None  # Ray starts a replica again for ever

    def __init__(self, engine: Any, config: ServerConfig, load_s: float = 0.0) -> None:  # noqa: ANN401 - ray.serve's DeploymentHandle
        self.changes, self._config, self._load_s, self._is_draining = AsyncCondition(), config, load_s, False
        self._quarantine = Quarantine(config.life.quarantine_s)
        self._sender = ReplicaSender(engine, self._quarantine)
        self._engine, self._max_unread = engine, config.life.max_unread_events
        self._remote: RemoteBackend | None = None

    def start(self) -> None:
        """Ask for the model in the background."""
        self._learning = asyncio.get_running_loop().create_task(self._learn())

    def described(self) -> tuple[ModelInfo, tuple[str, ...], float, int]:
        """See `ServedBackend.described`."""
        info = self._there().info
        return info, tuple(sorted(info.default_spec.leaves)), self._load_s, self._config.life.workers

    @property
    def num_open(self) -> int:
        """Calls in flight."""
        return self._sender.num_open

    async def drain(self, drain_s: float) -> bool:
        """See `ServedBackend.drain`. The calls that have not ended get an `UnavailableError`."""
        self._is_draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                while self.num_open:
                    await asyncio.sleep(0.02)
        all_ended = not self.num_open
        if self._remote is not None:
            self._remote.abandon("the server is shutting down")
        return all_ended

    async def close(self) -> None:
        """End what connects replicas with this process."""
        self._learning.cancel()
        await self._sender.close()

    def kill_now(self) -> None:
        """Nothing: what this process has started of Ray ends with it."""

    async def _learn(self) -> None:
        """Ask a replica what it serves, until one answers."""
        await self._sender.listen()
        while self._remote is None:
            try:
                info = _INFO.decode(await self._engine.info.remote())
            except (ray.exceptions.RayError, RayServeException) as error:
                _log.warning("no replica says what it serves: %s", type(error).__name__)
                await asyncio.sleep(_AGAIN_S)
            else:
                self._sender.remote = self._remote = RemoteBackend(self._sender, info, self._max_unread)
                self.changes.notify_all()

    @property
    def state(self) -> State:
        """See `Backend.state`. Requests wait while all replicas are being replaced."""
        if self._is_draining:
            return "draining"
        return "loading" if self._remote is None else "ready"

    @property
    def info(self) -> ModelInfo | None:
        """See `Backend.info`."""
        return None if self._remote is None else self._remote.info

    async def open(self, call: Call) -> RemoteGeneration:
        """See `Backend.open`.

        Raises:
            InputError: replicas died twice while they answered this request; WorkerDiedError: the replica died
                meanwhile.
        """
        self._quarantine.check(fingerprint_of(call))
        return await self._there().open(call)

    async def tokenize(self, text: TextToEncode) -> list[int]:
        """See `Backend.tokenize`."""
        return await self._there().tokenize(text)

    async def spell(self, token_ids: Sequence[int]) -> list[str | None]:
        """See `Backend.spell`."""
        return await self._there().spell(token_ids)

    async def detokenize(self, token_ids: Sequence[int], has_specials: bool = False) -> str:
        """See `Backend.detokenize`."""
        return await self._there().detokenize(token_ids, has_specials)

    async def stats(self) -> dict[str, Any]:
        """See `Replicas.stats`: of all replicas that answer within some seconds."""
        self._there()
        found = await asyncio.gather(*(detached(self._sender.stats_of(name)) for name in live_replicas()))
        replicas = [{**stats, "engine": name} for name, stats in filter(None, found)]
        if not replicas:
            raise UnavailableError("no replica of the engine answers")
        said = [stats for _, stats in filter(None, found)]
        return merged(said) | {"num_restarts": len(self._sender.dead), "replicas": replicas}

    def _there(self) -> RemoteBackend:
        if self._remote is None:
            raise UnavailableError("the model is being loaded")
        if self._is_draining:
            raise UnavailableError("the server is shutting down")
        return self._remote


class ReplicaSender:
    """Sends the commands of a `RemoteBackend` to replicas as calls of Ray, and hands it what they answer.

    Events come over a TCP connection of each replica to this front, a step of many answers as one write: as a stream of
    Ray each of them would cost about as much as a step of a small model.
    """

    def __init__(self, engine: Any, quarantine: Quarantine) -> None:  # noqa: ANN401
        self._engine, self._quarantine = engine, quarantine
        self._front, self._numbers = secrets.token_hex(8), itertools.count(-1, -1)
        self._address = Address("", 0, secrets.token_hex(32))
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._opened: dict[int, _Opened] = {}
        self._readers: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}
        self.remote: RemoteBackend | None = None
        self.dead: dict[str, set[bytes]] = {}  # by replica: the requests that were in flight

    @property
    def num_open(self) -> int:
        """Calls that replicas have not answered to the end."""
        return len(self._opened)

    async def listen(self) -> None:
        """Take connections of replicas, on this node's address in the cluster."""
        host = ray.util.get_node_ip_address()
        self._server = server = await listen(self._read, host, READ_BYTES)
        self._address = self._address._replace(host=host, port=server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """End the connections."""
        if self._server is not None:
            self._server.close()
        for writer in self._readers.values():
            writer.close()  # whose reader then ends
        await asyncio.gather(*self._readers)

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take what one replica sends."""
        task = asyncio.current_task()
        assert task is not None
        self._readers[task] = writer
        try:
            key, _, name = (await reader.readline()).decode("ascii", "replace").rstrip().partition(" ")
            if not secrets.compare_digest(key.encode(), self._address.key.encode()):
                return
            channel = wire.Channel(reader, writer, wire.Message)
            while (message := await channel.receive()) is not None:
                if (opened := self._opened.get(message.call)) is not None:
                    opened.replica = name
                self._take(message)
        except (ForetokenError, ValueError, OSError) as error:  # its calls end with their calls of Ray
            _log.warning("a replica sent what is no message: %s", error)
        finally:
            del self._readers[task]
            writer.close()

    def send(self, message: wire.Command) -> None:
        """See `Channel.send`."""
        data = wire.packed(message)
        if isinstance(message, wire.Open):
            work = self._open(message, data)
        elif isinstance(message, wire.Cancel):
            work = self._cancel(message, data)
        else:
            work = self._ask(message, data)
        task = detached(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stats_of(self, replica: str) -> tuple[str, dict[str, Any]] | None:
        """The statistics of one replica; None if it does not answer."""
        command = wire.AskStats(next(self._numbers))
        try:
            async with asyncio.timeout(_ASK_S):
                data = await self._engine.answer.remote(wire.packed(command), self._front, replica=replica)
        except (TimeoutError, ray.exceptions.RayError, RayServeException):
            return None
        if data is None:
            return None
        name, message = _MESSAGES.decode(data)
        return (name, message.value) if isinstance(message, wire.Returned) else None

    async def _open(self, command: wire.Open, data: bytes) -> None:
        call = command.call
        response = self._engine.generate.remote(
            data, self._front, prefix=prefix_of(command.request), address=tuple(self._address)
        )
        opened = self._opened[call] = _Opened(response)
        try:
            await response
            async with asyncio.timeout(_ASK_S):  # for what is on its way
                await opened.ended.wait()
        except asyncio.CancelledError:
            self._take(wire.Over(call))  # cancelled before a replica had it
        except Exception as error:  # noqa: BLE001 - whatever Ray raises ends this call, and its reader gets the error
            found = _ours(error)
            if isinstance(found, WorkerDiedError):
                self._note_death(opened.replica, fingerprint_of(command.request))
            self._take(wire.Refused(call, wire.to_wire(found)))
        finally:
            del self._opened[call]

    async def _cancel(self, command: wire.Cancel, data: bytes) -> None:
        opened = self._opened.get(command.call)
        if opened is None:
            return
        if not opened.replica:
            opened.response.cancel()
            return
        try:
            await self._engine.answer.remote(data, self._front, replica=opened.replica)
        except (ray.exceptions.RayError, RayServeException):  # the call itself tells its reader
            opened.response.cancel()

    async def _ask(self, command: Any, data: bytes) -> None:  # noqa: ANN401 - a command with a call
        try:
            _, message = _MESSAGES.decode(await self._engine.answer.remote(data, self._front))
        except Exception as error:  # noqa: BLE001 - see `_open`
            message = wire.Refused(command.call, wire.to_wire(_ours(error)))
        self._take(message)

    def _note_death(self, replica: str, fingerprint: bytes) -> None:
        """A replica ("" where it had not said its name yet) died with a request: once for each replica and request."""
        known = self.dead.setdefault(replica, set())
        if not replica or fingerprint not in known:
            known.add(fingerprint)
            self._quarantine.died([fingerprint])

    def _take(self, message: Any) -> None:  # noqa: ANN401 - a message of a call
        assert self.remote is not None
        if isinstance(message, wire.Over | wire.Refused) and (opened := self._opened.get(message.call)) is not None:
            opened.ended.set()
        self.remote.take(message)


@dataclass(eq=False)
class _Opened:
    """A call of Ray that answers; `replica` is "" until it has sent something, `ended` set with its last message."""

    response: Any
    replica: str = ""
    ended: asyncio.Event = field(default_factory=asyncio.Event)


def detached(work: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
    """A task that Serve does not take for a part of the HTTP request that is being answered: it would give all calls of
    one request the same identity, and its router confuses those that wait at the same time.
    """
    return asyncio.get_running_loop().create_task(work, context=contextvars.Context())


def _ours(error: Exception) -> ForetokenError:
    """The error of this project that one of Ray means."""
    if isinstance(error, ForetokenError):
        return error
    if isinstance(error, BackPressureError):
        return OverloadedError("too many requests wait for a replica: come again later")
    if isinstance(error, ray.exceptions.RayActorError | ray.exceptions.ObjectLostError):
        return WorkerDiedError("the replica that answered died; another one takes its place")
    if isinstance(error, RayServeException):
        return UnavailableError("no replica of the engine takes requests")
    _log.warning("a call failed in Ray", exc_info=error)
    found = EngineError("the request failed on the way to a replica")
    found.__cause__ = error
    return found
