"""A target divided among processes gives the answers of one process, with every drafter, rule and form of weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from foretoken import LLM, ConfigError, EngineConfig, InputError, SamplingParams, SpecConfig
from foretoken.model.interface import LanguageModel, Segment
from foretoken.model.strict import StrictModel
from foretoken.parallel import group
from foretoken.parallel.open import LeadModel
from foretoken.parallel.plan import Move
from tests.engine.test_exactness import PROMPTS, all_specs
from tests.helpers import faulty_rank
from tests.helpers.checkpoints import related_pair, tiny_checkpoint, token_ids, variant
from tests.helpers.gguf_files import write_gguf
from tests.helpers.mtp_checkpoints import add_mtp
from tests.helpers.specs import predicting, spec_of
from tests.helpers.tiny_heads import KINDS
from tests.helpers.usual import some_of

# A third of a target of two layers is as small as a draft of one.
pytestmark = pytest.mark.filterwarnings("ignore:the draft has .* MB of weights to read")
# Divisible by 2 and by 3.
SHAPE = {
    "hidden_size": 48,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 16,
    "intermediate_size": 192,
}
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
Answers = list[tuple[int, ...]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A target with an MTP layer and its draft."""
    found = related_pair(tmp_path_factory.mktemp("divisible"), **SHAPE)
    add_mtp(found.target)
    return found


def opened(pair: SimpleNamespace, world: int, **options: object) -> LLM:
    return LLM(pair.target, SpecConfig(), dtype="float32", cache_tokens=2048, tensor_parallel=world, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def one(pair: SimpleNamespace) -> LLM:
    return opened(pair, 1)


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.repeated), 3])
def divided(pair: SimpleNamespace, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with opened(pair, request.param) as llm:
        yield llm


def answers(llm: LLM, specs: list[SpecConfig], params: list[SamplingParams]) -> Answers:
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(specs))]
    return [out.token_ids for out in llm.generate(prompts, params, specs)]


def test_every_drafter_gives_the_tokens_of_one_process(one: LLM, divided: LLM, pair: SimpleNamespace) -> None:
    """Greedy, side by side in batches; heads read the divided embedding and output matrix. All: proof/."""
    names = (*KINDS, "eagle/best_first", "eagle/static", "early_exit:adapter", "mtp", "mtp/static")
    specs = [*all_specs(pair.draft)[::9], *(spec_of(name, pair.draft, num_draft=4) for name in names)]
    params = [predicting(spec, GREEDY, PROMPTS[4] * 2) for spec in specs]
    found = answers(divided, specs, params)
    assert found == answers(one, specs, params)
    assert found == answers(one, [SpecConfig()] * len(specs), [GREEDY] * len(specs))


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled", "tree", "traversal"])
def test_every_rule_draws_the_tokens_of_one_process(one: LLM, divided: LLM, pair: SimpleNamespace, rule: str) -> None:
    params = [replace(GREEDY, temperature=0.9, seed=seed) for seed in range(6)]
    tree = "best_first" if rule in ("tree", "traversal") else "chain"
    specs = [SpecConfig("draft_model", str(pair.draft), num_draft=5, rule=rule, tree=tree)] * 3
    specs += [SpecConfig("ngram", num_draft=4, rule=rule)] * 3
    assert answers(divided, specs, params) == answers(one, specs, params)


def test_a_shared_prefix_that_is_written_to_is_copied_on_every_rank(one: LLM, divided: LLM) -> None:
    """The second prompt adopts blocks of the first; a third goes on within a block."""
    text = token_ids(100, seed=3)
    for prompt in (text, text, text[:70] + token_ids(9, seed=4), text[:96]):
        assert [out.token_ids for out in divided.generate([prompt] * 2, GREEDY)] == [
            out.token_ids for out in one.generate([prompt] * 2, GREEDY)
        ]
    assert divided.stats.prefix is not None
    assert divided.stats.prefix.num_found_tokens > 0


def test_threads_take_turns(one: LLM, divided: LLM) -> None:
    """Every thread's requests, in steps that they share."""
    expected, found = [out.token_ids for out in one.generate(PROMPTS[:4], GREEDY)], dict[int, tuple[int, ...]]()

    def ask(index: int) -> None:
        found[index] = divided.generate([PROMPTS[index]], GREEDY)[0].token_ids

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[index] for index in range(4)] == expected


