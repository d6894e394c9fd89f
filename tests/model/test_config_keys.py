"""Every key that changes what a native family computes means here what it means to transformers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from foretoken.model.attention.paged import PackedAttention
from foretoken.model.loader import load_decoder
from tests.helpers.checkpoints import token_ids, transformers_logits
from tests.helpers.config_draws import FAMILIES, draw, write
from tests.helpers.usual import some_of

LENGTH = 48  # longer than every window and trained length that is drawn, within every context
HEADS = ("none", "equal", "different")


def compare(folder: Path, family: str, seed: int) -> None:
    """One drawn configuration: the logits of both implementations."""
    rng = random.Random(f"{family} {seed}")
    raw = draw(rng, family)
    write(folder, raw, rng.choice(HEADS), seed)
    ids = token_ids(LENGTH, 61, seed)
    expected = transformers_logits(folder, ids)
    decoder = load_decoder(folder, dtype="float32")
    with torch.no_grad():
        found = decoder.logits(
            decoder(torch.tensor(ids), torch.arange(LENGTH), PackedAttention(decoder.config, 1, LENGTH)).last
        )
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0, msg=lambda text: f"{raw}\n{text}")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", some_of(range(10), range(4)))
def test_e2_drawn_configurations_give_the_logits_of_transformers(tmp_path: Path, family: str, seed: int) -> None:
    compare(tmp_path, family, seed)
