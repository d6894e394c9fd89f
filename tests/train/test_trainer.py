"""The trainer: it learns, and an interrupted run ends exactly where an uninterrupted one does."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from foretoken.errors import CheckpointError, ConfigError, StorageError
from foretoken.model.architecture import ModelConfig
from foretoken.model.decoder import Decoder
from foretoken.train.recipes import Data, ModelSize, Trainer, train_lm
from foretoken.train.run_options import TrainConfig

CONFIG = TrainConfig(
    tokens=64 * 24,
    batch_tokens=64,
    length=16,
    final_length=32,
    warmup_steps=2,
    compile=False,
    validate_every_steps=1000,
    report_every_steps=1000,
)


def decoder(hidden: int = 32, seed: int = 0) -> Decoder:
    config = ModelConfig("llama", 50, hidden, 64, 2, 2, 1, 16, 64, tie_embeddings=True, eos_token_ids=(0,))
    model = Decoder(config)
    model.initialise(seed)
    return model


def data() -> Data:
    """A text that repeats with a period of 13: easy to learn, impossible to predict."""
    text = np.tile(np.random.default_rng(0).integers(1, 50, 13), 40).astype(np.uint16)
    return Data(text, text[:200], held_out_bytes=600)


def weights(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_it_learns(tmp_path: Path) -> None:
    trainer = Trainer(decoder(), data(), dataclasses.replace(CONFIG, tokens=64 * 80), tmp_path)
    before = trainer.bits_per_byte()
    result = trainer.run()
    assert result.bits_per_byte < 0.7 * before
    assert result.steps == 80


def test_interrupted_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    whole = Trainer(decoder(), data(), CONFIG, tmp_path / "whole")
    whole.run()

    stopped = Trainer(decoder(), data(), CONFIG, tmp_path / "parts")
    train_step = stopped.train_step

    def interrupt_at_ten() -> float:
        loss = train_step()
        if stopped.step == 10:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss

    stopped.train_step = interrupt_at_ten  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        stopped.run()
    assert stopped.step == 10

    resumed = Trainer(decoder(seed=9), data(), CONFIG, tmp_path / "parts")
    assert resumed.step == 10
    resumed.run()
    assert resumed.step == whole.step == 24
    for name, value in weights(whole.model).items():
        torch.testing.assert_close(weights(resumed.model)[name], value, atol=0, rtol=0, msg=name)


def test_l3_whoever_handles_a_signal_hears_of_it_after_the_state_is_saved(tmp_path: Path) -> None:
    """The command line makes its exit code of it."""
    trainer = Trainer(decoder(), data(), CONFIG, tmp_path / "run")
    train_step, saved = trainer.train_step, []

    def interrupt_at_two() -> float:
        loss = train_step()
        if trainer.step == 2:
            os.kill(os.getpid(), signal.SIGHUP)
        return loss

    def handler(number: int, _frame: object) -> None:
        saved.append((number, (tmp_path / "run" / "state.safetensors").exists()))
        raise SystemExit(129)

    trainer.train_step = interrupt_at_two  # type: ignore[method-assign]
    old = signal.signal(signal.SIGHUP, handler)
    try:
        with pytest.raises(SystemExit):
            trainer.run()
        assert signal.getsignal(signal.SIGHUP) is handler
    finally:
        signal.signal(signal.SIGHUP, old)
    assert saved == [(signal.SIGHUP, True)]
    assert Trainer(decoder(seed=9), data(), CONFIG, tmp_path / "run").step == 2


def test_a_draft_is_distilled_from_its_teacher(tmp_path: Path) -> None:
    teacher = Trainer(decoder(), data(), dataclasses.replace(CONFIG, tokens=64 * 80), tmp_path / "teacher")
    teacher.run()
    student = Trainer(
        decoder(16, seed=1), data(), dataclasses.replace(CONFIG, tokens=64 * 80), tmp_path / "student", teacher.model
    )
    before = student.held_out_agreement()
    after = student.run().agreement
    assert before is not None
    assert after is not None
    assert after.sampled > before.sampled + 0.2
    assert after.greedy > before.greedy + 0.2
    assert after.tokens == 200


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(decoder(), data(), CONFIG, tmp_path)
    trainer.save()
    with pytest.raises(ConfigError, match=r"seed=1.*started with 0"):
        Trainer(decoder(), data(), dataclasses.replace(CONFIG, seed=1), tmp_path)
    with pytest.raises(CheckpointError, match="another model"):
        Trainer(decoder(48), data(), CONFIG, tmp_path)


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    trainer = Trainer(decoder(), data(), CONFIG, tmp_path / "file")
    with pytest.raises(StorageError, match="cannot write the training state"):
        trainer.save()


@pytest.mark.parametrize(("field", "value"), [("tokens", 0), ("final_length", 4096), ("decay_share", 2.0)])
def test_bad_settings_are_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError):
        dataclasses.replace(CONFIG, **{field: value})


@pytest.mark.parametrize(
    ("device", "said"), [("cuda:9", "this machine has 1 CUDA devices"), ("cpu:x", "use auto, cpu"), ("mps", "use auto")]
)
def test_a_device_that_is_not_here_is_refused_first(
    device: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before half a minute of reading."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=f"device='{device}': {said}"):
        train_lm(tmp_path / "run", ModelSize(64, 64, 1, 1, 1), CONFIG, device=device)
    assert not (tmp_path / "run").exists()
