"""Milliseconds of one pass over rows of one sequence, behind a text, by our engine and by llama-bench.

Up to MOST_VERIFIED rows ours is a verify pass: one token and a chain of draft tokens, with the logits of every row.
More rows are a prompt, which is read in steps of as many tokens as the engine's by default, with the logits of the last
one of each. llama-bench reads 512 at a time as well, and always computes the logits of the last row alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.backend.llama_programs import LlamaCpp, run_program
from foretoken.control.queue import SchedulerConfig
from foretoken.errors import ForetokenError
from foretoken.measure.stats import expanded_interval
from foretoken.model.interface import LanguageModel, Segment

Times = dict[int, list[float]]  # milliseconds of single passes, by rows

MOST_VERIFIED = 64
_WARM_UP = 1  # passes before each number of rows that are not timed, as llama-bench has one
_NUM_DRAWS, _SEED = 2000, 0


@torch.inference_mode()
def our_times(model: LanguageModel, counts: Sequence[int], depth: int, repeats: int) -> Times:
    """Passes behind `depth` tokens; as in `their_times` all of a number of rows follow one another. A pass of one row
    behind one of 2,048 finds nothing in the caches, which is not how texts are decoded.
    """
    generator = torch.Generator().manual_seed(_SEED)
    times: Times = {count: [] for count in counts}
    model.open(0)
    if depth:
        model.forward(torch.randint(model.vocab_size, (depth,), generator=generator), [Segment(0, depth)])
        model.commit(0, depth)
    for count in counts:
        for repeat in range(repeats + _WARM_UP):
            tokens = torch.randint(model.vocab_size, (count,), generator=generator)
            began = time.perf_counter()
            if count <= MOST_VERIFIED:
                model.forward(tokens, [Segment(0, 1, tuple(range(-1, count - 2)), count)])
            else:
                _read_prompt(model, tokens)
            if repeat >= _WARM_UP:
                times[count].append((time.perf_counter() - began) * 1e3)
            model.rollback(0, depth)
    model.close(0)
    return times


def _read_prompt(model: LanguageModel, tokens: Tensor) -> None:
    most = SchedulerConfig().max_prompt_tokens
    for first in range(0, len(tokens), most):
        chunk = tokens[first : first + most]
        model.forward(chunk, [Segment(0, len(chunk))])
        model.commit(0, len(chunk))


def their_times(llama: LlamaCpp, gguf: Path, counts: Sequence[int], depth: int, repeats: int, threads: int) -> Times:
    """The same by llama-bench, which takes all repeats of a number of rows in a row, behind a pass that is not timed.

    Raises:
        ForetokenError: the program failed.
    """
    rows = ",".join(map(str, counts))
    command = [str(llama.bench), "-m", str(gguf), "-n", "0", "-p", rows, "-d", str(depth), "-r", str(repeats)]
    return parse_rows(run_program([*command, "-t", str(threads), "-o", "json"])[0], counts)


def parse_rows(output: str, counts: Sequence[int]) -> Times:
    """The times that `llama-bench -o json` reports, by rows.

    Raises:
        ForetokenError: there is no result for a number of rows.
    """
    try:
        results = json.loads(output[output.index("[") :])
        found = {int(one["n_prompt"]): [ns / 1e6 for ns in one["samples_ns"]] for one in results}
        return {count: found[count] for count in counts}
    except (ValueError, KeyError, TypeError) as error:
        raise ForetokenError(f"llama-bench gave no result: {output[-200:]!r}") from error


def compared(ours: Sequence[Times], theirs: Sequence[Times]) -> list[dict[str, Any]]:
    """By rows: medians over all turns, and the ratio of theirs to ours, above 1 where ours is faster.

    With a 95 % interval by a bootstrap that draws turns, then passes within each; None with one turn.
    """
    rows = []
    for count in ours[0]:
        own, other = ([np.array(turn[count]) for turn in side] for side in (ours, theirs))
        draws = _draws(own, other)
        figures = None if draws is None else np.vstack([draws, draws[1] / draws[0]])
        medians = [float(np.median(np.concatenate(side))) for side in (own, other)]
        row: dict[str, Any] = {"rows": count, "ours_ms": medians[0], "theirs_ms": medians[1]}
        row["theirs_over_ours"] = medians[1] / medians[0]
        for place, name in enumerate(("ours_ms", "theirs_ms", "theirs_over_ours")):
            ends = None if figures is None else expanded_interval(figures[place], len(own))
            row[f"{name}_interval"] = None if ends is None else [ends.low, ends.high]
        rows.append(row)
    for row in rows:
        row["ours_over_one_row"], row["theirs_over_one_row"] = (
            row[name] / rows[0][name] for name in ("ours_ms", "theirs_ms")
        )
    return rows


def _draws(own: list[NDArray[np.float64]], other: list[NDArray[np.float64]]) -> NDArray[np.float64] | None:
    """Medians [2, draws] of both sides, the same turns drawn for both; None with one turn."""
    if len(own) < 2:
        return None
    rng = np.random.default_rng(_SEED)
    found = np.empty((2, _NUM_DRAWS))
    for draw in range(_NUM_DRAWS):
        turns = rng.integers(len(own), size=len(own))
        for place, side in enumerate((own, other)):
            found[place, draw] = np.median(np.concatenate([rng.choice(side[turn], len(side[turn])) for turn in turns]))
    return found
