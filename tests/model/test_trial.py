"""The trial of a loaded model: what it must find out, on models made wrong in one way each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foretoken.errors import UnsupportedModelError
from foretoken.model.trial import Findings, try_out

VOCABULARY, WIDTH, CONTEXT = 41, 16, 40


class Cache:
    """Token ids are all that the model below keeps of the past."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def crop(self, tokens_to_remove: int) -> None:
        del self.ids[tokens_to_remove:]


class Averaging(nn.Module):
    """A causal model: each row sees the average of the embeddings so far, positions included. `flaw` names what is
    wrong with it.
    """

    def __init__(self, flaw: str = "", dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.flaw, self.dtype, self.device = flaw, dtype, torch.device("cpu")
        self.attention_type = "sparse"
        self.tokens = nn.Parameter(torch.randn(VOCABULARY, WIDTH, generator=generator))
        self.positions = nn.Parameter(torch.randn(CONTEXT + 2, WIDTH, generator=generator))
        self.head = nn.Parameter(torch.randn(WIDTH, VOCABULARY, generator=generator))
        text = SimpleNamespace(pad_token_id=1)
        self.config: Any = SimpleNamespace(model_type="averaging", get_text_config=lambda decoder: text)

    @torch.inference_mode()
    def forward(
        self,
        ids: Tensor,
        past_key_values: Cache | None = None,
        use_cache: bool = False,
        output_hidden_states: bool = False,
    ) -> SimpleNamespace:
        if self.flaw == "wants pictures":
            raise ValueError("You must specify pixel_values")
        rows, text = ids.shape[1], ids[0].tolist()
        if self.flaw == "switches":
            self.attention_type = "sparse" if rows > 30 else "full"
        if use_cache and past_key_values is not None and self.flaw != "ignores its cache":
            past_key_values.ids += text
            text = past_key_values.ids
            if self.flaw == "forgets":
                text = text[-6:]
            if self.flaw == "loses count behind padding":
                text = [token for token in text if token != 1 or len(text) == rows]
        x = nn.functional.embedding(torch.tensor(text), self.tokens) + nn.functional.embedding(
            torch.arange(len(text)) + 2, self.positions
        )
        seen = x.cumsum(0) / torch.arange(1, len(text) + 1)[:, None]
        if self.flaw == "reads later tokens":
            seen = seen + 0.01 * x.mean(0)
        if self.flaw == "knows how long the text is":
            seen = seen * (1 + 0.01 * len(text))
        if self.flaw == "draws at random":
            seen = seen + 0.01 * torch.randn(seen.shape)
        if self.flaw == "takes its length from padding tokens":
            seen = seen * (torch.arange(len(text)) < sum(token != 1 for token in text))[:, None]
        logits = ((seen + x).to(self.dtype) @ self.head.to(self.dtype))[None, -rows:]
        if self.flaw == "gives no rows":
            logits = logits[:, -1]
        return SimpleNamespace(logits=logits, hidden_states=(x, seen, seen) if output_hidden_states else None)


def test_a_sound_model_passes() -> None:
    expected = Findings(uses_cache=True, num_columns=VOCABULARY, num_layers=2, num_positions=CONTEXT)
    assert try_out(Averaging(), VOCABULARY, CONTEXT, Cache) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_no_reason_to_do_without_the_cache(dtype: torch.dtype) -> None:
    assert try_out(Averaging(dtype=dtype), VOCABULARY, CONTEXT, Cache).uses_cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("flaw", ["ignores its cache", "forgets"])
def test_e4_a_cache_that_gives_other_logits_is_not_used(flaw: str, dtype: torch.dtype) -> None:
    assert not try_out(Averaging(flaw, dtype), VOCABULARY, CONTEXT, Cache).uses_cache


def test_positions_counted_from_padding_tokens_are_noticed() -> None:
    assert not try_out(Averaging("loses count behind padding"), VOCABULARY, CONTEXT, Cache).uses_cache


def test_a_model_without_a_cache_and_a_tiny_context_are_recomputed() -> None:
    assert not try_out(Averaging(), VOCABULARY, CONTEXT, None).uses_cache
    for context in (1, 2, 11):
        assert not try_out(Averaging(), VOCABULARY, context, Cache).uses_cache


@pytest.mark.parametrize(
    ("flaw", "reason"),
    [
        ("reads later tokens", "'averaging' reads later tokens too"),
        ("knows how long the text is", "gives a text other logits when more text follows"),
        ("draws at random", "does not give the same logits for the same text twice"),
        ("takes its length from padding tokens", "gives a text other logits when more text follows"),
        ("switches", "turns from attention_type='sparse' to 'full' when it reads a short text"),
        ("gives no rows", r"gives logits of shape \[1, 41\] for 12 tokens, not one row for each"),
        ("wants pictures", r"cannot run on token ids alone \(ValueError: You must specify pixel_values\)"),
    ],
)
def test_what_cannot_be_run_exactly_is_refused_with_its_reason(flaw: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        try_out(Averaging(flaw), VOCABULARY, CONTEXT, Cache)
