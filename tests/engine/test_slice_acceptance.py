"""Live acceptance by slice, drafter and position."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.engine import stats
from foretoken.engine.stats import SliceAcceptance
from tests.helpers.checkpoints import token_ids


def test_slices_add_up_to_the_engines_totals(pair: SimpleNamespace) -> None:
    specs = [SpecConfig("ngram", num_draft=2), SpecConfig("draft_model", str(pair.draft), num_draft=3)]
    with LLM(pair.target, dtype="float32", cache_tokens=2048) as llm:
        for number, name in enumerate(("code", "chat", "code", "")):
            params = SamplingParams(max_tokens=16, ignore_eos=True, slice=name)
            llm.generate([token_ids(6, seed=number) * 3], params, specs[number % 2])
        stats = llm.stats
        assert stats.acceptance.slices == ("chat", "code", "")
        assert stats.acceptance.of("chat", "draft_model")[0][0] > 0
        assert stats.acceptance.of("chat", "ngram") == ()
        for drafter, total in stats.drafted_by.items():
            own = [counts for name in stats.acceptance.slices for counts in stats.acceptance.of(name, drafter)]
            assert (sum(drafted for drafted, _ in own), sum(accepted for _, accepted in own)) == (
                total,
                stats.accepted_by.get(drafter, 0),
            )
        positions = [0] * len(stats.drafted_at)
        for drafters in stats.as_dict()["acceptance_by_slice"].values():
            for counts in drafters.values():
                for place, (drafted, _) in enumerate(counts):
                    positions[place] += drafted
        assert positions == stats.drafted_at
        before = stats.as_dict()
        llm.generate([token_ids(6) * 3], SamplingParams(max_tokens=8, slice="chat"), specs[1])
        assert stats.as_dict() == before  # a snapshot stays as it is
        assert llm.stats.as_dict()["acceptance_by_slice"] != before["acceptance_by_slice"]


def test_trees_count_every_node_of_a_depth() -> None:
    counted = SliceAcceptance()
    counted.count("s", depths=[1, 1, 2, 3], provenance=["a", "b", "a", None], emitted=[0, 2])
    assert counted.of("s", "a") == ((1, 1), (1, 1))
    assert counted.of("s", "b") == ((1, 0),)


class Meanwhile(list[tuple[int, int]]):
    """Counts that make another thread's round visible: while they are read, one of every slice is counted."""

    def __init__(self, counted: SliceAcceptance) -> None:
        super().__init__([(1, 0)])
        self.counted = counted

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for name in ("b", "a", "new"):
            self.counted.count(name, [1], [f"by {name}"], [])
        return super().__iter__()


def test_a_copy_is_made_while_another_thread_counts() -> None:
    counted = SliceAcceptance()
    for name in ("a", "b"):
        counted.count(name, [1], ["ngram"], [])
    counted._counts["a"]["ngram"] = Meanwhile(counted)
    assert counted.copy().of("a", "ngram") == ((1, 0),)
    assert counted.slices == ("b", "a", "new")


def test_the_slice_unused_longest_is_dropped(monkeypatch: object) -> None:
    monkeypatch.setattr(stats, "MAX_SLICES", 2)
    counted = SliceAcceptance()
    for name in ("a", "b", "a", "c", "b"):
        counted.count(name, [1], ["ngram"], [])
    assert (counted.slices, counted.num_dropped) == (("c", "b"), 2)
    assert counted.of("b", "ngram") == ((1, 0),)  # came again, and began at zero
