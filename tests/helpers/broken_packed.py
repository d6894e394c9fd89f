"""Tiny checkpoints of packed matrices, broken at random: each is refused by name or answers.

`python -m tests.helpers.broken_packed FOLDER FIRST LAST` tries the cases FIRST .. LAST and prints one JSON object for
each that did neither, then how many there were of each outcome.
"""

from __future__ import annotations

import random
import shutil
import sys
import warnings
from pathlib import Path

from foretoken import LLM, SamplingParams
from foretoken.errors import ContextLengthError, InputError, ModelError, NumericsError
from foretoken.model.loader import DequantisedWarning
from tests.helpers.broken_checkpoints import mutate
from tests.helpers.broken_runs import try_cases
from tests.helpers.checkpoints import tiny_checkpoint
from tests.helpers.packed_files import FORMS, write_packed

GOOD = ("refused", "ran", "not finite", "no room", "not read")
_SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 104}


def make_bases(folder: Path) -> None:
    """Write a checkpoint of every form of packing."""
    source = tiny_checkpoint(folder / "plain", "llama", **_SHAPE)
    for number, form in enumerate(FORMS.values()):
        write_packed(folder / str(number), source, form)


def try_case(bases: Path, work: Path, seed: int) -> tuple[str, str]:
    """(outcome, what was done and what came of it) for the case `seed`."""
    rng, number = random.Random(seed), seed % len(FORMS)
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(bases / str(number), work)
    done = f"{seed} {list(FORMS)[number]} {mutate(work, rng)}"
    warnings.simplefilter("ignore", DequantisedWarning)
    try:
        with LLM(work, dtype="float32", cache_tokens=128, profile="off") as llm:
            out = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))[0]
    except ModelError as error:
        return "refused", f"{done}: {error}"
    except ContextLengthError:
        return "no room", done
    except InputError as error:
        if error.field in ("prompt", "prompts"):  # a vocabulary of fewer tokens
            return "not read", done
        raise
    return "not finite" if isinstance(out.error, NumericsError) else "ran", done


if __name__ == "__main__":
    try_cases(try_case, GOOD, Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
