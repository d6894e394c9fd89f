"""`foretoken serve` as a process, with workers that are processes: crashes, stuck steps, signals.

Tests share a server while it lives, and none depends on the order. Nothing here waits for a time.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.helpers import faulty_worker

ROOT = Path(__file__).resolve().parents[2]
_PATIENCE_S = 120.0  # until a test gives up; nothing depends on it
REFERENCE = ("--target", "reference:target", "--drafter", "auto", "--draft", "reference:draft")
REFERENCE += ("--dtype", "float32", "--cost-profile", "off", "--cache-tokens", "4096", "--first-restart-s", "0.05")


class Server:
    """A running `foretoken serve --json`, its first worker with a `fault` of `faulty_worker`."""

    def __init__(self, *arguments: str, fault: str = "") -> None:
        module = faulty_worker.MODULE if fault else "foretoken"
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FORETOKEN_TEST": "1"}
        if fault:
            environment[faulty_worker.VARIABLE] = fault
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, "serve", "--port", "0", "--json", *arguments],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.err = ""
        self._reader = threading.Thread(target=self._read_err, daemon=True)
        self._reader.start()
        self.facts: dict[str, Any] = {}

    def _read_err(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.err += line

    def wait_ready(self) -> None:
        """Until the block of a server that is ready is printed."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.err
        self.facts = json.loads(line)

    @property
    def client(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.facts["url"], timeout=_PATIENCE_S)

    def get(self, path: str) -> httpx2.Response:
        with self.client as client:
            return client.get(path)

    def invariants(self) -> dict[str, Any]:
        with self.client as client:
            found = client.get("/debug/invariants", headers={"authorization": "Bearer admin-key"})
        return dict(found.json())

    def stream(self, max_tokens: int = 4000) -> Iterator[str]:
        """Data of an endless answer as it comes."""
        body = {
            "model": self.facts["model"],
            "prompt": "def f(x):",
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "temperature": 1.0,
        }
        with self.client as client, client.stream("POST", "/v1/completions", json=body, headers=KEY) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: "):
                    yield line.removeprefix("data: ")

    def complete(self, **fields: Any) -> httpx2.Response:
        body = {"model": self.facts["model"], "prompt": "def f(x):", "max_tokens": 8, **fields}
        with self.client as client:
            return client.post("/v1/completions", json=body, headers=KEY)

    def end(self) -> int:
        """Wait for the process; its exit code."""
        code = self.process.wait(_PATIENCE_S)
        self._reader.join(_PATIENCE_S)
        return code


class Started(list[Server]):
    """Servers that end with `stack`."""

    def __init__(self, stack: ExitStack) -> None:
        super().__init__()
        self.stack = stack


KEY = {"authorization": "Bearer users-key"}
TEMPLATE = "{% for one in messages %}# {{ one.role }}: {{ one.content }}\n{% endfor %}# assistant:"
KEYS = ("--api-key", "users-key", "--admin-key", "admin-key")


@contextmanager
def serving(*arguments: str, fault: str = "") -> Iterator[Server]:
    server = Server(*arguments, fault=fault)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.send_signal(signal.SIGINT)
            server.process.send_signal(signal.SIGINT)
        server.process.kill()
        server.end()
        for stream in (server.process.stdout, server.process.stderr):
            assert stream is not None
            stream.close()


def until(condition: Callable[[], bool], what: str) -> None:
    """Ask again until it holds."""
    end = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def servers() -> Iterator[Started]:
    """The servers that tests share, the last one first to be asked for."""
    with ExitStack() as stack:
        yield Started(stack)


