"""Short prompts of code, edits, JSON and chat in one file, as `foretoken bench speed --prompts` and others read it.

python -m studies.gguf_rivals.prompts --target FILE.gguf --count 10 --out prompts.jsonl

A prompt keeps its last tokens, an edit is whole; the shortest of each slice are taken, so that a run is over sooner.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from foretoken.errors import InputError
from foretoken.files import check_file
from foretoken.measure.load.prompts import asks
from foretoken.model.names import model_folder
from foretoken.text.tokenizer import Tokenizer, load_tokenizer
from studies.command import exit_code_of, words

SLICES = ("code", "edit", "json", "chat")


def main() -> int:
    """Write the file; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.gguf_rivals.prompts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", default="reference:target", help="whose tokens count")
    parser.add_argument("--slices", type=words, default=SLICES)
    parser.add_argument("--count", type=int, default=10, help="of each slice")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    return exit_code_of(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    tokenizer = load_tokenizer(model_folder(options.target))
    if tokenizer is None:
        raise InputError("target", options.target, "has no tokenizer; name a model that has one")
    check_file("out", options.out)
    lines = prompt_lines(tokenizer, options.slices, options.count, options.prompt_tokens)
    options.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return 0


def prompt_lines(tokenizer: Tokenizer, slices: tuple[str, ...], count: int, max_tokens: int) -> list[dict[str, str]]:
    """`count` prompts of each slice as a file of prompts has them.

    Raises:
        InputError: an unknown slice.
    """
    found = asks(slices, count, lambda text: tokenizer.encode(text, add_special_tokens=False), max_tokens, seed=0)
    return [
        {"prompt": tokenizer.decode(one.prompt_ids), "slice": one.slice, "name": f"{one.slice}:{number} {one.name}"}
        for asked in found.values()
        for number, one in enumerate(asked)
    ]


if __name__ == "__main__":
    sys.exit(main())
