"""What a server reports of its drafts for the prompts of a diagnosis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretoken.backend.http import HttpBackend
from foretoken.errors import InputError
from foretoken.measure.asked import BackendSource
from foretoken.measure.diagnose.options import DiagnoseOptions
from foretoken.measure.eval.options import BackendEvalOptions
from foretoken.measure.eval.prompts import EvalPrompt
from foretoken.measure.eval.result import overall
from foretoken.measure.eval.run import BackendEvalRun
from foretoken.measure.stats import ratio


@dataclass(frozen=True)
class Reported:
    """Accepted tokens per draft, and by place where the server counts them; `source` says what was read.

    Without a count of drafts each is taken to have the number of tokens that was asked for.
    """

    per_draft: float
    places: tuple[float, ...]
    source: str
    server: str


def reported_from(values: Mapping[str, Any]) -> Reported:
    """What a file holds of a `Reported`, as plain values."""
    return Reported(**{**values, "places": tuple(values["places"])})


def ask_endpoint(options: DiagnoseOptions, prompts: Sequence[EvalPrompt], command: str) -> Reported:
    """Ask the server at `options.url` the prompts, one after the other; nobody else may use it meanwhile.

    Raises:
        InputError: it reports no drafts, or cannot be asked at this temperature.
        UnavailableError: it does not answer.
    """
    assert options.url is not None
    asked = BackendEvalOptions(
        BackendSource(options.url, served_model=options.model),
        num_draft=options.num_draft,
        prompts_per_slice=len(prompts),
        max_tokens=options.max_tokens,
        temperatures=(options.temperature,),
        stop_at_eos=True,
        chat=options.chat,
        seed=options.seed,
    )
    with asked.source.open() as backend:
        assert isinstance(backend, HttpBackend)
        before = backend.position_counters()
        run = BackendEvalRun(asked, prompts, command, backend)
        try:
            run.run()
        except InputError as error:
            if error.field != "backend":
                raise
            raise InputError("url", options.url, error.remedy) from error
        after, server = backend.position_counters(), backend.version()
    if before is not None and after is not None and (own := after.since(before)).num_drafts:
        if len(own.accepted) < options.num_draft:
            remedy = f"the server counts {len(own.accepted)} tokens of a draft; give that number"
            raise InputError("num_draft", options.num_draft, remedy)
        places = tuple(count / own.num_drafts for count in own.accepted[: options.num_draft])
        return Reported(sum(places), places, "accepted tokens by position of /metrics", server)
    rate = ratio(overall(run.samples))
    if rate is None:
        remedy = "drafted nothing for these prompts: is speculation on, and for this model?"
        raise InputError("url", options.url, remedy)
    return Reported(rate * options.num_draft, (), "drafted and accepted tokens of its answers", server)
