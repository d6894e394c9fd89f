"""When a stream's pieces are sent: one for each step, one for each token, or what came within an interval."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass

import msgspec

from foretoken.backend.events import Event, Piece, RoundEvent
from foretoken.server.api.config import ApiConfig
from foretoken.server.api.exchange import stop


@dataclass
class PieceGroup:
    """Pieces of one answer that are sent as one."""

    piece: Piece
    rounds: list[RoundEvent]


async def paced(events: AsyncIterator[Event], config: ApiConfig) -> AsyncGenerator[Event | PieceGroup]:
    """The events in their order for each answer, pieces grouped as the settings say."""
    if config.interval_s:
        async with contextlib.aclosing(_by_interval(events, config.interval_s)) as groups:
            async for group in groups:
                yield group
        return
    async for event in events:
        if not isinstance(event, Piece):
            yield event
        elif config.granularity == "token":
            for one in _by_token(event):
                yield one
        else:
            yield PieceGroup(event, [] if event.round is None else [event.round])


def _by_token(piece: Piece) -> Iterator[PieceGroup]:
    """A piece as one for each token, its text divided as far as tokens and characters agree."""
    rest = piece.text
    for place, token in enumerate(piece.tokens):
        is_last = place == len(piece.tokens) - 1
        text = rest if is_last else rest[: len(token.text)]
        rest = rest[len(text) :]
        rounds = [piece.round] if place == 0 and piece.round is not None else []
        yield PieceGroup(msgspec.structs.replace(piece, text=text, tokens=(token,)), rounds)
    if not piece.tokens:
        yield PieceGroup(piece, [])


async def _by_interval(events: AsyncIterator[Event], interval_s: float) -> AsyncGenerator[Event | PieceGroup]:
    """What came in each interval, on a clock that does not depend on when it came."""
    arrived: asyncio.Queue[Event | None] = asyncio.Queue()

    async def pump() -> None:
        try:
            async for event in events:
                arrived.put_nowait(event)
        finally:
            arrived.put_nowait(None)

    task, loop = asyncio.create_task(pump()), asyncio.get_running_loop()
    due_s, is_open = loop.time() + interval_s, True
    try:
        while is_open:
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            due_s = max(due_s + interval_s, loop.time())
            batch: list[Event] = []
            while not arrived.empty():
                event = arrived.get_nowait()
                if event is None:
                    is_open = False
                else:
                    batch.append(event)
            for one in _merged(batch):
                yield one
        await task
    finally:
        await stop(task)


def _merged(events: list[Event]) -> Iterator[Event | PieceGroup]:
    """Pieces of each answer put together; other events stay behind the pieces that came before them."""
    open_groups: dict[int, PieceGroup] = {}
    for event in events:
        if isinstance(event, Piece):
            group = open_groups.get(event.index)
            rounds = [] if event.round is None else [event.round]
            if group is None:
                open_groups[event.index] = PieceGroup(event, rounds)
            else:
                text, tokens = group.piece.text + event.text, group.piece.tokens + event.tokens
                group.piece = msgspec.structs.replace(group.piece, text=text, tokens=tokens)
                group.rounds += rounds
            continue
        yield from open_groups.values()
        open_groups.clear()
        yield event
    yield from open_groups.values()
