"""The trainer of heads: it learns, and a run that ends in any way goes on to the same curve."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from foretoken.errors import CheckpointError, ConfigError, NumericsError, StorageError
from foretoken.heads.base import Head
from foretoken.heads.losses import LossConfig
from foretoken.train.frozen_target import FrozenTarget, fast_precision
from foretoken.train.head_data import Batches, TokenText
from foretoken.train.head_recipes import BlockShape, EagleShape, HeadShape, MedusaShape, new_head
from foretoken.train.head_trainer import CURVE, HeadTrainer
from foretoken.train.optimizer import OptimizerConfig
from foretoken.train.parallel import Ranks, joined_ranks
from foretoken.train.training_loop import check_same, restore_state, save_state
from tests.train.tiny import CONFIG, SHAPES, VOCABULARY, tiny_target, tiny_text, tiny_trainer


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return tiny_target()


def weights(trainer: HeadTrainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.head.named_parameters()}


def curve(folder: Path) -> list[dict[str, object]]:
    rows = [json.loads(line) for line in (folder / CURVE).read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


@pytest.mark.parametrize("kind", SHAPES)
def test_every_kind_learns(kind: str, target: FrozenTarget, tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, target, kind, dataclasses.replace(CONFIG, tokens=32 * 40))
    before = trainer.measure()
    result = trainer.run()
    assert result.steps == 40
    assert result.acceptance.emitted_sampled > before.emitted_sampled + 0.3
    assert result.acceptance.emitted_greedy > before.emitted_greedy
    assert len(result.acceptance.sampled) == 3


def test_acceptance_is_the_sum_of_products_by_position(target: FrozenTarget, tmp_path: Path) -> None:
    """Against the heads' own distributions, position by position."""
    trainer = tiny_trainer(tmp_path, target, "medusa")
    found = trainer.measure()
    text, head = trainer.data.held_out, trainer.head
    total, count = 0.0, 0
    for number in range(CONFIG.validate_windows):
        tokens, wanted = text.batch([number], CONFIG.length, seed=0)
        batch = target.read(tokens, wanted, head.hidden_layers())
        p = target.decoder.output_logits(batch.normed[0]).double().softmax(-1)  # [S, V]
        places = list(head.places(batch, target.decoder, 3, 0))
        alphas = [torch.minimum(p[place.rows], place.logits.double().softmax(-1)).sum(-1).tolist() for place in places]
        for position in range(len(alphas[2])):  # the last place has the fewest rows
            product, emitted = 1.0, 1.0
            for place in range(3):
                product *= alphas[place][position]
                emitted += product
            total, count = total + emitted, count + 1
    assert found.num_positions == count
    assert found.emitted_sampled == pytest.approx(total / count, abs=1e-4)


class _Pair(Ranks):
    """The first of two ranks; the other one has the gradients `theirs`."""

    theirs = torch.zeros(0)

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.theirs


