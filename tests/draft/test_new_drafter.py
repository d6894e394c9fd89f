"""A drafter is one file, one line in the registry and one row in the guarantees: one is added here, and works
everywhere.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foretoken import LLM, ConfigError, SamplingParams, SpecConfig, add_drafter, registry
from foretoken.backend.drafting import parse_drafters
from foretoken.cli.app import run
from foretoken.cli.flags import spec_from
from foretoken.draft.base import Drafter, Factory, ModelDrafter, parts_of
from foretoken.draft.group import drafter_key
from foretoken.draft.ngram import NgramDrafter
from foretoken.engine.drafters import DrafterFactory, ModelOptions
from foretoken.engine.startup import known_costs
from foretoken.engine.startup.start_profile import describe_drafter, model_drafters
from foretoken.measure.speed.options import ProfileOptions
from foretoken.measure.speed.profile import run_profile
from foretoken.model.paged import PagedModel
from foretoken.registry import DRAFTERS, Traits
from tests.draft.toy_model_drafter import ToyDrafter
from tests.helpers import audit, distribution, watch
from tests.helpers.checkpoints import token_ids
from tests.helpers.heads import RecordingHead
from tests.helpers.specs import spec_of

LINE = Traits("tests.draft.toy_model_drafter:ToyDrafter", samples=True, fields=("draft",))
PROMPTS = [token_ids(3 + 2 * i, seed=i) * (1 + i % 2) for i in range(8)]
LONG = SamplingParams(max_tokens=24, ignore_eos=True)
SHORT = ["--max-tokens", "16", "--dtype", "float32", "--cache-tokens", "2048"]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line in the registry; what the tests' helpers have to know of every drafter."""
    monkeypatch.setitem(DRAFTERS, "toy", LINE)
    monkeypatch.setattr(registry, "ADDED", {})
    watch.STATE_CHECKS[ToyDrafter] = check_state
    audit.KEPT_BY_DRAFTER[ToyDrafter] = lambda drafter: drafter.texts


def check_state(drafter: Any, sequence: int, text: list[int], num_drafted: int, num_accepted: int) -> None:
    assert drafter.texts[sequence] == text
    assert drafter.model.length(sequence) < len(text)