@pytest.fixture
def server(servers: Started, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """A server that is ready: the one that other tests have left, or a new one. Its target has no chat template."""
    if not servers or servers[-1].process.poll() is not None:
        template = tmp_path_factory.mktemp("template") / "chat.jinja"
        template.write_text(TEMPLATE)
        flags = (*REFERENCE, *KEYS, "--drain-s", "60", "--chat-template", str(template))
        servers.append(servers.stack.enter_context(serving(*flags)))
        servers[-1].wait_ready()
    until(lambda: servers[-1].get("/ready").status_code == 200, "not ready")
    return servers[-1]


def test_ready(server: Server) -> None:
    """What is printed once the model is loaded; the front has no torch, and no key is shown."""
    facts = server.facts
    assert facts["target"] == "reference:target"
    assert {"draft_model", "suffix"} <= set(facts["drafters"])
    assert facts["key"] is True
    assert server.get("/ready").status_code == 200
    assert "users-key" not in server.err
    maps = Path(f"/proc/{server.process.pid}/maps")
    assert "libtorch" not in maps.read_text()
    assert "TEST BUILD" in server.err


def test_a_chat_in_the_template_of_a_file(server: Server) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with server.client as client:
        asked = {"messages": messages, "max_tokens": 2}
        chat = client.post("/v1/chat/completions", headers=KEY, json=asked)
        plain = client.post("/tokenize", headers=KEY, json={"prompt": "# user: hi\n# assistant:"})
        laid_out = client.post("/tokenize", headers=KEY, json={"messages": messages})
    assert chat.status_code == 200, chat.text
    assert laid_out.json()["tokens"] == plain.json()["tokens"]
    assert chat.json()["usage"]["prompt_tokens"] == plain.json()["count"]


def test_watchdog_stuck_step() -> None:
    """Case 63: a step longer than T: stack dump, 503, restart. Case 64: a drain with timeout 0: an error event."""
    with serving(*REFERENCE, *KEYS, "--watchdog-s", "1.0", "--drain-s", "0", fault="step:30:hang") as server:
        server.wait_ready()
        events = list(server.stream())
        assert json.loads(events[-1])["error"]["code"] == "worker_died"
        until(lambda: server.get("/ready").status_code == 200, "no worker came back")
        assert "a step has lasted" in server.err
        assert "in hooked" in server.err  # the stack of the thread that hangs
        assert server.invariants()["workers"][0]["num_starts"] == 2
        assert server.complete().status_code == 200
        stream = server.stream()
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        error = json.loads(list(stream)[-1])["error"]
        assert error["type"] in ("unavailable_error", "server_error")
        assert server.end() == 0


def test_worker_sigkill(server: Server) -> None:
    """Case 61: mid-stream: SSE error event, non-stream 500, 503 while it restarts, canary, no orphans."""
    (before,) = server.invariants()["workers"]
    pid = before["pid"]
    answers: list[httpx2.Response] = []
    whole = threading.Thread(
        target=lambda: answers.append(server.complete(max_tokens=4000, ignore_eos=True, temperature=1.0))
    )
    whole.start()
    stream = server.stream()
    assert "text" in next(stream)
    until(lambda: server.invariants()["workers"][0]["num_calls"] == 2, "both requests run")
    os.kill(pid, signal.SIGKILL)
    events = list(stream)
    whole.join()
    assert json.loads(events[-1])["error"]["code"] == "worker_died"
    assert (answers[0].status_code, answers[0].headers["x-should-retry"]) == (500, "false")
    refused = server.get("/health")
    assert refused.status_code == 503 or server.invariants()["workers"][0]["num_starts"] > before["num_starts"]
    until(lambda: server.get("/health").status_code == 200, "no worker came back")
    assert server.complete().status_code == 200
    assert not is_alive(pid)
    held = server.invariants()
    assert held["num_open"] == 0
    assert held["workers"][0]["pools"]["target"]["used"] == 0


def test_sigterm_drain(server: Server) -> None:
    """Case 64: what is in flight ends, new requests get 503, exit code 0, no orphans."""
    pid = server.invariants()["workers"][0]["pid"]
    stream = server.stream(max_tokens=200)
    next(stream)
    server.process.send_signal(signal.SIGTERM)
    until(lambda: server.get("/ready").status_code == 503, "not draining")
    refused = server.complete()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert refused.headers["retry-after"]
    events = list(stream)
    assert events[-1] == "[DONE]"
    assert server.end() == 0
    assert not is_alive(pid)


def test_a_second_sigint_ends_at_once() -> None:
    """Case 64: exit code 130, although a request is in flight and there is time to drain."""
    with serving(*REFERENCE, "--drain-s", "600") as server:
        server.wait_ready()
        stream = server.stream(max_tokens=4000)
        next(stream)
        (child,) = children(server.process.pid)
        server.process.send_signal(signal.SIGINT)
        until(lambda: server.get("/ready").status_code == 503, "not draining")
        server.process.send_signal(signal.SIGINT)
        assert server.end() == 130
        until(lambda: not is_alive(child), "the worker ends")


def test_signals_while_loading() -> None:
    """Case 64: SIGTERM ends a server that loads; a second SIGINT ends it at once with 130. No orphans either way."""
    for sent, code in (((signal.SIGTERM,), 0), ((signal.SIGINT, signal.SIGINT), 130)):
        port = free_port()
        with serving(*REFERENCE, "--port", str(port), fault="load:1:hang") as server:
            server.facts = {"url": f"http://127.0.0.1:{port}", "model": "target"}
            until(lambda port=port: is_listening(port), "it listens at once")  # type: ignore[misc]
            assert server.get("/ready").status_code == 503
            assert server.get("/health").status_code == 200
            assert server.complete().json()["error"]["code"] == "loading"
            (child,) = children(server.process.pid)
            for number in sent:
                server.process.send_signal(number)
            assert server.end() == code, server.err
            until(lambda child=child: not is_alive(child), "the worker ends")  # type: ignore[misc]


def test_no_worker_outlives_its_front() -> None:
    """Case 61: a front that is killed while a load hangs, of which it told."""
    with serving(*REFERENCE, "--watchdog-s", "0.5", fault="load:1:hang") as server:
        until(lambda: len(children(server.process.pid)) == 1, "the worker starts")
        (child,) = children(server.process.pid)
        until(lambda: f"`kill -USR1 {child}` has it write its stacks" in server.err, "the log says that it loads")
        server.process.kill()
        until(lambda: not is_alive(child), "the worker ends")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def is_listening(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has just ended
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(path.parent.name))
    return found
