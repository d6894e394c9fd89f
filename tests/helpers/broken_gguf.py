"""Small GGUF files, broken at random: each is refused by name or answers.

`python -m tests.helpers.broken_gguf FOLDER FIRST LAST` tries the cases FIRST .. LAST and prints one JSON object for
each that did neither, then how many there were of each outcome.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from foretoken import LLM, SamplingParams
from foretoken.errors import ContextLengthError, InputError, ModelError, NumericsError
from tests.helpers.broken_runs import try_cases
from tests.helpers.checkpoints import tiny_checkpoint, tiny_tokenizer
from tests.helpers.gguf_files import write_gguf

BASES = (
    *(
        ("llama", "Q4_K"),
        ("qwen2", "Q8_0"),
        ("qwen3", "Q6_K"),
        ("llama", "Q2_K"),
        ("qwen2", "Q3_K"),
        ("qwen3", "MXFP4"),
    ),
    *(("llama", "IQ4_NL"), ("qwen2", "IQ4_XS")),
)
GOOD = ("refused", "ran", "not finite", "no room", "not read")
_NUMBERS = (0, 1, 2, 3, 5, 8, 9, 12, 31, 40, 97, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)


def make_bases(folder: Path) -> None:
    """Files of each family, in another type each, with a tokenizer."""
    for family in dict.fromkeys(family for family, _ in BASES):
        source = tiny_checkpoint(
            *(folder / "hf" / family, family),
            vocab_size=300,
            hidden_size=256,
            intermediate_size=256,
            num_hidden_layers=2,
        )
        tiny_tokenizer(source)
        for kind in (kind for other, kind in BASES if other == family):
            write_gguf(folder / f"{kind}.gguf", source, kind, tokenizer=True)


def mutate(raw: bytearray, rng: random.Random) -> str:
    """Break the file in one to three places, most of them in its header; says how."""
    return ", ".join(_break(raw, rng) for _ in range(rng.choice((1, 1, 2, 3))))


def _break(raw: bytearray, rng: random.Random) -> str:
    table = raw.find(b"token_embd.weight")
    values = raw.find(b"tokenizer.ggml.tokens")
    places = [(0, 24), (24, max(25, values)), (max(0, table - 8), table + 2000), (0, max(1, table)), (0, len(raw))]
    first, last = rng.choice(places)
    place = rng.randrange(max(0, first), max(first + 1, min(last, len(raw))))
    how = rng.randrange(6)
    if how == 0:
        raw[place : place + 1] = bytes([rng.randrange(256)])
    elif how == 1:
        size = rng.choice((4, 8))
        raw[place : place + size] = (rng.choice(_NUMBERS) % (1 << 8 * size)).to_bytes(size, "little")
    elif how == 2:
        return _replace_size(raw, rng)
    elif how == 3 and rng.random() < 0.5:
        del raw[place:]
    elif how == 4:
        del raw[place : place + rng.choice((1, 4, 8, 32, 500))]
    else:
        raw[place:place] = rng.randbytes(rng.choice((1, 4, 8, 32)))
    return f"{how} at {place}"


def _replace_size(raw: bytearray, rng: random.Random) -> str:
    """Another number behind the name of a metadata key or a tensor: its type, its value, a dimension, a place."""
    starts = [place for name in (b"llama.", b"qwen", b"tokenizer.", b"blk.", b"output") for place in _all(raw, name)]
    if not starts:
        return "nothing"
    place = rng.choice(starts)
    length = int.from_bytes(raw[place - 8 : place], "little")
    place += min(length, 64) + rng.choice((0, 4, 8, 12, 16, 20, 24, 28))
    size = rng.choice((4, 8))
    raw[place : place + size] = (rng.choice(_NUMBERS) % (1 << 8 * size)).to_bytes(size, "little")
    return f"number at {place}"


def _all(raw: bytearray, name: bytes) -> list[int]:
    found, place = [], raw.find(name)
    while place >= 0:
        found.append(place)
        place = raw.find(name, place + 1)
    return found


def try_case(bases: Path, work: Path, seed: int) -> tuple[str, str]:
    """(outcome, what was done and what came of it) for the case `seed`."""
    rng = random.Random(seed)
    family, kind = BASES[seed % len(BASES)]
    raw = bytearray((bases / f"{kind}.gguf").read_bytes())
    done = f"{seed} {family} {kind} {mutate(raw, rng)}"
    work.mkdir(exist_ok=True)
    path = work / f"{seed}.gguf"
    path.write_bytes(raw)
    try:
        with LLM(path, dtype="float32", cache_tokens=128, profile="off") as llm:
            llm.generate([rng.choice(([1, 2, 3], "the cat"))], SamplingParams(max_tokens=2, temperature=0.0))
    except ModelError as error:
        return "refused" if str(path) in str(error) else "not named", f"{done}: {error}"
    except NumericsError:
        return "not finite", done
    except ContextLengthError:
        return "no room", done
    except InputError as error:
        if error.field in ("prompt", "prompts"):  # a vocabulary of fewer tokens, or no tokenizer
            return "not read", done
        raise
    finally:
        path.unlink()
    return "ran", done


if __name__ == "__main__":
    try_cases(try_case, GOOD, Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
