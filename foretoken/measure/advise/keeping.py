"""The file of an adviser's answers, from which a run that was stopped goes on."""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.machine.identity import versions
from foretoken.measure.advise.options import AdviseOptions
from foretoken.measure.eval.prompts import EvalPrompt
from foretoken.measure.kept import KeptFile, digest, run_of

_FREE_TO_CHANGE = ("memory", "reserve", "machines", "budget_s", "concurrency")  # of a run that goes on: of no answer


def kept_answers(
    options: AdviseOptions,
    prompts: Sequence[EvalPrompt],
    models: Sequence[str | None],
    files: Sequence[str | None] = (),
    **more: object,
) -> KeptFile:
    """The file; `models`, `files` and `more` must agree too. Costs of steps are measured anew.

    Raises:
        InputError, StorageError: see `KeptFile`.
    """
    run = run_of(options, _FREE_TO_CHANGE, models, files, versions=versions(), **more)
    return KeptFile(options.resume, "advise", run | {"prompts by content": digest([one.key for one in prompts])})
