"""From documents to token ids: the byte-level BPE tokenizer of the reference family, and flat id arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from foretoken.train.corpus import Document

END_OF_TEXT = "<|endoftext|>"  # id 0: between documents, and the end of an answer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE (Sennrich et al. 1508.07909 over bytes, as GPT-2); every byte string has an encoding."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    """`tokenizer_config.json` for transformers and llama.cpp."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
    }


def encode(tokenizer: Tokenizer, documents: Sequence[Document]) -> npt.NDArray[np.uint16]:
    """All documents as one array of ids, each followed by the end-of-text token."""
    assert tokenizer.get_vocab_size() <= 1 << 16
    end = tokenizer.token_to_id(END_OF_TEXT)
    pieces: list[npt.NDArray[np.uint16]] = []
    for encoding in tokenizer.encode_batch_fast([document.text for document in documents]):
        pieces.append(np.array([*encoding.ids, end], dtype=np.uint16))
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.uint16)


def windows(ids: npt.NDArray[np.uint16], step: int, batch_size: int, length: int, seed: int) -> npt.NDArray[np.int64]:
    """Batch number `step`: `[batch_size, length + 1]` windows at random positions.

    A function of (seed, step) alone, so a resumed run sees the same batches.
    """
    rng = np.random.default_rng((seed, step))
    starts = rng.integers(0, len(ids) - length - 1, size=batch_size)
    return np.stack([ids[start : start + length + 1] for start in starts]).astype(np.int64)
