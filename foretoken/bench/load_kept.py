"""The file that keeps the turns of a load measurement, so that a run that was stopped goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from foretoken.bench.batch_prompts import Ask
from foretoken.bench.kept_lines import KeptLines
from foretoken.bench.load_options import LoadOptions
from foretoken.bench.report import as_plain, machine, versions

GONE_ON = "The run was stopped and gone on with; policies of adaptive settings started without measurements again."
_NOT_MEASURED = ("out", "name", "resume")  # options that no turn depends on


def kept_turns(
    options: LoadOptions, found: Mapping[str, Sequence[Ask]], without_effect: Iterable[str]
) -> KeptLines | None:
    """The file of `options.resume`, None without one. Besides the options, prompts, machine and versions must agree;
    `without_effect` names options that this kind of run does not read.

    Raises:
        InputError, StorageError: see `KeptLines`.
    """
    if options.resume is None:
        return None
    texts = {name: [list(ask.prompt_ids) for ask in own] for name, own in found.items()}
    prompts = hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]
    left_out = {*_NOT_MEASURED, *without_effect}
    given = {name: value for name, value in asdict(options).items() if name not in left_out}
    about = given | {"prompts by content": prompts, "machine": machine(), "versions": versions()}
    return KeptLines(options.resume, {name: as_plain(value) for name, value in about.items()})
