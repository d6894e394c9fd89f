"""Of equal logits every drafter takes the first, as the target does, also where a tensor library takes another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foretoken import SamplingParams, SpecConfig
from foretoken.draft.base import Drafter, Feedback
from foretoken.draft.cascade import CascadeDrafter
from foretoken.draft.draft_model import DraftModelDrafter
from foretoken.draft.early_exit import EarlyExitDrafter, SkipSearch
from foretoken.draft.group import DrafterGroup, drafter_key
from foretoken.draft.ngram import NgramDrafter
from foretoken.engine.engine import Engine
from foretoken.engine.request import RequestState
from foretoken.verify import first_max
from tests.helpers.scripted import Context, ScriptedModel

VOCAB = 12
GREEDY = SamplingParams(max_tokens=60, ignore_eos=True)


@pytest.fixture(autouse=True)
def last_of_equals(monkeypatch: pytest.MonkeyPatch) -> None:
    """An `argmax` that takes the last of equal numbers: nothing forbids it on some device or in some version."""

    def argmax(rows: Tensor, dim: int = -1, keepdim: bool = False) -> Tensor:
        places = torch.arange(rows.shape[dim]).expand_as(rows.movedim(dim, -1)).movedim(-1, dim)
        return torch.where(rows == rows.amax(dim, keepdim=True), places, -1).amax(dim, keepdim=keepdim)

    monkeypatch.setattr(Tensor, "argmax", argmax)
    monkeypatch.setattr(torch, "argmax", argmax)


def tied(context: Context) -> list[float]:
    """Two or three tokens share the highest logit after any text."""
    place = (3 * context[-1] + 5 * len(context)) % (VOCAB - 4)
    return [2.0 if token in (place, place + 2, place + 1 + context[-1] % 3) else 0.5 for token in range(VOCAB)]


class DeepScript(ScriptedModel):
    """Layers enough to leave some out."""

    num_layers = 6


def answer(drafter: Drafter, spec: SpecConfig, target: ScriptedModel) -> RequestState:
    drafters = DrafterGroup(target)
    key = drafter_key(spec)
    assert key is not None
    drafters.drafters[key] = drafter
    engine = Engine(target, drafters, eos_token_ids=())
    state = engine.submit([1, 2, 3], GREEDY, spec)
    while engine.has_work:
        engine.step()
    return state


def test_the_fixture_bites() -> None:
    rows = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]], dtype=torch.bfloat16)
    assert rows.argmax(-1).tolist() == [2, 2]
    assert first_max(rows).tolist() == [1, 0]
    assert first_max(rows[None]).tolist() == [[1, 0]]


@pytest.mark.parametrize("levels", [0, 1, 2])
def test_every_level_of_a_cascade_says_what_the_target_says(levels: int) -> None:
    """All models know the target's logits, so every draft token stands; 0 levels: a draft model alone."""
    models = [ScriptedModel(tied, VOCAB) for _ in range(max(1, levels))]
    if not levels:
        spec, drafter = SpecConfig("draft_model", "d", num_draft=4), DraftModelDrafter(models[0])
        state = answer(drafter, spec, ScriptedModel(tied, VOCAB))
    else:
        parts = tuple(SpecConfig("draft_model", f"d{number}") for number in range(levels))
        spec = SpecConfig("cascade", parts=("ngram", *parts), num_draft=4)
        state = answer(CascadeDrafter(models, NgramDrafter()), spec, ScriptedModel(tied, VOCAB))
    assert state.stats.num_drafted == state.stats.num_accepted > 30


def test_what_a_set_of_layers_would_have_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial compares with the text itself, so it has to choose as the text was chosen."""
    compared: list[float] = []
    monkeypatch.setattr(SkipSearch, "_speed", lambda self, shares, *_: compared.extend(shares) or 1.0)
    target = DeepScript(tied, VOCAB)
    drafter = EarlyExitDrafter(target)
    state = answer(drafter, SpecConfig("early_exit", skip_layers="auto", num_draft=2), target)
    assert drafter.skips.num_trials > 0
    assert sum(compared) / len(compared) == pytest.approx(1.0, abs=0.05)
    assert state.stats.num_drafted == state.stats.num_accepted > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_after_probes(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0], [7.0, 7.0, 7.0, 7.0], [1.0, 2.0, 3.0, 3.0]], dtype=dtype)
    feedback = Feedback(torch.empty(0, 4), (), probe_logits=logits, probe_rows=(2, 0))
    said = feedback.after_probes()
    assert said is not None
    assert said.tolist() == [2, 1]
