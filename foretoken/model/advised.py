"""The sampling that a model's makers advise, for requests that name none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretoken.errors import CheckpointError, InputError
from foretoken.model.fields import Fields, read_json
from foretoken.model.gguf.header import is_gguf
from foretoken.model.gguf.parts import read_header
from foretoken.model.names import model_folder
from foretoken.model.packaged import PACKAGED
from foretoken.params import ADVISED_FIELDS, SamplingParams

# Fields of `SamplingParams`, as `generation_config.json` names them and as GGUF does.
_GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def advised_sampling(name: str | Path) -> dict[str, Any]:
    """What is advised for a model, by field of `SamplingParams`: from the table of packaged models, the metadata of a
    GGUF file, or `generation_config.json`, whose `do_sample` is not read (as in vLLM). Empty where nothing is advised.

    Raises:
        CheckpointError: a value that cannot be honoured, or no such model.
    """
    if isinstance(name, str) and name in PACKAGED:
        return dict(PACKAGED[name].sampling)
    folder = model_folder(name)
    keys: Mapping[str, str]
    if is_gguf(folder):
        fields, keys = read_header(folder).fields, _GGUF_KEYS
    else:
        file = folder / "generation_config.json"
        if not file.exists():
            return {}
        fields, keys = Fields(read_json(file), str(file)), {own: own for own in ADVISED_FIELDS}
    return {own: _advised(fields, own, key) for own, key in keys.items() if fields.has(key)}


def _advised(fields: Fields, own: str, key: str) -> Any:  # noqa: ANN401 - of the type that the field has
    value = fields.raw[key]
    if own == "top_k" and value == -1:
        value = 0  # all tokens
    try:
        SamplingParams(**{own: value})
    except InputError as error:
        raise CheckpointError(f"{fields.where}: {key}={value!r} {error.remedy}; mend the file") from error
    return value
