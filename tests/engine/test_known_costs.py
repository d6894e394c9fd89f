"""Costs known from the start: measured without a trace, kept, found again, refused where they belong to something else.
No time is asserted.
"""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from foretoken import LLM, SamplingParams, SpecConfig, files
from foretoken.backend.drafting import parse_drafters
from foretoken.draft.group import option_kind
from foretoken.engine.startup import known_costs, profiling, start_profile
from foretoken.engine.startup.profiling import load_profile, save_profile
from foretoken.engine.startup.start_profile import measure_start, model_drafters
from foretoken.errors import ConfigError, SpeculationWarning, StorageError
from foretoken.files import cache_folder
from foretoken.measure.speed.options import ProfileOptions
from foretoken.measure.speed.profile import run_profile, write_profile
from foretoken.model.interface import LanguageModel
from foretoken.text.tokenizer import Tokenizer
from tests.helpers import audit
from tests.helpers.checkpoints import tiny_checkpoint, token_ids
from tests.helpers.foreign_tokenizers import foreign_tokenizer

PROMPT = token_ids(20)
ANSWER = SamplingParams(max_tokens=24, temperature=0.8, seed=5)
PLENTY_S = 600.0  # every point is measured, however slow or busy the machine is; what is measured takes milliseconds


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache for every test, tiny targets measured too, a copy that takes no time, and time enough for every
    point.
    """
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(known_costs, "_TINY_STEP_BYTES", 0)
    monkeypatch.setattr(start_profile, "_COPY_BYTES", 1 << 20)
    monkeypatch.setattr(
        known_costs,
        "measure_start",
        lambda target, made, name, say: measure_start(target, made, name, PLENTY_S, say),
    )


@pytest.fixture
def open_llm(pair: SimpleNamespace) -> Callable[..., LLM]:
    def make(spec: SpecConfig | None = None, **options: Any) -> LLM:
        return LLM(
            pair.target,
            spec=spec or SpecConfig("draft_model", draft=str(pair.draft)),
            dtype="float32",
            cache_tokens=4096,
            **options,
        )

    return make


def plain(thing: object, seen: frozenset[int] = frozenset()) -> object:
    """Everything an object holds, models by what they remember alone, as values that compare; a tokenizer remembers
    nothing of texts.
    """
    if (
        id(thing) in seen
        or isinstance(thing, torch.nn.Module | torch.device | torch.dtype | type | Tokenizer)
        or callable(thing)
    ):
        return None
    seen = seen | {id(thing)}
    if isinstance(thing, torch.Tensor | np.ndarray):
        return None if thing.ndim == 3 else thing.tolist()  # a cache's slots: what nobody holds nobody reads
    if isinstance(thing, dict):
        return {str(key): plain(value, seen) for key, value in thing.items()}
    if isinstance(thing, list | tuple | set | frozenset):
        return [plain(value, seen) for value in thing]
    return plain(vars(thing), seen) if hasattr(thing, "__dict__") else repr(thing)


def everything(llm: LLM) -> object:
    """What may not change: queue, caches with their index, drafters, controller, counters, everybody's random
    numbers.
    """
    engine = llm.engine
    numbers = (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state()))
    own = (engine.scheduler, engine.chooser, engine.states, engine.stats, repr(engine._ids), llm._driver._receivers)
    return plain([own, llm.target, llm._drafters.drafters, numbers])


SPECS: dict[str, dict[str, Any]] = {
    "plain": {"drafter": None},
    "ngram": {"drafter": "ngram"},
    "draft_model": {"drafter": "draft_model", "draft": True},
    "tree": {"drafter": "draft_model", "draft": True, "tree": "best_first"},
    "early_exit": {"drafter": "early_exit"},
    "cascade": {"drafter": "cascade", "draft": True, "parts": ("suffix", "draft_model")},
    "mix": {"drafter": "mix", "draft": True},
}


@pytest.mark.parametrize("name", SPECS)
def test_measuring_leaves_no_trace(name: str, open_llm: Callable[..., LLM], pair: SimpleNamespace) -> None:
    """Before and after are the same in every part of the engine, and so is what it answers."""
    spec = SpecConfig(**{key: str(pair.draft) if value is True else value for key, value in SPECS[name].items()})
    with open_llm(spec, profile="off") as llm:
        before = everything(llm)
        made = model_drafters([(spec, drafter) for drafter in llm._drafters.drafters.values()])
        assert list(made) == {"plain": [], "ngram": [], "tree": ["draft_model"], "mix": ["draft_model"]}.get(
            name, [name]
        )
        profile = measure_start(llm.target, made, "it", PLENTY_S)
        assert profile is not None
        assert everything(llm) == before
        audit.check_idle(llm)
        assert [count for count, _ in profile.rows.points] == [1, 2, 4, 8, 16, 32]
        for cost in profile.drafters.values():
            assert [count for count, _ in cost.guesses.points] == [1, 2, 4, 8]
            assert all(seconds > 0 for _, seconds in cost.guesses.points)
        answers = llm.generate([PROMPT, PROMPT[:9]], ANSWER)
    with open_llm(spec, profile="off") as llm:
        assert [answer.token_ids for answer in llm.generate([PROMPT, PROMPT[:9]], ANSWER)] == [
            answer.token_ids for answer in answers
        ]


@pytest.mark.parametrize("kind", ["through transformers", "another tokenizer"])
def test_other_models_leave_no_trace_either(kind: str, text_pair: SimpleNamespace, tmp_path: Path) -> None:
    """A target without a twin, and a draft that speaks other tokens."""
    target, spec = text_pair.target, SpecConfig("ngram")
    if kind == "through transformers":
        target = tiny_checkpoint(tmp_path / "target", "opt")
    else:
        tiny_checkpoint(tmp_path / "draft", "llama", vocab_size=400, hidden_size=16)
        foreign_tokenizer(tmp_path / "draft", "unigram", 400)
        spec = SpecConfig("draft_model", draft=str(tmp_path / "draft"), draft_vocabulary="strings")
    with LLM(target, spec=spec, dtype="float32", cache_tokens=4096, profile="off") as llm:
        before = everything(llm)
        profile = measure_start(
            llm.target, model_drafters([(spec, drafter) for drafter in llm._drafters.drafters.values()]), "it", PLENTY_S
        )
        assert everything(llm) == before
        assert profile is not None
        assert len(profile.rows.points) == 6
        assert list(profile.drafters) == (["draft_model"] if spec.draft else [])
        llm.generate(PROMPT, ANSWER)


def test_a_start_measures_once_and_seeds_the_controller(open_llm: Callable[..., LLM]) -> None:
    with open_llm() as first:
        path = first.costs.path
        assert path is not None
        assert path.parent == cache_folder("profiles")
        assert [file.name for file in path.parent.iterdir()] == [path.name]
        assert first.stats.profile_s == first.costs.measured_s > 0
        policy, profile = first.engine.chooser.policy, first.costs.profile
        assert profile is not None
        assert policy.target_cost.seconds(4) == profile.rows.seconds(4)
        (kind,) = (option_kind(option) for option in first.spec.drafter_options)
        assert policy.draft_costs.seconds(kind, 2) == profile.drafters["draft_model"].guesses.seconds(2)
        assert policy.target_cost.as_dict() == {}
        first.generate(PROMPT, ANSWER)
        assert policy.target_cost.as_dict()
    with open_llm() as second:
        assert (second.costs.profile, second.costs.path, second.stats.profile_s) == (profile, path, 0.0)
        assert second.engine.chooser.policy.target_cost.seconds(4) == profile.rows.seconds(4)
    with open_llm(profile="measure") as third:
        assert third.costs.profile != profile
        assert third.costs.path == path
    assert load_profile(path) == third.costs.profile


def test_auto_measures_only_where_somebody_chooses(
    open_llm: Callable[..., LLM], pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = str(pair.draft)
    for spec in (SpecConfig(), SpecConfig("draft_model", draft=draft, num_draft=3)):
        with open_llm(spec) as llm:
            assert llm.costs.profile is None
    for options in ({"profile": "off"}, {"spec": SpecConfig("ngram"), "profile": "off"}):
        with open_llm(**options) as llm:
            assert llm.costs.profile is None
    monkeypatch.setattr(known_costs, "_TINY_STEP_BYTES", 1e9)
    with open_llm() as llm:
        assert llm.costs.profile is None
    assert not cache_folder("profiles").exists()
    with open_llm(SpecConfig(), profile="measure") as llm:
        assert llm.costs.profile is not None
    monkeypatch.setattr(known_costs, "_TINY_STEP_BYTES", 0)
    with open_llm(SpecConfig()) as llm:  # kept is kept
        assert llm.costs.profile is not None
        assert llm.stats.profile_s == 0


@pytest.mark.filterwarnings("ignore:the draft has")
def test_other_machines_models_threads_and_drafts_have_files_of_their_own(
    open_llm: Callable[..., LLM], pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = str(pair.draft)
    open_llm().close()
    open_llm(SpecConfig("ngram")).close()
    open_llm(SpecConfig("draft_model", draft=draft, tree="static")).close()
    open_llm(SpecConfig("draft_model", draft=str(pair.target))).close()
    open_llm(numerics="strict").close()
    assert len(list(cache_folder("profiles").iterdir())) == 5
    monkeypatch.setattr(known_costs, "machine", lambda: {"cpu": "another"})
    monkeypatch.setattr(start_profile, "machine", lambda: {"cpu": "another"})
    open_llm().close()
    torch.set_num_threads(2)
    try:
        open_llm().close()
    finally:
        torch.set_num_threads(1)
    assert len(list(cache_folder("profiles").iterdir())) == 7


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "foretoken-profile-1"}', '{"format": "x"}', "\x00\xff"])
def test_a_corrupt_file_is_named_and_measured_anew(content: str, open_llm: Callable[..., LLM]) -> None:
    with open_llm() as llm:
        path = llm.costs.path
    assert path is not None
    path.write_bytes(content.encode("latin-1"))
    with pytest.warns(UserWarning, match=str(path)), open_llm() as llm:
        assert llm.stats.profile_s > 0
    with warnings.catch_warnings(), open_llm() as llm:
        warnings.simplefilter("error")
        assert llm.stats.profile_s == 0


def test_a_warning_that_filters_make_an_error_is_logged_and_the_engine_opens(
    open_llm: Callable[..., LLM], unheard: list[str]
) -> None:
    with open_llm() as llm:
        path = llm.costs.path
    assert path is not None
    path.write_text("{")
    with open_llm() as llm:
        assert llm.stats.profile_s > 0
    assert [
        text for text in unheard if text.startswith(f"UserWarning: cached profile {path} cannot be used")
    ] == unheard
    unheard.clear()


def test_a_file_of_something_else_under_this_name_is_not_believed(open_llm: Callable[..., LLM]) -> None:
    with open_llm() as llm:
        path, profile = llm.costs.path, llm.costs.profile
    assert path is not None
    assert profile is not None
    save_profile(replace(profile, machine={"cpu": "another"}), path)
    with pytest.warns(UserWarning, match="measured for something else"), open_llm() as llm:
        assert llm.stats.profile_s > 0
    assert load_profile(path).fingerprint == path.stem


def test_a_cache_that_cannot_be_written_is_done_without(open_llm: Callable[..., LLM], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, where a folder should be")
    with pytest.warns(UserWarning, match="FORETOKEN_CACHE") as heard:
        llm = open_llm()
    with llm:
        assert llm.costs.profile is not None
        assert llm.costs.path is None
    assert sum(one.category is not SpeculationWarning for one in heard) == 1


def test_a_failed_write_leaves_nothing_behind(
    tmp_path: Path, open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_llm() as llm:
        profile = llm.costs.profile
    assert profile is not None

    def broken(source: object, destination: object) -> None:
        raise OSError("full")

    monkeypatch.setattr(files.os, "replace", broken)
    with pytest.raises(StorageError, match="full"):
        save_profile(profile, tmp_path / "new" / "x.json")
    assert list((tmp_path / "new").iterdir()) == []


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder("profiles") == tmp_path / "cache" / "profiles"
    monkeypatch.delenv("FORETOKEN_CACHE")
    monkeypatch.setattr(files.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder("profiles") == Path("/xdg/foretoken/profiles")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder("profiles") == Path.home() / ".cache" / "foretoken" / "profiles"
    monkeypatch.setattr(files.sys, "platform", "darwin")
    assert cache_folder("profiles") == Path.home() / "Library" / "Caches" / "foretoken" / "profiles"
    monkeypatch.setattr(files.sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", "/local")
    assert cache_folder("profiles") == Path("/local/foretoken/profiles")


def test_files_of_bench_are_read_and_checked(
    open_llm: Callable[..., LLM], pair: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `bench profile` writes serves as it is; another machine, target or draft is refused with what differs."""
    monkeypatch.setattr(profiling, "_POINT_S", 0.0)
    options = ProfileOptions(
        str(pair.target), str(pair.draft), parse_drafters(["draft_model", "ngram"]), dtype="float32", budget_s=0.5
    )
    profile = run_profile(options)
    file = write_profile(profile, tmp_path / "out", "profile")
    with open_llm(profile=file) as llm:
        assert llm.costs.profile == profile
        assert llm.costs.path == file
        assert llm.stats.profile_s == 0
        assert llm.engine.chooser.policy.target_cost.seconds(1) == profile.rows.seconds(1)
        assert list(llm.engine.chooser.policy.draft_costs._tables) == [option_kind(llm.spec)]
        llm.generate(PROMPT, ANSWER)
    cost = profile.drafters["draft_model"]
    others = {
        "another machine .cpu": replace(profile, machine={**profile.machine, "cpu": "another"}),
        "another target .num_layers": replace(profile, target={**profile.target, "num_layers": 99}),
        "another target .threads": replace(profile, target={**profile.target, "threads": 99}),
        "another drafter draft_model .tree": replace(
            profile, drafters={"draft_model": replace(cost, about={**cost.about, "tree": "static"})}
        ),
    }
    for message, other in others.items():
        save_profile(other, tmp_path / "other.json")
        with pytest.raises(ConfigError, match=message) as caught:
            open_llm(profile=str(tmp_path / "other.json"))
        assert "bench profile" in str(caught.value)
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(StorageError, match=r"broken\.json"):
        open_llm(profile=str(tmp_path / "broken.json"))
    assert not cache_folder("profiles").exists()


