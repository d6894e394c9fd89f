"""A pytest plugin under which llama.cpp's `tools/server/tests` run against `foretoken serve` (`make llama-cpp-suite`).

Their model cannot be had offline, so its words and token counts are not compared; everything else is. A server is kept
for the next test that wants the same flags. Tests that do not apply are skipped with the reason of `REASONS`.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
import types
from pathlib import Path
from unittest.mock import ANY

import pytest

sys.path.insert(0, os.getcwd())
sys.modules.setdefault("wget", types.ModuleType("wget"))  # downloads models, of which there are none
import utils  # noqa: E402 - of the suite
from llama_server import NoCounterpart, serve_flags  # noqa: E402

REASONS = {
    r"test_(embedding|rerank|vision_api|lora|router|sleep|slot_save)\.py": "a feature that this server does not have",
    r"test_(mcp_servers|tools_builtin|proxy|compat_gcp|stream)\.py": "a feature that this server does not have",
    r"test_kv_keep_only_active\.py": "reads llama.cpp's log",
    r"test_metrics_(prometheus|prompt_processed|predicted_total|embedding)": (
        "names of llama.cpp's metrics; this server has vLLM's"
    ),
    r"vision|image|media|mtm_error|local_media|multimodal": "a model that sees",
    r"multiple_addresses": "one address, by design",
    r"real_model|test_weather|test_calc_result|test_thoughts|test_hello_world": "a model from the hub",
    r"thinking_with_reasoning_model|load_split_model|openai_library_stops|qwen_model": "a model from the hub",
    r"model_aliases_and_tags": "one name for a model",
    r"test_no_ui|static_assets": "llama.cpp's web page",
    r"cors": "CORS is off unless origins are listed; echoing any origin is refused by design",
    r"verbose_debug|llama_telemetry|return_progress|prompt_progress|assistant_prefill|vllm_compat": (
        "llama.cpp's debugging fields"
    ),
    r"date_inside_prompt.*firefunction": "a template variable of llama.cpp's own",
    r"post_sampling|backend_sampling": "probabilities after filters are not reported",
    r"tokenize_with_bos|test_completion_response_fields.*-32-": "a model whose texts begin with a token",
    r"cached_tokens|prompt_cache|ctx_shift_disabled_(short_prompt.*True|long_prompt)|slot_ctx_not_exceeded": (
        "token counts of llama.cpp's model and cache"
    ),
    r"test_infill_with(out)?_input": "a model with tokens for a text in the middle",
}
_kept: dict[tuple[str, ...], object] = {}


def _start(server: utils.ServerProcess, timeout_seconds: int = 300) -> None:
    """Take the running server where its flags are those wanted; start another one in its place where they are not."""
    try:
        key = tuple(serve_flags(_arguments(server)))
    except NoCounterpart as flag:
        pytest.skip(f"does not apply: {flag} has no counterpart")
    running = _kept.get(key)
    if running is not None and running.poll() is None:  # type: ignore[attr-defined]
        server.process = running
        return
    for one in _kept.values():
        one.terminate()  # type: ignore[attr-defined]
        one.wait(60)  # type: ignore[attr-defined]
    _kept.clear()
    _START(server, timeout_seconds=max(timeout_seconds, 300))
    while server.make_request("GET", "/ready").status_code != 200:  # /health tells of life only
        time.sleep(0.5)
    _kept[key] = server.process


def _arguments(server: utils.ServerProcess) -> list[str]:
    """The flags that the suite would start a server with."""
    seen: list[list[str]] = []

    class Seen(Exception):
        pass

    def stop(arguments: list[str], **_: object) -> None:
        seen.append(arguments)
        raise Seen

    popen, utils.subprocess.Popen = utils.subprocess.Popen, stop
    try:
        _START(server)
    except Seen:
        pass
    finally:
        utils.subprocess.Popen = popen
    return seen[0][1:]


def _target() -> str:
    """The reference target with a chat template that takes tools."""
    root = Path(__file__).parents[2]
    folder = Path(tempfile.mkdtemp()) / "target"
    shutil.copytree(root / "tests/reference/target", folder)
    shutil.copy(root / "clients/chat_template.jinja", folder)
    return str(folder)


os.environ.setdefault("SERVER_TARGET", _target())
os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])  # of the servers
_START = utils.ServerProcess.start
utils.ServerProcess.start = _start
utils.ServerProcess.stop = lambda server: utils.server_instances.discard(server)
utils.ServerPreset.load_all = staticmethod(lambda: None)
utils.download_file = lambda url, _path=None: url
utils.match_regex = lambda _pattern, text: isinstance(text, str)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what does not apply, and the token counts of llama.cpp's model."""
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if "n_prompt" in params:
            params["n_prompt"] = ANY
        name = item.nodeid.removeprefix("unit/")
        reason = next((why for pattern, why in REASONS.items() if re.search(pattern, name)), None)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"does not apply: {reason}"))


def pytest_sessionfinish() -> None:
    """Stop the last server."""
    for one in _kept.values():
        one.terminate()  # type: ignore[attr-defined]


assert Path("unit").is_dir(), "run it in tools/server/tests of a llama.cpp checkout"
