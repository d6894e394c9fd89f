"""Speculation of one request: which `SpecConfig` its `spec` field asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from foretoken.backend.call import ModelInfo
from foretoken.config import LOSSY_RULES, RULES, SpecConfig
from foretoken.errors import ConfigError
from foretoken.registry import PLAIN, known_drafters, traits_of
from foretoken.server.api.config import ApiConfig
from foretoken.server.api.errors import invalid, unsupported
from foretoken.server.api.schemas import SamplingFields, SpecFields

_ALIASES = {
    "num_draft_tokens": "num_draft_tokens",
    "draft_num_predict": "draft_num_predict",
    "speculative_n_max": "speculative.n_max",
}


def spec_of(body: SamplingFields, info: ModelInfo, config: ApiConfig) -> SpecConfig:
    """The configuration that a request runs with. Where nobody drafts, how much and under which rule has no effect; the
    response's report says so.

    Raises:
        ApiError: a drafter that this server does not have, names that contradict each other, a rule that is refused.
    """
    asked = body.spec or SpecFields()
    num_draft, wants_none, spec = _num_draft(body, asked), _wants_none(asked), info.default_spec
    if wants_none and num_draft not in (None, 0, "auto"):
        raise invalid("spec.num_draft", "drafter null is plain decoding; leave num_draft out", num_draft)
    if wants_none or num_draft == 0:
        spec = SpecConfig()
    elif asked.drafter is not None:
        spec = _named(asked.drafter, info, config)
    if asked.rule is not None:
        _check_rule(asked.rule, config)
    spec = with_prediction(body, spec, config)
    if asked.exact and (asked.rule or spec.rule) in LOSSY_RULES:
        raise invalid("spec.exact", "the rule changes the target's distribution; name another one")
    if spec.drafter is None:
        return spec
    try:
        if num_draft is not None:
            spec = replace(spec, num_draft=num_draft)
        if asked.rule is not None:
            spec = replace(spec, rule=asked.rule, allow_lossy=config.allow_lossy)
    except ConfigError as error:
        raise invalid(f"spec.{error.field}", error.remedy, error.value) from None
    return spec


def _check_rule(rule: str, config: ApiConfig) -> None:
    if rule not in RULES:
        raise invalid("spec.rule", f"must be one of {', '.join(RULES)}")
    if rule in LOSSY_RULES and not config.allow_lossy:
        raise invalid("spec.rule", "changes the target's distribution, and this server allows no such rule")


def with_prediction(body: SamplingFields, spec: SpecConfig, config: ApiConfig) -> SpecConfig:
    """The configuration under which a request's prediction is drafted beside its drafter: plain requests stay plain,
    but a server without a drafter drafts predictions.
    """
    if not uses_prediction(body, config) or "predicted" in spec.leaves:
        return spec
    if spec.drafter is None:
        return SpecConfig("predicted")
    if spec.drafter in ("auto", "mix") and not spec.parts:
        return spec  # takes it in by itself
    if spec.is_composite and spec.drafter != "cascade":
        return replace(spec, parts=("predicted", *spec.parts))
    part = replace(spec, rule="auto", allow_lossy=False, draft_probability=1.0)
    if part.num_probe:  # probes run beside their drafter's own tokens only
        part = replace(part, lookahead_window=0)
    return SpecConfig("auto", rule=spec.rule, allow_lossy=spec.allow_lossy, parts=("predicted", part))


def uses_prediction(body: SamplingFields, config: ApiConfig) -> bool:
    """Whether the request's prediction is drafted: there is one, the operator allows it, and the request speculates."""
    asked = body.spec or SpecFields()
    return bool(body.prediction) and config.predictions and not _wants_none(asked) and _num_draft(body, asked) != 0


def _wants_none(asked: SpecFields) -> bool:
    return "drafter" in asked.model_fields_set and asked.drafter in (None, PLAIN)


def _num_draft(body: SamplingFields, asked: SpecFields) -> int | Literal["auto"] | None:
    """How many tokens to draft, under whichever name."""
    given: dict[str, Any] = {} if asked.num_draft is None else {"spec.num_draft": asked.num_draft}
    for name, shown in _ALIASES.items():
        if getattr(body, name) is not None:
            given[shown] = getattr(body, name)
    if len(set(given.values())) > 1:
        raise invalid("spec.num_draft", f"{' and '.join(given)} disagree; give one")
    return next(iter(given.values()), None)


def _named(name: str, info: ModelInfo, config: ApiConfig) -> SpecConfig:
    offered = offered_specs(info, config)
    if name not in offered:
        is_lost = info.missing_draft is not None and name in {spec.drafter for spec in config.specs}
        what = "its draft could not be loaded" if is_lost else "this server has no settings for it"
        what = what if name in known_drafters() else "there is no such drafter"
        raise unsupported("spec.drafter", f"{what}; choose one of {', '.join(sorted(offered))}, or null")
    return offered[name]


def offered_specs(info: ModelInfo, config: ApiConfig) -> dict[str, SpecConfig]:
    """What a request may name: the operator's settings by drafter, without those of a draft that could not be loaded,
    then drafters that need no file.
    """
    kept = [spec for spec in config.specs if info.missing_draft is None or spec.draft != info.missing_draft]
    found = {spec.drafter: spec for spec in (info.default_spec, *kept) if spec.drafter is not None}
    for name in known_drafters():
        if name not in found and traits_of(name).is_lookup and name != "predicted":
            found[name] = SpecConfig(name)
    return {"auto": SpecConfig("auto")} | found
