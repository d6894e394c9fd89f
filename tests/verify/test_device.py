"""On an accelerator every rule decides as on a CPU."""

from dataclasses import replace

import pytest
import torch

from foretoken.core import Uniforms
from foretoken.verify import RULES, verify_batch
from tests.verify.batches import ANY, random_batch


@pytest.mark.gpu
@pytest.mark.parametrize(("rule", "tree"), ANY)
def test_every_rule_on_a_gpu(rule: str, tree: bool) -> None:
    """Random batches in float64, where the last bits of a sum decide nothing."""
    for seed in range(60):
        draft, probs, uniforms = random_batch(seed, tree)
        if draft.mass is not None:
            draft = replace(draft, mass=replace(draft.mass, distributions=draft.mass.distributions.double()))
        probs = probs.double()
        there = Uniforms(uniforms.accept.cuda(), uniforms.next.cuda(), tuple(noise.cuda() for noise in uniforms.race))
        expected, verdict = (
            RULES[rule].verify(draft, probs, uniforms),
            RULES[rule].verify(draft.on("cuda"), probs.cuda(), there),
        )
        assert replace(verdict, probabilities=()) == replace(expected, probabilities=())
        accept, weights = (getattr(RULES[rule], name) for name in ("accept_probabilities", "next_token_weights"))
        rows = range(draft.num_rows)
        assert torch.allclose(accept(draft.on("cuda"), probs.cuda()).cpu(), accept(draft, probs))
        assert torch.allclose(weights(draft.on("cuda"), probs.cuda(), rows).cpu(), weights(draft, probs, rows))
        rules = [rule if b % 2 else "greedy" for b in range(draft.num_requests)]
        mixed = verify_batch(draft.on("cuda"), probs.cuda(), there, rules)
        assert replace(mixed, probabilities=()) == replace(
            verify_batch(draft, probs, uniforms, rules), probabilities=()
        )
