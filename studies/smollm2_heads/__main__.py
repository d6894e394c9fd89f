"""Prompts for the training of SmolLM2's heads, none of them from a set that anything is measured with.

Chat prompts are written by the model itself: behind the empty beginning of a user's turn it writes what users write
(Magpie, arXiv 2406.08464). Prompts about code, edits, documents and word problems are made from the standard library,
the descriptions of installed packages, and templates.

    python -m studies.smollm2_heads openings --count 4000 --out openings.jsonl
    foretoken train answers --target smollm2 --prompts openings.jsonl --out turns.jsonl --max-tokens 120 \
        --temperature 0.9 --batch-size 32
    python -m studies.smollm2_heads mixed --turns turns.jsonl --out prompts.jsonl
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from foretoken.files import to_json
from foretoken.model.names import model_folder
from foretoken.printing.console import Console
from foretoken.text.tokenizer import load_tokenizer
from foretoken.train.answers import read_answers
from studies.command import exit_code_of
from studies.smollm2_heads.texts import Passage, SourceFunction, library_functions, passages
from studies.smollm2_heads.word_problems import word_problem

_MARK = "xyzzy"
_MIN_TURN_CHARACTERS = 12


def main() -> int:
    """Write openings, or prompts of all kinds."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.smollm2_heads",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("openings", "mixed"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--count", type=int, default=4000, help="openings to write")
    parser.add_argument("--turns", type=Path, action="append", default=[], help="what the model wrote behind openings")
    parser.add_argument("--per-kind", type=int, default=500, help="prompts of each kind that is made here")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    return exit_code_of(lambda: _openings(options) if options.what == "openings" else _mixed(options))


def _openings(options: argparse.Namespace) -> int:
    """Write `count` times the beginning of a conversation, up to where the user's text begins."""
    from foretoken import LLM

    llm = LLM(options.target)
    try:
        whole = llm.encode_chat([{"role": "user", "content": _MARK}])
        first = llm.encode_plain("mark", _MARK)[0]
    finally:
        llm.close()
    line = to_json({"prompt_ids": whole[: whole.index(first)]})
    options.out.write_text(f"{line}\n" * options.count, encoding="utf-8")
    Console().line(f"{options.out}: {options.count} openings of {whole.index(first)} tokens")
    return 0


def _mixed(options: argparse.Namespace) -> int:
    """Write the users' turns, and prompts of the other kinds, in an order drawn at random."""
    chooser, per_kind = random.Random(options.seed), options.per_kind
    functions, documents = list(library_functions()), list(passages())
    chat = list(_turns(options.turns, options.target))
    chooser.shuffle(functions)
    chooser.shuffle(documents)
    half = min(per_kind, len(functions) // 2)
    made = {
        "chat": chat,
        "code": [_code(chooser, one) for one in functions[:half]],
        "edit": [_edit(chooser, one) for one in functions[half : 2 * half]],
        "summary": [_summary(chooser, one) for one in documents[:per_kind]],
        "retrieval": [_retrieval(chooser, documents) for _ in range(per_kind // 2)],
        "maths": [word_problem(chooser) for _ in range(per_kind)],
    }
    lines = [(kind, prompt) for kind, prompts in made.items() for prompt in prompts]
    chooser.shuffle(lines)
    with options.out.open("w", encoding="utf-8") as file:
        for kind, prompt in lines:
            file.write(to_json({"slice": kind, "messages": [{"role": "user", "content": prompt}]}) + "\n")
    counts = ", ".join(f"{kind} {len(prompts)}" for kind, prompts in made.items())
    Console().line(f"{options.out}: {len(lines)} prompts, {counts}")
    return 0


def _turns(paths: Sequence[Path], target: str) -> Iterator[str]:
    """Users' turns that ended by themselves, each once."""
    tokenizer = load_tokenizer(model_folder(target))
    assert tokenizer is not None
    ends = set(tokenizer.special_ids)
    seen: set[str] = set()
    for path in paths:
        for _, answer in read_answers(path).pairs:
            if not answer or answer[-1] not in ends:
                continue
            text = tokenizer.decode([token for token in answer if token not in ends]).strip()
            if len(text) >= _MIN_TURN_CHARACTERS and text not in seen:
                seen.add(text)
                yield text


def _code(chooser: random.Random, one: SourceFunction) -> str:
    forms = (
        one.stub,
        one.stub,
        f"Complete this Python function:\n\n```python\n{one.stub}\n```",
        f"Explain what this function does.\n\n```python\n{one.text}\n```",
        f"Write a Python function `{one.name}`. {one.summary}",
        f"Write unit tests for this function:\n\n{one.text}",
    )
    return chooser.choice(forms)


_EDITS = (
    "Rename the function to `{name}`.",
    "Add type hints to the function.",
    "Add comments that explain each step.",
    "Rewrite the docstring so that it is easier to read.",
    "Remove the docstring.",
    "Add a check that the arguments are not None.",
    "Make the function print its result before it returns it.",
    "Simplify the code and keep its behaviour.",
    "Add a parameter `verbose=False` that prints what is done.",
    "Find the bug in this code and fix it.",
)
_NEW_NAMES = ("process", "compute_value", "handle_item", "run_step", "convert", "load_entry", "find_match")


def _edit(chooser: random.Random, one: SourceFunction) -> str:
    instruction = chooser.choice(_EDITS).format(name=chooser.choice(_NEW_NAMES))
    forms = (
        f"{instruction}\n\n```python\n{one.text}\n```",
        f"{instruction}\n\n{one.text}",
        f"Here is some code:\n\n{one.text}\n\n{instruction} Write the whole function.",
        f"# {instruction}\n# Before:\n{one.text}\n# After:",
    )
    return chooser.choice(forms)


def _summary(chooser: random.Random, one: Passage) -> str:
    forms = (
        f"Summarize the following text.\n\n{one.text}",
        f"Summarize: {one.text}",
        f"{one.text}\n\nGive a summary in two sentences.",
        f"What are the main points of this text?\n\n{one.text}",
        f"Rewrite this text in simple words:\n\n{one.text}",
    )
    return chooser.choice(forms)


def _retrieval(chooser: random.Random, documents: Sequence[Passage]) -> str:
    chosen = chooser.sample(documents, chooser.randint(2, 4))
    asked = chooser.choice(chosen)
    context = "\n\n".join(f"Document [{number}] ({one.subject})\n{one.text}" for number, one in enumerate(chosen, 1))
    question = chooser.choice(
        (
            f"What is {asked.subject}?",
            f"What does {asked.subject} do?",
            f"What do the documents say about {asked.subject}?",
            f"Which document is about {asked.subject}, and what does it say?",
        )
    )
    return f"{context}\n\nAnswer the question with the documents above.\nQuestion: {question}\nAnswer:"


if __name__ == "__main__":
    sys.exit(main())
