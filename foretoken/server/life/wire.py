"""What front and worker say to each other, and how: msgpack messages, each behind its length, over a socket pair.

The pair is made by the front and inherited by the worker, so nobody else can connect, and either side reads the end of
the stream when the other one dies. Errors cross with class, field, remedy and numbers, never with the texts of a user.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec.msgpack import Decoder as MessageDecoder

from foretoken import errors
from foretoken.backend.call import Call, Event, ModelInfo, TextToEncode
from foretoken.config import SpecConfig
from foretoken.control.adaptation import AdaptConfig
from foretoken.control.routing import RoutingRules
from foretoken.engine_config import EngineConfig
from foretoken.errors import EngineError, ForetokenError, InputError, WorkerDiedError
from foretoken.field_text import from_mapping

Number = int | float

# Measures such as "4097 tokens" or "9000 tokens or more" hold nothing of a request's text.
_MEASURE = re.compile(r"[\d.,]{1,24}( (tokens|bytes|characters|seconds)( or more)?)?")
_OWN = ("field", "value", "remedy")  # attributes of an `InputError` that have a place of their own
_LENGTH_BYTES = 4
# Far above a prompt of a million tokens or the log-probabilities of one; below what a broken length would ask for.
MAX_MESSAGE_BYTES = 256 << 20
_NAMED_LEVELS = 16

_Kind = TypeVar("_Kind")


class WireError(msgspec.Struct, frozen=True):
    """An error of `foretoken.errors` by its class name.

    `value` is the refused value where it is a number or a measure. `numbers` are further attributes, such as the limits
    of a `ContextLengthError`.
    """

    name: str
    message: str = ""
    field: str | None = None
    remedy: str = ""
    value: Number | str | None = None
    numbers: dict[str, Number] = {}


class LoadEngine(msgspec.Struct, frozen=True, tag="load"):
    """Build the engine: `plain` values of an `EngineConfig`. `draft_required`: do not serve without the draft."""

    engine: dict[str, Any]
    name: str
    max_waiting: int
    beat_s: float
    draft_required: bool = False


class Open(msgspec.Struct, frozen=True, tag="open"):
    """`Backend.open`; `call` numbers everything that belongs to it from now on."""

    call: int
    request: Call


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """`Generation.cancel`, also of a call that is still being opened."""

    call: int


class Tokenize(msgspec.Struct, frozen=True, tag="tokenize"):
    """`Backend.tokenize`."""

    call: int
    request: TextToEncode


class Spell(msgspec.Struct, frozen=True, tag="spell"):
    """`Backend.spell`."""

    call: int
    token_ids: list[int]


class Detokenize(msgspec.Struct, frozen=True, tag="detokenize"):
    """`Backend.detokenize`."""

    call: int
    token_ids: list[int]
    has_specials: bool = False


class AskStats(msgspec.Struct, frozen=True, tag="stats"):
    """`Backend.stats`."""

    call: int


class AskInvariants(msgspec.Struct, frozen=True, tag="invariants"):
    """What the worker holds now: requests, blocks, tasks, threads, file handles."""

    call: int


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The engine is built."""

    info: ModelInfo
    load_s: float
    drafters: tuple[str, ...]


class NotLoaded(msgspec.Struct, frozen=True, tag="not_loaded"):
    """The engine could not be built; the worker ends."""

    error: WireError


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """Sent at intervals. `step_s`: how long the engine's thread has been at its running step; None while it waits."""

    step_s: float | None


class Happened(msgspec.Struct, frozen=True, tag="event"):
    """An event of a call."""

    call: int
    event: Event


