"""The adviser on small checkpoints: three planted bad ideas get "don't" with the reason, a good one gets "yes".

What steps cost is given, as of a machine on which a step costs what its weights and rows do: acceptance is measured,
and no answer depends on the clock. One test measures everything.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import foretoken
from foretoken.engine.llm import LLM
from foretoken.errors import CheckpointError, InputError
from foretoken.measure.advise import memory, run
from foretoken.measure.advise.costs import DrafterCosts, LoadCosts, Made
from foretoken.measure.advise.options import AdviseOptions
from foretoken.measure.html import html_page
from foretoken.measure.report import Report
from foretoken.model.interface import LanguageModel
from foretoken.plan.profile import Curve
from tests.helpers.checkpoints import tiny_checkpoint, tiny_tokenizer
from tests.helpers.foreign_tokenizers import foreign_tokenizer

ROW = 0.04  # of a plain step, what a row adds: 25 rows take as long as reading the weights
COUNTS = (1, 2, 4, 8)


def given_costs(
    target: LanguageModel, made: Mapping[str, Made], options: AdviseOptions, prompt_tokens: int, tell: object
) -> LoadCosts:
    """A plain step of one request takes 1 + ROW; a draft model's step its share of the weights of that."""

    def step_s(load: int, count: int) -> float:
        return 1 + ROW * load * (1 + count)

    drafters = {}
    for name, (candidate, _, drafter) in made.items():
        share = drafter.models()[0].step_bytes / target.step_bytes if candidate.kind == "draft model" else 0.0
        steps = {
            load: Curve(
                tuple((n, share * n * step_s(load, 0) + candidate.runs_model * step_s(load, n)) for n in COUNTS)
            )
            for load in options.loads
        }
        drafters[name] = DrafterCosts(candidate.runs_model, steps, share * prompt_tokens * ROW)
    curves = {load: Curve(tuple((n, step_s(load, n)) for n in (0, *COUNTS))) for load in options.loads}
    return LoadCosts(prompt_tokens, prompt_tokens, prompt_tokens * ROW, curves, drafters)


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Report]:
    monkeypatch.setattr(run, "measure_costs", given_costs)

    def call(target: Path, *drafts: object, **options: Any) -> Report:
        usual = {"concurrency": (1,), "num_drafts": COUNTS, "max_tokens": 24, "dtype": "float32", "memory": "1GiB"}
        return foretoken.advise(str(target), drafts=tuple(map(str, drafts)), **(usual | options))

    return call


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    lines = [
        {"prompt": f"def {name}(self): return the list", "slice": "code"} for name in ("a", "b", "c", "d", "e", "f")
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture
def hard(tmp_path: Path) -> Path:
    """32 requests of random tokens."""
    rng, path = random.Random(3), tmp_path / "hard.jsonl"
    lines = [{"prompt_ids": [rng.randrange(97) for _ in range(12)], "slice": "hard"} for _ in range(32)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_few_prompts_are_said_to_give_no_interval(
    advised: Callable[..., Report], hard: Path, pair: SimpleNamespace
) -> None:
    few = advised(pair.target, "ngram", prompts=hard, prompts_per_slice=4)
    assert any("Fewer than 5 prompts give no interval" in one and "(all texts)" in one for one in few.caveats)
    enough = advised(pair.target, "ngram", prompts=hard, prompts_per_slice=5)
    assert not any("no interval" in one for one in enough.caveats)


def test_another_tokenizer_gets_dont(advised: Callable[..., Report], texts: Path, tmp_path: Path) -> None:
    target = tiny_tokenizer(tiny_checkpoint(tmp_path / "target", "llama", num_hidden_layers=12, vocab_size=300), 300)
    draft = tiny_checkpoint(tmp_path / "draft", "llama", num_hidden_layers=1, vocab_size=400)
    foreign_tokenizer(draft, "sentencepiece")
    report = advised(target, draft, prompts=texts)
    assert report.results["answer"] == "no"
    assert report.verdict.startswith("Don't speculate with draft: draft ")
    assert "has another tokenizer than the target" in report.verdict
    (finding,) = (one for one in report.results["findings"] if one.topic == "tokenizer")
    assert "vLLM" in finding.remedy
    assert not report.passed


def test_a_draft_of_half_the_size_gets_dont(advised: Callable[..., Report], texts: Path, tmp_path: Path) -> None:
    for name, layers, seed in (("target", 8, 0), ("draft", 4, 1)):
        tiny_checkpoint(tmp_path / name, "llama", num_hidden_layers=layers, vocab_size=300, seed=seed)
        tiny_tokenizer(tmp_path / name, 300)
    report = advised(tmp_path / "target", tmp_path / "draft", prompts=texts)
    assert report.results["answer"] == "no"
    assert "times smaller than the target" in report.verdict
    assert "plain steps" in report.verdict


def test_32_requests_of_hard_text_get_dont_and_one_alone_does_not(
    advised: Callable[..., Report], hard: Path, pair: SimpleNamespace
) -> None:
    """The draft guesses half of the tokens: too few for a machine that 32 requests keep busy."""
    options = {"prompts": hard, "prompts_per_slice": 32}
    report = advised(pair.target, "ngram", pair.draft, concurrency=(32,), **options)
    assert report.results["answer"] == "no"
    assert "with 32 requests at once" in report.verdict
    alone = [one for one in report.results["rows"] if one.candidate == "draft"]
    assert {one.num_draft for one in alone} == {1}
    assert "max_speculating_requests" in " ".join(
        one.remedy for one in report.results["findings"] if one.topic == "load"
    )


def test_the_same_draft_pays_at_a_low_load_and_a_rule_says_up_to_which(
    advised: Callable[..., Report], hard: Path, pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where drafting takes a tenth of a step."""

    def cheap(*arguments: Any) -> LoadCosts:
        found = given_costs(*arguments)
        steps = {
            load: Curve(tuple((n, 0.1 * n + found.target[load].seconds(n)) for n in COUNTS)) for load in found.target
        }
        return LoadCosts(12, 12, found.prefill_s, found.target, {"draft": DrafterCosts(True, steps)})

    monkeypatch.setattr(run, "measure_costs", cheap)
    options = {"prompts": hard, "prompts_per_slice": 32, "price_per_hour": 2.0}
    report = advised(pair.target, pair.draft, concurrency=(1, 32), **options)
    assert report.results["answer"] == "only under this load"
    assert report.results["routing"] == {"max_speculating_requests": 1}
    lines = {one.engine: one.command or one.refusal for one in report.results["launch"]}
    assert "--drafter draft_model" in lines["foretoken"]
    assert "--max-speculating-requests 1" in lines["foretoken"]
    assert "draft_model" in lines["vLLM"]
    assert "has no counterpart in TGI" in lines["TGI"]
    assert set(lines) == {"foretoken", "vLLM", "SGLang", "llama.cpp", "TensorRT-LLM", "TGI"}
    (cost,) = report.results["costs_per_million"]
    assert cost.after <= cost.plain
    page = html_page(report)
    assert page.index("Speculate with draft") < page.index("By load")


def test_memory_that_a_draft_takes_is_told(advised: Callable[..., Report], hard: Path, pair: SimpleNamespace) -> None:
    report = advised(pair.target, pair.draft, "ngram", prompts=hard)
    rows = {one.candidate: one for one in report.results["memory"]}
    assert rows["draft"].draft_weight_bytes > 0 == rows["ngram"].draft_weight_bytes
    assert rows["draft"].displaced_tokens > rows["ngram"].displaced_tokens
    assert rows["draft"].room.candidate < rows["draft"].room.plain
    assert not [one for one in report.results["findings"] if one.topic == "memory"]
    tight = advised(pair.target, pair.draft, prompts=hard, memory=f"{rows['draft'].total_bytes * 10 // 9}")
    (finding,) = [one for one in tight.results["findings"] if one.topic == "memory"]
    assert (finding.candidate, "leaves 10% in reserve" in finding.finding) == ("draft", True)


def test_memory_without_a_size_is_what_is_free_before_the_target_is_loaded(
    advised: Callable[..., Report], hard: Path, pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Afterwards its weights would count twice."""
    loaded, free = list[object](), list[int]()

    def available(_device: object) -> int:
        free.append((1 << 30) >> len(loaded))
        return free[-1]

    class Loading(LLM):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            loaded.append(self)

    monkeypatch.setattr(memory, "available_bytes", available)
    monkeypatch.setattr(run, "LLM", Loading)
    report = advised(pair.target, "ngram", prompts=hard, prompts_per_slice=1, memory=None)
    assert report.results["memory"]
    assert (len(loaded), free) == (1, [1 << 30])


def test_what_cannot_be_loaded_is_told_and_the_others_are_judged(
    advised: Callable[..., Report], hard: Path, pair: SimpleNamespace, tmp_path: Path
) -> None:
    """A draft of another vocabulary without a tokenizer to translate with."""
    other = tiny_checkpoint(tmp_path / "other", "llama", vocab_size=50)
    report = advised(pair.target, "suffix", other, prompts=hard)
    assert "vocabulary of 50 tokens" in report.results["failed"]["other"]
    assert {one.candidate for one in report.results["rows"]} == {"suffix"}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"drafts": ("auto",)}, "drafts"),
        ({"drafts": ("ngram:num_draft=3",)}, "drafts"),
        ({"drafts": ("draft_model",)}, "drafts"),
        ({"drafts": ("early_exit",)}, "drafts"),
        ({"drafts": ("suffix", "ngrma")}, "drafts"),
        ({"concurrency": (0,)}, "concurrency"),
        ({"num_drafts": ()}, "num_drafts"),
        ({"memory": "much"}, "memory"),
        ({"price_per_hour": 0.0}, "price_per_hour"),
        ({"machines": Path("machines.json")}, "machines"),
    ],
)
def test_questions_that_make_no_sense_are_refused(
    options: dict[str, Any], named: str, pair: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("machines.json").write_text('[{"name": "a"}]')
    with pytest.raises(InputError) as error:
        foretoken.advise(str(pair.target), **options)
    assert error.value.field == named


def test_a_draft_that_is_not_there_is_told_before_anything_is_measured(
    advised: Callable[..., Report], pair: SimpleNamespace, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere does not exist"):
        advised(pair.target, "suffix", tmp_path / "nowhere")


def test_everything_measured(hard: Path, pair: SimpleNamespace, tmp_path: Path) -> None:
    """No figure is looked at but that there is one: the machine is what it is."""
    report = foretoken.advise(
        str(pair.target),
        drafts=("ngram", str(pair.draft)),
        prompts=hard,
        prompts_per_slice=2,
        concurrency=(2, 1),
        num_drafts=(2, 1),
        max_tokens=8,
        memory="1GiB",
        budget_s=1.0,
        out=tmp_path / "advice.html",
    )
    costs = report.results["step_costs"]
    assert costs.prefill_s > 0
    assert {load: [count for count, _ in curve.points] for load, curve in costs.target.items()} == {
        1: [0, 1, 2],
        2: [0, 1, 2],
    }
    assert all(s > 0 for one in costs.drafters.values() for curve in one.steps.values() for _, s in curve.points)
    assert len(report.results["rows"]) == 4
    assert len(report.results["sweep"]) == 8
    assert "Where the figures come from" in (tmp_path / "advice.html").read_text()
    assert report.json_line()


def test_an_answer_longer_than_the_context_is_named(
    advised: Callable[..., Report], hard: Path, pair: SimpleNamespace
) -> None:
    report = advised(pair.target, "ngram", prompts=hard, prompts_per_slice=2, max_tokens=5000)
    assert "2 of 2 answers end before 5000 tokens" in " ".join(report.caveats)
