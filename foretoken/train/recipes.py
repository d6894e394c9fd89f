"""The trainer of language models (resumable with the same data order), and its recipes: the model of the reference
family, and a draft distilled from it.

Matrices are trained with Muon (orthogonalised momentum), embeddings and norms with AdamW; the learning rate is constant
and then decays to zero over the last part of the run (warm-up, stable, decay).
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from foretoken.errors import ConfigError, MismatchError, StorageError
from foretoken.files import check_folder
from foretoken.model.architecture import ModelConfig
from foretoken.model.decoder import Decoder
from foretoken.model.loader import load_decoder
from foretoken.model.open import open_device
from foretoken.model.saving import save_checkpoint
from foretoken.printing.console import Console
from foretoken.text.tokenizer import load_tokenizer
from foretoken.train.configs import TrainConfig
from foretoken.train.corpus import END_OF_TEXT, encode, standard_library, tokenizer_config, train_tokenizer
from foretoken.train.trainer import Data, Result, Trainer


@dataclass(frozen=True)
class ModelSize:
    """Size of a Llama-architecture model to train from scratch."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 64

    def __post_init__(self) -> None:
        for name, size in asdict(self).items():
            if size < 1:
                raise ConfigError(name, size, "must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError("num_heads", self.num_heads, f"must be a multiple of num_kv_heads={self.num_kv_heads}")


CONTEXT_TOKENS = 2048
TARGET_SHAPE = ModelSize(hidden_size=256, intermediate_size=640, num_layers=8, num_heads=4, num_kv_heads=2)
DRAFT_SHAPE = ModelSize(hidden_size=128, intermediate_size=384, num_layers=2, num_heads=2, num_kv_heads=1)


def prepare(folder: Path, vocab_size: int = 4096) -> tuple[Tokenizer, Data]:
    """Tokenizer and token ids of the standard library, computed once and stored in `folder`."""
    corpus_file = folder / "corpus.npz"
    if not corpus_file.exists():
        Console(stderr=True).line("reading the standard library and learning its tokens: about half a minute")
        corpus = standard_library()
        tokenizer = train_tokenizer((d.text for d in corpus.train if d.slice == "code"), vocab_size)
        held_out = [d for d in corpus.held_out if d.slice == "code"]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tokenizer.save(str(folder / "tokenizer.json"))
            size = sum(len(d.text.encode()) for d in held_out)
            # numpy requires the suffix; an interruption must not leave half a corpus
            partial, ids = folder / "corpus.partial.npz", encode(tokenizer, corpus.train)
            np.savez(partial, train=ids, held_out=encode(tokenizer, held_out), held_out_bytes=size)
            partial.replace(corpus_file)
        except OSError as error:
            raise StorageError(f"cannot write the corpus to {folder}: {error}") from error
    try:
        with np.load(corpus_file) as arrays:
            data = Data(arrays["train"], arrays["held_out"], int(arrays["held_out_bytes"]))
        return Tokenizer.from_file(str(folder / "tokenizer.json")), data
    except Exception as error:  # numpy and tokenizers raise various types for a broken file
        raise StorageError(
            f"the corpus in {folder} cannot be read ({error}); remove corpus.npz there to make it again"
        ) from error


def model_config(shape: ModelSize, tokenizer: Tokenizer) -> ModelConfig:
    """Llama configuration of `shape` for `tokenizer`."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert end is not None
    return ModelConfig(
        model_type="llama",
        vocab_size=tokenizer.get_vocab_size(),
        max_context_tokens=CONTEXT_TOKENS,
        tie_embeddings=True,
        bos_token_id=end,
        eos_token_ids=(end,),
        dtype="bfloat16",
        **asdict(shape),
    )


def train_lm(
    out: Path,
    shape: ModelSize,
    config: TrainConfig,
    teacher: Path | None = None,
    corpus: Path | None = None,
    init: Path | None = None,
    device: str = "cpu",
) -> tuple[Result, Path]:
    """Train a model of `shape`, or resume the run in `out`; returns the result and the folder of the model.

    With `teacher` the model is distilled from that checkpoint, whose tokenizer must be that of the corpus. `corpus` is
    the folder of a run whose tokenizer and tokens are used, `init` a checkpoint of the same shape to start from.

    Raises:
        ConfigError, MismatchError, StorageError; KeyboardInterrupt after the state is saved.
    """
    place = open_device(device)
    for name in ("length", "final_length"):
        if getattr(config, name) > CONTEXT_TOKENS:
            raise ConfigError(
                name, getattr(config, name), f"must be at most the model's context of {CONTEXT_TOKENS} tokens"
            )
    check_folder(out)  # reading the corpus takes half a minute
    if corpus is not None and not os.path.exists(corpus / "corpus.npz"):
        raise StorageError(
            f"{corpus} holds no corpus.npz: give the folder of a run, or leave the corpus out to make one"
        )
    tokenizer, data = prepare(corpus or out)
    decoder = Decoder(model_config(shape, tokenizer))
    decoder.initialise(config.seed)
    if init is not None:
        decoder = _start_from(init, decoder.config)
    teacher_decoder = None if teacher is None else _load_teacher(teacher, tokenizer, place)
    trainer = Trainer(decoder.to(place), data, config, out, teacher_decoder)
    result = trainer.run()
    folder = out / "model"
    save_checkpoint(decoder.to(device="cpu", dtype=torch.bfloat16), decoder.config, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(), indent=2) + "\n")
    return result, folder


def _start_from(folder: Path, config: ModelConfig) -> Decoder:
    decoder = load_decoder(folder, dtype="float32", pack=False)
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    for name in sizes:
        if getattr(decoder.config, name) != getattr(config, name):
            raise MismatchError(
                f"{folder} has {name}={getattr(decoder.config, name)}, this run {getattr(config, name)}: "
                "start from a model of the same shape"
            )
    return decoder.requires_grad_(True)


def _load_teacher(folder: Path, tokenizer: Tokenizer, device: torch.device) -> Decoder:
    teacher = load_decoder(folder, dtype="float32", device=device, pack=False)
    teacher.requires_grad_(False)
    if teacher.config.vocab_size != tokenizer.get_vocab_size():
        raise MismatchError(
            f"the teacher has {teacher.config.vocab_size} tokens, the corpus "
            f"{tokenizer.get_vocab_size()}: use its --corpus"
        )
    words = load_tokenizer(folder)
    if words is not None and words.vocabulary != tokenizer.get_vocab():
        raise MismatchError(f"the teacher in {folder} has another tokenizer than the corpus: use its --corpus")
    return teacher
