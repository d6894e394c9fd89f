"""`foretoken serve --ray` as its users meet it: two replicas of smollm2 on this machine."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import openai
import pytest
import ray
import yaml
from ray import serve
from ray.serve.context import _set_global_client
from ray.serve.schema import ServeDeploySchema

from foretoken.errors import ConfigError
from foretoken.serve_ray import app

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ["SERVER_PYTHON"]
LIMIT_S = 180.0  # for what takes a replica some seconds on an idle machine
DEPLOY = ROOT / "deploy"
QUESTIONS = [f"Write one sentence about the number {number}." for number in range(8)]


@contextmanager
def served(*flags: str) -> Iterator[str]:
    """The address of a server with these flags; at the end it drains and exits with 0."""
    command = [PYTHON, "-m", "foretoken", "serve", "--ray", "--json", "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, "the server did not start; see its messages above"
        ray.init(address="auto", logging_level="error")
        _set_global_client(None)  # that of the cluster before
        yield str(json.loads(line)["url"])
    finally:
        ray.shutdown()
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0


def num_running() -> int:
    states = serve.status().applications["foretoken"].deployments["Engine"].replica_states
    return states.get("RUNNING", 0)


def wait_for(predicate: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not predicate():
        assert time.monotonic() < deadline
        time.sleep(0.25)


def replica_pids() -> list[int]:
    """The processes of the engine's replicas, which Ray names so."""
    names = {path.parent.name: path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()}
    return sorted(int(pid) for pid, name in names.items() if name.startswith(b"ray::ServeReplica:foretoken:Engine"))


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def children_of(pid: int) -> list[int]:
    return [int(one) for path in Path(f"/proc/{pid}/task").glob("*/children") for one in path.read_text().split()]


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


def ask(client: openai.OpenAI, question: str, max_tokens: int = 24) -> tuple[str, str | None]:
    """Text and reason of the end of a streamed answer."""
    text, reason = "", None
    messages = [{"role": "user", "content": question}]
    options = {"model": "smollm2", "temperature": 0, "max_tokens": max_tokens, "stream": True}
    for chunk in client.chat.completions.create(messages=messages, **options):
        text += chunk.choices[0].delta.content or ""
        reason = chunk.choices[0].finish_reason or reason
    return text, reason


class Load:
    """Asks the questions in turn, several at a time, until it is stopped: what came of each."""

    def __init__(self, url: str, num_threads: int, pause_s: float = 0.0) -> None:
        self.url, self.pause_s, self.is_over = url, pause_s, threading.Event()
        self.answers: list[tuple[str, str, str | None]] = []
        self.errors: list[openai.APIError] = []
        self.threads = [threading.Thread(target=self.run, args=(number,)) for number in range(num_threads)]
        for thread in self.threads:
            thread.start()

    def run(self, number: int) -> None:
        client = client_of(self.url)
        while not self.is_over.is_set():
            number = (number + 1) % len(QUESTIONS)
            try:
                self.answers.append((QUESTIONS[number], *ask(client, QUESTIONS[number])))
            except openai.APIError as error:
                self.errors.append(error)
            self.is_over.wait(self.pause_s)

    def stop(self) -> None:
        self.is_over.set()
        for thread in self.threads:
            thread.join()


@pytest.mark.parametrize("name", ["ray-serve.yaml", "ray-service.yaml"])
def test_ray_reads_the_configurations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETOKEN_API_KEY", "a-long-secret")
    read = yaml.safe_load((DEPLOY / name).read_text())
    config = yaml.safe_load(read["spec"]["serveConfigV2"]) if name == "ray-service.yaml" else read
    (application,) = ServeDeploySchema.model_validate(config).applications
    assert application.import_path == "foretoken.serve_ray:app"
    app(application.args)
    with pytest.raises(ConfigError, match="did you mean max_replicas"):
        app({**application.args, "max_replica": 2})
    del config["applications"][0]["import_path"]
    with pytest.raises(ValueError, match="import_path"):
        ServeDeploySchema.model_validate(config)