def test_a_parameter_without_a_gradient_on_every_rank_has_none() -> None:
    """Zeros in its place would be a step of momentum and weight decay, which one process does not make."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    parameters[0].grad = torch.tensor([1.0, 2.0])
    ranks = _Pair(0, 2)
    ranks.theirs = torch.tensor([1.0, 0.0, 1.0, 10.0, 20.0, 0.0, 0.0, 5.0, 6.0])
    ranks.sum_gradients(parameters)
    assert [None if p.grad is None else p.grad.tolist() for p in parameters] == [[11.0, 22.0], None, [5.0, 6.0]]


@pytest.mark.parametrize("kind", ["eagle", "block", "adapter"])
def test_a_killed_run_goes_on_to_the_same_curve(kind: str, target: FrozenTarget, tmp_path: Path) -> None:
    """It dies at step 9 without a word, its last state is of step 7, and a save was under way."""
    whole = tiny_trainer(tmp_path / "whole", target, kind)
    whole.run()
    killed = tiny_trainer(tmp_path / "parts", target, kind)
    step = killed.train_step

    def die_at_nine() -> float:
        if killed.step == 7:
            killed.save()
        if killed.step == 9:
            raise SystemExit("killed")
        return step()

    killed.train_step = die_at_nine  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        killed.run()
    (tmp_path / "parts" / "state.safetensors.partial").write_bytes(b"half a st")
    with (tmp_path / "parts" / CURVE).open("a") as file:
        file.write('{"step": 9, "lo')
    resumed = tiny_trainer(tmp_path / "parts", target, kind, seed=5)
    assert resumed.step == 7
    resumed.run()
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(resumed)[name], value, atol=0, rtol=0, msg=name)


def test_a_run_ends_in_its_time_and_its_rate_falls_with_it(target: FrozenTarget, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, tokens=32 * 1000, seconds=100.0, validate_every_steps=1000)
    trainer = tiny_trainer(tmp_path, target, config=config)
    step, rates = trainer.train_step, []

    def as_if_slow() -> float:
        trainer.seconds = 25.0 * trainer.step
        loss = step()
        rates.append(trainer.optimizers[0].param_groups[0]["lr"] / 1e-2)
        if trainer.step == 4:
            trainer.config = dataclasses.replace(config, seconds=1e-9)
        return loss

    trainer.train_step = as_if_slow  # type: ignore[method-assign]
    result = trainer.run()
    assert result.steps == 4
    assert rates == pytest.approx([1.0, 1.0, 1.0, 0.5])  # the second half decays
    assert len(trainer.kept) == 1  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="seconds"):
        tiny_trainer(tmp_path / "other", target, config=config, ranks=Ranks(0, 2))


def test_an_interrupted_run_saves_its_state(target: FrozenTarget, tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, target)
    step = trainer.train_step

    def interrupt_at_four() -> float:
        loss = step()
        if trainer.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss

    trainer.train_step = interrupt_at_four  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert tiny_trainer(tmp_path, target).step == 4


class _Interrupted(Ranks):
    """Another process is interrupted in exchange `at`; or this one, right after it."""

    def __init__(self, at: int, is_other: bool) -> None:
        super().__init__()
        self.left, self.is_other = at, is_other

    def any(self, flag: bool) -> bool:
        self.left -= 1
        if self.left == 0 and not self.is_other:
            os.kill(os.getpid(), signal.SIGTERM)
        return flag or (self.left == 0 and self.is_other)


@pytest.mark.parametrize("is_other", [True, False])
def test_an_interruption_that_a_process_hears_of_late_is_no_end_of_the_run(
    is_other: bool, target: FrozenTarget, tmp_path: Path
) -> None:
    """Of two processes one was interrupted: the other reported a finished run, with a result in its manifest. An
    interruption behind the last exchange lost what was not saved.
    """
    last = 4 if is_other else CONFIG.num_steps
    trainer = tiny_trainer(tmp_path, target, ranks=_Interrupted(last, is_other))
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert tiny_trainer(tmp_path, target).step == last


@pytest.mark.parametrize("kind", SHAPES)
def test_a_window_of_which_nothing_is_wanted_teaches_nothing(kind: str, target: FrozenTarget, tmp_path: Path) -> None:
    """A long prompt may fill a window, and its answer begin behind it."""
    text = TokenText.answered([([1 + number % 40 for number in range(4000)], [1, 2])])
    trainer = tiny_trainer(tmp_path, target, kind)
    trainer.batches = Batches(text, CONFIG.batch_windows, CONFIG.length, CONFIG.seed)
    assert not text.batch([0, 1], CONFIG.length, CONFIG.seed)[1].any()
    assert trainer.train_step() == 0
    assert all(value.isfinite().all() for value in weights(trainer).values())


def test_a_loss_that_is_no_number_ends_the_run_and_the_last_good_state_stays(
    target: FrozenTarget, tmp_path: Path
) -> None:
    trainer = tiny_trainer(tmp_path, target)
    for _ in range(3):
        trainer.train_step()
    trainer.save()
    good = (tmp_path / "state.safetensors").read_bytes()
    with torch.no_grad():
        next(iter(trainer.head.parameters())).fill_(float("nan"))
    with pytest.raises(NumericsError, match=r"step 3 .* lower rates"):
        trainer.run()
    assert (tmp_path / "state.safetensors").read_bytes() == good
    assert tiny_trainer(tmp_path, target).step == 3


def test_a_full_disk_leaves_the_last_good_state(target: FrozenTarget, tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, target)
    trainer.train_step()
    trainer.save()
    good = (tmp_path / "state.safetensors").read_bytes()
    trainer.train_step()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(StorageError, match="cannot write the training state"):
            trainer.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    assert (tmp_path / "state.safetensors").read_bytes() == good
    assert not (tmp_path / "state.safetensors.partial").exists()


def test_the_best_head_is_kept_and_a_run_without_gain_ends_early(target: FrozenTarget, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, tokens=32 * 100, validate_every_steps=1, patience=3)
    trainer = tiny_trainer(tmp_path, target, config=config)
    gains = iter([1.0, 2.0, 1.5, 1.9, 2.0, 9.0])
    measured = trainer.measure()
    trainer.measure = lambda: dataclasses.replace(measured, emitted_sampled=next(gains))  # type: ignore[method-assign]
    result = trainer.run()
    assert result.is_early
    assert result.steps == 5
    assert result.acceptance.emitted_sampled == 2.0
    assert len(trainer.kept) == 2  # type: ignore[attr-defined]
    assert tiny_trainer(tmp_path, target, config=config).run().steps == 5


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"seed": 1}, r"train\.seed=1.*started with 0"),
        ({"num_places": 2}, "num_places=2"),
        ({"clip_norm": 2.0}, "clip_norm=2.0"),
        ({"warmup_steps": 2}, "warmup_steps=2"),
        ({"decay_share": 1.0}, "decay_share=1.0"),
        ({"validate_windows": 2}, "validate_windows=2"),
        ({"loss": dataclasses.replace(CONFIG.loss, kind="tv")}, r"train\.loss\.kind='tv'.*started with lk"),
        ({"loss": dataclasses.replace(CONFIG.loss, place_decay=1.0)}, r"loss\.place_decay=1\.0"),
        ({"optimizer": dataclasses.replace(CONFIG.optimizer, matrix_rate=1e-3)}, r"matrix_rate=0\.001.*with 0\.01"),
        ({"optimizer": dataclasses.replace(CONFIG.optimizer, weight_decay=0.0)}, r"weight_decay=0\.0"),
    ],
)
def test_a_folder_of_another_run_is_refused(
    change: dict[str, Any], error: str, target: FrozenTarget, tmp_path: Path
) -> None:
    tiny_trainer(tmp_path, target).save()
    with pytest.raises(ConfigError, match=error):
        tiny_trainer(tmp_path, target, config=dataclasses.replace(CONFIG, **change))


def test_a_run_goes_on_with_its_own_held_out_text(target: FrozenTarget, tmp_path: Path) -> None:
    """The best head so far was measured on it: another text may change it alone, as one more answer at the end does."""
    trainer = tiny_trainer(tmp_path, target)
    trainer.save()
    other = dataclasses.replace(trainer.data, held_out=TokenText.running(np.arange(1, 40, dtype=np.uint16)))
    with pytest.raises(ConfigError, match=r"out=.*was started with another text"):
        HeadTrainer(trainer.head, target, other, CONFIG, tmp_path, trainer.keep)
    meta = json.loads((tmp_path / "state.json").read_text())
    del meta["held_out"]  # as earlier versions wrote it
    save_state(tmp_path, trainer.head, trainer.optimizers, meta)
    HeadTrainer(trainer.head, target, other, CONFIG, tmp_path, trainer.keep)


def test_a_full_disk_leaves_the_whole_curve(
    target: FrozenTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run writes it anew, without what came after the last save."""
    tiny_trainer(tmp_path, target).save()
    curve = '{"step": 0}\n{"step": 5}\n'
    (tmp_path / CURVE).write_text(curve)

    def full(path: Path, *_: object, **__: object) -> None:
        path.open("wb").close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(StorageError, match=rf"cannot write .*{CURVE}"):
        tiny_trainer(tmp_path, target)
    assert (tmp_path / CURVE).read_text() == curve