class Over(msgspec.Struct, frozen=True, tag="over"):
    """No more events of a call."""

    call: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A command failed."""

    call: int
    error: WireError


class Returned(msgspec.Struct, frozen=True, tag="answer"):
    """What a command returns: token ids, a text, or figures."""

    call: int
    value: Any


Command = LoadEngine | Open | Cancel | Tokenize | Spell | Detokenize | AskStats | AskInvariants


Message = Loaded | NotLoaded | Beat | Happened | Over | Refused | Returned


class _Numbered(msgspec.Struct):
    """What is read of a message that cannot be read as a whole."""

    call: int | None = None


Refuse = Callable[[int, str], None]


def packed(value: object) -> bytes:
    """A message, or a list of them, as bytes.

    Raises:
        OverflowError, UnicodeEncodeError, TypeError, ValueError: it holds a value that msgpack cannot write.
    """
    data = _ENCODER.encode(value)
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} can be sent")
    return data


def unwritable(message: object) -> tuple[str, object]:
    """The part of a message that msgpack cannot write, by its name with dots, and its value; no name: it is the whole.

    What lies deeper than `_NAMED_LEVELS` is named by what holds it: each level writes the part once more.
    """
    names, value = list[str](), message
    for _ in range(_NAMED_LEVELS):
        found = next(((key, part) for key, part in _parts_of(value) if not _is_writable(part)), None)
        if found is None:
            break
        names.append(str(found[0]))
        value = found[1]
    return ".".join(names), value


def _parts_of(value: object) -> Iterable[tuple[object, object]]:
    if isinstance(value, msgspec.Struct):
        return [(name, getattr(value, name)) for name in value.__struct_fields__]
    if is_dataclass(value):
        return [(one.name, getattr(value, one.name)) for one in fields(value)]
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, list | tuple) else ()


def _is_writable(value: object) -> bool:
    try:
        _ENCODER.encode(value)
    except (OverflowError, UnicodeEncodeError, TypeError, RecursionError):
        return False
    return True


class Channel:
    """One end of the pair: writes what it is given, reads messages of `kind` (a union of the classes above).

    What is sent within one turn of the event loop is written at once: a step of many answers is one write.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: Any) -> None:  # noqa: ANN401 - a union
        self._reader, self._writer = reader, writer
        self._decoder = MessageDecoder(kind)
        self._unsent: list[bytes] = []

    def send(self, message: Command | Message) -> None:
        """Write a message soon; without effect once the other side is gone.

        Raises:
            OverflowError, UnicodeEncodeError, TypeError, ValueError: see `packed`.
        """
        data = packed(message)
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent += [len(data).to_bytes(_LENGTH_BYTES, "big"), data]

    @property
    def is_closing(self) -> bool:
        """Whether the other side is known to be gone: nothing more is written."""
        return self._writer.is_closing()

    async def drained(self) -> None:
        """Wait until the other side has taken most of what was written."""
        await self._writer.drain()

    async def receive(self, refuse: Refuse | None = None) -> Any:  # noqa: ANN401 - of the union
        """The next message; None when the other side has closed or died. One that cannot be read, but tells its call,
        is passed over where `refuse` takes the call and the reason.

        Raises:
            EngineError: what came is no message.
        """
        while (data := await self._data()) is not None:
            try:
                return self._decoder.decode(data)
            except (msgspec.ValidationError, msgspec.DecodeError) as error:
                call = _call_of(data)
                if refuse is None or call is None:
                    raise EngineError(f"what came from the other process is no message: {error}") from error
                refuse(call, str(error))
        return None

    async def _data(self) -> bytes | None:
        try:
            length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
            if length > MAX_MESSAGE_BYTES:
                raise EngineError(f"a message of {length} bytes was announced; at most {MAX_MESSAGE_BYTES} are taken")
            return await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def close(self) -> None:
        """Write what is left, and end the stream."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        data, self._unsent = b"".join(self._unsent), []
        if data and not self._writer.is_closing():
            self._writer.write(data)


def _call_of(data: bytes) -> int | None:
    """The command that a message belongs to, as far as it can be read."""
    try:
        return msgspec.msgpack.decode(data, type=_Numbered).call
    except (msgspec.ValidationError, msgspec.DecodeError):
        return None


def to_wire(error: BaseException) -> WireError:
    """The error of a call; of one that is not ours the class alone: its message may hold a user's text."""
    if isinstance(error, InputError):
        return WireError(
            type(error).__name__,
            field=error.field,
            remedy=error.remedy,
            value=error.value if _is_open(error.value) else None,  # type: ignore[arg-type]
            numbers=_numbers(error),
        )
    if isinstance(error, EngineError) or not isinstance(error, ForetokenError):
        cause = error.__cause__ if isinstance(error, EngineError) else error
        name = "" if cause is None else f": {type(cause).__name__}"
        kind, what = EngineError, "the request failed inside the engine"
        if isinstance(error, WorkerDiedError):
            kind, what = type(error), "the engine's process died"
        return WireError(kind.__name__, f"{what}{name}", numbers=_numbers(error))
    return WireError(type(error).__name__, str(error), numbers=_numbers(error))


def to_wire_of_loading(error: BaseException) -> WireError:
    """The error of a start, for the operator: with its value and its message."""
    if isinstance(error, InputError):
        value = error.value if isinstance(error.value, int | float) else str(error.value)
        return WireError(type(error).__name__, field=error.field, remedy=error.remedy, value=value)
    if isinstance(error, ForetokenError):
        return WireError(type(error).__name__, str(error))
    return WireError(EngineError.__name__, f"the engine could not be started: {type(error).__name__}: {error}")


def from_wire(error: WireError) -> ForetokenError:
    """The same error on this side."""
    kind = getattr(errors, error.name, EngineError)
    if not (isinstance(kind, type) and issubclass(kind, ForetokenError)):
        kind = EngineError
    found: ForetokenError
    if issubclass(kind, InputError):
        found = kind(error.field or "request", error.value, error.remedy)
    else:
        found = kind(error.message)
    for name, number in error.numbers.items():
        setattr(found, name, number)
    return found


def _is_open(value: object) -> bool:
    """Whether a refused value may be shown."""
    if isinstance(value, int):
        return value.bit_length() < 64
    return isinstance(value, float) or (isinstance(value, str) and _MEASURE.fullmatch(value) is not None)


def _numbers(error: BaseException) -> dict[str, Number]:
    return {
        name: value
        for name, value in vars(error).items()
        if name not in _OWN and isinstance(value, int | float) and _is_open(value)
    }


def plain(config: SpecConfig | EngineConfig) -> dict[str, Any]:
    """The fields of a configuration that are not the default, as values that msgpack has."""
    return {
        field.name: _value(value) for field in fields(config) if (value := getattr(config, field.name)) != field.default
    }


def engine_config_of(values: Mapping[str, Any]) -> EngineConfig:
    """What an engine is built from, from `plain` values.

    Raises:
        InputError: a value that cannot be honoured; msgspec.ValidationError: one inside `spec`, `routing` or `adapt`.
    """
    kinds: dict[str, Any] = {"spec": SpecConfig, "routing": RoutingRules, "adapt": AdaptConfig | bool}
    built = {name: msgspec.convert(values[name], kind) for name, kind in kinds.items() if name in values}
    return from_mapping(EngineConfig, {**values, **built})


def builtin(value: object) -> object:
    """What msgspec writes in place of a value that it does not know (`enc_hook`); a `TypeError` for others."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be written")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=builtin)


def _value(value: Any) -> Any:  # noqa: ANN401 - a field of any type
    if isinstance(value, SpecConfig):
        return plain(value)
    if isinstance(value, list | tuple):
        return [_value(one) for one in value]
    return msgspec.to_builtins(value, enc_hook=builtin)
