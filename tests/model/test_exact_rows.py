"""Default numerics where the compiled kernels run all layers: a position's logits have the same bits in a cold prompt,
behind a cached beginning, in chunks of any size, beside other sequences, and as a node of a verified tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foretoken.model.attention.paged import KernelAttention, PagedAttention
from foretoken.model.interface import Segment
from foretoken.model.open import open_model
from foretoken.model.paged import PagedModel
from tests.helpers.checkpoints import token_ids, variant

LENGTH = 600  # crosses a split of the kernel
TEXT = token_ids(LENGTH)
CASES = [
    ("llama-mqa", "auto", {}),
    ("llama-biases", "auto", {}),
    ("llama-head-dim", "int4", {}),
    ("mistral-sliding", "int8", {"sliding_window": 70}),
    ("qwen2-layer-types", "auto", {}),
    ("qwen3", "int4", {"head_dim": 80}),
]


@pytest.fixture(autouse=True)
def own_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of bf16 matrices, also on a processor where oneDNN's are taken."""
    monkeypatch.setattr("foretoken.model.layers.has_amx", lambda: False)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case[:2]))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PagedModel:
    name, weights, options = request.param
    return opened(tmp_path_factory.mktemp(name), name, weights, options)


def opened(folder: Path, name: str, weights: str, options: dict[str, object]) -> PagedModel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foretoken.model.layers.has_amx", lambda: False)
        dtype = "bfloat16" if weights == "auto" else "float32"
        found = open_model(
            variant(folder, name, max_position_embeddings=1024, **options), dtype, cache_tokens=4096, weights=weights
        )
    assert isinstance(found, PagedModel)
    return found


def read(model: PagedModel, tokens: Sequence[int], chunks: Sequence[int], sequence: int = 0) -> Tensor:
    """Logits of all `tokens` behind what `sequence` holds, read in `chunks`, the last of which repeats."""
    found, start, sizes = [], 0, list(chunks)
    while start < len(tokens):
        size = min(sizes.pop(0) if len(sizes) > 1 else sizes[0], len(tokens) - start)
        some = torch.tensor(tokens[start : start + size])
        found.append(model.forward(some, [Segment(sequence, size, (), size)]).logits)
        model.commit(sequence, size)
        start += size
    return torch.cat(found)


def cold(model: PagedModel, tokens: Sequence[int] = TEXT, chunks: Sequence[int] = (LENGTH,)) -> Tensor:
    model.open(0)
    found = read(model, tokens, chunks)
    model.close(0)
    return found


def test_chunks(model: PagedModel) -> None:
    assert model.numerics == "strict"
    whole = cold(model)
    for chunks in ((7,), (32,), (33,), (64,), (500,), (580, 1)):
        assert torch.equal(cold(model, chunks=chunks), whole), chunks


def test_cached_beginning(model: PagedModel) -> None:
    whole = cold(model)
    model.open(0)
    read(model, TEXT, (LENGTH,))
    model.publish(0, TEXT, "a")
    model.close(0)
    model.open(1)
    held = model.adopt(1, TEXT[:-1], "a")
    assert held > LENGTH // 2
    assert torch.equal(read(model, TEXT[held:], (LENGTH,), sequence=1), whole[held:])
    model.close(1)


def test_beside_others_and_read_again(model: PagedModel) -> None:
    """The prompt in chunks beside other prompts, given up half read, and read again."""
    whole = cold(model)
    others = [token_ids(40 + 30 * i, seed=i) for i in range(3)]
    alone = [cold(model, other) for other in others]
    for sequence in range(4):
        model.open(sequence)
    read(model, TEXT[:300], (150,))
    segments = [Segment(0, LENGTH - 300, (), LENGTH - 300)]
    segments += [Segment(1 + i, len(other), (), len(other)) for i, other in enumerate(others)]
    flat = torch.tensor([*TEXT[300:], *(token for other in others for token in other)])
    logits = model.forward(flat, segments).logits
    assert torch.equal(logits, torch.cat((whole[300:], *alone)))
    model.rollback(0, 17)
    assert torch.equal(read(model, TEXT[17:], (100,)), whole[17:])
    for sequence in range(4):
        model.close(sequence)


def test_nodes_of_a_tree(model: PagedModel) -> None:
    """Each node is a token of the text, or a wrong one beside it."""
    whole, past = cold(model), LENGTH - 4
    wrong = [(token + 1) % model.vocab_size for token in TEXT]
    model.open(0)
    read(model, TEXT[:past], (LENGTH,))
    tokens = [TEXT[past], wrong[past + 1], TEXT[past + 1], wrong[past + 2], TEXT[past + 2], TEXT[past + 3]]
    logits = model.forward(torch.tensor(tokens), [Segment(0, 1, (-1, -1, 1, 1, 3), 6)]).logits
    assert torch.equal(logits[[0, 2, 4, 5]], whole[past:])
    model.close(0)


def test_these_tests_notice_other_attention(tmp_path: Path) -> None:
    """With torch's attention for prompts a chunk changes the bits."""
    model = opened(tmp_path / "m", "llama", "auto", {})
    assert model.attention is KernelAttention
    model.attention = PagedAttention
    assert not torch.equal(cold(model, chunks=(32,)), cold(model))