def test_answers_that_are_shorter_than_a_draft_are_refused(target: FrozenTarget, tmp_path: Path) -> None:
    """Nothing could be measured of any head: the first one was kept as the best."""
    data = tiny_text()
    head = new_head(SHAPES["eagle"], target, data.train.counts(VOCABULARY), [0], 0)
    for length in (2, 3):
        text = TokenText.answered([([1, 2, number], [5, 6, 7][:length]) for number in range(9)])
        short = dataclasses.replace(data, held_out=text)
        if length == 2:
            with pytest.raises(ConfigError, match=r"num_places=3.*has 3 tokens"):
                HeadTrainer(head, target, short, CONFIG, tmp_path, lambda: None)
        else:
            assert HeadTrainer(head, target, short, CONFIG, tmp_path, lambda: None).measure().num_positions == 3


@pytest.mark.parametrize(
    ("field", "value"), [("matrix_rate", float("nan")), ("vector_rate", float("inf")), ("weight_decay", float("nan"))]
)
def test_rates_that_are_no_numbers_are_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        OptimizerConfig(**{field: value})  # type: ignore[arg-type]


def test_a_run_may_be_made_longer_and_validate_more_often(target: FrozenTarget, tmp_path: Path) -> None:
    tiny_trainer(tmp_path, target).save()
    changed = {"tokens": 32 * 24, "validate_every_steps": 3, "patience": 2, "loss": LossConfig(chunk_rows=4)}
    assert tiny_trainer(tmp_path, target, config=dataclasses.replace(CONFIG, **changed)).config.num_steps == 24


