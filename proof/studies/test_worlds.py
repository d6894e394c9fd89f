from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.measure.load.prompts import asks
from foretoken.plan.profile import Curve, DrafterCost, Profile
from foretoken.simulate.sim_request import Records
from studies.dials.dials import named_dials
from studies.worlds import __main__ as command
from studies.worlds import data, record
from studies.worlds.ablations import ABLATIONS, Ablation
from studies.worlds.data import Look, Looks, RecordedAnswer, Recording
from studies.worlds.profiles import smallest
from studies.worlds.simulator import Machine, known_of, noisy, run
from studies.worlds.study import Outcome, Outcomes
from studies.worlds.worlds import World, all_worlds

ANSWER = RecordedAnswer(
    slice="code",
    prompt="one",
    num_prompt_tokens=5,
    tokens=(1, 2, 3, 4),
    looks={
        "ngram": Looks(
            1e-5, (Look((2, 3, 9), (-1, 0, 1), (0.5, 0.4, 0.3)), Look((7,), (-1,), (0.2,)), Look((), (), ()))
        )
    },
    chains={"draft_model": ((2, 3, 4), (3, 9, 4), (5,))},
)
PROFILE = Profile(
    target={},
    machine={},
    versions={},
    command="",
    date="",
    rows=Curve(((1, 0.010), (16, 0.012))),
    drafters={name: DrafterCost(Curve(((1, 1e-5),))) for name in ("ngram", "suffix", "draft_model")},
)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    recording = Recording({"date": "today"}, (ANSWER,))
    data.save(recording, tmp_path / "a.gz")
    assert data.load(tmp_path / "a.gz") == recording


def test_the_recording_in_the_tree_is_whole_small_and_names_no_folder() -> None:
    files = list(data.DATA.iterdir())
    assert sum(path.stat().st_size for path in files) < 2_000_000
    text = gzip.decompress(data.ANSWERS.read_bytes()).decode()
    text += "".join(path.read_text(encoding="utf-8") for path in files if path.suffix == ".json")
    assert "/tmp" not in text
    assert "/work" not in text
    recording = data.load()
    assert set(recording.slices) == set(record.SLICES)
    for answer in recording.answers:
        assert set(answer.looks) == {"ngram", "suffix"}
        assert len(answer.tokens) == record.ANSWER_TOKENS
        assert len(answer.looks["ngram"].places) == len(answer.chains["draft_model"]) == len(answer.tokens) - 1


def test_draft_tokens_are_accepted_where_they_equal_the_answer() -> None:
    recording = Recording({}, (replace(ANSWER, looks=dict.fromkeys(("ngram", "suffix"), ANSWER.looks["ngram"])),))
    known = known_of(recording, World("p", ("code",), 1))
    lookups, models = known["ngram"]["code"], known["draft_model"]["code"]
    assert isinstance(lookups, Records)
    assert isinstance(models, Records)
    (ngram,), (chains,) = lookups.answers, models.answers
    assert [one.path for one in ngram.rounds] == [(0, 1), (), ()]
    assert [(len(one.parents), len(one.path)) for one in chains.rounds] == [(3, 3), (3, 1), (1, 0)]


def test_recorded_chains_are_what_the_drafter_drafts() -> None:
    found = record.record("reference:target", "reference:draft", per_slice=1, answer_tokens=12)
    with LLM("reference:target", dtype="float32", profile="off") as llm:
        every = asks(record.SLICES, 1, llm.encode, record.PROMPT_TOKENS, record.SEED)
        spec = SpecConfig("draft_model", draft="reference:draft", num_draft=4)
        for place, answer in enumerate(found.answers):
            (ask,) = every[answer.slice]
            params = SamplingParams(
                max_tokens=12, temperature=ask.temperature, seed=record.SEED + place, ignore_eos=True
            )
            (output,) = llm.generate([list(ask.prompt_ids)], params, spec)
            assert output.token_ids == answer.tokens
            assert (output.stats.num_drafted, output.stats.num_accepted) == walked(answer, 4), answer.slice


def walked(answer: RecordedAnswer, num_draft: int) -> tuple[int, int]:
    """Drafted and accepted tokens, along an answer whose first token is never drafted."""
    place = drafted = accepted = 0
    while place < len(answer.tokens) - 1:
        most = min(num_draft, len(answer.tokens) - place - 2)
        tokens = answer.chains["draft_model"][place][:most]
        rest = answer.tokens[place + 1 :]
        kept = next((i for i, token in enumerate(tokens) if token != rest[i]), len(tokens))
        drafted, accepted, place = drafted + len(tokens), accepted + kept, place + kept + 1
    return drafted, accepted


def test_there_are_worlds_enough() -> None:
    worlds = all_worlds(("2ms", "1b"), record.SLICES)
    assert len({world.name for world in worlds}) == len(worlds) >= 30


