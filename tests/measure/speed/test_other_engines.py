"""Other engines: transformers for real, on tiny checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foretoken.backend.answering import Drafting, Question
from foretoken.backend.transformers import TransformersBackend, exits
from foretoken.errors import ForetokenError, InputError
from foretoken.measure.speed.contenders import Other
from foretoken.train.corpus import tokenizer_config, train_tokenizer

QUESTION = Question("def f(x):\n    '''Add\\n two'''\n", max_tokens=12, ignore_eos=True)
PLAIN = Drafting()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> tuple[Path, Path]:
    """A random target and a smaller random draft with one tokenizer, in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = train_tokenizer(["def f(x):\n    return x + 1\n"] * 4, 300)
    folders = []
    for seed, (name, layers) in enumerate([("target", 2), ("draft", 1)]):
        torch.manual_seed(seed)
        folder = tmp_path_factory.mktemp("models") / name
        shape = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": layers,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        }
        config = LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=256, bos_token_id=0, eos_token_id=0, **shape
        )
        LlamaForCausalLM(config).save_pretrained(folder)
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config()), encoding="utf-8")
        folders.append(folder)
    return folders[0], folders[1]


@pytest.fixture(scope="module")
def library(checkpoints) -> TransformersBackend:
    return TransformersBackend(*checkpoints, "float32", "cpu")


@pytest.fixture(scope="module")
def answers(library):
    ways = (PLAIN, *library.draftings((2, 4), (4, 32)))
    return {Other(library, way).setting.name: library.answer(QUESTION, way) for way in ways}


def test_transformers_in_every_setting(answers):
    assert list(answers) == [
        "transformers",
        *(f"transformers-assisted{mode}" for mode in ("", "-heuristic", "-2", "-4")),
        *("transformers-lookup-4", "transformers-lookup-10", "transformers-lookup-32"),
        *(f"transformers-early_exit-layer=1{mode}" for mode in ("", "-heuristic", "-2", "-4")),
    ]
    for answer in answers.values():
        assert answer.num_emitted == len(answer.token_ids) == QUESTION.max_tokens
        assert answer.token_ids == answers["transformers"].token_ids
        assert answer.decode_s > 0
        assert answer.ttft_s is not None


def test_the_number_that_follows_acceptance_begins_anew_with_each_answer(library):
    answers = [library.answer(QUESTION, Drafting("assisted", "heuristic")) for _ in range(2)]
    assert answers[0].num_steps == answers[1].num_steps
    assert library.draft.generation_config.num_assistant_tokens_schedule == "heuristic"


def test_a_sampled_answer_comes_again_for_its_seed(library):
    """Also with a draft, whose own draws come from the same generator."""
    ways = (PLAIN, Drafting("assisted", 2), Drafting("lookup", 4))
    for way in ways:
        first, again, other = (
            library.answer(replace(QUESTION, temperature=1.0, seed=seed), way).token_ids for seed in (1, 1, 2)
        )
        assert first == again != other


def test_a_conversation_goes_through_the_models_own_template(checkpoints, library):
    assert not library.capabilities.conversations
    with pytest.raises(InputError, match="renders no conversations"):
        library.answer(Question(messages=(("user", "hi"),)), PLAIN)
    chatty = TransformersBackend(checkpoints[0], None, "float32", "cpu")
    chatty.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert chatty.capabilities.conversations
    asked = replace(QUESTION, text="", messages=(("user", QUESTION.text),))
    assert chatty.answer(asked, PLAIN).token_ids == library.answer(QUESTION, PLAIN).token_ids


def test_transformers_counts(answers):
    plain = answers["transformers"]
    assert (plain.num_steps, plain.decode_tokens, plain.num_accepted) == (12, 11, 0)
    assisted = answers["transformers-assisted-2"]
    assert assisted.num_steps + assisted.num_accepted == assisted.num_emitted
    assert assisted.decode_steps == assisted.num_steps - 1
    early = answers["transformers-early_exit-layer=1-2"]
    assert early.num_steps + early.num_accepted == early.num_emitted


def test_penalties_and_filters_of_the_models_own_settings_are_left_out(checkpoints, answers):
    library = TransformersBackend(checkpoints[0], None, "float32", "cpu")
    library.target.generation_config.repetition_penalty = 1.5
    library.target.generation_config.min_p = 1.0
    assert library.answer(QUESTION, PLAIN).token_ids == answers["transformers"].token_ids
    drawn = {library.answer(replace(QUESTION, temperature=1.0, seed=seed), PLAIN).token_ids for seed in (1, 2)}
    assert len(drawn) == 2


def test_one_way_leaves_nothing_behind_for_the_next(checkpoints):
    """The model carries what early exit is told."""
    library = TransformersBackend(checkpoints[0], None, "float32", "cpu")
    before = library.answer(QUESTION, PLAIN)
    assert library.answer(QUESTION, Drafting("early_exit", 2, "layer=1")).token_ids == before.token_ids
    assert library.target.generation_config.num_assistant_tokens == 2
    assert library.answer(QUESTION, PLAIN).token_ids == before.token_ids
    assert library.target.generation_config.num_assistant_tokens != 2


def test_each_way_knows_which_drafter_of_ours_it_is_like(library):
    settings = {(one := Other(library, way).setting).name: one for way in library.draftings((2,))}
    early = settings["transformers-early_exit-layer=1-2"]
    assert (early.drafter, early.counterpart, early.options, early.num_draft) == (
        "early_exit",
        "early_exit",
        "layer=1",
        2,
    )
    assert (settings["transformers-lookup-2"].counterpart, settings["transformers-lookup-2"].free) == ("ngram", True)
    assert settings["transformers-assisted"].num_draft == "auto"


def test_early_exit_is_tried_at_a_quarter_and_half_of_the_layers(tmp_path):
    for layers, expected in ((8, ("layer=2", "layer=4")), (3, ("layer=1",)), (1, ())):
        (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": layers}), encoding="utf-8")
        assert exits(tmp_path) == expected
    assert exits(tmp_path / "nowhere") == ()


def test_a_failing_transformers_is_an_error_of_ours(tmp_path, library):
    with pytest.raises(ForetokenError, match="transformers failed"):
        TransformersBackend(tmp_path, None, "auto", "cpu").answer(QUESTION, PLAIN)
    with pytest.raises(InputError, match="drafting='magic'"):
        library.answer(QUESTION, Drafting("magic"))
    with pytest.raises(InputError, match="needs a draft"):
        TransformersBackend(library._names[0], None, "float32", "cpu").answer(QUESTION, Drafting("assisted"))
