"""The file that keeps the turns of a load measurement, so that a run that was stopped resumes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from foretoken.bench.batch_prompts import Ask
from foretoken.bench.load_options import LoadOptions
from foretoken.engine.startup.machine import machine, versions
from foretoken.measure.kept import KeptFile, digest, run_of

RESUMED = "The run was stopped and resumed; policies of adaptive settings started without measurements again."


def kept_turns(
    options: LoadOptions, found: Mapping[str, Sequence[Ask]], without_effect: Iterable[str]
) -> KeptFile | None:
    """The file of `options.resume`, None without one. Besides the options, prompts, machine and versions must agree;
    `without_effect` names options that this kind of run does not read.

    Raises:
        InputError, StorageError: see `KeptFile`.
    """
    if options.resume is None:
        return None
    prompts = digest({name: [list(ask.prompt_ids) for ask in own] for name, own in found.items()})
    run = run_of(options, without_effect, machine=machine(), versions=versions())
    return KeptFile(options.resume, "bench load", run | {"prompts by content": prompts})
