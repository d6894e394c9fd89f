"""A fixed probe of the speed of the machine, to separate its drift from errors of the simulator."""

from __future__ import annotations

from statistics import median

from foretoken.config import SamplingParams, SpecConfig
from studies.validation.replay import Clock, Serving

_STEPS = 40  # that are timed
_FIRST = 4  # the prompt's own step, and a few that warm up
_PROMPT_TOKENS = 16


def pace_s(llm: Serving, clock: Clock) -> float:
    """Seconds of a plain step of one request with a short context, a median. The engine must be idle."""
    assert not llm.engine.has_work
    prompt = [1 + token % (llm.engine.target.vocab_size - 1) for token in range(_PROMPT_TOKENS)]
    state = llm.submit(
        prompt, SamplingParams(max_tokens=_FIRST + _STEPS, temperature=0.0, ignore_eos=True, seed=0), SpecConfig()
    )
    took_s: list[float] = []
    try:
        while llm.engine.has_work:
            began_s = clock.now()
            llm.step()
            took_s.append(clock.now() - began_s)
    finally:
        llm.engine.abort(state.request_id)
    if state.error is not None:
        raise state.error
    return median(took_s[_FIRST:])