@pytest.mark.parametrize("value", ["always", "", None, 3, "/nowhere/profile.json"])
def test_wrong_values_are_named_before_anything_is_loaded(value: object) -> None:
    with pytest.raises(ConfigError, match=r"profile=.*auto, off, measure"):
        LLM("/no/such/model", profile=value)  # type: ignore[arg-type]


def test_what_is_too_small_to_measure_in(pair: SimpleNamespace) -> None:
    """A cache of three blocks: `auto` goes without, `measure` says why not."""
    spec = SpecConfig("draft_model", draft=str(pair.draft))
    with LLM(pair.target, spec=spec, cache_tokens=64) as llm:
        assert llm.costs.profile is None
    with pytest.raises(ConfigError, match="too small"):
        LLM(pair.target, spec=spec, cache_tokens=64, profile="measure")
    with LLM(pair.target, spec=spec, cache_tokens=96) as llm:
        assert llm.costs.profile is not None
        assert [count for count, _ in llm.costs.profile.rows.points] == [1, 2, 4, 8, 16]


def test_time_that_is_up(open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any time there is a point of the target and one of each drafter; slow steps are announced, once."""
    heard: list[str] = []
    monkeypatch.setattr(known_costs, "_LONG_S", 0.0)
    with open_llm(on_profile=heard.append, profile="off") as llm:
        made = model_drafters([(llm.spec, drafter) for drafter in llm._drafters.drafters.values()])
        profile = measure_start(llm.target, made, "it", budget_s=0.0)
        assert profile is not None
        assert [count for count, _ in profile.rows.points] == [1]
        assert [count for count, _ in profile.drafters["draft_model"].guesses.points] == [1]
    assert heard == []
    with open_llm(on_profile=heard.append):
        assert len(heard) == 1
        assert "measuring" in heard[0]


@pytest.mark.filterwarnings("ignore:the draft has")
def test_equal_drafters_are_numbered(pair: SimpleNamespace, open_llm: Callable[..., LLM]) -> None:
    parts = (
        SpecConfig("draft_model", draft=str(pair.draft)),
        SpecConfig("draft_model", draft=str(pair.target)),
        SpecConfig("ngram"),
    )
    with open_llm(SpecConfig("auto", parts=parts)) as llm:
        assert dict(llm.costs.specs) == {"draft_model": parts[0], "draft_model#2": parts[1]}
        assert set(llm.engine.chooser.policy.draft_costs._tables) == {option_kind(parts[0]), option_kind(parts[1])}


def test_the_roofline_of_a_target(open_llm: Callable[..., LLM]) -> None:
    with open_llm(profile="measure") as llm:
        target: LanguageModel = llm.target
        line = llm.costs.profile.roofline if llm.costs.profile else None
        assert line is not None
        assert line.step_bytes == target.step_bytes
        assert line.row_flops == target.step_bytes / 2  # float32: two operations for four bytes
        assert line.kv_bytes_per_token > 0
        assert json.loads(json.dumps(llm.costs.profile.as_dict()))["roofline"]["step_bytes"] == target.step_bytes
