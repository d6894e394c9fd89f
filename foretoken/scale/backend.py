"""`RayBackend`: the replicas of an application as one `Backend`, for the HTTP front."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import secrets
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import ray.exceptions
from ray.serve.exceptions import BackPressureError, RayServeException

from foretoken.backend.call import Call, ModelInfo, State
from foretoken.errors import EngineError, ForetokenError, OverloadedError, UnavailableError, WorkerDiedError
from foretoken.scale.decide import live_replicas
from foretoken.server.config import ServerConfig
from foretoken.server.life.remote import RemoteBackend, RemoteGeneration
from foretoken.server.life.replicas import Quarantine, fingerprint_of, merged, prefix_of
from foretoken.server.life.wire import (
    AskStats,
    Cancel,
    Command,
    Message,
    Open,
    Over,
    Refused,
    Returned,
    packed,
    to_wire,
)

_ASK_S = 5.0  # for the statistics of one replica
_AGAIN_S = 1.0
_log = logging.getLogger("foretoken.server")
_MESSAGES = msgspec.msgpack.Decoder(tuple[str, Message])
_Result = TypeVar("_Result")
_INFO = msgspec.msgpack.Decoder(ModelInfo)


class RayBackend:
    """`Backend` over a handle of `EngineReplica`s. Made in the event loop that uses it."""

    def __init__(self, engine: Any, config: ServerConfig) -> None:  # noqa: ANN401 - ray.serve's DeploymentHandle
        self._quarantine = Quarantine(config.life.quarantine_s)
        self._sender = ReplicaSender(engine, self._quarantine)
        self._engine, self._max_unread = engine, config.life.max_unread_events
        self._remote: RemoteBackend | None = None
        self._learning = asyncio.get_running_loop().create_task(self._learn())

    async def _learn(self) -> None:
        """Ask a replica what it serves, until one answers."""
        while self._remote is None:
            try:
                info = _INFO.decode(await self._engine.info.remote())
            except (ray.exceptions.RayError, RayServeException) as error:
                _log.warning("no replica says what it serves: %s", type(error).__name__)
                await asyncio.sleep(_AGAIN_S)
            else:
                self._sender.remote = self._remote = RemoteBackend(self._sender, info, self._max_unread)

    @property
    def state(self) -> State:
        """See `Backend.state`. Requests wait while all replicas are being replaced."""
        return "loading" if self._remote is None else "ready"

    @property
    def info(self) -> ModelInfo | None:
        """See `Backend.info`."""
        return None if self._remote is None else self._remote.info

    async def open(self, call: Call) -> RemoteGeneration:
        """See `Backend.open`.

        Raises:
            InputError: replicas died twice while they answered this request.
            WorkerDiedError: the replica died meanwhile.
        """
        self._quarantine.check(fingerprint_of(call))
        return await self._there().open(call)

    async def tokenize(
        self,
        prompt: str | None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        add_special_tokens: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] = {},
    ) -> list[int]:
        """See `Backend.tokenize`."""
        return await self._there().tokenize(prompt, messages, add_special_tokens, tools, template_options)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """See `Backend.detokenize`."""
        return await self._there().detokenize(token_ids)

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
        return self._remote


class ReplicaSender:
    """Sends the commands of a `RemoteBackend` to replicas, and hands it what they answer."""

    def __init__(self, engine: Any, quarantine: Quarantine) -> None:  # noqa: ANN401
        self._engine, self._streaming = engine, engine.options(stream=True)
        self._quarantine = quarantine
        self._front, self._numbers = secrets.token_hex(8), itertools.count(-1, -1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._opened: dict[int, tuple[Any, str]] = {}  # by call: the response, and its replica once that is known
        self.remote: RemoteBackend | None = None
        self.dead: dict[str, set[bytes]] = {}  # by replica: the requests that were in flight

    def send(self, message: Command) -> None:
        """See `Channel.send`."""
        data = packed(message)
        if isinstance(message, Open):
            work = self._stream(message, data)
        elif isinstance(message, Cancel):
            work = self._cancel(message, data)
        else:
            work = self._ask(message, data)
        task = detached(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stats_of(self, replica: str) -> tuple[str, dict[str, Any]] | None:
        """The statistics of one replica; None if it does not answer."""
        command = AskStats(next(self._numbers))
        try:
            async with asyncio.timeout(_ASK_S):
                data = await self._engine.answer.remote(packed(command), self._front, replica=replica)
        except (TimeoutError, ray.exceptions.RayError, RayServeException):
            return None
        if data is None:
            return None
        name, message = _MESSAGES.decode(data)
        return (name, message.value) if isinstance(message, Returned) else None

    async def _stream(self, command: Open, data: bytes) -> None:
        call, name, message = command.call, "", None
        response = self._streaming.generate.remote(data, self._front, prefix=prefix_of(command.request))
        self._opened[call] = response, ""
        try:
            async for chunk in response:
                name, message = _MESSAGES.decode(chunk)
                self._opened[call] = response, name
                self._take(message)
            if not isinstance(message, Over | Refused):
                raise WorkerDiedError("the replica stopped within the answer")
        except asyncio.CancelledError:
            self._take(Over(call))  # cancelled before a replica had it
        except Exception as error:  # noqa: BLE001 - whatever Ray raises ends this call, and is told to its reader
            found = _ours(error)
            if isinstance(found, WorkerDiedError):
                self._note_death(name, fingerprint_of(command.request))
            self._take(Refused(call, to_wire(found)))
        finally:
            del self._opened[call]

    async def _cancel(self, command: Cancel, data: bytes) -> None:
        response, replica = self._opened.get(command.call, (None, ""))
        if response is None:
            return
        if not replica:
            response.cancel()
            return
        try:
            await self._engine.answer.remote(data, self._front, replica=replica)
        except (ray.exceptions.RayError, RayServeException):  # the stream of the call tells its reader
            response.cancel()

    async def _ask(self, command: Any, data: bytes) -> None:  # noqa: ANN401 - a command with a call
        try:
            _, message = _MESSAGES.decode(await self._engine.answer.remote(data, self._front))
        except Exception as error:  # noqa: BLE001 - see `_stream`
            message = Refused(command.call, to_wire(_ours(error)))
        self._take(message)

    def _note_death(self, replica: str, fingerprint: bytes) -> None:
        """A replica ("" where it had not said its name yet) died with a request: once for each replica and request."""
        known = self.dead.setdefault(replica, set())
        if not replica or fingerprint not in known:
            known.add(fingerprint)
            self._quarantine.died([fingerprint])

    def _take(self, message: Message) -> None:
        assert self.remote is not None
        self.remote.take(message)


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
