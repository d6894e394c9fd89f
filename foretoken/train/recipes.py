"""Ready-made runs: the language model of the reference family, and a draft distilled from it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from foretoken.errors import StorageError
from foretoken.model.architecture import ModelConfig
from foretoken.model.decoder import Decoder
from foretoken.train.corpus import standard_library
from foretoken.train.tokens import END_OF_TEXT, encode, tokenizer_config, train_tokenizer
from foretoken.train.trainer import Data, Result, TrainConfig, Trainer


@dataclass(frozen=True)
class Shape:
    """Size of a Llama-architecture model to train from scratch."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 64


TARGET_SHAPE = Shape(hidden_size=256, intermediate_size=640, num_layers=8, num_heads=4, num_kv_heads=2)
DRAFT_SHAPE = Shape(hidden_size=128, intermediate_size=384, num_layers=2, num_heads=2, num_kv_heads=1)


def prepare(folder: Path, vocab_size: int = 4096) -> tuple[Tokenizer, Data]:
    """Tokenizer and token ids of the standard library, made once and kept in `folder`."""
    corpus_file = folder / "corpus.npz"
    if not corpus_file.exists():
        corpus = standard_library()
        tokenizer = train_tokenizer((d.text for d in corpus.train if d.slice == "code"), vocab_size)
        held_out = [d for d in corpus.held_out if d.slice == "code"]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tokenizer.save(str(folder / "tokenizer.json"))
            size = sum(len(d.text.encode()) for d in held_out)
            np.savez(corpus_file, train=encode(tokenizer, corpus.train), held_out=encode(tokenizer, held_out), held_out_bytes=size)
        except OSError as error:
            raise StorageError(f"cannot write the corpus to {folder}: {error}") from error
    with np.load(corpus_file) as arrays:
        data = Data(arrays["train"], arrays["held_out"], int(arrays["held_out_bytes"]))
    return Tokenizer.from_file(str(folder / "tokenizer.json")), data


def model_config(shape: Shape, tokenizer: Tokenizer, max_context_tokens: int = 2048) -> ModelConfig:
    """Llama configuration of `shape` for `tokenizer`."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    return ModelConfig(
        model_type="llama",
        vocab_size=tokenizer.get_vocab_size(),
        max_context_tokens=max_context_tokens,
        tie_embeddings=True,
        bos_token_id=end,
        eos_token_ids=(end,),
        dtype="bfloat16",
        **asdict(shape),
    )
