"""The drafters over which cases marked SPEC run; each is cheap on the reference pair.

The fixture `backend` registers `synthetic`.
"""

from __future__ import annotations

from typing import Any

from foretoken import SpecConfig
from foretoken.server.api.config import ApiConfig

_CHAIN = SpecConfig("draft_model", draft="reference:draft", num_draft=3)
_TREE = SpecConfig("draft_model", draft="reference:draft", num_draft=6, tree="static", branching=2)

# name -> the field `spec` of a request
DRAFTERS: dict[str, dict[str, Any]] = {
    "off": {"drafter": None},
    "ngram": {"drafter": "ngram", "num_draft": 4},
    "suffix": {"drafter": "suffix", "num_draft": 4},
    "draft_model": {"drafter": "draft_model"},
    "tree": {"drafter": "draft_model"},
    "synthetic_0.0": {"drafter": "synthetic"},
    "synthetic_0.5": {"drafter": "synthetic"},
    "synthetic_1.0": {"drafter": "synthetic"},
}

# Over HTTP `suffix` drafts as `ngram` does, and `draft_model` too has a part of its tokens accepted: where a case costs
# seconds, these two are in proof/test_server_cases.py.
REST = ("suffix", "synthetic_0.5")
FEW = tuple(name for name in DRAFTERS if name not in REST)


def config_for(drafter: str, **settings: Any) -> ApiConfig:
    """Settings under which a request that names `draft_model` or `synthetic` gets the one that is meant."""
    specs: tuple[SpecConfig, ...] = (_TREE if drafter == "tree" else _CHAIN,)
    if drafter.startswith("synthetic"):
        specs = (*specs, SpecConfig("synthetic", num_draft=4, options={"rate": float(drafter.partition("_")[2])}))
    return ApiConfig(specs=specs, **settings)