def test_texts_that_change_go_on_as_another_answer() -> None:
    recording = data.load()
    for one, first, second in zip(*(recording.of(name) for name in ("edit>random", "edit", "random")), strict=True):
        assert one.tokens == (*first.tokens, *second.tokens)
        assert len(one.looks["ngram"].places) == len(one.chains["draft_model"]) == len(one.tokens) - 1
        assert one.looks["ngram"].places[-len(second.tokens) + 1 :] == second.looks["ngram"].places


def test_conditions_change_what_lookups_name_and_how_steps_scatter() -> None:
    recording = data.load()
    named = []
    for condition in ("usual", "chances too high", "chances too low"):
        records = known_of(recording, World("p", ("edit",), 2, condition))["ngram"]["edit"]
        assert isinstance(records, Records)
        named.append(records.answers[0].previews[5].chances)
    usual, high, low = named
    assert len(usual) > 1
    assert all(a > b > c for a, b, c in zip(high, usual, low, strict=True) if b < 1)
    quiet, disturbed = (
        [noisy(PROFILE, 0.05, 0, is_disturbed).step_s(1, ()) for _ in range(3)] for is_disturbed in (False, True)
    )
    assert quiet != disturbed


def test_accepted_draft_tokens_make_a_world_faster() -> None:
    world, machine = World("p", ("edit",), 2), Machine(PROFILE, 0.05)
    known = known_of(data.load(), world)
    plain, drafted = (run(world, name, machine, known, 64, 0) for name in ("plain", "ngram-5"))
    assert drafted.tokens_per_s > 1.5 * plain.tokens_per_s
    assert run(world, "auto", machine, known, 64, 0).tokens_per_s > 1.5 * plain.tokens_per_s


def test_scatter_is_the_same_for_the_same_seed_and_right_on_average() -> None:
    def times(seed: int) -> list[float]:
        scattered = noisy(PROFILE, 0.05, seed)
        return [scattered.step_s(1, [10]) for _ in range(4000)]

    assert times(1) == times(1) != times(2)
    # Pauses add 0.8 %; the standard error of the mean of 4000 draws is 0.22 % (pauses 0.2 %, scatter 0.08 %).
    assert sum(times(1)) / 4000 == pytest.approx(0.010 * 1.008, rel=0.01)
    assert noisy(PROFILE, 0.0, 1) is PROFILE


@pytest.mark.parametrize("ablation", ABLATIONS, ids=lambda one: one.name)
def test_an_ablation_changes_every_dial_that_it_names(ablation: Ablation) -> None:
    assert ablation.dials
    assert len(set(named_dials(ablation.policy_config())) - set(named_dials())) == len(ablation.dials)


def test_an_ablation_of_what_is_not_there_is_refused() -> None:
    for name in ("not_there", "cost.not_there", "nor.this"):
        with pytest.raises((TypeError, AttributeError)):
            Ablation("x", "", {name: 1}).policy_config()


def test_comparisons_are_geometric_means_with_their_extremes() -> None:
    rows = [("a", "plain", "full", 1.0), ("b", "plain", "full", 1.0), ("a", "ngram-auto", "full", 2.0)]
    rows += [("b", "ngram-auto", "full", 0.5), ("a", "ngram-auto", "off", 1.0), ("b", "ngram-auto", "off", 0.5)]
    rows.append(("a", "ngram-5", "full", 4.0))
    found = Outcomes([Outcome(*row, 0.0, 0.0) for row in rows])
    to_plain = found.compared("ngram-auto", "full", "plain")
    assert to_plain is not None
    assert to_plain.mean == pytest.approx(1.0)
    assert (to_plain.worst_at, to_plain.num_below) == ("b", 1)
    to_full = found.compared("ngram-auto", "off", "full")
    assert to_full is not None
    assert (to_full.worst, to_full.worst_at, to_full.best) == (0.5, "a", 1.0)
    to_best = found.compared("ngram-auto", "full", "best_fixed")
    assert to_best is not None
    assert to_best.worst == to_best.best == 0.5


def test_the_smallest_of_several_passes_never_descends_with_more_work() -> None:
    slow = replace(PROFILE, rows=Curve(((1, 0.9), (2, 0.3), (4, 0.4))))
    fast = replace(PROFILE, rows=Curve(((1, 0.5), (4, 0.35))))
    assert smallest([slow, fast]).rows.points == ((1, 0.3), (2, 0.3), (4, 0.35))


def test_the_command_writes_tables(tmp_path: Path) -> None:
    name = sorted(data.profiles())[0]
    words = ["--ablate", "no_trials", "--worlds", f"{name}:2:edit", "--seeds", "1", "--out", str(tmp_path)]
    assert command.main(words) == 0
    (raw,) = tmp_path.glob("*.json")
    assert command.main([*words, "--workers", "2"]) == 0
    again = json.loads(next(path for path in tmp_path.glob("*.json") if path != raw).read_text(encoding="utf-8"))
    found = json.loads(raw.read_text(encoding="utf-8"))
    assert found["summary"]["auto"]["no_trials"]["full"]["mean"] > 0
    assert again["outcomes"] == found["outcomes"]
    assert str(tmp_path) not in raw.read_text(encoding="utf-8")
    assert "no_trials" in raw.with_suffix(".md").read_text(encoding="utf-8")
