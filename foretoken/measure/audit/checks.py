"""The checks that never fail by chance: greedy answers, repeated seeds, equal logits, conserved cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foretoken.config import SamplingParams, SpecConfig
from foretoken.engine.request import GenerateOutput
from foretoken.engine.shadow.sequential_test import GreedyEvidence, weigh_greedy
from foretoken.measure.audit.session import Session, scored_place
from foretoken.measure.checks import Check, Result, equality
from foretoken.model.interface import LanguageModel, Segment
from foretoken.text.randomness import RaceNoise

_TEXTS = 4  # answers whose logits and seeds are compared; the tests of the distribution use all
_OTHER_NUM_DRAFTS = (1, 7)
AS_PLAIN = "the same answers as plain decoding"
CHOICE = "every token is the target's choice"
EQUAL_SEEDS = "equal seeds, equal answers"
_CHOOSERS = ("mix", "auto")  # drafters that choose among parts by measured times
_WHY_NOT_DEMANDED = (
    "in 16-bit precision rounding changes the probabilities of this rule; "
    "--rule coupled or --dtype float32 reproduces a seed"
)


def check_greedy(session: Session) -> list[Check]:
    """Temperature 0: the speculative answer is the plain one, and every token is the target's own choice."""
    params = SamplingParams(max_tokens=session.options.max_tokens, ignore_eos=True)
    prompts = session.prompts[: session.options.num_prompts]
    each = [params] * len(prompts)
    outputs = session.answers(prompts, each, session.options.spec).outputs
    chosen = GreedyEvidence()
    for output in outputs:
        for rows in session.rescore(output, params):
            chosen += weigh_greedy(rows.logits, rows.tokens, rows.rounding)
    checks = [choice_check("temperature 0", chosen)]
    if session.options.spec.drafter is None:
        return checks
    plain = session.answers(prompts, each, SpecConfig()).outputs

    def gap(i: int, place: int) -> tuple[float, float]:
        logits, rounding = scored_place(session.rescore(outputs[i], params), place)
        return abs(float(logits[plain[i].token_ids[place]] - logits[outputs[i].token_ids[place]])), rounding

    return [equality(AS_PLAIN, "temperature 0", _ids(plain), _ids(outputs), session.exact, gap), *checks]


def choice_check(where: str, chosen: GreedyEvidence) -> Check:
    """Whether every token is the one that the target prefers, but for near ties."""
    found = f"{chosen.num_other} others, largest gap {chosen.max_gap:.2g}"
    return Check(CHOICE, where, "fail" if chosen.num_beyond else "pass", chosen.num_tokens, found, "0 beyond rounding")


def _ids(outputs: Sequence[GenerateOutput]) -> list[Sequence[int]]:
    return [output.token_ids for output in outputs]


def check_seeds(session: Session) -> list[Check]:
    """A given seed reproduces its answer: under the coupled rule with any settings, under another rule with the same
    ones.

    Under the coupled rule an answer may differ where rounding decides between two tokens. Other rules compare random
    numbers with probabilities of target and draft, so they are reproducible only if those have the same bits: see
    `Session.repeats_draws`. Choices from measured times are not reproducible under them.
    """
    options = session.options
    prompts = session.prompts_in_turn(min(_TEXTS, options.num_prompts))
    usual = SamplingParams(max_tokens=options.max_tokens, temperature=max(options.sampled), ignore_eos=True)
    params = [replace(usual, seed=options.seed + i) for i in range(len(prompts))]
    if options.spec.rule in ("auto", "coupled"):
        return _coupled_seeds(session, prompts, params)
    spec = _untimed(options.spec)
    return [] if spec is None else [_drawn_seeds(session, prompts, params, spec)]


def _coupled_seeds(session: Session, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Check]:
    spec, exact, temperature = session.options.spec, session.exact, params[0].temperature
    base = session.answers(prompts, params, spec).outputs

    def compare(words: str, spec: SpecConfig, together: bool = True) -> Check:
        again = session.answers(prompts, params, spec, together).outputs

        def gap(i: int, place: int) -> tuple[float, float]:
            """Difference of the perturbed logits that decide under the coupled rule, up to a constant of the row."""
            logits, rounding = scored_place(session.rescore(again[i], params[i]), place)
            noise = RaceNoise(params[i].seed or 0, len(logits), logits.device).at([len(again[i].prompt_ids) + place])[0]
            keys = noise.double().log() - logits.double() / temperature  # [V]
            return abs(float(keys[base[i].token_ids[place]] - keys[again[i].token_ids[place]])), rounding / temperature

        where = f"temperature {temperature:g}, {words}"
        return equality(EQUAL_SEEDS, where, _ids(base), _ids(again), exact, gap)

    checks = [compare("the same again", spec), compare("one by one", spec, together=False)]
    if spec.drafter is not None:
        number = next(n for n in _OTHER_NUM_DRAFTS if n != spec.num_draft)
        checks += [
            compare(f"num_draft {number}", replace(spec, num_draft=number)),
            compare("plain decoding", SpecConfig()),
        ]
    return checks


