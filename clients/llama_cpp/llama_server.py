#!/usr/bin/env python3
"""`llama-server` as llama.cpp's own tests start it: its flags become those of `foretoken serve`.

A flag that has no counterpart ends the start with its name, so that a test that needs it says so.
"""

from __future__ import annotations

import os
import sys

REFUSED = 78  # exit status of a start whose flag has no counterpart
# Flags of one value and of none that change nothing that is tested: where the model comes from, how it is computed.
_IGNORED = {"--temp": 1, "--seed": 1, "--hf-repo": 1, "--hf-file": 1, "--offline": 0, "--batch-size": 1}
_IGNORED |= {"--ubatch-size": 1, "--threads": 1, "--n-gpu-layers": 1, "--cont-batching": 0, "-fa": 1, "--slots": 0}
_IGNORED |= {"--jinja": 0, "--no-jinja": 0, "--metrics": 0, "--kv-unified": 0, "--cache-ram": 1, "--no-slots": 0}
_IGNORED |= {"--verbose": 0}
_VALUES = {"--port": "--port", "--host": "--host", "--alias": "--name", "--api-key": "--api-key"}
_VALUES |= {"--n-predict": "--default-max-tokens", "--parallel": "--max-batch-size"}


def serve_flags(arguments: list[str]) -> list[str]:
    """The flags of `foretoken serve`.

    Raises:
        SystemExit: a flag that has no counterpart.
    """
    made: list[str] = []
    rest = list(arguments)
    while rest:
        flag = rest.pop(0)
        if flag in _VALUES:
            value = rest.pop(0)
            if not (flag == "--n-predict" and value == "-1"):
                made += [_VALUES[flag], value]
        elif flag == "--ctx-size":
            made += ["--max-prompt-tokens", rest.pop(0)]
        elif flag in _IGNORED:
            del rest[: _IGNORED[flag]]
        else:
            print(f"llama_server: {flag} has no counterpart", file=sys.stderr)
            raise SystemExit(REFUSED)
    return made


def main() -> None:
    """Become the server."""
    python = os.environ["SERVER_PYTHON"]
    model = ["--target", os.environ["SERVER_TARGET"], "--llama-cpp", "--granularity", "token"]
    flags = serve_flags(sys.argv[1:])
    os.execv(python, [python, "-m", "foretoken", "serve", "--cost-profile", "off", *model, *flags])


if __name__ == "__main__":
    main()
