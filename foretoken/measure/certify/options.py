"""What a certificate asks of which two backends, and how small an error it is to find."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from foretoken.errors import InputError
from foretoken.field_text import words
from foretoken.measure import options as shared
from foretoken.measure.options import check_wholes, resume_option, setting
from foretoken.measure.sides import SideOptions
from foretoken.measure.write import check_result
from foretoken.option import check_fields
from foretoken.params import check_number

KINDS = ("greedy", "parameters", "limits", "stream", "distribution", "seeds", "forms")


@dataclass(frozen=True)
class CertifyOptions(SideOptions):
    """Two backends of the same model, A without speculation, and the size of the comparison.

    `num_prompts` greedy answers of `max_tokens` tokens are compared. `effect` is the total variation between the two
    sides' answers that a test of sampled answers shall find with probability 0.99: it sets how many are drawn. `alpha`
    is the probability that a correct B fails any of those tests. `tolerance` is how far two log-probabilities may lie
    apart by rounding, and how near a tie of two tokens must be for either to stand. `only` are the kinds of checks to
    make. `resume` is a file that keeps every answer.
    """

    prompts: Path | None = field(default=None, metadata=shared.PROMPTS_OPTION)
    num_prompts: int = setting(10, "Greedy answers to compare; prompts are taken in turn.")
    max_tokens: int = setting(64, "Tokens of a greedy answer.")
    chat: bool = field(default=False, metadata=shared.CHAT_OPTION)
    effect: float = setting(
        0.15,
        "Total variation of sampled answers that is found with probability 0.99; a smaller one needs more answers.",
    )
    alpha: float = setting(1e-3, "Probability that a correct B fails any of the tests of sampled answers.")
    tolerance: float = setting(
        0.25, "Largest difference at which log-probabilities count as equal: near ties, and rounding."
    )
    only: tuple[str, ...] = setting(KINDS, f"Kinds of checks, separated by commas: {', '.join(KINDS)}.", read=words)
    resume: Path | None = field(default=None, metadata=resume_option("answer"))
    out: Path | None = field(default=None, metadata=shared.OUT_OPTION)
    name: str = field(default="certify", metadata=shared.NAME_OPTION)
    seed: int = field(default=0, metadata=shared.SEED_OPTION)

    def __post_init__(self) -> None:
        check_fields(self)
        self.check_sides()
        check_wholes(self, num_prompts=(1, 10_000), max_tokens=(8, 1 << 20), seed=(0, 2**62))
        check_number("effect", self.effect, 0.005, 1.0)
        check_number("alpha", self.alpha, 1e-6, 0.1)
        check_number("tolerance", self.tolerance, 0.0, 10.0)
        if not self.only:
            raise InputError("only", "", f"name at least one of {', '.join(KINDS)}")
        for kind in self.only:
            if kind not in KINDS:
                raise InputError("only", kind, f"choose from {', '.join(KINDS)}")
        check_result(self.out, self.name)
