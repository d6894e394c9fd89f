"""A sample of the families of docs/models.md; `make proof-release` goes through all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretoken.model.families import NATIVE_MODEL_TYPES
from proof.families import families, read_page
from tests.helpers.family_trial import HOWS, NATIVE, NOT_BUILT, REFUSED, try_family

# Our own decoder (plain, and with most options), learned positions, no cache to speak of (rwkv, openai-gpt, xlm), a
# state instead of one, positions that begin at 2, experts, windows, a decoder torn from its encoder, a text model in a
# multimodal folder, later tokens read, sparse attention for long texts only.
SAMPLE = [
    "qwen3",
    "gpt2",
    "rwkv",
    "openai-gpt",
    "xlm",
    "mamba",
    "roberta",
    "olmoe",
    "olmo3",
    "cohere2",
    "gemma3_text",
    "bart",
    "emu3",
    "xlnet",
    "big_bird",
]


@pytest.mark.filterwarnings("ignore:the draft has")
@pytest.mark.parametrize("family", SAMPLE)
def test_e4_a_sample_of_families_is_exact_or_refused_as_the_page_says(tmp_path: Path, family: str) -> None:
    finding = try_family(family, tmp_path, ways=("ngram", "best first tree"), num_prompts=1)
    assert finding.differences == ()
    assert (finding.how, finding.note) == read_page()[family]


def test_the_page_lists_every_registered_family_with_a_reason_for_each_that_is_not_run() -> None:
    page = read_page()
    assert sorted(page) == families()
    assert {family for family, (how, _) in page.items() if how == NATIVE} == set(NATIVE_MODEL_TYPES)
    for family, (how, note) in page.items():
        assert how in HOWS, family
        assert note or how not in (REFUSED, NOT_BUILT), family
