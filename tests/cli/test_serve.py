"""The flags of `foretoken serve`, and what is printed when the server is ready. Nothing is served here."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest

from foretoken import SpecConfig
from foretoken.backend.call import ModelInfo
from foretoken.control.routing import RoutingRules
from foretoken.measure.advise.candidates import candidates_of
from foretoken.measure.advise.launches import OURS, as_toml, launch_lines, settings_of
from foretoken.measure.advise.options import AdviseOptions
from foretoken.option import options_of
from foretoken.server import run
from foretoken.server.api.config import ApiConfig
from foretoken.server.config import ServerConfig
from foretoken.server.guard.config import KEY_VARIABLE, GuardConfig
from foretoken.server.life.config import LifeConfig
from foretoken.server.observe.config import ObserveConfig
from foretoken.server.run import Readiness
from tests.cli.conftest import Run

ROOT = Path(__file__).resolve().parents[2]
INFO = ModelInfo("m", 100, 50, (0,), None, None, None, False, False, {}, 4)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServerConfig]:
    """The configuration of every server that would have run."""
    found: list[ServerConfig] = []

    def stand_in(config: ServerConfig, on_ready: Callable[[Readiness], None]) -> int:
        found.append(config)
        on_ready(Readiness("http://127.0.0.1:8000", INFO, ("ngram",), 1.25, config.life.workers))
        return 0

    monkeypatch.setattr(run, "run_server", stand_in)
    return found


def test_with_nothing_named_it_serves_smollm2(foretoken: Run, served: list[ServerConfig]) -> None:
    done = foretoken("serve")
    assert done.code == 0, done.err
    (config,) = served
    assert config.engine.model == "smollm2"
    assert config.engine.spec is None  # the engine's own choice
    assert (config.guard.host, config.port, config.model_name) == ("127.0.0.1", 8000, "smollm2")
    assert not config.api.obfuscation
    for text in ("http://127.0.0.1:8000/v1", "m (smollm2)", "ngram", "none: every program", "ready after 1.2"):
        assert text in done.out
    assert done.err == "loading smollm2\n"


@pytest.mark.parametrize(
    ("flags", "spec"),
    [
        (("-t", "m"), None),
        (("--num-draft", 3), SpecConfig("auto", num_draft=3)),
        (("--drafter", "none"), SpecConfig()),
        (("--drafter", "ngram"), SpecConfig("ngram")),
        (("-t", "m", "--draft", "d", "--draft-required"), SpecConfig("draft_model", "d")),
    ],
)
def test_how_it_speculates(
    foretoken: Run, served: list[ServerConfig], flags: tuple[object, ...], spec: SpecConfig | None
) -> None:
    assert foretoken("serve", *flags).code == 0
    assert served[0].engine.spec == spec
    assert served[0].draft_required == ("--draft-required" in flags)


def test_flags_reach_their_configurations(
    foretoken: Run, served: list[ServerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("key").write_text("from-a-file\n")
    done = foretoken(
        *("serve", "--json", "--target", "folder/some-model", "--host", "0.0.0.0", "--port", 0, "--api-key", "@key"),
        *("--workers", 2, "--devices", "cuda:0", "--devices", "cuda:1", "--drain-s", 5, "--watchdog-s", 9),
        *("--strict", "--no-predictions", "--max-choices", 4, "--granularity", "interval:50", "--ping-s", 3),
        *("--cors-origins", "https://a.example", "--metrics-public", "--max-body-bytes", 1000),
        *("--metrics-alias", "vllm", "--history", "h.sqlite", "--request-log", "json", "--slices", "code"),
        *("--dtype", "float32", "--device", "cpu", "--cache-tokens", 512, "--max-batch-size", 3, "--shadow-rate", 0.1),
        *("--max-speculating-requests", 5),
    )
    assert done.code == 0, done.err
    assert json.loads(done.lines[-1])["key"] is True
    assert "from-a-file" not in done.out + done.err
    (config,) = served
    assert (config.model_name, config.guard.api_key, config.port) == ("some-model", "from-a-file", 0)
    assert (config.life.workers, config.life.devices, config.life.drain_s) == (2, ("cuda:0", "cuda:1"), 5)
    assert (config.api.strict, config.api.predictions, config.api.max_choices) == (True, False, 4)
    assert config.api.obfuscation  # other machines reach it
    assert (config.guard.cors_origins, config.guard.max_body_bytes) == (("https://a.example",), 1000)
    assert (config.observe.metrics_alias, config.observe.slices, config.observe.history) == (
        "vllm",
        ("code",),
        "h.sqlite",
    )
    assert (config.engine.dtype, config.engine.cache_tokens, config.engine.shadow_rate) == ("float32", 512, 0.1)
    assert config.engine.routing == RoutingRules(max_speculating_requests=5)
    monkeypatch.setenv(KEY_VARIABLE, "from-the-environment")
    assert foretoken("serve").code == 0
    assert served[1].guard.api_key == "from-the-environment"


@pytest.mark.parametrize("closed", [("--drafter", "none"), ("--num-draft", 3)])
def test_a_rule_that_nothing_would_ask_is_refused_by_its_flag(foretoken: Run, closed: tuple[object, ...]) -> None:
    done = foretoken("serve", *closed, "--max-speculating-requests", 5)
    assert done.code == 2
    assert "max_speculating_requests=5: rules hold where the number of draft tokens is open" in done.err


@pytest.mark.parametrize(
    "draft",
    [
        "ngram",
        "suffix:store_tokens=1000",
        "early_exit:skip_layers=1+2",
        "draft_model:draft=reference:draft;tree=static;branching=3+2;draft_dtype=float16",
    ],
)
def test_the_line_and_the_settings_of_advise_start_what_was_judged(
    foretoken: Run, served: list[ServerConfig], draft: str
) -> None:
    (candidate,) = candidates_of(AdviseOptions("m", drafts=(draft,)))
    rules = {"max_speculating_requests": 3, "min_tokens_to_speculate": 9}
    (line,) = launch_lines(candidate, "m", 4, rules, (OURS,))
    assert foretoken(*shlex.split(line.command)[1:]).code == 0
    Path("foretoken.toml").write_text(as_toml(settings_of(candidate, "m", rules)))
    assert foretoken("serve").code == 0
    for config in served:
        assert config.engine.routing == RoutingRules(**rules)
        assert config.engine.spec == replace(candidate.spec, num_draft="auto")


def test_files_of_deployment_use_flags_that_exist() -> None:
    lines = (ROOT / "tests" / "cli_options.txt").read_text().splitlines()
    known = {line.split()[-1] for line in lines if line.startswith("foretoken serve ")} | {"--help"}
    others = {"--now", "--rm", "--secret", "--build-arg", "--from", "--index-url", "--no-deps", "--no-build-isolation"}
    others |= {"--system", "--create-home", "--uid", "--start-period", "--interval", "--timeout", "--yes"}
    others |= {"--no-install-recommends"}  # of other commands
    study = re.compile(r"python -m studies\.(?:.*\\\n)*.*")  # with the lines that continue it
    for name in ("deploy/foretoken.service", "deploy/Containerfile", "docs/serving/operations.md"):
        flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", study.sub("", (ROOT / name).read_text())))
        assert len(flags & known) >= 3
        assert flags - others <= known, (name, flags - known)


def test_keys_in_settings_are_not_shown(foretoken: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETOKEN_SERVE__API_KEY", "from-a-setting")
    for flags in ((), ("--json",)):
        done = foretoken("config", "show", "--origin", *flags)
        assert done.code == 0, done.err
        assert "from-a-setting" not in done.out
        assert "FORETOKEN_SERVE__API_KEY" in done.out or flags


def test_every_setting_of_the_server_has_a_flag() -> None:
    derived = {"specs", "allow_lossy", "engine", "api", "guard", "observe", "life"}  # made from other flags
    for kind in (ServerConfig, ApiConfig, GuardConfig, LifeConfig, ObserveConfig):
        assert {field.name for field in fields(kind)} - {field.name for field, _ in options_of(kind)} <= derived, kind


@pytest.mark.parametrize("flags", [[], ["--drafter", "suffix", "--drafter-option", "store_tokens=4096"]])
def test_the_front_imports_no_torch(tmp_path: Path, flags: list[str]) -> None:
    """Settings from outside are checked without importing other verbs, and a drafter's options without the drafter."""
    (tmp_path / "foretoken.toml").write_text("[serve]\nworkers = 2\n")
    code = (
        "import os, sys\n"
        f"os.environ |= {{'FORETOKEN_TOML': {str(tmp_path / 'foretoken.toml')!r}, 'FORETOKEN_SERVE__PORT': '70000'}}\n"
        "from foretoken.cli.app import run\n"
        "import foretoken.server.run\n"
        f"assert run(['serve', *{flags!r}]) == 2\n"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr
    assert "port=70000" in done.stderr


def test_without_the_extra_it_says_what_to_install(foretoken: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "foretoken.server.run", None)
    done = foretoken("serve")
    assert (done.code, "pip install 'foretoken[server]'" in done.err) == (2, True)


def test_without_ray_the_extra_is_named(foretoken: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.cli.serve.find_spec", lambda name: None)
    done = foretoken("serve", "--ray")
    assert done.code == 2
    assert "pip install '.[ray]' in a checkout, or pip install 'foretoken[ray]' where a wheel is installed" in done.err
    assert foretoken("serve", "--max-replicas", "0").code == 2
