"""What an engine holds at this moment: requests, and tokens of its caches."""

from __future__ import annotations

from typing import Any

from foretoken.draft.base import ModelDrafter
from foretoken.engine.llm import LLM
from foretoken.model.interface import LanguageModel


def gauges(llm: LLM) -> dict[str, Any]:
    """`kv_cache_usage` and `draft_kv_cache_usage` (0 to 1, the fullest draft), `invariants`, and where drafters learn
    `adaptation`.

    `invariants` holds `num_running` and `num_waiting` requests and, for each of the `pools` (the target's and one for
    every draft model), its tokens: `free` (what the prefix cache keeps and gives away when needed included), `used`
    and `total`. Read between or during steps of the engine: numbers of one moment, whole only while it is idle.
    """
    engine = llm.engine
    target = pool_of(engine.target)
    drafts = {
        f"{drafter.name} {number}": pool_of(model)
        for drafter in llm.loaded_drafters()
        if isinstance(drafter, ModelDrafter)
        for number, model in enumerate(drafter.models())
        if model is not engine.target
    }
    return {
        "kv_cache_usage": _share(target),
        "draft_kv_cache_usage": max(map(_share, drafts.values()), default=0.0),
        "invariants": {
            "num_running": len(engine.scheduler.running),
            "num_waiting": len(engine.scheduler.waiting),
            "pools": {"target": target, **drafts},
        },
    } | _adaptation(llm)


def _adaptation(llm: LLM) -> dict[str, Any]:
    """What learning did so far, over all drafters and as counts, so that workers add up."""
    states = llm.adaptations
    if not states:
        return {}
    names = ("num_swaps", "num_returns", "num_judged", "num_learnt_tokens")
    counts = {name: sum(getattr(state, name) for state in states) for name in names}
    return {"adaptation": {"num_drafters": len(states), **counts, "spent_s": llm.adaptation_s}}


def pool_of(model: LanguageModel) -> dict[str, int]:
    """The tokens of a model's cache."""
    total, free = model.capacity_tokens, model.num_free_tokens()
    return {"free": free, "used": total - free, "total": total}


def _share(pool: dict[str, int]) -> float:
    return pool["used"] / pool["total"] if pool["total"] else 0.0
