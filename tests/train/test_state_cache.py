"""The cache of hidden states: the same loss curve with and without it, a bound that holds, files that are broken."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.heads.base import HeadBatch
from foretoken.train import frozen_target
from foretoken.train.frozen_target import FrozenTarget, StateCache, entry_bytes
from foretoken.train.head_trainer import CURVE
from foretoken.train.run_job import states_bytes
from tests.train.tiny import CONFIG, SHAPES, tiny_target, tiny_trainer

LAYERS = {"eagle": (2, 3, 4), "eagle1": (7,), "medusa": (7,), "block": (2, 3, 4), "adapter": (3,)}
ENTRY = entry_bytes(tiny_target(), CONFIG.batch_windows, CONFIG.length, 3)


class Counted(FrozenTarget):
    """A target that counts what it computes."""

    num_read = 0

    def read(self, tokens: Tensor, wanted: Tensor, layers: object) -> HeadBatch:
        self.num_read += 1
        return super().read(tokens, wanted, layers)  # type: ignore[arg-type]


@pytest.fixture
def target() -> Counted:
    return Counted(tiny_target().decoder)


def opened(
    folder: Path, target: FrozenTarget, kind: str = "eagle", max_bytes: int = 1 << 30, name: str = "a"
) -> tuple[StateCache, list[str]]:
    said: list[str] = []
    wanted = states_bytes(CONFIG, target, len(LAYERS[kind]))
    return StateCache(folder, target, LAYERS[kind], {"target": name}, max_bytes, wanted, said.append), said


def curve(folder: Path) -> list[dict[str, object]]:
    rows = [json.loads(line) for line in (folder / CURVE).read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


@pytest.mark.parametrize("kind", SHAPES)
def test_the_curve_is_the_same_bit_for_bit(kind: str, target: Counted, tmp_path: Path) -> None:
    """Computed, written, and read by a second run, which asks the target for nothing."""
    assert tiny_trainer(tmp_path / "plain", target, kind).run().loss is not None
    plain = curve(tmp_path / "plain")
    for number in range(2):
        states, said = opened(tmp_path / "states", target, kind)
        target.num_read = 0
        tiny_trainer(tmp_path / str(number), target, kind, states=states).run()
        assert curve(tmp_path / str(number)) == plain
        assert len(said) == 1
        # 12 steps, and 3 windows of which the second validation reads nothing anew
        assert target.num_read == (15, 0)[number]


def test_a_bound_is_kept_and_nothing_evicted(target: Counted, tmp_path: Path) -> None:
    bound, before = 4 * ENTRY, list[Path]()
    for number in range(2):
        states, said = opened(tmp_path / "states", target, max_bytes=bound)
        tiny_trainer(tmp_path / str(number), target, states=states).run()
        found = sorted((tmp_path / "states").glob("*.safetensors"))
        assert states.used_bytes == sum(path.stat().st_size for path in found) <= bound
        assert "bound of" in said[1]
        assert "computed when they are needed" in said[1]
        assert len(said) == 2
        if number:
            assert found == before
        before = found
    assert len(before) >= 4
    tiny_trainer(tmp_path / "plain", target).run()
    assert curve(tmp_path / "0") == curve(tmp_path / "1") == curve(tmp_path / "plain")


def test_a_broken_file_is_said_and_computed_again(target: Counted, tmp_path: Path) -> None:
    states, _ = opened(tmp_path / "states", target)
    tiny_trainer(tmp_path / "a", target, states=states).run()
    first, second, *_ = sorted((tmp_path / "states").glob("*.safetensors"))
    whole = first.read_bytes()
    first.write_bytes(whole[:-7])
    shutil.copyfile(sorted((tmp_path / "states").glob("*"))[-1], second.with_suffix(".partial"))
    states, said = opened(tmp_path / "states", target)
    assert not list((tmp_path / "states").glob("*.partial"))
    target.num_read = 0
    tiny_trainer(tmp_path / "b", target, states=states).run()
    assert target.num_read == 1
    assert f"{first} is truncated or corrupt" in said[1]
    assert first.read_bytes() == whole
    assert curve(tmp_path / "a") == curve(tmp_path / "b")


@pytest.mark.parametrize("change", ["target", "layers", "precision"])
def test_states_of_something_else_are_dropped(change: str, target: Counted, tmp_path: Path) -> None:
    states, _ = opened(tmp_path / "states", target)
    tiny_trainer(tmp_path / "a", target, states=states).train_step()
    assert states.used_bytes
    if change == "precision":
        target.precision = "bfloat16"
    kind, name = "medusa" if change == "layers" else "eagle", "b" if change == "target" else "a"
    other, said = opened(tmp_path / "states", target, kind, name=name)
    assert "another target, precision or choice of layers" in said[0]
    assert other.used_bytes == 0
    assert not list((tmp_path / "states").glob("*.safetensors"))


def test_the_size_is_known_before(target: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states, said = opened(tmp_path / "states", target)
    wanted = states_bytes(CONFIG, target, 3)
    assert f"up to {wanted / 2**20:,.1f} MiB will be written to {tmp_path / 'states'}" in said[0]
    tiny_trainer(tmp_path / "a", target, states=states).run()
    assert 0.9 * wanted < states.used_bytes <= wanted
    monkeypatch.setattr(frozen_target.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match=r"state_cache_bytes=.*bytes more in .* which has 1,000 free"):
        opened(tmp_path / "new", target)
    with pytest.raises(ConfigError, match="state_cache_bytes=-1"):
        dataclasses.replace(CONFIG, state_cache_bytes=-1)


def test_a_full_disk_ends_the_writing_only(target: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    states, said = opened(tmp_path / "states", target)
    monkeypatch.setattr(frozen_target, "save_file", full)
    tiny_trainer(tmp_path / "a", target, states=states).run()
    assert "No space left on device" in said[1]
    assert len(said) == 2
    assert not list((tmp_path / "states").glob("*.safetensors*"))


@torch.no_grad()
def test_states_come_back_bit_for_bit(target: Counted, tmp_path: Path) -> None:
    states, _ = opened(tmp_path / "states", target)
    tokens = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))
    wanted = torch.ones_like(tokens, dtype=torch.bool)
    first, second, fresh = (
        states.read(tokens, wanted),
        states.read(tokens, wanted),
        target.read(tokens, wanted, (2, 3, 4)),
    )
    assert Counter(second.states.keys()) == Counter(fresh.states.keys())
    for one in (first, second):
        assert torch.equal(one.normed, fresh.normed)
        assert all(torch.equal(one.states[layer], fresh.states[layer]) for layer in fresh.states)
