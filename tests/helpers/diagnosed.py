"""A target and heads that are trained in seconds on a language of three modes, to plant faults in.

The token five places back decides the next one, by a permutation that the text's first token chooses: BOS, the chat
template's opening, or anything else. A head that was trained in one mode fails in the others; the distance of five
needs its rotary positions, so that another base or longer texts than it has seen confuse it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor

from foretoken.heads.base import DraftVocabulary
from foretoken.heads.checkpoint import make_head, save_head
from foretoken.heads.config import EagleConfig
from foretoken.heads.eagle import EagleHead
from foretoken.heads.losses import LossConfig, compare, target_logits
from foretoken.model.architecture import ModelConfig
from foretoken.model.decoder import Decoder
from foretoken.model.loader import read_config
from foretoken.model.saving import save_checkpoint
from foretoken.train.evaluate import cross_entropy, logits_of
from foretoken.train.frozen_target import FrozenTarget
from foretoken.train.head_recipes import begin_as_last_layer

VOCABULARY, FIRST_WORD, DISTANCE = 40, 4, 5
PLAIN, BOS, OPENING = 0, 1, 2
CONFIG = ModelConfig(
    "llama", VOCABULARY, 64, 128, 5, 4, 4, 16, 512, tie_embeddings=True, bos_token_id=BOS, eos_token_ids=(3,),
    dtype="float32",
)  # fmt: skip
TAPS = (1, 2, 4)


def texts(mode: int | None, count: int, length: int, seed: int, language: int = 0) -> Tensor:
    """`count` texts of `length` tokens [count, length] in one mode, or in all of them."""
    generator = torch.Generator().manual_seed(seed)
    rules = torch.Generator().manual_seed(language)
    words = VOCABULARY - FIRST_WORD
    tables = torch.stack([torch.randperm(words, generator=rules) for _ in range(3)])
    modes = torch.randint(3, (count,), generator=generator) if mode is None else torch.full((count,), mode)
    found = torch.randint(words, (count, length), generator=generator)
    for place in range(DISTANCE, length):
        found[:, place] = tables[modes, found[:, place - DISTANCE]]
    found += FIRST_WORD
    heads = modes[:, None]
    return torch.where(heads > 0, torch.cat((heads, found[:, :-1]), dim=1), found)


def train(parameters: list[Tensor], loss: Callable[[int], Tensor], steps: int, rate: float = 3e-3) -> None:
    """Adam with a rate that falls to nothing."""
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, step / 20) * min(1.0, 2 * (1 - step / steps))
        optimizer.zero_grad()
        loss(step).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()


def word_of(token: int) -> str:
    """How a token is spelt; none begins another, as special tokens are found within words."""
    return f"w{token:02}"


def make_target(folder: Path, language: int = 0, steps: int = 300, length: int = 64) -> Path:
    """Train a target that writes the language, with a tokenizer and a chat template."""
    decoder = Decoder(CONFIG)
    decoder.initialise(language)

    def loss(step: int) -> Tensor:
        batch = texts(None, 16, length, seed=step, language=language)
        wanted = batch[:, 1:].clone()
        logits = logits_of(decoder, batch[:, :-1]).view(*wanted.shape, -1)
        return cross_entropy(logits[:, DISTANCE:].flatten(0, 1), wanted[:, DISTANCE:].flatten())

    train(list(decoder.requires_grad_(True).parameters()), loss, steps)
    save_checkpoint(decoder.requires_grad_(False), CONFIG, folder)
    words = {word_of(number): number for number in range(VOCABULARY)}
    own = tokenizers.Tokenizer(WordLevel(words, unk_token=word_of(0)))
    own.pre_tokenizer = WhitespaceSplit()
    own.save(str(folder / "tokenizer.json"))
    template = word_of(2) + " {% for message in messages %}{{ message['content'] }}{% endfor %}"
    settings = {"bos_token": word_of(BOS), "eos_token": word_of(3), "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def make_head_for(
    target: Path, folder: Path, mode: int = PLAIN, steps: int = 300, length: int = 64, language: int = 0, **flags: Any
) -> Path:
    """Train an EAGLE-3 head for texts of one mode and `length`, with the norm `flags`, and write it."""
    frozen = FrozenTarget.load(target)
    ids = torch.arange(FIRST_WORD, VOCABULARY - 2)
    config = EagleConfig(
        3, frozen.decoder.config.llama_layers(1), CONFIG.hidden_size, CONFIG.num_layers, TAPS, len(ids), **flags
    )
    head = make_head(config, DraftVocabulary(ids, VOCABULARY))
    assert isinstance(head, EagleHead)
    head.initialise(0)
    head.begin_from(frozen.decoder.output_logits)
    begin_as_last_layer(head, frozen.decoder)

    def loss(step: int) -> Tensor:
        batch = texts(mode, 8, length + 1, seed=10_000 + step, language=language)
        wanted = torch.zeros_like(batch, dtype=torch.bool)
        wanted[:, DISTANCE + 2 :] = True
        read = frozen.read(batch, wanted, TAPS)
        output = frozen.output_over(head.vocabulary)
        logits = target_logits(read, output)
        places = head.places(read, frozen.decoder, 3, step)
        return torch.stack([compare(place, logits, LossConfig("kl")) for place in places]).sum()

    train(list(head.requires_grad_(True).parameters()), loss, steps)
    save_head(head.requires_grad_(False), folder, read_config(target), target)
    return folder


def edit_config(folder: Path, **fields: Any) -> None:
    """Write other values into a config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def prompts_file(path: Path, count: int = 10, length: int = 10) -> Path:
    """Prompts in words, of the plain mode."""
    rows = texts(PLAIN, count, length, seed=77).tolist()
    lines = [json.dumps({"prompt": " ".join(map(word_of, row))}) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path
