"""N-gram tables: counted against a twin of dictionaries, read and written, joined with what a text says, and in use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file

from foretoken import LLM, CheckpointError, ConfigError, MismatchError, SamplingParams, SpecConfig, StorageError
from foretoken.draft import ngram_table
from foretoken.draft.lookup_tree import EMPTY, LookupTree, continued
from foretoken.draft.ngram_table import (
    context_keys,
    load_table,
    save_table,
    table_for,
    vocabulary_digest,
)
from foretoken.draft.suffix import SuffixDrafter
from foretoken.text.tokenizer import load_tokenizer
from foretoken.train.ngrams import count_ngrams
from tests.helpers.rounds import Alone

Pairs = list[tuple[list[int], list[int]]]
texts = st.lists(st.integers(0, 3), max_size=30)
answers = st.lists(st.tuples(texts, texts), min_size=1, max_size=4)
ANSWERS: Pairs = [([7, 8], [1, 2, 3] * 4 + [1, 2, 4]), ([9], [1, 2, 3, 5, 6] * 3)]


def seen_after(pairs: Pairs, context: Sequence[int]) -> Counter[int]:
    """What stands in the answers after `context`, which may begin in the prompt's last three tokens."""
    found: Counter[int] = Counter()
    for prompt, answer in pairs:
        text = [*prompt[-3:], *answer]
        for stop in range(max(len(context), len(prompt[-3:])), len(text)):
            if text[stop - len(context) : stop] == list(context):
                found[text[stop]] += 1
    return found


def twin(pairs: Pairs) -> dict[tuple[int, ...], tuple[int, float]]:
    """The entries of a table by context."""
    kept: dict[tuple[int, ...], tuple[int, float]] = {}
    spelt = {tuple([*p[-3:], *a][i : i + n]) for p, a in pairs for n in (1, 2, 3) for i in range(len(p) + len(a))}
    for context in sorted(filter(None, spelt), key=len):
        found = seen_after(pairs, context)
        if found.total() < 3:
            continue
        most = max(found.values())
        token = min(token for token, count in found.items() if count == most)
        chance = (most - 0.5) / (found.total() + 0.5)
        shorter = next((kept[context[n:]] for n in range(1, len(context)) if context[n:] in kept), (-1, 0.0))
        if max(chance, shorter[1]) >= 0.1 and (shorter[0] != token or abs(shorter[1] - chance) > 0.15):
            kept[context] = token, chance
    return kept


@settings(max_examples=150, deadline=None, derandomize=True)
@given(answers, texts)
def test_a_table_says_what_the_answers_say(pairs: Pairs, text: list[int]) -> None:
    kept, table = twin(pairs), count_ngrams(pairs, "")
    assert table.num_entries == len(kept)
    expected = next((kept[tuple(text[-n:])] for n in (3, 2, 1) if tuple(text[-n:]) in kept and len(text) >= n), None)
    found = table.after(text)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found[0] == expected[0]
        assert found[1] == pytest.approx(expected[1], abs=1 / 255)


def test_a_hash_of_one_context_is_that_of_many() -> None:
    columns = np.random.default_rng(0).integers(0, 1 << 18, (3, 50)).astype(np.uint64)
    keys = context_keys(list(columns)) >> np.uint64(32)
    assert keys.tolist() == [ngram_table._key(list(map(int, context))) for context in columns.T]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    table = count_ngrams(ANSWERS, "some tokenizer")
    save_table(table, tmp_path / "t.safetensors", {"answers": "2"})
    again = load_table(tmp_path / "t.safetensors")
    assert again.vocabulary == "some tokenizer"
    assert (again.keys, again.tokens, again.chances) == (table.keys, table.tokens, table.chances)
    assert again.num_bytes > again.num_entries > 0
    with pytest.raises(StorageError, match="cannot write"):
        save_table(table, tmp_path / "none" / "t.safetensors", {})


def test_a_table_is_written_through_a_link_and_may_be_read_by_others(tmp_path: Path) -> None:
    """A server runs as a user of its own; a link or a device at the place was replaced by a file."""
    link, file = tmp_path / "link", tmp_path / "t.safetensors"
    link.symlink_to(file)
    save_table(count_ngrams(ANSWERS, "any"), link, {})
    (tmp_path / "usual").write_bytes(b"")
    assert link.is_symlink()
    assert file.stat().st_mode == (tmp_path / "usual").stat().st_mode
    assert load_table(file).num_entries