def test_two_replicas(tmp_path: Path) -> None:
    """Clients, a conversation that stays, metrics, and a replica that is killed under load."""
    with served("--workers", "2") as url:
        client = client_of(url)
        expected = {question: ask(client, question) for question in QUESTIONS}
        for question, (text, reason) in expected.items():
            asked = {"model": "smollm2", "temperature": 0, "max_tokens": 24}
            whole = client.chat.completions.create(messages=[{"role": "user", "content": question}], **asked)
            assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (text, reason)
            assert whole.usage is not None
            assert whole.usage.prompt_tokens_details is not None
            assert whole.usage.prompt_tokens_details.cached_tokens, "the same conversation went to another replica"
        with pytest.raises(openai.BadRequestError):
            ask(client, "x", max_tokens=-1)

        metrics = httpx2.get(f"{url}/metrics").text
        (generated,) = [line for line in metrics.splitlines() if line.startswith("foretoken_generation_tokens_total")]
        assert float(generated.split()[1]) >= sum(2 for _ in expected)

        victim, survivor = replica_pids()
        load = Load(url, num_threads=6)
        try:
            wait_for(lambda: len(load.answers) > 6)
            os.kill(victim, signal.SIGKILL)
            num_before = len(load.answers)
            wait_for(lambda: len(load.answers) > num_before + 6)  # traffic has moved
            wait_for(lambda: num_running() == 2 and set(replica_pids()) - {victim, survivor} != set())
        finally:
            load.stop()
        assert all((text, reason) == expected[question] for question, text, reason in load.answers)
        assert len(load.errors) <= 6, load.errors  # at most what was in flight, each told to its client
        assert {error.code for error in load.errors} <= {"worker_died"}
        with client.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": "hi"}], max_tokens=2000, stream=True
        ) as stream:
            next(iter(stream))  # and leave
        wait_for(lambda: "foretoken_num_requests_running 0.0" in httpx2.get(f"{url}/metrics").text)


class OpenLoop:
    """Asks at the times of a Poisson process, however long answers take; `rate` may change meanwhile. No request waits
    for another, so a replica that falls behind gets a queue, not fewer requests.
    """

    def __init__(self, url: str, rate: float, seed: int) -> None:
        self.rate, self.is_over, self.errors = rate, threading.Event(), list[Exception]()
        self.answers: list[tuple[str, str, str | None]] = []
        self._client, self._rng, self._asked = client_of(url), random.Random(seed), list[threading.Thread]()
        self._clock = threading.Thread(target=self._run)
        self._clock.start()

    def _run(self) -> None:
        while not self.is_over.wait(self._rng.expovariate(self.rate)):
            one = threading.Thread(target=self._ask, args=(self._rng.choice(QUESTIONS),))
            self._asked.append(one)
            one.start()

    def _ask(self, question: str) -> None:
        try:
            self.answers.append((question, *ask(self._client, question)))
        except openai.APIError as error:
            self.errors.append(error)

    def stop(self) -> None:
        """End the arrivals, and wait for the answers of all that came."""
        self.is_over.set()
        for thread in (self._clock, *self._asked):
            thread.join()
        assert len(self.answers) + len(self.errors) == len(self._asked)


@pytest.mark.parametrize("aim", [("--replica-tokens", "100"), ("--max-batch-size", "4")])
def test_scaling_under_an_open_loop(aim: tuple[str, str]) -> None:
    """1 -> 2 -> 1 replicas while requests arrive by a clock, and none fails or gets another answer. Decoding is plain:
    drafts of answers given before made them so short that one replica kept up with any clock of this process.
    """
    scaling = ("--drafter", "none", "--scale-up-s", "1", "--scale-down-s", "5")
    with served("--workers", "1", "--max-replicas", "2", *aim, *scaling) as url:
        expected = {question: ask(client_of(url), question) for question in QUESTIONS}
        assert num_running() == 1
        load = OpenLoop(url, rate=12.0, seed=33)
        try:
            wait_for(lambda: num_running() == 2)
            load.rate = 0.4
            wait_for(lambda: num_running() == 1 and len(replica_pids()) == 1)
        finally:  # a clock that goes on would keep this process alive
            load.stop()
        assert not load.errors
        assert all((text, reason) == expected[question] for question, text, reason in load.answers)