def test_a_run_goes_on_with_its_own_vocabulary(
    target: FrozenTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other special tokens of the target may leave its size as it is: the weights would be those of other tokens."""
    tiny_trainer(tmp_path, target).save()

    def with_last(*given: Any) -> Head:
        return new_head(*given[:3], [0, VOCABULARY - 1], given[4])

    monkeypatch.setattr("tests.train.tiny.new_head", with_last)
    with pytest.raises(ConfigError, match=r"draft_vocabulary='\w+'.*started with \w+"):
        tiny_trainer(tmp_path, target)


def test_a_run_goes_on_in_its_own_precision(target: FrozenTarget, tmp_path: Path) -> None:
    tiny_trainer(tmp_path, target).save()
    with pytest.raises(ConfigError, match=r"precision='bfloat16'.*started with float32"):
        tiny_trainer(tmp_path, FrozenTarget(target.decoder, "bfloat16"))


@pytest.mark.parametrize(
    ("before", "after", "error"),
    [
        (EagleShape(taps=(1, 3, 5)), EagleShape(taps=(2, 4, 6)), r"taps=\[2, 4, 6\].*started with \[1, 3, 5\]"),
        (EagleShape(), EagleShape(norm_output=True), "norm_output=True"),
        (EagleShape(fc_norm=True), EagleShape(), "fc_norm=False"),
        (BlockShape(num_layers=1), BlockShape(num_layers=1, is_causal=False), "is_causal=False"),
        (EagleShape(), EagleShape(intermediate_size=40), "layer.intermediate_size=40"),
    ],
)
def test_a_run_of_another_shape_is_refused(
    before: HeadShape,
    after: HeadShape,
    error: str,
    target: FrozenTarget,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where weights of the same sizes would be taken for those of the other network."""
    monkeypatch.setitem(SHAPES, "one", before)
    tiny_trainer(tmp_path, target, "one").save()
    monkeypatch.setitem(SHAPES, "one", after)
    with pytest.raises(ConfigError, match=error):
        tiny_trainer(tmp_path, target, "one")


def test_a_run_goes_on_with_its_own_optimiser_and_whatever_earlier_versions_kept(
    target: FrozenTarget, tmp_path: Path
) -> None:
    trainer = tiny_trainer(tmp_path, target)
    trainer.save()
    muon = dataclasses.replace(CONFIG, optimizer=dataclasses.replace(CONFIG.optimizer, kind="muon"))
    with pytest.raises(ConfigError, match=r"train.optimizer.kind='muon'.*started with adamw"):
        tiny_trainer(tmp_path, target, config=muon)
    check_same({"unknown": 1}, {"taps": [1]}, tmp_path)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (EagleShape, "num_layers", 0),
        (EagleShape, "intermediate_size", 0),
        (MedusaShape, "num_heads", 0),
        (MedusaShape, "num_blocks", 0),
        (BlockShape, "num_layers", -1),
        (BlockShape, "markov_rank", -1),
    ],
)
def test_shapes_that_no_head_has_are_refused(kind: Any, field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{field}={value}: must be at least"):
        kind(**{field: value})
    with pytest.raises(ConfigError, match="taps"):
        EagleShape(version=1, taps=(1, 2))


def test_states_that_are_broken_or_of_another_head_are_refused(target: FrozenTarget, tmp_path: Path) -> None:
    tiny_trainer(tmp_path, target).save()
    with pytest.raises(ConfigError, match=r"kind='block'.*started with eagle"):
        tiny_trainer(tmp_path, target, "block")
    other = tiny_trainer(tmp_path / "other", target, "block")
    with pytest.raises(CheckpointError, match="another model"):
        restore_state(tmp_path, other.head, other.optimizers)
    path = tmp_path / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="not a complete training state"):
        tiny_trainer(tmp_path, target)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", "1"), ("step", True), ("step", None), ("seconds", "1"), ("config", []), ("num_worse", []),
        ("num_worse", None), ("best", 1), ("best", {}), ("best", {"sampled": [1], "greedy": 3}),
    ],
)  # fmt: skip
def test_a_state_with_counters_of_another_kind_is_refused(
    target: FrozenTarget, tmp_path: Path, name: str, value: object
) -> None:
    tiny_trainer(tmp_path, target).save()
    path = tmp_path / "state.safetensors"
    with safe_open(path, framework="pt") as file:
        meta = json.loads(file.metadata()["state"])
    tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"state": json.dumps(meta | {name: value})})
    with pytest.raises(CheckpointError, match=r"state\.safetensors is no.*; remove it to start again"):
        tiny_trainer(tmp_path, target)
    del meta[name]
    save_file(tensors, path, metadata={"state": json.dumps(meta)})
    with pytest.raises(CheckpointError, match=rf"state\.safetensors is no.*{name}.*; remove it to start again"):
        tiny_trainer(tmp_path, target)


