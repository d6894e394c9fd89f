"""An engine without a model for tests of sampled answers: each letter depends on the one before."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from foretoken.backend.requesting import ApiChoice, ApiRequest, Reply

LETTERS = "abcdefgh"


def chances(before: str, temperature: float, top_p: float, twist: float) -> dict[str, float]:
    """The distribution of the letter behind another one; `twist` is the share that comes from a wrong one."""
    rng = random.Random(before)
    weights = {letter: rng.random() ** 3 for letter in LETTERS}
    wrong = {letter: weights[LETTERS[-1 - place]] for place, letter in enumerate(LETTERS)}
    total = sum(weights.values())
    mixed = {letter: ((1 - twist) * weights[letter] + twist * wrong[letter]) / total for letter in LETTERS}
    if temperature == 0:
        return {max(mixed, key=mixed.__getitem__): 1.0}
    sharp = {letter: value ** (1 / temperature) for letter, value in mixed.items()}
    kept, mass = {}, 0.0
    for letter, value in sorted(sharp.items(), key=lambda item: -item[1]):
        if mass < top_p * sum(sharp.values()):
            kept[letter] = value
        mass += value
    return kept


@dataclass
class Dice:
    """See `Requester`. `twist`: the error of every letter behind the first, which no draft proposes; `ignores`: fields
    that it does not obey, `refuses`: those that it refuses; `tells`: whether it reports its letters as tokens.
    """

    twist: float = 0.0
    ignores: tuple[str, ...] = ()
    refuses: tuple[str, ...] = ()
    tells: bool = True
    num_together: int = 1
    asked: list[ApiRequest] = field(default_factory=list)

    def ask(self, request: ApiRequest) -> Reply:
        self.asked.append(request)
        for name in self.refuses:
            if name in request.fields:
                return Reply(refused=f"{name} is not known here")
        fields = {name: value for name, value in request.fields.items() if name not in self.ignores}
        choices = tuple(self._choice(request.text, fields, number) for number in range(fields.get("n", 1)))
        return Reply(choices, len(request.text), sum(len(one.text) for one in choices))

    def _choice(self, prompt: str, fields: dict[str, float], number: int) -> ApiChoice:
        rng = random.Random(f"{prompt} {fields.get('seed', 0)} {number}")
        text = ""
        while len(text) < fields["max_tokens"]:
            before = text[-1:] or prompt[-1:]
            twist = self.twist if text else 0.0
            found = chances(before, fields.get("temperature", 1.0), fields.get("top_p", 1.0), twist)
            text += rng.choices(list(found), list(found.values()))[0]
        return ApiChoice(text, "length", pieces=tuple(text) if self.tells else ())