def _drawn_seeds(
    session: Session, prompts: Sequence[list[int]], params: Sequence[SamplingParams], spec: SpecConfig
) -> Check:
    """Two independent runs: drafters are reset before each, and each has its own tenant, so neither finds cached blocks
    of the other.
    """

    def run(name: str) -> list[GenerateOutput]:
        session.llm.reset_drafters(spec)
        return session.answers(prompts, [replace(one, tenant=f"audit {name}") for one in params], spec).outputs

    base, again = run("one"), run("two")
    where = f"temperature {params[0].temperature:g}, the same again"
    check = equality(EQUAL_SEEDS, where, _ids(base), _ids(again), exact=True)
    if check.result == "pass" or session.repeats_draws(spec):
        return check
    return replace(check, result="info", demanded="", detail=_WHY_NOT_DEMANDED)


def _untimed(spec: SpecConfig) -> SpecConfig | None:
    """The settings with fixed numbers instead of those chosen by measured times; None for a drafter that uses such."""
    has_open_exit = spec.drafter == "early_exit" and spec.skip_layers is None and spec.exit_layer == "auto"
    if has_open_exit or spec.drafter in _CHOOSERS:
        return None
    if spec.drafter is not None and spec.num_draft == "auto":
        spec = replace(spec, num_draft=_OTHER_NUM_DRAFTS[0])
    return replace(spec, draft_probability=1.0) if spec.draft_probability == "auto" else spec


def check_numerics(session: Session) -> list[Check]:
    """The logits of a row computed alone, with drafted tokens after it, and beside another request; must be equal only
    with strict numerics.
    """
    options, target = session.options, session.target
    params = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True)
    prompts = session.prompts_in_turn(min(_TEXTS, options.num_prompts))
    outputs = session.answers(prompts, [params] * len(prompts), SpecConfig()).outputs
    texts = [(output.prompt_ids, output.token_ids) for output in outputs]
    num_draft = options.spec.num_draft if options.spec.num_draft != "auto" and options.spec.num_draft > 0 else 4
    single = [_decode(target, [text], 0)[0] for text in texts]
    cases = {
        f"{1 + num_draft} rows against 1": [_decode(target, [text], num_draft)[0] for text in texts],
        f"{len(texts)} requests against 1": _decode(target, texts, 0),
    }
    strict = options.numerics == "strict"
    checks = []
    for where, found in cases.items():
        pairs = list(zip(single, found, strict=True))
        equal = all(torch.equal(one, other) for one, other in pairs)
        apart = max(float((one.double() - other.double()).abs().max()) for one, other in pairs)
        result: Result = "info" if not strict else "pass" if equal else "fail"
        rows = sum(len(one) for one in single)
        told = "bitwise equal" if equal else f"up to {apart:.2g} apart"
        demanded = "bitwise equal" if strict else ""
        checks.append(Check("logits do not depend on the batch", where, result, rows, told, demanded))
    return checks


def _decode(
    target: LanguageModel, texts: Sequence[tuple[Sequence[int], Sequence[int]]], num_draft: int
) -> list[Tensor]:
    """Logits `[n, V]` of the answers of some texts, run as one batch, each step one row and `num_draft` drafted tokens
    after it.

    The drafted tokens are the text itself, so the rows of a verification pass are rows of the text.
    """
    sequences = [-1 - i for i in range(len(texts))]
    found: list[list[Tensor]] = [[] for _ in texts]
    opened = []
    try:
        for sequence, (prompt, _) in zip(sequences, texts, strict=True):
            target.open(sequence)
            opened.append(sequence)
            if len(prompt) > 1:
                target.forward(_tensor(target, prompt[:-1]), [Segment(sequence, len(prompt) - 1, (), 0)])
                target.commit(sequence, len(prompt) - 1)
        length = min(len(answer) for _, answer in texts)
        for start in range(0, length, 1 + num_draft):
            count = min(1 + num_draft, length - start)
            rows = [[prompt[-1], *answer][start : start + count] for prompt, answer in texts]
            parents = tuple(range(-1, count - 2))
            tokens = _tensor(target, [token for row in rows for token in row])
            logits = target.forward(tokens, [Segment(s, 1, parents, count) for s in sequences]).logits
            for i, sequence in enumerate(sequences):
                target.commit(sequence, 1, tuple(range(count - 1)))
                found[i].append(logits[i * count : (i + 1) * count])
    finally:
        for sequence in opened:
            target.close(sequence)
    return [torch.cat(parts) for parts in found]


def _tensor(target: LanguageModel, tokens: Sequence[int]) -> Tensor:
    return torch.tensor(tokens, dtype=torch.int64, device=target.device)


def check_blocks(session: Session) -> list[Check]:
    """At the end no cache is in use."""
    checks = []
    for name, model in session.models():
        free, total = model.num_free_tokens(), model.capacity_tokens
        result: Result = "pass" if free == total and not session.llm.engine.has_work else "fail"
        checks.append(Check("all cache is released", name, result, 0, f"{free} of {total} tokens free", "all free"))
    return checks