def test_a_replica_of_two_ranks() -> None:
    """A tensor-parallel replica reserves what its ranks take, answers as one process does, and is replaced when a rank
    is killed.
    """
    common = ("--target", str(ROOT / "tests/reference/target"), "--name", "reference", "--dtype", "float32")
    asked = {"model": "reference", "temperature": 0, "max_tokens": 24}

    def answers(url: str) -> list[str]:
        client = client_of(url)
        return [client.completions.create(prompt=text, **asked).choices[0].text for text in ("def add(", "class A:")]

    with served(*common, "--workers", "1") as url:
        expected = answers(url)
    with served(*common, "--workers", "1", "--tp", "2") as url:
        assert answers(url) == expected
        assert ray.cluster_resources()["CPU"] - ray.available_resources().get("CPU", 0.0) == 2.0
        (replica,) = replica_pids()
        (rank,) = [pid for pid in children_of(replica) if b"foretoken.parallel.rank" in command_of(pid)]
        os.kill(rank, signal.SIGKILL)
        wait_for(lambda: set(replica_pids()) - {replica} != set() and num_running() == 1)
        wait_for(lambda: replica not in replica_pids())
        assert answers(url) == expected


def test_a_configuration_is_served(tmp_path: Path) -> None:
    """`deploy/ray-serve.yaml` with a small model, run by Ray's own command: the front is a deployment too, behind Ray's
    proxy, and two replicas answer it.
    """
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    config = yaml.safe_load((DEPLOY / "ray-serve.yaml").read_text())
    config["http_options"] = {"host": "127.0.0.1", "port": port}
    own = {"target": str(ROOT / "tests/reference/target"), "name": "reference", "dtype": "float32"}
    config["applications"][0]["args"] |= own | {"replica_cpus": 0.5, "max_replicas": 2, "drain_s": 10}
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(config))
    environment = {**os.environ, "FORETOKEN_API_KEY": "a-long-secret", "RAY_ADDRESS": "local"}
    # On a busy machine the proxy's own 5 s are too few, and so is what a process of niceness 15 gets.
    environment |= {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "50", "RAY_worker_niceness": "0"}
    command = [str(Path(PYTHON).with_name("serve")), "run", str(tmp_path / "serve.yaml")]
    with subprocess.Popen(command, env=environment, cwd=ROOT) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(lambda: process.poll() is not None or is_ready(url))
            assert process.poll() is None, "the application was not started; see its messages above"
            asked = {"model": "reference", "prompt": "def add(", "temperature": 0, "max_tokens": 24}
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="a-long-secret", max_retries=0, timeout=120)
            whole = client.completions.create(**asked).choices[0]
            streamed = [chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)]
            assert whole.finish_reason == "length"
            assert whole.text == "".join(streamed)
            assert len(streamed) > 2
            with pytest.raises(openai.AuthenticationError):
                client_of(url).completions.create(**asked)
            key = {"Authorization": "Bearer a-long-secret"}
            wait_for(lambda: num_answering(url, key) == 2)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(LIMIT_S)


def is_ready(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/ready").status_code == 200
    except httpx2.TransportError:
        return False


def num_answering(url: str, key: dict[str, str]) -> int:
    """How many replicas a front hears of."""
    engine = httpx2.get(f"{url}/v1/stats", headers=key, timeout=60).json()["engine"]
    return 0 if engine is None else len(engine["replicas"])