def test_files_that_are_no_table_are_refused(tmp_path: Path) -> None:
    other, text = tmp_path / "head.safetensors", tmp_path / "t.txt"
    save_file({"x": np.zeros(3)}, other)
    text.write_text("no table")
    for path in (other, text):
        with pytest.raises(CheckpointError, match=r"no n-gram table.*train ngrams"):
            load_table(path)
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises((StorageError, CheckpointError), match=r"n-gram table|ngram_table"):
            load_table(path)


@pytest.mark.parametrize(
    "changed",
    [
        {"tokens.1": np.zeros(2, np.uint16)},
        {"keys.1": np.array([1, 3, 2], np.uint32)},
        {"keys.1": np.array([[1], [2], [3]], np.uint32)},
        {"keys.1": np.array(1, np.uint32)},
        {"keys.1": np.array([1, 2, 3], np.uint64)},
        {"tokens.1": np.array([-1, 2, 3], np.int32)},
        {"chances.1": np.ones(3, np.float32)},
        {"tokens.1": np.array([1, 2, (1 << 32) + 5], np.uint64)},  # in 32 bits token 5
    ],
)
def test_damaged_tables_are_refused(tmp_path: Path, changed: dict[str, NDArray[np.generic]]) -> None:
    path = tmp_path / "t.safetensors"
    whole: dict[str, NDArray[np.generic]] = {
        "keys.1": np.array([1, 2, 3], np.uint32),
        "tokens.1": np.ones(3, np.uint16),
        "chances.1": np.ones(3, np.uint8),
    }
    save_file(whole, path, {"format": "foretoken n-gram table"})
    load_table(path)
    save_file(whole | changed, path, {"format": "foretoken n-gram table"})
    with pytest.raises(CheckpointError, match="damaged"):
        load_table(path)


def test_a_number_format_that_numpy_does_not_have_is_refused(tmp_path: Path) -> None:
    path, column = tmp_path / "t.safetensors", torch.zeros(3, dtype=torch.bfloat16)
    columns = {f"{name}.1": column.clone() for name in ("keys", "tokens", "chances")}
    save_torch_file(columns, path, {"format": "foretoken n-gram table"})
    with pytest.raises(CheckpointError, match="no n-gram table"):
        load_table(path)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(-1, 6), st.integers(0, 3), st.floats(0.1, 1.0)), max_size=7),
    st.dictionaries(st.integers(0, 3), st.tuples(st.integers(0, 3), st.floats(0.0, 1.0))),
    st.integers(1, 12),
)
def test_a_continued_tree(nodes: list[tuple[int, int, float]], said: dict[int, tuple[int, float]], budget: int) -> None:
    """The likeliest of all paths that the tree has, or that go on from one of its leaves."""
    tree = tree_of(nodes)
    made = continued(tree, lambda text: said.get(text[-1]), [9, 0], budget, 0.12)
    expected = sorted(all_paths(tree, said, budget).items(), key=lambda path: -path[1])
    paths: list[tuple[int, ...]] = []
    for place, (token, parent) in enumerate(zip(made.tokens, made.parents, strict=True)):
        assert -1 <= parent < place
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(paths)
    grown = len(expected) > len(tree.tokens)
    assert len(paths) == (min(budget, len(expected)) if grown else len(tree.tokens))
    assert [chance for _, chance in expected[: len(paths)]] == pytest.approx(sorted(made.chances, reverse=True))
    assert {path: chance for path, chance in expected if path in paths} == pytest.approx(
        dict(zip(paths, made.chances, strict=True))
    )
    if grown:
        assert list(made.chances) == sorted(made.chances, reverse=True)  # fewer are the beginning of more


def tree_of(nodes: list[tuple[int, int, float]]) -> LookupTree:
    """A tree whose siblings differ and share a chance of at most 1, from parents, tokens and wishes."""
    made: list[tuple[int, int, float]] = []
    for parent, token, wish in nodes:
        above = min(parent, len(made) - 1)
        siblings = [node for node in made if node[0] == above]
        if token not in (node[1] for node in siblings):
            whole = 1.0 if above < 0 else made[above][2]
            made.append((above, token, wish * (whole - sum(node[2] for node in siblings))))
    parents, tokens, chances = zip(*made, strict=True) if made else ((), (), ())
    return LookupTree(tokens, parents, chances)


def all_paths(tree: LookupTree, said: dict[int, tuple[int, float]], budget: int) -> dict[tuple[int, ...], float]:
    """Every path of a tree, and those that go on behind its leaves, with its chance."""
    own: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        own.append((*(own[parent] if parent >= 0 else ()), token))
    found = dict(zip(own, tree.chances, strict=True))
    leaves = [path for path in own if path not in {other[:-1] for other in own}] or [()]
    for leaf in leaves:
        path, chance = leaf, found.get(leaf, 1.0)
        for _ in range(budget):
            token, share = said.get(path[-1] if path else 0, (0, 0.0))
            path, chance = (*path, token), chance * share
            if chance < 0.12:
                break
            found[path] = chance
    return found


