"""Short prompts for whole batches: many of each slice, so that decoding dominates prefill.

Beside the slices of `workload`: `chat`, short instructions, and `random`, words in random order, sampled at a
temperature at which no drafter is accurate.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from foretoken.errors import InputError
from foretoken.measure.prompts import choose, messages_of, read_prompts
from foretoken.measure.workload import SLICES, Prompt, slices

CHAT, RANDOM = "chat", "random"
BATCH_SLICES: tuple[str, ...] = (*SLICES, CHAT, RANDOM)
_WHOLE = ("edit",)  # slices whose prompts need their beginning
_NOISE_TEMPERATURE = 1.5
_MAX_CANDIDATES = 400
_RANDOM_WORDS = 16
_SYLLABLES = ("ka", "lo", "mi", "ru", "te", "shan", "vor", "qui", "ple", "dra", "zen", "oth", "un", "ix", "bel", "gru")

# Instructions without code before them.
_REQUESTS = (
    "Write a short thank-you note to a neighbour who watered the plants.",
    "Explain to a ten-year-old why the sky is blue.",
    "Give three reasons to learn a second language, one sentence each.",
    "Suggest a name for a small bakery near a river, and say why.",
    "What should I check before I buy a used bicycle?",
    "Describe a rainy morning in a big city in four sentences.",
    "How do I politely refuse an invitation to a wedding?",
    "Compare trains and buses for a trip of two hundred kilometres.",
    "Write the opening line of a detective story set in a library.",
    "What are the main differences between butter and margarine?",
    "Plan a simple dinner for four people, one of whom eats no meat.",
    "Tell me how a suspension bridge carries its load.",
    "Summarise the rules of chess for somebody who knows draughts.",
    "Draft a message to my landlord about a dripping tap.",
    "Which plants grow well on a shady balcony?",
    "Explain the difference between weather and climate.",
    "Give me a checklist for moving to another flat.",
    "Why do cats purr, and when do they do it?",
    "Write a polite reminder that an invoice is overdue.",
    "How can I sleep better on a long flight?",
    "Describe the taste of fresh bread without using the word good.",
    "What questions should I ask at the end of a job interview?",
    "Explain compound interest with one worked example.",
    "Write a two-line poem about an old lighthouse.",
    "What happens in the body when somebody holds their breath?",
    "Suggest five topics for a talk about local history.",
    "How do noise-cancelling headphones work?",
    "Give advice to a friend who is nervous about public speaking.",
    "What is the best way to store potatoes through the winter?",
    "Write a short product description of a wooden desk lamp.",
    "Explain how vaccines train the immune system.",
    "List what to pack for a day of walking in the hills.",
)


@dataclass(frozen=True)
class Ask:
    """One request of a batch: its prompt's tokens, the temperature that its slice is answered at, and the slice."""

    name: str
    prompt_ids: tuple[int, ...]
    temperature: float = 0.0
    slice: str = ""


def asks(
    names: Sequence[str],
    count: int,
    encode: Callable[[str], list[int]],
    prompt_tokens: int,
    seed: int,
    file: Path | None = None,
    encode_chat: Callable[[list[dict[str, str]]], list[int]] | None = None,
) -> dict[str, tuple[Ask, ...]]:
    """`count` requests of every named slice, the shortest first, repeated where there are fewer.

    A prompt keeps its last `prompt_tokens` tokens; an edit or a conversation is kept whole. `encode_chat` gives the
    tokens of messages. `file` replaces the slices of `workload` and `chat`.

    Raises:
        InputError: an unknown slice, or messages without `encode_chat`.
    """
    found: dict[str, tuple[Ask, ...]] = {}
    for name in names:
        texts = [prompt for prompt in _texts(name, seed, file) if prompt.text or prompt.messages]
        ids = [(prompt, _ids(prompt, encode, encode_chat)) for prompt in texts]
        ids.sort(key=lambda pair: (len(pair[1]), pair[0].name))
        if name in (CHAT, RANDOM) or file is not None:
            usable = ids
        else:  # very short texts determine too little of the answer
            usable = [pair for pair in ids if len(pair[1]) >= min(prompt_tokens, _RANDOM_WORDS)] or ids
        temperature, cut = _NOISE_TEMPERATURE if name == RANDOM else 0.0, []
        for prompt, own in usable:
            if own:
                kept = own if name in _WHOLE or prompt.messages else own[-prompt_tokens:]
                cut.append(Ask(prompt.name, tuple(kept), temperature, name))
        if not cut:
            raise InputError("slices", name, "has no prompt of at least one token; leave it out")
        found[name] = tuple(cut[place % len(cut)] for place in range(count))
    return found


def _ids(
    prompt: Prompt, encode: Callable[[str], list[int]], encode_chat: Callable[[list[dict[str, str]]], list[int]] | None
) -> list[int]:
    if not prompt.messages:
        return encode(prompt.text)
    if encode_chat is None:
        raise InputError("prompts", prompt.name, "has messages, and nothing here lays them out; give a text")
    return encode_chat(messages_of(prompt))


def _texts(name: str, seed: int, file: Path | None) -> Sequence[Prompt]:
    if name == RANDOM:
        return [Prompt(f"random:{number}", RANDOM, _noise(random.Random(f"{seed} {number}"))) for number in range(64)]
    if file is not None:
        return choose(read_prompts(file), (name,), _MAX_CANDIDATES)[0]
    if name == CHAT:
        return [Prompt(f"chat:{number}", CHAT, text) for number, text in enumerate(_REQUESTS)]
    if name not in SLICES:
        raise InputError("slices", name, f"choose from {', '.join(BATCH_SLICES)}")
    return slices((name,), _MAX_CANDIDATES)


def _noise(rng: random.Random) -> str:
    return " ".join("".join(rng.choices(_SYLLABLES, k=rng.randint(1, 3))) for _ in range(_RANDOM_WORDS))
