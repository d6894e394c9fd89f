"""Bits per byte of a text under a GGUF file, by our engine and by llama-perplexity, over the same tokens.

The text is cut into windows of `context` tokens without overlap; the second half of a window is scored, its first token
left out, each token behind all before it in its window. That is what llama-perplexity does, from whose file of logits
the tokens are read that it scored.
"""

from __future__ import annotations

import math
import re
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foretoken.backend.llama_programs import LlamaCpp, parsed
from foretoken.errors import ForetokenError, InputError, UnsupportedModelError
from foretoken.model.interface import LanguageModel, Segment
from foretoken.text.tokenizer import Tokenizer
from foretoken.train.corpus import is_held_out

_HEADER_BYTES = 8 + 3 * 4  # "_logits_", then context, vocabulary and windows as int32


def held_out_text() -> str:
    """Modules of the standard library that the reference models were not trained on."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in sorted(root.glob("*.py")) if is_held_out(path.relative_to(root))]
    return "".join(path.read_text(encoding="utf-8") for path in paths)


def windows_of(tokenizer: Tokenizer, text: str, context: int, most: int) -> list[list[int]]:
    """At most `most` windows of `context` tokens; a token that begins every text takes the place of a window's first.

    Raises:
        InputError: the text has less than two windows, which llama-perplexity refuses.
    """
    ids, begin = tokenizer.encode(text), tokenizer.opening_ids
    count = len(ids) // context
    if count < 2:
        raise InputError("text", f"{len(ids)} tokens", f"give a text of at least 2 windows of {context} tokens")
    windows = [ids[start : start + context] for start in range(0, min(count, most) * context, context)]
    return [[*begin, *window[len(begin) :]] for window in windows]


def scored_bytes(tokenizer: Tokenizer, windows: Sequence[Sequence[int]]) -> int:
    """Bytes of text that the scored tokens write.

    Raises:
        UnsupportedModelError: a tokenizer whose tokens have no bytes of their own.
    """
    written = tokenizer.token_bytes
    if written is None:
        raise UnsupportedModelError(f"{tokenizer.folder}: the decoder does more than join its tokens: no bits per byte")
    return sum(len(written[token]) for window in windows for token in window[len(window) // 2 + 1 :])


@torch.inference_mode()
def our_nats(model: LanguageModel, windows: Sequence[Sequence[int]]) -> float:
    """Negative log-likelihood of the scored tokens in nats."""
    total = 0.0
    for window in windows:
        first = len(window) // 2
        model.open(0)
        logits = model.forward(torch.tensor(window), [Segment(0, len(window), num_logits=len(window) - first)]).logits
        model.close(0)
        logs = torch.log_softmax(logits[:-1].double(), dim=-1)  # [context - first - 1, V]
        total -= float(logs.gather(1, torch.tensor(window[first + 1 :])[:, None]).sum())
    return total


def their_nats(
    llama: LlamaCpp, gguf: Path, text: str, windows: Sequence[Sequence[int]], threads: int
) -> tuple[float, dict[str, Any]]:
    """The same by llama-perplexity, and what it printed.

    Raises:
        ForetokenError: the program failed, or it scored other tokens.
    """
    context = len(windows[0])
    with tempfile.TemporaryDirectory() as folder:
        source, logits = Path(folder, "text.txt"), Path(folder, "logits")
        source.write_text(text, encoding="utf-8")
        command = [str(llama.program("llama-perplexity")), "-m", str(gguf), "-bf", str(source), "-t", str(threads)]
        command += ["-c", str(context), "-b", str(context), "--chunks", str(len(windows))]
        perplexity, error = parsed([*command, "--kl-divergence-base", str(logits)], parse_perplexity)
        theirs = np.fromfile(logits, np.int32, len(windows) * context, offset=_HEADER_BYTES)
    compare_tokens(windows, theirs.reshape(-1, context).tolist())
    count = sum(len(window) - len(window) // 2 - 1 for window in windows)
    return math.log(perplexity) * count, {"perplexity": perplexity, "standard_error": error}


def compare_tokens(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> None:
    """Both engines must score the same tokens; the first of a window may be a BOS that only one of them notes.

    Raises:
        ForetokenError: names the first place where they differ.
    """
    for number, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        for place in range(1, len(own)):
            if own[place] != other[place]:
                raise ForetokenError(
                    f"window {number}, token {place}: the tokenizer of the GGUF file gives {own[place]} here and "
                    f"{other[place]} in llama.cpp"
                )


def parse_perplexity(output: str, log: str) -> tuple[float, float]:
    """The last estimate that llama-perplexity prints on one of its streams, and its standard error.

    Raises:
        ForetokenError: no estimate in the output.
    """
    found = re.search(r"Final estimate: PPL = ([\d.]+) \+/- ([\d.]+)", f"{output}\n{log}")
    if found is None:
        raise ForetokenError(f"llama-perplexity gave no result: {log[-200:]!r}")
    return float(found.group(1)), float(found.group(2))
