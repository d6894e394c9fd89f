"""Two workers behind one front, as processes: one is killed under load, the other goes on, and both serve again."""

from __future__ import annotations

import asyncio
import os
import signal

from proof.test_kills import Load
from tests.server.test_life import KEYS, REFERENCE, children, is_alive, serving, until


def test_a_server_with_two_workers_stays_ready() -> None:
    with serving(*REFERENCE, *KEYS, "--workers", "2", "--request-log", "none") as server:
        server.wait_ready()

        def states() -> list[str]:
            return [worker["state"] for worker in server.invariants()["workers"]]

        until(lambda: states() == ["ready", "ready"], "the second worker")
        load = Load(server)

        async def run() -> None:
            clients = [asyncio.create_task(load.client(number)) for number in range(6)]
            while load.outcomes["answered"] < 20:
                await asyncio.sleep(0.01)
            pid = server.invariants()["workers"][0]["pid"]
            os.kill(pid, signal.SIGKILL)
            while is_alive(pid):
                await asyncio.sleep(0.01)
            answered = load.outcomes["answered"]
            while load.outcomes["answered"] < answered + 20:
                await asyncio.sleep(0.01)
            load.is_over = True
            await asyncio.gather(*clients)

        asyncio.run(run())
        assert load.outcomes["told: worker died"]
        assert not load.outcomes["refused: 503"]
        until(lambda: states() == ["ready", "ready"], "the worker that was killed")
        held = server.invariants()
        assert [worker["num_starts"] for worker in held["workers"]] == [2, 1]
        assert [worker["num_calls"] for worker in held["workers"]] == [0, 0]
        with server.client as client:
            stats = client.get("/v1/stats", headers={"authorization": "Bearer users-key"}).json()["engine"]
        assert len(stats["replicas"]) == 2
        assert stats["num_emitted"] == sum(one["num_emitted"] for one in stats["replicas"])
        workers = children(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
        assert not any(map(is_alive, workers))
