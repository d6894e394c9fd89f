"""Fixtures that many tests share: a tiny target with a related draft, and the audit after every test."""

from __future__ import annotations

import gc
import logging
import os
import random
import shutil
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from foretoken import LLM, SpecConfig
from foretoken.draft.base import Drafter, DrafterKey
from foretoken.draft.failures import DrafterFailures
from foretoken.engine import admission
from tests.helpers import audit
from tests.helpers.checkpoints import related_pair, tiny_checkpoint, tiny_tokenizer
from tests.helpers.faults import Injected
from tests.helpers.interrupts import heed_interrupts
from tests.helpers.mtp_checkpoints import add_mtp
from tests.helpers.real_model import NO_INDEX, smollm2_file

__all__ = ["smollm2_file"]

torch.set_num_threads(1)  # tiny matrices: a second thread costs more than it brings
audit.watch()
heed_interrupts()
settings.register_profile(
    "the same everywhere", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("the same everywhere")


def pytest_configure(config: pytest.Config) -> None:
    """Advice is for users; tiny models earn it in nearly every test. Tests of advice ask for it."""
    config.addinivalue_line("filterwarnings", "ignore::foretoken.errors.SpeculationWarning")
    config.addinivalue_line("filterwarnings", "ignore::foretoken.machine.identity.PrecisionWarning")  # of this machine


@pytest.fixture(autouse=True)
def unheard() -> Iterator[list[str]]:
    """Filters make errors of warnings here, and `errors.warn` logs those: a test fails that leaves one in this list."""
    texts: list[str] = []

    def hear(record: logging.LogRecord) -> bool:
        if not record.getMessage().startswith("SpeculationWarning"):  # advice hangs on times, see `pytest_configure`
            texts.append(record.getMessage())
        return True

    log = logging.getLogger("foretoken")  # a filter sees this logger's own records, not those of its children
    log.addFilter(hear)
    yield texts
    log.removeFilter(hear)
    assert not texts


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` need a CUDA device."""
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    """Modules and tests stay until the end: the garbage collector need not go through them again and again, nor start
    every 700 objects.
    """
    gc.freeze()
    gc.set_threshold(5_000, 10, 10)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Numbers that nobody seeded, those of requests without a seed among them, are a test's own: a failure can be
    repeated.
    """
    own = random.Random(item.nodeid)
    admission.secrets = SimpleNamespace(randbits=own.getrandbits)  # type: ignore[assignment]
    random.seed(own.getrandbits(32))
    np.random.seed(own.getrandbits(32))
    torch.manual_seed(own.getrandbits(32))


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> None:
    """Profiles of this run stay out of the user's cache folder, also in processes that tests start. Kernels, which are
    named by their sources and the compiler, stay in pytest's for the processes of this run and for the next one. No
    model is fetched but by `smollm2_file`.
    """
    cache = tmp_path_factory.mktemp("cache")
    assert pytestconfig.cache is not None
    (cache / "kernels").symlink_to(pytestconfig.cache.mkdir("kernels"))
    os.environ["FORETOKEN_CACHE"] = str(cache)
    os.environ[NO_INDEX] = "1"


@pytest.fixture(scope="session", autouse=True)
def no_probe() -> None:
    """Heads of tests are random: trying each of them at load would take time and find what is known."""
    os.environ["FORETOKEN_PROBE"] = "0"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Every test leaves torch with one thread: engines of later tests choose among as many as they find."""
    yield
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert num_threads == 1, f"the test left torch with {num_threads} threads"


@pytest.fixture(autouse=True)
def conserved() -> Iterator[None]:
    """Blocks: free + used = total, and an idle engine holds nothing, after every test."""
    yield
    audit.check_all()


@pytest.fixture
def failed_drafters(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What drafters failed at, in a test that means them to; everywhere else a failure is an error of the test."""
    failed: list[str] = []
    add = DrafterFailures.add

    def record(
        self: DrafterFailures, key: DrafterKey, drafter: Drafter, request_id: int, reason: str, is_last: bool = False
    ) -> None:
        failed.append(f"{drafter.name}: {reason}")
        add(self, key, drafter, request_id, reason, is_last)

    monkeypatch.setattr(DrafterFailures, "add", record)
    return failed


@pytest.fixture(autouse=True)
def sound_drafters(request: pytest.FixtureRequest) -> Iterator[None]:
    """The engine goes on without a drafter that fails: what a test of ours would have shown as an exception must show
    here.
    """
    failed = request.getfixturevalue("failed_drafters")
    yield
    by_accident = [one for one in failed if Injected.__name__ not in one]
    assert not by_accident or "failed_drafters" in request.node.fixturenames, by_accident


@pytest.fixture(scope="session")
def usual_pair(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Folders of a tiny `target` and a `draft` that predicts about half of its tokens: the target without its second
    layer.
    """
    return related_pair(tmp_path_factory.mktemp("pair"), hidden_size=32)


@pytest.fixture(scope="session")
def pair(usual_pair: SimpleNamespace) -> SimpleNamespace:
    """`usual_pair`, which a module may replace."""
    return usual_pair


@pytest.fixture(scope="session")
def mtp_pair(usual_pair: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The same pair, whose target brings an MTP layer: every drafter runs for it."""
    folder = tmp_path_factory.mktemp("mtp_pair")
    for name in ("target", "draft"):
        shutil.copytree(getattr(usual_pair, name), folder / name)
    add_mtp(folder / "target")
    return SimpleNamespace(target=folder / "target", draft=folder / "draft")


@pytest.fixture(scope="session")
def mtp_llm(mtp_pair: SimpleNamespace) -> LLM:
    """One engine for the target with an MTP layer."""
    return LLM(mtp_pair.target, SpecConfig(), dtype="float32", cache_tokens=8192)


@pytest.fixture(scope="session")
def text_pair(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The same with a tokenizer in both folders."""
    folder = tmp_path_factory.mktemp("text_pair")
    for name, layers in (("target", 2), ("draft", 1)):
        tiny_checkpoint(folder / name, "llama", num_hidden_layers=layers, hidden_size=32, vocab_size=300)
        tiny_tokenizer(folder / name, 300)
    return SimpleNamespace(target=folder / "target", draft=folder / "draft")


@pytest.fixture(scope="session")
def llm(pair: SimpleNamespace) -> LLM:
    """One engine for many tests, in float32, so that each test meets the used cache of the one before."""
    return LLM(pair.target, SpecConfig(), dtype="float32", cache_tokens=8192)
