#!/usr/bin/env python3
"""`llama-server` as llama.cpp's own tests start it: its flags become those of `foretoken serve`.

A flag that has no counterpart ends the start with its name, so that a test that needs it says so.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

# Flags of one value and of none that change nothing that is tested: where the model comes from, how it is computed.
_IGNORED = {"--hf-repo": 1, "--hf-file": 1, "--offline": 0, "--batch-size": 1, "--spec-draft-n-min": 1, "--verbose": 0}
_IGNORED |= {"--ubatch-size": 1, "--threads": 1, "--n-gpu-layers": 1, "--cont-batching": 0, "-fa": 1, "--slots": 0}
_IGNORED |= {"--jinja": 0, "--no-jinja": 0, "--metrics": 0, "--cache-ram": 1}
_VALUES = {"--port": "--port", "--host": "--host", "--alias": "--name", "--api-key": "--api-key"}
_VALUES |= {"--temp": "--default-temperature", "--seed": "--default-seed", "--chat-template-file": "--chat-template"}
_VALUES |= {"--n-predict": "--default-max-tokens", "--spec-draft-n-max": "--num-draft"}
_DRAFTER = ["--drafter", "draft_model", "--draft", "reference:draft"]


class NoCounterpart(Exception):
    """A flag of llama.cpp that this server does not have."""


def serve_flags(arguments: list[str]) -> list[str]:
    """The flags of `foretoken serve`.

    Raises:
        NoCounterpart: names the flag.
    """
    made: list[str] = []
    if "--metrics" not in arguments:  # there it is off unless asked for
        made.append("--no-metrics")
    num_context_tokens, num_slots = 0, 1
    rest = list(arguments)
    while rest:
        flag = rest.pop(0)
        if flag == "--n-predict" and rest[0] == "-1":
            del rest[0]
        elif flag == "--no-slots":
            made.append(flag)
        elif flag in _VALUES:
            made += [_VALUES[flag], rest.pop(0)]
        elif flag in _IGNORED:
            del rest[: _IGNORED[flag]]
        elif flag == "--ctx-size":
            num_context_tokens = int(rest.pop(0))
        elif flag == "--parallel":
            num_slots = int(rest.pop(0))
            made += ["--max-batch-size", str(num_slots)]
        elif flag == "--chat-template" and " " in rest[0]:  # no name of a template that is built in
            made += ["--chat-template", _as_file(rest.pop(0))]
        elif flag == "--reasoning" and rest[0] != "off":  # as the template does by itself
            del rest[0]
        elif flag == "--model-draft":
            made += _DRAFTER
            del rest[0]
        elif flag == "--spec-type" and rest[0] == "draft-simple":
            del rest[0]
        elif flag != "--kv-unified":
            raise NoCounterpart(flag)
    divisor = 1 if "--kv-unified" in arguments else num_slots
    return ["--target", _target(num_context_tokens // divisor), *made]


def _as_file(text: str) -> str:
    """A file with the text."""
    path = Path(os.environ["SERVER_TARGET"]).parent / "given.jinja"
    path.write_text(text, encoding="utf-8")
    return str(path)


def _target(num_context_tokens: int) -> str:
    """The target with a context of so many tokens, which there is no flag for; 0, or more than it has: its own."""
    whole = Path(os.environ["SERVER_TARGET"])
    config = json.loads((whole / "config.json").read_text())
    if not 0 < num_context_tokens < config["max_position_embeddings"]:
        return str(whole)
    folder = whole.with_name(f"context_{num_context_tokens}")
    if not folder.exists():
        shutil.copytree(whole, folder)
        config["max_position_embeddings"] = num_context_tokens
        (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def main() -> None:
    """Become the server.

    Raises:
        SystemExit: a flag has no counterpart.
    """
    python = os.environ["SERVER_PYTHON"]
    try:
        flags = serve_flags(sys.argv[1:])
    except NoCounterpart as error:
        raise SystemExit(f"llama_server: {error} has no counterpart") from error
    fixed = ["--llama-cpp", "--granularity", "token", "--cost-profile", "off"]
    os.execv(python, [python, "-m", "foretoken", "serve", *fixed, *flags])


if __name__ == "__main__":
    main()
