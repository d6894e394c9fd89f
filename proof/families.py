"""Every causal family that transformers registers: run exactly, refused by name, or impossible to build here. Writes docs/models.md."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.family_trial import HOWS, Finding, try_family

TABLE = Path(__file__).resolve().parents[1] / "docs" / "models.md"

_HEAD = """\
# Models

Which causal families of transformers foretoken runs, and how. This page is written by `python -m proof.families --write`; `make proof` checks that it
is what the sweep finds, with transformers {version}.

For each family that `AutoModelForCausalLM` registers, the sweep writes a small random checkpoint ({context} tokens of context, sliding windows of 20),
loads it in float32 and generates greedily to the end of its context: plain, with n-gram drafting, with a draft model, and with two kinds of trees.
Every token must be the one that transformers finds when it reads the whole text again for each token, without a cache.

| how | meaning |
|---|---|
| native | foretoken's own decoder |
| transformers | the model of transformers with its cache of keys and values |
| recomputed | the model of transformers, which reads the whole text for each step: it has no cache that can be cut back, or one that gives other logits |
| refused | loading ends with `UnsupportedModelError` (exit code 3); the note is its reason |
| not built | no small checkpoint could be made from the family's configuration alone; the note is the error. Nothing is known about it |

A family can be run in another way when its configuration asks for what the small checkpoint does not have, such as another kind of rotary embedding.
The same trial of a few tokens runs on every model that is loaded through transformers (`foretoken/model/trial.py`), so that a model that
does not pass it is refused whatever this table says.

"""


def families() -> list[str]:
    """The registered model types, by name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def find(family: str) -> Finding:
    """`try_family` in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return try_family(family, Path(folder))


def sweep(names: list[str], num_processes: int | None = None) -> Iterator[Finding]:
    """Findings as they come."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(num_processes or min(2, os.cpu_count() or 1), _one_thread) as pool:
        yield from pool.imap_unordered(find, names)


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def page(findings: list[Finding]) -> str:
    """The text of docs/models.md."""
    import transformers

    from tests.helpers.families import CONTEXT

    counts = ", ".join(f"{sum(one.how == how for one in findings)} {how}" for how in HOWS)
    rows = [f"| {one.family} | {one.how} | {one.note.replace('|', '/')} |" for one in sorted(findings, key=lambda one: one.family)]
    text = _HEAD.format(version=transformers.__version__, context=CONTEXT)
    return text + f"{len(findings)} families: {counts}.\n\n| family | how | note |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def read_page() -> dict[str, tuple[str, str]]:
    """How and note of every family of the committed page."""
    rows = (line.strip("|").split("|") for line in TABLE.read_text(encoding="utf-8").split("| family | how | note |")[1].splitlines()[2:])
    return {family.strip(): (how.strip(), note.strip()) for family, how, note in rows}


def main() -> None:
    """Sweep, say what was found, and write the page if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="model types; all by default")
    parser.add_argument("--write", action="store_true", help="write docs/models.md")
    options = parser.parse_args()
    findings = []
    for finding in sweep(options.families or families()):
        findings.append(finding)
        print(f"{finding.family:24} {finding.how:12} {finding.note} {' / '.join(finding.differences)}", flush=True)
    wrong = [finding.family for finding in findings if finding.differences]
    if wrong:
        sys.exit(f"not exact: {', '.join(sorted(wrong))}")
    if options.write:
        TABLE.write_text(page(findings), encoding="utf-8")


if __name__ == "__main__":
    main()
