"""E3: to the last token of the context, speculative, plain and transformers' own decoding agree, whatever scales the
rope.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.model.footprint import shape_of
from tests.helpers.checkpoints import tiny_checkpoint

CONTEXT = 64
_SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn-added": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},  # nothing else changed
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
_SPECS = {
    "ngram": SpecConfig("ngram", num_draft=4),
    "early_exit": SpecConfig("early_exit", exit_layer=1, num_draft=3),
    "lookahead": SpecConfig("lookahead", num_draft=3),
    "recycling": SpecConfig("recycling", num_draft=6),
}


@pytest.mark.parametrize("kind", _SCALINGS)
def test_e3_every_way_agrees_to_the_end_of_the_context(tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_checkpoint(
        tmp_path,
        "llama",
        max_position_embeddings=CONTEXT // 4 if kind == "yarn-added" else CONTEXT,
        rope_parameters={"rope_theta": 1e4} | _SCALINGS[kind],
        eos_token_id=None,
    )
    ids = [5, 9, 7, 5, 9, 7, 5, 9, 11, 2]
    model = AutoModelForCausalLM.from_pretrained(folder)
    expected = model.generate(torch.tensor([ids]), max_length=CONTEXT, do_sample=False, pad_token_id=0)[
        0, len(ids) :
    ].tolist()
    with LLM(folder, dtype="float32", cache_tokens=512, profile="off") as llm:
        params = SamplingParams(max_tokens=10 * CONTEXT)
        outs = llm.generate([ids] * (1 + len(_SPECS)), params, [SpecConfig(), *_SPECS.values()])
    assert len(expected) == CONTEXT - len(ids)
    for out, name in zip(outs, ["plain", *_SPECS], strict=True):
        assert list(out.token_ids) == expected, name
        assert out.finish_reason == "length"
    assert sum(out.stats.num_drafted for out in outs) > 50


def test_e3_a_plan_knows_the_cap_of_a_model_that_runs_through_transformers(tmp_path: Path) -> None:
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    folder = tiny_checkpoint(
        tmp_path,
        "phi3",
        max_position_embeddings=128,
        original_max_position_embeddings=32,
        rope_parameters=longrope,
        pad_token_id=0,
    )
    assert shape_of(folder, "phi3").max_context_tokens == 32


def test_a_plan_knows_every_name_of_the_longest_sequence(tmp_path: Path) -> None:
    """A model that transformers runs is planned with the length that it will run with."""
    file = tiny_checkpoint(tmp_path, "opt") / "config.json"
    raw = json.loads(file.read_text())
    raw["max_sequence_length"] = raw.pop("max_position_embeddings")
    file.write_text(json.dumps(raw))
    assert shape_of(tmp_path, "m").max_context_tokens == raw["max_sequence_length"]
