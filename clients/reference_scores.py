"""Log-likelihoods by transformers, for clients/first/test_lm_eval.py; runs in the server's environment.

Standard input: a JSON list of [context, continuation]. Standard output: a JSON list of [log-likelihood, is greedy].
"""

from __future__ import annotations

import json
import sys

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM


def main() -> None:
    folder = sys.argv[1]
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for context, continuation in json.load(sys.stdin):
        # As the harness does: white space at the end of a context counts as the continuation's.
        stripped = context.rstrip()
        context, continuation = stripped, context[len(stripped) :] + continuation
        whole = tokenizer.encode(context + continuation, add_special_tokens=False).ids
        start = len(tokenizer.encode(context, add_special_tokens=False).ids)
        with torch.no_grad():
            logprobs = model(torch.tensor([whole])).logits[0].log_softmax(-1)  # [T, V]
        scored = [(logprobs[i - 1], whole[i]) for i in range(start, len(whole))]
        total = sum(float(row[token]) for row, token in scored)
        found.append([total, all(int(row.argmax()) == token for row, token in scored)])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