@pytest.fixture
def toy(llm: LLM, pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[SpecConfig]:
    """A configuration of it, which the shared engine forgets afterwards."""
    spec = SpecConfig("toy", draft=str(pair.draft), num_draft=4, options={"width": 2})
    llm.prepare(spec)
    key = drafter_key(spec)
    watched = watch.Watched(llm._drafters.drafters[key], llm.target.vocab_size)
    monkeypatch.setitem(llm._drafters.drafters, key, watched)
    yield spec
    assert watched.num_drafted > 0
    monkeypatch.undo()
    del llm._drafters.drafters[key]


def test_greedy_answers_are_plain(llm: LLM, toy: SpecConfig) -> None:
    plain = [out.token_ids for out in llm.generate(PROMPTS, LONG)]
    specs = [toy if i % 2 else SpecConfig("ngram", num_draft=3) for i in range(len(PROMPTS))]
    outputs = llm.generate(PROMPTS, LONG, specs)
    assert [out.token_ids for out in outputs] == plain
    assert sum(out.stats.accepted_by.get("toy", 0) for out in outputs) > 0


def test_seeded_answers_are_those_without_it(llm: LLM, toy: SpecConfig) -> None:
    params = [SamplingParams(max_tokens=24, temperature=0.9, seed=i, ignore_eos=True) for i in range(len(PROMPTS))]
    plain = [out.token_ids for out in llm.generate(PROMPTS, params)]
    assert [out.token_ids for out in llm.generate(PROMPTS, params, toy)] == plain


@pytest.mark.repeated
def test_sampled_answers_have_the_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = distribution.narrow_models(tmp_path)
    params = SamplingParams(max_tokens=distribution.LENGTH + 3, temperature=1.0, ignore_eos=True)
    spec = SpecConfig("toy", draft="d", num_draft=3, rule="block")
    engine_of = distribution.narrow_engine

    def with_toy(models: SimpleNamespace) -> Any:
        engine, width = engine_of(models), 2
        model = PagedModel(models.reverse, 20_000, 16)
        engine.drafters.drafters[drafter_key(spec)] = watch.Watched(ToyDrafter(model, width), distribution.VOCAB)
        return engine

    monkeypatch.setattr(distribution, "narrow_engine", with_toy)
    asked = [(params.__class__(**{**vars(params), "seed": seed}), spec) for seed in range(1600)]
    assert (
        min(distribution.p_values(distribution.sample_answers(narrow, asked), distribution.exact_law(narrow, params)))
        > distribution.ALARM
    )


def test_it_is_profiled_at_the_start(pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
    monkeypatch.setattr(known_costs, "_TINY_STEP_BYTES", 0)
    spec = SpecConfig("toy", draft=str(pair.draft), options={"width": 2})
    with LLM(pair.target, spec=spec, dtype="float32", cache_tokens=4096, profile="measure") as llm:
        assert llm.costs.profile is not None
        (cost,) = llm.costs.profile.drafters.values()
        assert cost.guesses.points[0][1] > 0
        assert cost.about["options"] == {"width": 2}
        assert len(cost.about["models"]) == 1


def test_it_is_on_the_command_line(pair: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["-t", str(pair.target), "--drafter", "toy", "--draft", str(pair.draft), "--num-draft", "3"]
    asked = ["generate", *arguments, "--prompt-ids", "5,6,7", *SHORT, "--json"]
    answers = []
    for drafting in ([], ["--drafter-option", "width=2"]):
        assert run([*asked, *drafting]) == 0
        answers.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert run(["generate", "-t", str(pair.target), "--prompt-ids", "5,6,7", *SHORT, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert all(answer["token_ids"] == plain["token_ids"] for answer in answers)
    for value, message in (
        ("width=0", "width=0: must be at least 1"),
        ("width=x", "width='x': must be a whole number"),
        ("widht=2", "did you mean 'width'?"),
        ("q=2", "its options: width (draft from so many of the likeliest tokens)"),
        ("width", "must be NAME=VALUE"),
    ):
        assert run([*asked, "--drafter-option", value]) == 2
        assert message in capsys.readouterr().err


def test_it_is_in_the_help() -> None:
    """Of a process whose registry holds the line from the beginning."""
    line = "Traits('tests.draft.toy_model_drafter:ToyDrafter', samples=True, fields=('draft',))"
    program = f"""
from foretoken.registry import DRAFTERS, Traits
DRAFTERS['toy'] = {line}
from foretoken.cli.app import run
run(['generate', '--help'])
"""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root, check=True)
    assert "mix, auto, toy, none." in " ".join(done.stdout.split())
    assert "--drafter-option" in done.stdout


def test_it_is_audited(pair: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "ids.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_ids": token_ids(4 + i, seed=i)}) + "\n" for i in range(4)))
    drafting = ["--drafter", "toy", "--draft", str(pair.draft), "--drafter-option", "width=2", "--num-draft", "3"]
    asked = ["audit", "-t", str(pair.target), *drafting, "--prompts", str(prompts), "--num-prompts", "4", *SHORT]
    assert run(asked) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("PASS: ")


def test_it_is_in_the_bench(pair: SimpleNamespace) -> None:
    (choice,) = parse_drafters(["toy:width=2;num_draft=3"])
    assert (choice.label, choice.needs) == ("toy(width=2)", {"draft"})
    assert choice.spec(draft="d") == SpecConfig("toy", draft="d", num_draft=3, options={"width": 2})
    assert "toy" in [one.name for one in parse_drafters(["all"])]
    options = ProfileOptions(str(pair.target), draft=str(pair.draft), drafters=(choice,), budget_s=0.1, dtype="float32")
    assert run_profile(options).drafters["toy(width=2)"].about["options"] == {"width": 2}


# ---- options


def test_options_are_frozen_checked_and_part_of_the_identity() -> None:
    spec = SpecConfig("toy", draft="d", options={"width": 2})
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert hash(pickle.loads(pickle.dumps(spec))) == hash(spec)
    assert {spec: 1}[SpecConfig("toy", draft="d", options={"width": 2})] == 1
    assert drafter_key(spec) != drafter_key(SpecConfig("toy", draft="d"))
    assert drafter_key(spec) == drafter_key(SpecConfig("toy", draft="d", num_draft=3, options={"width": 2}))
    with pytest.raises(TypeError):
        spec.options["width"] = 5  # type: ignore[index]
    with pytest.raises(ConfigError, match=r"with=2: unknown option of drafter='toy'; did you mean 'width'\?"):
        SpecConfig("toy", draft="d", options={"with": 2})
    with pytest.raises(ConfigError, match="width=2: unknown option of drafter='ngram'; its options: none"):
        SpecConfig("ngram", options={"width": 2})
    with pytest.raises(ConfigError, match="width=2: unknown option of drafter='auto'"):
        SpecConfig("auto", options={"width": 2})
    parts = SpecConfig("auto", parts=("ngram", spec))
    assert parts.configs[1].options == {"width": 2}
    assert spec_from({"drafter": "toy", "draft": "d", "drafter_option": ["width=2"]}) == spec


def test_a_drafter_from_outside_has_the_same_abilities(llm: LLM, pair: SimpleNamespace) -> None:
    add_drafter("mine", ToyDrafter, samples=True, fields=("draft",))
    spec = SpecConfig("mine", draft=str(pair.draft), num_draft=3, draft_probability=0.5, options={"width": 1})
    assert llm._loader.factory.make(spec).width == 1  # type: ignore[attr-defined]
    assert spec_from({"drafter": "mine", "draft": "d", "drafter_option": ["width=2"]}).options == {"width": 2}
    add_drafter("lookup", lambda factory, spec: NgramDrafter(), options=ToyDrafter.Options)
    assert SpecConfig("lookup", options={"width": 2}).options == {"width": 2}
    with pytest.raises(ConfigError, match=r"draft_probability=0.5: needs a drafter that samples"):
        SpecConfig("lookup", draft_probability=0.5)


# ---- who asks a model is measured


@pytest.mark.parametrize("name", [name for name, traits in DRAFTERS.items() if traits.source is not None])
def test_every_drafter_that_runs_a_model_is_profiled(
    name: str, mtp_llm: LLM, mtp_pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, pair = mtp_llm, mtp_pair
    opened: list[Path] = []
    factory = DrafterFactory(llm.folder, llm.target, llm.tokenizer, ModelOptions("float32", cache_tokens=1024))
    open_draft = factory.open_draft
    monkeypatch.setattr(factory, "open_draft", lambda folder, *rest: opened.append(folder) or open_draft(folder, *rest))
    forwards: list[int] = []
    for method in ("forward", "forward_early"):
        monkeypatch.setattr(type(llm.target), method, lambda self, *_args, **_options: forwards.append(1))
    spec = spec_of(name, pair.draft)
    drafter = factory.make(spec)
    profiled = model_drafters([(spec, drafter)])
    assert bool(profiled) == bool(opened or DRAFTERS[name].samples)
    held = [model for _, part in profiled.values() for model in part.models()]
    assert len(held) == len(opened)
    if name == "early_exit":
        assert isinstance(drafter, ModelDrafter)
    for own, part in profiled.values():
        assert describe_drafter(own, part)["drafter"] == own.drafter
        fresh = part.fresh(lambda model: model)
        assert type(fresh) is type(part)
        assert fresh is not part
        assert [*fresh.models()] == [*part.models()]
    assert not forwards


def test_a_drafter_cannot_hide_a_model(llm: LLM, pair: SimpleNamespace) -> None:
    class Hiding(NgramDrafter):
        @classmethod
        def make(cls, factory: Factory, spec: SpecConfig) -> Drafter:
            drafter = cls()
            drafter.hidden = factory.open_draft(pair.draft)  # type: ignore[attr-defined]
            return drafter

    add_drafter("hiding", Hiding)
    with pytest.raises(ConfigError, match=r"drafter='hiding': opened a draft model, but its cost cannot be measured"):
        llm._loader.factory.make(SpecConfig("hiding"))


def test_a_mix_refuses_a_part_that_reads_hidden_states_and_cannot_share_them(llm: LLM) -> None:
    """Requests of the mix would adopt no prefix."""
    add_drafter("head", lambda factory, spec: RecordingHead(NgramDrafter(), [1]))
    assert llm._loader.factory.make(SpecConfig("head")).name == "ngram"
    with pytest.raises(ConfigError, match="parts='ngram': reads hidden states without sharing them"):
        llm._loader.factory.make(SpecConfig("mix", parts=("ngram", "head")))


def test_parts_are_measured_by_themselves(llm: LLM, pair: SimpleNamespace) -> None:
    spec = SpecConfig("mix", draft=str(pair.draft), parts=("ngram", "toy"))
    assert spec.shape_follows_draws
    drafter = llm._loader.factory.make(spec)
    assert [part.name for _, part in parts_of(spec, drafter)] == ["ngram", "toy"]
    assert list(model_drafters([(spec, drafter)])) == ["toy"]


def test_an_open_exit_is_measured_at_every_exit(llm: LLM) -> None:
    spec = SpecConfig("early_exit", draft_probability="auto")
    drafter = llm._loader.factory.make(spec)
    found = model_drafters([(spec, drafter)])
    exits = {own.exit_layer for own, _ in found.values()}
    assert len(found) == len(exits) == len(drafter.exits)  # type: ignore[attr-defined]
    assert "auto" not in exits
