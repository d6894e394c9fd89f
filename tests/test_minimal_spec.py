"""The example is the whole algorithm: the engine gives its tokens, and its distribution is the target's."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.text.randomness import Purpose, uniforms
from tests.helpers.checkpoints import token_ids

FILE = Path(__file__).resolve().parents[1] / "examples" / "minimal_spec.py"
PROMPTS = [token_ids(n, seed=n) for n in (1, 6, 13)]


@pytest.fixture(scope="module")
def minimal() -> ModuleType:
    spec = importlib.util.spec_from_file_location("minimal_spec", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Softmax:
    """A checkpoint as a function from tokens to a distribution, by transformers."""

    def __init__(self, folder: Path, temperature: float) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.temperature = temperature
        self.known: dict[tuple[int, ...], np.ndarray] = {}

    def __call__(self, text: Sequence[int]) -> np.ndarray:
        key = tuple(text)
        if key not in self.known:
            with torch.no_grad():
                logits = self.model(torch.tensor([key])).logits[0, -1]
            self.known[key] = (logits / self.temperature).softmax(-1).double().numpy()
        return self.known[key]


class EngineDice:
    """The engine's random numbers of one round: for each draft token, for each test, for the last token."""

    def __init__(self, seed: int, round_start: int, num_draft: int) -> None:
        self.seed, self.round_start, self.num_draft = seed, round_start, num_draft
        self.picks = self.tests = 0

    def number(self, purpose: Purpose, index: int) -> float:
        return float(uniforms([self.seed], purpose, [self.round_start], [index])[0])

    def pick(self, distribution: np.ndarray) -> int:
        drafting, place = self.picks < self.num_draft, self.picks
        self.picks += 1
        if drafting:
            distribution = distribution[:-1]  # a draft model always proposes something
        cumulative = distribution.cumsum()
        u = self.number(Purpose.DRAFT, place) if drafting else self.number(Purpose.NEXT, 0)
        return int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))

    def accept(self, p: float, mu: float) -> bool:
        self.tests += 1
        return self.number(Purpose.ACCEPT, self.tests - 1) * mu < p


def rounds_of(llm: LLM, prompt: list[int], params: SamplingParams, spec: SpecConfig) -> list[list[int]]:
    out = llm.generate([prompt], params, spec)[0]
    pairs = zip(out.token_ids, out.provenance, strict=True)
    return [[token for token, _ in group] for _, group in itertools.groupby(pairs, key=lambda pair: pair[1].step)]


@pytest.mark.parametrize("num_draft", [1, 3, 5])
def test_greedy_token_for_token_and_round_by_round(
    minimal: ModuleType, llm: LLM, pair: SimpleNamespace, num_draft: int
) -> None:
    """The engine's first step only reads the prompt; from there on every round is the same."""
    target, draft = (minimal.greedy(Softmax(folder, 1.0)) for folder in (pair.target, pair.draft))
    for prompt in PROMPTS:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        first, *rest = rounds_of(llm, prompt, params, SpecConfig("draft_model", str(pair.draft), num_draft=num_draft))
        assert minimal.generate(target, draft, prompt + first, 19, num_draft, minimal.Dice()) == rest


@pytest.mark.parametrize("num_draft", [1, 3, 5])
def test_sampled_token_for_token_with_the_engines_numbers(
    minimal: ModuleType, llm: LLM, pair: SimpleNamespace, num_draft: int
) -> None:
    """The same random numbers in the same places: every formula on the way gives the same decision."""
    target, draft = (Softmax(folder, 0.8) for folder in (pair.target, pair.draft))
    kept = 0
    for seed, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.8, seed=seed)
        first, *rest = rounds_of(
            llm, prompt, params, SpecConfig("draft_model", str(pair.draft), num_draft=num_draft, rule="rejection")
        )
        text = prompt + first
        for expected in rest:
            limit = min(num_draft, 20 - (len(text) - len(prompt)) - 1)
            assert minimal.one_round(target, draft, text, limit, EngineDice(seed, len(text), limit)) == expected
            text += expected
            kept += len(expected) - 1
    assert kept > 10  # the test means something


@pytest.mark.parametrize("num_draft", [0, 1, 2, 3])
@pytest.mark.parametrize("share", [1.0, 0.6, 0.0])
def test_the_distribution_is_exact(minimal: ModuleType, num_draft: int, share: float) -> None:
    assert minimal.max_error(minimal.toy(1), minimal.toy(2, share), 3, 3, num_draft) < 1e-12
    assert minimal.max_error(minimal.toy(1), minimal.greedy(minimal.toy(3)), 3, 3, num_draft) < 1e-12


def test_a_wrong_residual_is_seen(minimal: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The enumeration is a test: without the subtraction the distribution is wrong."""
    broken = SimpleNamespace(**vars(np))
    broken.maximum = lambda left, floor: np.maximum(left, floor) + 0.3
    monkeypatch.setattr(minimal, "np", broken)
    assert minimal.max_error(minimal.toy(1), minimal.toy(2), 3, 2, 2) > 0.01


def test_it_is_short_and_stands_alone(minimal: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    text = FILE.read_text()
    assert len(text.splitlines()) <= 150
    assert "import foretoken" not in text
    assert "from foretoken" not in text
    minimal.main()
    assert capsys.readouterr().out.count("off by") == 3
