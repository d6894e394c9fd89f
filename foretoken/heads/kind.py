"""Which drafter runs a head, from its files alone; reads neither weights nor torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError, safe_open

from foretoken.config import SpecConfig
from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.model.fields import Fields, read_json, refuse_adapter, shown
from foretoken.model.names import model_folder

# What other engines run and this one does not, with what to take in its place.
_REFUSED = {
    "mlp_speculator": "an MLP speculator (IBM); train medusa heads for this target (foretoken train medusa)",
    "peagle": "P-EAGLE, which drafts in parallel; take an EAGLE-3 head, or train a block drafter",
    "dflash2": "DFlash2, whose convolutions are not run here; train a block drafter (foretoken train block)",
    "domino": "Domino, which only SGLang runs; train a block drafter (foretoken train block)",
    "hydra": "Hydra's own form, which is not read; train medusa heads with head.is_sequential=true",
}
_SPECULATORS = {"eagle3": "eagle", "dflash": "block", "dspark": "block"}
EXIT_ADAPTER = "early_exit_adapter"  # model_type of an adapter, a form of our own


def kind_of_head(name: str) -> str:
    """`head_kind` of the head of this name; a hub id is downloaded."""
    return head_kind(model_folder(name))


def with_head_kind(spec: SpecConfig, kind_of_name: Callable[[str], str] = kind_of_head) -> SpecConfig:
    """`spec` with the drafter that runs its head (`SpecConfig.head_kind`), read from the head's files where it is not
    known; a hub id is downloaded.

    Raises:
        CheckpointError, UnsupportedModelError: see `kind_of_head`.
        ConfigError: an option that this drafter does not take.
    """
    if spec.head is None or not spec.needs_head_kind:
        return spec
    return replace(spec, head_kind=kind_of_name(spec.head))


def head_kind(folder: Path) -> str:
    """The drafter that runs the head in `folder`: "eagle", "medusa", "block" or "early_exit".

    Raises:
        CheckpointError: no directory of a head, or one whose weights are pickles.
        UnsupportedModelError: a kind of head that is not run here; the message names it. Or a LoRA adapter.
    """
    refuse_adapter(folder)
    fields = Fields(read_json(folder / "config.json"), str(folder / "config.json"))
    kind = kind_of(fields)
    if kind is not None:
        return kind
    names = _tensor_names(folder)
    if any(name.startswith("speculator.") for name in names):
        raise refusal(folder, "mlp_speculator")
    if "fc.weight" in names:  # SafeAILab's EAGLE-1 heads call themselves LlamaForCausalLM
        return "eagle"
    if not names:
        from foretoken.model.weights import refuse_pickle  # with torch

        refuse_pickle(folder)  # as SafeAILab's EAGLE-1 heads are published
    raise CheckpointError(
        f"{folder} is no head that is known here (model_type={shown(fields.text('model_type'))}, "
        f"architectures={shown(fields.raw.get('architectures'))}); give the directory of an EAGLE, Medusa, DFlash or "
        "DSpark head, of an early-exit adapter, or of a speculators export"
    )


def kind_of(fields: Fields) -> str | None:
    """The same by `config.json`; None if it does not say."""
    model_type = fields.text("model_type", "") or ""
    speculators = fields.text("speculators_model_type")
    names = " ".join(fields.texts("architectures") or ()).lower()
    for kind in _REFUSED:
        if kind in (model_type, speculators) or kind.replace("_", "") in names.replace("_", ""):
            raise refusal(fields.where, kind)
    if fields.has("hydra_num_heads"):
        raise refusal(fields.where, "hydra")
    if speculators is not None:
        if speculators not in _SPECULATORS:
            known = ", ".join(_SPECULATORS)
            raise UnsupportedModelError(
                f"{fields.where}: speculators_model_type={shown(speculators)} is not run here; known: {known}"
            )
        return _SPECULATORS[speculators]
    if model_type == EXIT_ADAPTER:
        return "early_exit"
    if model_type == "medusa" or fields.has("medusa_num_heads"):
        return "medusa"
    if "dflash" in names or "dspark" in names:
        return "block"
    return "eagle" if "eagle" in names or fields.has("draft_vocab_size") else None


def refusal(where: object, kind: str) -> UnsupportedModelError:
    """The error for a kind of head that is not run here."""
    return UnsupportedModelError(f"{where} is {_REFUSED[kind]}")


def _tensor_names(folder: Path) -> list[str]:
    """Names in `model.safetensors`, from its header; none where there is no such file."""
    path = folder / "model.safetensors"
    if not path.exists():
        return []
    try:
        with safe_open(path, framework="numpy") as tensors:
            return list(tensors.keys())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is truncated or corrupt ({error}): download it again") from error
