"""docs/models.md says of thirty published models how each runs: natively, through transformers, or not at all."""

from __future__ import annotations

from foretoken.model.families import FAMILIES
from proof.families import TABLE
from tests.helpers.family_trial import NATIVE
from tests.helpers.published_models import MODELS, table


def test_the_page_says_how_each_published_model_runs() -> None:
    assert len({model.name for model in MODELS}) == 30
    assert table() in TABLE.read_text(encoding="utf-8"), "run `python -m proof.families llama --write`"


def test_published_models_of_a_native_family_run_natively() -> None:
    """No option that they use is missing, and only families that nobody here runs are left out."""
    hows = {model.name: (model.raw["model_type"], model.row[2]) for model in MODELS}
    assert all((how == NATIVE) == (family in FAMILIES) for family, how in hows.values())
