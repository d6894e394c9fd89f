"""Graphs of Medusa heads; see `helpers.emulated_graphs`. Whole runs of the engine are in `engine/test_graphs.py`."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from foretoken.errors import CapacityError, ConfigError
from foretoken.heads.graphs import MAX_STATES, medusa_graphs
from foretoken.heads.medusa import MedusaHead
from foretoken.model.graphs.cache import FAILED, MANY_ROWS, NO_MEMORY, REPLAYED, Step
from foretoken.model.graphs.choice import GRAPHS_VARIABLE, GraphWarning, NotCaptured
from foretoken.model.paged import PagedModel
from tests.helpers.checkpoints import randomise
from tests.helpers.emulated_graphs import EmulatedCapture, emulated_graphs, memory_of
from tests.helpers.random_heads import random_head
from tests.helpers.stored_heads import medusa_config, vocabulary_of
from tests.model.test_graphs import BLOCK, TOLERANCE, decoder_of


def parts(name: str) -> tuple[MedusaHead, PagedModel]:
    """`name`: medusa or medusa:hydra with output matrices of their own, or medusa:shared with the target's."""
    target = PagedModel(decoder_of("llama"), 400, BLOCK)
    if name == "medusa:shared":
        config = medusa_config(target.config, has_own_output=False)
        head = MedusaHead(config, vocabulary_of(config))
        randomise(head, 0)
    else:
        made = random_head(name, target.config)
        assert isinstance(made, MedusaHead)
        head = made
    return head.double().requires_grad_(False), target


def expected(head: MedusaHead, target: PagedModel, states: Tensor, num_places: int) -> Tensor:
    normed = target.final_norm(states)
    return torch.stack([head.predict(number, normed, None, target) for number in range(num_places)])


@pytest.mark.parametrize("name", ["medusa", "medusa:shared"])
def test_replayed_heads_are_those_of_torch(name: str) -> None:
    """For any number of states and places; nothing is read but weights and states."""
    with emulated_graphs(), torch.inference_mode():
        head, target = parts(name)
        graphs = medusa_graphs(head, target)
        assert graphs is not None
        for count, places in ((1, 3), (5, 2), (5, 3), (6, 3), (1, 3)):
            states = torch.randn(count, head.config.hidden_size, dtype=torch.float64)
            found = graphs.run(states, places)
            torch.testing.assert_close(found, expected(head, target, states, places), **TOLERANCE)
        assert graphs.run(torch.zeros(MAX_STATES + 1, head.config.hidden_size), 1) is None
    assert graphs.steps == {REPLAYED: 5, MANY_ROWS: 1}
    assert isinstance(graphs.capture, EmulatedCapture)
    assert len(graphs.capture.graphs) == 3
    known = {memory_of(one) for one in (*head.parameters(), *target.decoder.parameters(), graphs.states, graphs.logits)}
    known |= {memory_of(head.vocabulary.ids)}
    assert all(graph.inputs.keys() <= known for graph in graphs.capture.graphs)


def test_other_matrices_are_captured_anew_and_no_memory_is_no_fault() -> None:
    with emulated_graphs(), torch.inference_mode():
        head, target = parts("medusa")
        graphs = medusa_graphs(head, target)
        assert graphs is not None
        states = torch.randn(2, head.config.hidden_size, dtype=torch.float64)
        graphs.run(states, 2)
        for module in head.modules():
            if getattr(module, "weight", None) is not None:
                module.weight = torch.nn.Parameter(module.weight.flip(0), requires_grad=False)
        torch.testing.assert_close(graphs.run(states, 2), expected(head, target, states, 2), **TOLERANCE)
        graphs.capture = _without_memory
        assert graphs.run(states, 1) is None
        graphs.capture = EmulatedCapture()  # which is not asked for what there was no memory for
        assert graphs.run(states, 1) is None
        graphs.capture = _not_captured
        with pytest.warns(GraphWarning, match="FORETOKEN_GRAPHS=off"):
            assert graphs.run(states[:1], 1) is None
        assert graphs.run(states[:1], 2) is None  # said once
    assert graphs.steps == {REPLAYED: 2, NO_MEMORY: 2, FAILED: 2}


def test_without_memory_for_buffers_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated_graphs():
        head, target = parts("medusa")
        monkeypatch.setattr(torch, "zeros", mock.Mock(side_effect=torch.OutOfMemoryError))
        with pytest.raises(CapacityError, match=rf"smaller cache_tokens, or set {GRAPHS_VARIABLE}=off"):
            medusa_graphs(head, target)


def _without_memory(step: Step) -> Step:
    raise torch.OutOfMemoryError


def _not_captured(step: Step) -> Step:
    raise NotCaptured from RuntimeError("not permitted")


def test_heads_without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless told to, they run as ever."""
    assert medusa_graphs(*parts("medusa")) is None  # its target has none here
    with emulated_graphs():
        head, target = parts("medusa:hydra")
        assert medusa_graphs(head, target) is None
        monkeypatch.setenv(GRAPHS_VARIABLE, "on")
        with pytest.raises(ConfigError, match="the tokens before it"):
            medusa_graphs(head, target)
        with pytest.raises(ConfigError, match="two formats"):
            medusa_graphs(parts("medusa")[0].float(), target)