def test_plans_of_another_thread_take_no_moves_from_a_pass(
    one: LLM, divided: LLM, pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that learns asks for logits in its own thread, which may be stopped anywhere."""
    model, main, is_over = divided.target, threading.current_thread(), threading.Event()
    assert isinstance(model, LeadModel)
    taken, num_asked = model._taken, list[int]()

    def slowly() -> list[Move]:
        found = taken()
        if threading.current_thread() is not main:
            num_asked.append(len(found))
            time.sleep(0.02)  # the thread is not on a core
        return found

    @torch.inference_mode()
    def learn() -> None:
        while not is_over.is_set():
            model.output_logits(torch.zeros(1, SHAPE["hidden_size"]))

    monkeypatch.setattr(model, "_taken", slowly)
    thread = threading.Thread(target=learn)
    thread.start()
    try:
        specs = [SpecConfig("draft_model", str(pair.draft), num_draft=6, tree="best_first")] * 5
        assert answers(divided, specs, [GREEDY] * 5) == answers(one, specs, [GREEDY] * 5)
    finally:
        is_over.set()
        thread.join(60)
    assert num_asked


@pytest.mark.repeated
def test_quantised_experts_of_a_file_are_divided(tmp_path: Path) -> None:
    """A mixture with a shared expert, whose file has codes: by the channels of every expert. Other forms: proof/."""
    shape = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "moe_intermediate_size": 96}
    folder = variant(tmp_path, "qwen2-moe", shared_expert_intermediate_size=96, **shape)
    codes = write_gguf(tmp_path / "codes.gguf", folder, "Q8_0")
    assert len(set(same_on(3, codes))) > 1


def same_on(num_ranks: int, folder: Path, **options: object) -> Answers:
    """The answers of one process, which so many ranks give too."""
    found = list[Answers]()
    for world in (1, num_ranks):
        with opened(SimpleNamespace(target=folder), world, **options) as llm:
            found.append(answers(llm, [SpecConfig("ngram", num_draft=3)] * 4, [GREEDY] * 4))
    assert found[0] == found[1]
    return found[0]


def test_a_rank_with_other_logits_changes_no_token(
    one: LLM, pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rank 0 alone reads logits: what another rank makes of them, at a tie or anywhere, has no consequence."""
    monkeypatch.setenv(faulty_rank.VARIABLE, str(tmp_path / "fault"))
    faulty_rank.Fault(1, "perturb", 1).tell(tmp_path / "fault")
    monkeypatch.setattr(group, "RANK_COMMAND", faulty_rank.COMMAND)
    specs = [SpecConfig("draft_model", str(pair.draft), num_draft=3, tree="best_first"), SpecConfig("ngram")]
    with opened(pair, 2) as llm:
        assert answers(llm, specs, [GREEDY] * 2) == answers(one, specs, [GREEDY] * 2)


@pytest.mark.parametrize("weights", some_of(["auto", "int8"], ["int8"]))
def test_strict_logits_are_those_of_one_process(pair: SimpleNamespace, weights: str) -> None:
    """Alone and among others; bit for bit but for torch's float32 products, which may sum by the shape of a matrix."""
    texts = [token_ids(7, seed=seed) for seed in range(3)]

    def logits(model: LanguageModel) -> torch.Tensor:
        """Of all texts in one pass, then of each alone."""
        for sequence in range(6):
            model.open(sequence)
        whole = [Segment(sequence, 7, (), 7) for sequence in range(3)]
        found = [model.forward(torch.tensor([token for text in texts for token in text]), whole).logits]
        found += [model.forward(torch.tensor(text), [Segment(3 + i, 7, (), 7)]).logits for i, text in enumerate(texts)]
        for sequence in range(6):
            model.close(sequence)
        return torch.cat(found)

    found = list[torch.Tensor]()
    for world in (1, 3):
        with opened(pair, world, numerics="strict", weights=weights) as llm:
            assert llm.target.numerics == "strict"
            assert isinstance(llm.target, StrictModel) == (weights == "auto")
            found.append(logits(llm.target))
    torch.testing.assert_close(found[0], found[1], atol=0.0 if weights == "int8" else 1e-5, rtol=0.0)
    assert torch.equal(found[1][:21], found[1][21:])


def test_what_is_not_divided_is_refused_by_name(tmp_path: Path) -> None:
    def refusal(folder: Path, world: int = 2, **options: object) -> str:
        with pytest.raises(ConfigError, match="tensor_parallel=") as caught:
            LLM(folder, SpecConfig(), dtype="float32", tensor_parallel=world, **options)  # type: ignore[arg-type]
        return str(caught.value)

    assert "num_attention_heads, 4" in refusal(variant(tmp_path / "a", "llama"), 3)
    assert "runs through transformers" in refusal(tiny_checkpoint(tmp_path / "b", "opt"))
    assert "intermediate size of an expert, 25" in refusal(
        variant(tmp_path / "c", "qwen3-moe", moe_intermediate_size=25), 2
    )
    assert "norms the queries of all heads together" in refusal(variant(tmp_path / "d", "olmo2"))
    with pytest.raises(InputError, match="tensor_parallel=0"):
        EngineConfig("x", tensor_parallel=0)
