"""Measure the reference family along real held-out text and print the tables of its card.

python scripts/reference_card.py --target out/target/model --draft out/draft/model --corpus out/target
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch

from foretoken.measure.workload import SLICES, slices
from foretoken.model.decoder import Decoder
from foretoken.model.loader import load_decoder
from foretoken.text.tokenizer import load_tokenizer
from foretoken.train.evaluate import acceptance, bits_per_byte, logits_of
from foretoken.train.recipes import prepare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True, help="folder of the run that made the tokenizer")
    parser.add_argument("--prompts", type=int, default=16, help="held-out texts per slice")
    options = parser.parse_args()
    models = {
        "target": load_decoder(options.target, "float32", pack=False),
        "draft": load_decoder(options.draft, "float32", pack=False),
    }
    _, data = prepare(options.corpus)
    result: dict[str, object] = {
        "held_out_bits_per_byte": {
            name: bits_per_byte(model, data.held_out.tolist(), data.held_out_bytes) for name, model in models.items()
        },
        "slices": along_real_text(models["target"], models["draft"], options.target, options.prompts),
    }
    print(json.dumps(result))


@torch.no_grad()
def along_real_text(target: Decoder, draft: Decoder, folder: Path, per_slice: int) -> dict[str, dict[str, float]]:
    """By slice, on the real continuation of held-out prompts: target's bits per byte, acceptance sampled and greedy."""
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    rows: dict[str, dict[str, float]] = {}
    for name in SLICES:
        nats, num_bytes, sampled, greedy, count = 0.0, 0, 0.0, 0, 0
        for prompt in slices([name], per_slice):
            if not prompt.continuation:
                continue
            head, tail = tokenizer.encode(prompt.text), tokenizer.encode(prompt.continuation)
            ids = torch.tensor([head + tail])[:, : target.config.max_context_tokens]
            rest = slice(len(head) - 1, ids.shape[1] - 1)  # rows that predict the continuation
            p, q = logits_of(target, ids)[rest], logits_of(draft, ids)[rest]
            tokens = ids[0, len(head) :]
            nats -= float(p.log_softmax(-1)[torch.arange(len(tokens)), tokens].sum())
            num_bytes += len(tokenizer.decode(tokens.tolist()).encode())
            sampled += float(acceptance(p, q).sum())
            greedy += int((p.argmax(-1) == q.argmax(-1)).sum())
            count += len(tokens)
        rows[name] = {
            "tokens": count,
            "bits_per_byte": nats / math.log(2) / num_bytes,
            "sampled_acceptance": sampled / count,
            "greedy_acceptance": greedy / count,
        }
    return rows


if __name__ == "__main__":
    main()
