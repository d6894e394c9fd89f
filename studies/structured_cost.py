"""Is drafting slower than plain decoding where answers must fit a schema?

    python -m studies.structured_cost --target smollm2 --settings ngram,auto --requests 1,4 --out structured.json

The same prompts with and without their schemas. Settings take turns on the same prompts, and every second round they
stand the other way round. Answers have seeds, so that every setting emits the same tokens: a ratio compares the time of
equal work. Intervals are over rounds. `--seconds` ends the measurement after a whole round.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from foretoken import LLM
from foretoken.measure.prompts import with_template
from foretoken.measure.stats import Measured, paired_ratio
from foretoken.measure.workload import Prompt
from studies.command import exit_code_of, record, record_file, setting_of, whole_numbers, words
from studies.real_batches.stage import PLAIN, Sampling, Stage

_TEXT = {"type": "string", "maxLength": 40}
_COUNT = {"type": "integer", "minimum": 0, "maximum": 999}


def _object(**properties: Any) -> dict[str, Any]:  # noqa: ANN401 - parts of a schema
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


TASKS: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "Extract the person as JSON: Maria Lopez, 34, lives in Lisbon and works as a nurse.",
        _object(name=_TEXT, age=_COUNT, city=_TEXT, job=_TEXT),
    ),
    (
        "Write this order as JSON: three apples at 2 euros, one loaf of bread at 4, and six eggs at 3.",
        _object(
            items={"type": "array", "items": _object(name=_TEXT, count=_COUNT, price=_COUNT), "maxItems": 4},
            currency={"enum": ["EUR", "USD", "GBP"]},
        ),
    ),
    (
        "Is this review good or bad, and why? As JSON: The screen is bright but the battery is dead by noon.",
        _object(verdict={"enum": ["good", "bad", "mixed"]}, reason=_TEXT, stars={"type": "integer", "maximum": 5}),
    ),
    (
        "Call a tool as JSON to set a timer of ten minutes for the pasta.",
        _object(
            name={"enum": ["set_timer", "get_weather"]},
            arguments=_object(minutes=_COUNT, label=_TEXT, loud={"type": "boolean"}),
        ),
    ),
    (
        "Give the configuration of a small web server as JSON: port 8080, two workers, logs to a file.",
        _object(
            server=_object(host=_TEXT, port={"type": "integer"}), workers=_COUNT, log=_object(level=_TEXT, file=_TEXT)
        ),
    ),
    (
        "List four European capitals with their countries as JSON.",
        {"type": "array", "items": _object(capital=_TEXT, country=_TEXT), "minItems": 4, "maxItems": 4},
    ),
)
_FORMS = ("free", "schema")
_SEED = 100


@dataclass(frozen=True)
class Cell:
    """What is measured at once: the answers' form, temperature, and requests at once."""

    form: str
    temperature: float
    num_requests: int


def main() -> int:
    """Measure, print the figures, and with `--out` write them."""
    return exit_code_of(_study)


def _study() -> int:
    options = _parser().parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    cells = [
        Cell(form, temperature, count)
        for count in options.requests
        for temperature in options.temperatures
        for form in _FORMS
    ]
    settings = (PLAIN, *(name for name in options.settings if name != PLAIN))
    with LLM(options.target, dtype=options.dtype, profile="off", max_batch_size=max(options.requests)) as llm:
        turns = list(_measure(Stage(llm), cells, settings, options))
    found = {"options": setting_of(options), "rows": rows(turns, cells, settings), "turns": turns}
    report = record("structured_cost", found, options.out)
    for row in report["rows"]:
        print(json.dumps(row))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m studies.structured_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", default="smollm2", help="folder, hub id, smollm2 or reference:target")
    parser.add_argument(
        "--settings", type=words, default=("ngram", "auto"), help="beside plain: DRAFTER or DRAFTER-NUMBER"
    )
    parser.add_argument("--requests", type=whole_numbers, default=(1, 4), help="requests at once")
    parser.add_argument("--temperatures", type=lambda text: tuple(map(float, words(text))), default=(0.0, 1.0))
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=100, help="at most")
    parser.add_argument("--seconds", type=float, default=280.0, help="after which no further round begins")
    parser.add_argument("--threads", type=int, help="without it, torch's number")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=record_file, help="a JSON file for the record")
    return parser


def _measure(
    stage: Stage, cells: Sequence[Cell], settings: Sequence[str], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Every turn, a round of all cells and settings after the other; the first round only warms up."""
    asked = [Prompt(f"task {place}", "structured", text) for place, (text, _) in enumerate(TASKS)]
    if stage.llm.tokenizer is not None and stage.llm.tokenizer.chat_template is not None:
        asked = list(with_template(asked, stage.llm, chat=True))
    texts = [prompt.text for prompt in asked]
    began = time.monotonic()
    for number in range(1 + options.rounds):
        if number > 1 and time.monotonic() - began > options.seconds:
            return
        for cell in cells:
            places = [(number + i) % len(TASKS) for i in range(cell.num_requests)]
            schemas = tuple(json.dumps(TASKS[place][1]) for place in places) if cell.form == "schema" else ()
            sampling = Sampling(options.max_tokens, cell.temperature, _SEED, schemas)
            for setting in settings if number % 2 else settings[::-1]:
                found = stage.answer(setting, [texts[place] for place in places], places, sampling)
                if number:
                    yield {"round": number, "setting": setting, **asdict(cell), **found}
        print(f"round {number}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def rows(turns: Sequence[Mapping[str, Any]], cells: Sequence[Cell], settings: Sequence[str]) -> list[dict[str, Any]]:
    """For each cell and setting the rate, its ratio to plain decoding's with the ends of its interval, what of the
    drafts was accepted, and how many turns had answers other than plain's.
    """
    found = []
    for cell in cells:
        own = {name: [t for t in turns if t["setting"] == name and _is_of(t, cell)] for name in settings}
        measured: dict[str, Measured] = {
            name: {(t["round"], 0): (_sum(t, "num_tokens"), t["seconds"]) for t in part} for name, part in own.items()
        }
        answers = {t["round"]: [one["answer"] for one in t["prompts"]] for t in own[PLAIN]}
        for name, part in own.items():
            ratio = paired_ratio(measured[name], measured[PLAIN])
            found.append(
                {
                    "setting": name,
                    **asdict(cell),
                    "rounds": len(part),
                    "tokens_per_s": sum(_sum(t, "num_tokens") for t in part)
                    / max(1e-9, sum(t["seconds"] for t in part)),
                    "to_plain": None if ratio is None else (ratio.ratio, ratio.low, ratio.high),
                    "tokens_per_step": sum(_sum(t, "num_tokens") for t in part)
                    / max(1, sum(_sum(t, "num_steps") for t in part)),
                    "num_drafted": sum(_sum(t, "num_drafted") for t in part),
                    "num_accepted": sum(_sum(t, "num_accepted") for t in part),
                    "differ": sum([one["answer"] for one in t["prompts"]] != answers.get(t["round"]) for t in part),
                }
            )
    return found


def _is_of(turn: Mapping[str, Any], cell: Cell) -> bool:
    return all(turn[name] == value for name, value in asdict(cell).items())


def _sum(turn: Mapping[str, Any], name: str) -> int:
    return sum(one[name] for one in turn["prompts"])


if __name__ == "__main__":
    sys.exit(main())
