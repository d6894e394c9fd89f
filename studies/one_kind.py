"""A file of answers that holds one kind of the standard library's text, for a head that has seen no other.

    python -m studies.one_kind --kind code --tokens 3000000 --out code.jsonl
    foretoken train eagle --target reference:target --answers code.jsonl --out run --tokens 700000 --set head.version=1

The head is then taken through a domain shift by `studies.adaptation`. Documents come in a fixed random order, cut into
pieces that fit into the context.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from foretoken import LLM, SpecConfig
from foretoken.errors import InputError
from foretoken.files import to_json
from foretoken.printing.console import Console
from foretoken.train.answers import ANSWERS_KIND, folder_fingerprint
from foretoken.train.corpus import Corpus, standard_library
from studies.command import exit_code_of

PIECE_TOKENS, MIN_TOKENS, PROMPT_TOKENS = 4000, 64, 8


def main() -> int:
    """Write the file."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.one_kind",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", default="reference:target")
    parser.add_argument("--kind", default="code", help="code, edit or json")
    parser.add_argument("--tokens", type=int, default=3_000_000)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    return exit_code_of(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    num_tokens = write(options.target, options.kind, options.tokens, options.out, standard_library())
    Console().line(f"{options.out}: {num_tokens:,} tokens of {options.kind}")
    return 0


def write(target: str, kind: str, max_tokens: int, out: Path, corpus: Corpus) -> int:
    """Write training documents of `kind` until there are `max_tokens`; the number of tokens.

    Raises:
        InputError: a corpus without such documents.
    """
    documents = [document for document in corpus.train if document.slice == kind]
    if not documents:
        raise InputError("kind", kind, f"choose from {', '.join(sorted({one.slice for one in corpus.train}))}")
    random.Random(0).shuffle(documents)
    num_tokens = 0
    with LLM(target, SpecConfig()) as llm, out.open("w", encoding="utf-8") as file:
        file.write(to_json({"kind": ANSWERS_KIND, "target": folder_fingerprint(llm.folder)}) + "\n")
        for place, document in enumerate(documents):
            ids = llm.encode(document.text)
            for start in range(0, len(ids), PIECE_TOKENS):
                piece = ids[start : start + PIECE_TOKENS]
                if len(piece) < MIN_TOKENS:
                    continue
                row = {"place": place, "prompt_ids": piece[:PROMPT_TOKENS], "answer_ids": piece[PROMPT_TOKENS:]}
                file.write(to_json(row) + "\n")
                num_tokens += len(piece)
            if num_tokens >= max_tokens:
                break
    return num_tokens


if __name__ == "__main__":
    sys.exit(main())
