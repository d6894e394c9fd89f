"""The tensors behind the tables: what is written in a slot is read from it, layer by layer."""

from __future__ import annotations

import pytest
import torch

from foretoken.kv.pool import KVPool, bytes_per_token

LAYERS, GROUPS, SLOTS, HEAD_DIM = 2, 3, 12, 4


def filled() -> tuple[KVPool, torch.Tensor]:
    """A pool whose slot s holds s (keys) and -s (values), plus 100 per layer."""
    pool = KVPool(LAYERS, GROUPS, SLOTS, HEAD_DIM, torch.float32, torch.device("cpu"))
    rows = torch.arange(float(SLOTS))[:, None, None].expand(SLOTS, GROUPS, HEAD_DIM)
    for layer in range(LAYERS):
        pool.write(layer, torch.arange(SLOTS), rows + 100 * layer, -rows - 100 * layer)
    return pool, rows


def test_a_new_pool_is_finite() -> None:
    """A masked slot that was never written must not hold NaN: 0 * NaN is NaN."""
    pool = KVPool(LAYERS, GROUPS, SLOTS, HEAD_DIM, torch.float32, torch.device("cpu"))
    assert all(bool(torch.isfinite(tensor).all()) for tensor in (*pool.keys, *pool.values))


def test_write_touches_its_layer_and_slots_only() -> None:
    pool = KVPool(LAYERS, GROUPS, SLOTS, HEAD_DIM, torch.float32, torch.device("cpu"))
    key, value = torch.randn(2, GROUPS, HEAD_DIM), torch.randn(2, GROUPS, HEAD_DIM)
    pool.write(1, torch.tensor([7, 3]), key, value)
    got_key, got_value = pool.read(1, torch.tensor([7, 3]))
    torch.testing.assert_close(got_key, key.transpose(0, 1))
    torch.testing.assert_close(got_value, value.transpose(0, 1))
    assert int((pool.keys[1] != 0).any(-1).any(0).sum()) == 2
    assert not pool.keys[0].any()


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_run_is_a_view_and_a_list_is_gathered(layer: int) -> None:
    pool, _ = filled()
    run, _ = pool.read(layer, range(4, 8))
    assert (
        run.untyped_storage().data_ptr() == pool.keys[layer].untyped_storage().data_ptr()
    )  # no copy: the fast path is free
    key, value = pool.read(layer, torch.tensor([4, 5, 6, 7]))
    torch.testing.assert_close(key, run)
    torch.testing.assert_close(value, -key)
    scattered, _ = pool.read(layer, torch.tensor([9, 2]))
    assert scattered[0, :, 0].tolist() == [9 + 100 * layer, 2 + 100 * layer]


def test_move_reads_everything_before_it_writes() -> None:
    """A path 1, 3, 4 moved to 0, 1, 2: slot 1 is read as a source after it would have been overwritten."""
    pool, _ = filled()
    pool.move([3, 1, 4], [1, 0, 2])
    for layer in range(LAYERS):
        key, value = pool.read(layer, range(5))
        assert (key[0, :, 0] - 100 * layer).tolist() == [1, 3, 4, 3, 4]
        torch.testing.assert_close(value, -key)
    pool.move([], [])


def test_bytes_per_token_is_what_the_tensors_take() -> None:
    pool = KVPool(LAYERS, GROUPS, SLOTS, HEAD_DIM, torch.bfloat16, torch.device("cpu"))
    taken = sum(tensor.nbytes for tensor in (*pool.keys, *pool.values))
    assert bytes_per_token(LAYERS, GROUPS, HEAD_DIM, torch.bfloat16) * SLOTS == taken