@pytest.mark.parametrize("line", [b"{}", b"[]", b"3", b"null", b'{"step": "x"}', b"\xff"])
def test_a_curve_ends_before_a_line_that_is_none(target: FrozenTarget, tmp_path: Path, line: bytes) -> None:
    tiny_trainer(tmp_path, target).save()
    curve = tmp_path / CURVE
    curve.write_bytes(b'{"step": 0}\n' + line + b"\n")
    tiny_trainer(tmp_path, target)
    assert curve.read_text() == '{"step": 0}\n'


def test_accumulated_batches_are_one_larger_batch(target: FrozenTarget, tmp_path: Path) -> None:
    """All rows are wanted and Medusa heads draw none: the mean of two batches is that of one twice as large."""
    large = tiny_trainer(tmp_path / "a", target, "medusa", dataclasses.replace(CONFIG, batch_windows=4))
    small = tiny_trainer(tmp_path / "b", target, "medusa", dataclasses.replace(CONFIG, accumulate=2))
    torch.testing.assert_close(small._backward(0) + small._backward(1), large._backward(0))
    for one, other in zip(small.head.parameters(), large.head.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


TWICE = dataclasses.replace(CONFIG, accumulate=2, tokens=64 * 4, validate_every_steps=4)


def _rank(rank: int, port: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    with joined_ranks() as ranks:
        trainer = tiny_trainer(Path(folder) / "run", tiny_target(), config=TWICE, ranks=ranks)
        trainer.run()
        torch.save(weights(trainer), Path(folder) / f"weights{rank}.pt")


@pytest.mark.repeated
def test_two_processes_train_what_one_does(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_rank, args=(port, str(tmp_path)), nprocs=2)  # type: ignore[attr-defined, no-untyped-call]
    alone = tiny_trainer(tmp_path / "alone", tiny_target(), config=TWICE)
    alone.run()
    first, second = (torch.load(tmp_path / f"weights{rank}.pt") for rank in range(2))
    for name, value in weights(alone).items():
        torch.testing.assert_close(first[name], second[name], atol=0, rtol=0, msg=name)
        torch.testing.assert_close(first[name], value, atol=1e-5, rtol=1e-4, msg=name)
    assert (tmp_path / "run" / "state.safetensors").exists()


def test_batches_that_cannot_be_dealt_out_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of the 2 processes"):
        Ranks(0, 2).share(3)


def test_precision_follows_the_device() -> None:
    assert fast_precision("cuda") == "bfloat16"
    assert fast_precision("cpu") in ("bfloat16", "float32")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", 0),
        ("length", 3),
        ("row_share", 0.0),
        ("decay_share", 2.0),
        ("seed", -1),
        ("validate_every_steps", 0),
        ("clip_norm", 0.0),
        ("clip_norm", -1.0),
        ("seconds", float("nan")),
        ("save_every_s", float("nan")),
        ("warmup_steps", -5),
    ],
)
def test_bad_settings_are_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        dataclasses.replace(CONFIG, **{field: value})  # type: ignore[arg-type]