def test_where_the_text_says_nothing_the_table_goes_on() -> None:
    table = count_ngrams(ANSWERS, "")
    bare, joined = SuffixDrafter(), SuffixDrafter(table=table)
    assert Alone(bare, (9, 1, 2), 0).chain(4) == []
    assert Alone(joined, (9, 1, 2), 0, takes_trees=False).chain(4)[:1] == [3]
    assert Alone(joined, (9, 1, 2), 1, takes_trees=False).chain(0) == []
    copied = Alone(joined, (1, 2, 8, 6, 1, 2), 2, takes_trees=False)
    assert copied.chain(2)[0] == 8  # where the text says something, it is not asked
    assert continued(EMPTY, lambda _: None, [1], 4, 0.1) == EMPTY


def test_the_packaged_table_is_of_smollm2() -> None:
    (path,) = ngram_table._PACKAGED.glob("*.safetensors")
    table = load_table(path)
    assert path.stem == "smollm2"
    assert table.num_entries > 300_000
    assert table.num_bytes < 4_000_000
    assert [list(keys) == sorted(set(keys)) for keys in table.keys] == [True] * 3
    assert max(map(max, table.tokens)) < 49_152


@pytest.fixture(scope="module")
def text_llm(text_pair: SimpleNamespace) -> LLM:
    return LLM(text_pair.target, dtype="float32", cache_tokens=1024)


PROMPTS = [[5, 6, 7], [8, 9], [11, 5, 6]]
LONG = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def own_table(text_llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with what the model itself answers, three times so that it counts."""
    outputs = text_llm.generate(PROMPTS, LONG, SpecConfig())
    pairs = [(list(one.prompt_ids), list(one.token_ids)) for one in outputs] * 3
    path = tmp_path_factory.mktemp("table") / "own.safetensors"
    assert text_llm.tokenizer is not None
    save_table(count_ngrams(pairs, vocabulary_digest(text_llm.tokenizer)), path, {})
    return path


@pytest.mark.parametrize("drafter", ["suffix", "auto", "mix"])
@pytest.mark.parametrize("params", [LONG, SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.7, seed=5)])
def test_with_a_table_answers_stay_and_steps_are_fewer(
    text_llm: LLM, own_table: Path, drafter: str, params: SamplingParams
) -> None:
    plain = text_llm.generate(PROMPTS, params, SpecConfig())
    num_draft = "auto" if drafter == "auto" else 6
    steps = {}
    for name in ("none", str(own_table)):
        spec = SpecConfig(drafter, num_draft=num_draft, ngram_table=name)
        text_llm.reset_drafters(spec)
        made = text_llm.generate(PROMPTS, params, spec)
        assert [one.token_ids for one in made] == [one.token_ids for one in plain]
        steps[name] = sum(one.stats.num_steps for one in made)
    if drafter == "suffix" and params.temperature == 0:
        assert steps[str(own_table)] < steps["none"]


def test_the_package_is_asked_for_a_table_of_the_tokenizer(
    text_pair: SimpleNamespace, own_table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(text_pair.target)
    assert tokenizer is not None
    assert table_for(tokenizer, None) is None  # the package has one of another tokenizer
    monkeypatch.setattr(ngram_table, "_PACKAGED", own_table.parent)
    found = table_for(tokenizer, None)
    assert found is not None
    with LLM(text_pair.target, SpecConfig("auto"), dtype="float32", cache_tokens=256) as llm:
        (drafter,) = llm._drafters.drafters.values()
        assert drafter._table.num_entries == found.num_entries
        llm.prepare(SpecConfig("suffix", ngram_table="none"))
        assert [one._table for one in llm._drafters.drafters.values()] == [drafter._table, None]


def test_a_table_of_another_tokenizer_is_refused(text_llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    save_table(count_ngrams(ANSWERS, "another"), path, {})
    with pytest.raises(MismatchError, match="another tokenizer"):
        text_llm.prepare(SpecConfig("suffix", ngram_table=str(path)))
    with pytest.raises(StorageError, match="ngram_table: cannot read"):
        text_llm.prepare(SpecConfig("suffix", ngram_table=str(tmp_path / "none")))


@pytest.mark.parametrize(
    "values", [{"drafter": "ngram", "ngram_table": "x"}, {"drafter": "suffix", "ngram_table": ""}, {"ngram_table": 5}]
)
def test_wrong_names_are_refused(values: dict) -> None:
    with pytest.raises(ConfigError, match="ngram_table"):
        SpecConfig(**values)
