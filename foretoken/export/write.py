"""Writes a head in the variant of an engine, with the lines that start it: `launch.json` and `LAUNCH.md`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from foretoken.errors import ConfigError, StorageError
from foretoken.export.engines import OtherEngine, refusal_reason, target_reason
from foretoken.export.launch import Launch, launch_of, plain_launch
from foretoken.files import writing_folder
from foretoken.heads.base import Head
from foretoken.heads.checkpoint import load_head, save_head, save_speculators
from foretoken.heads.config import BlockConfig, EagleConfig, MedusaConfig
from foretoken.heads.formats.block import CORRECTION_KEYS
from foretoken.heads.formats.eagle import ARCHITECTURE_1_BIAS
from foretoken.heads.formats.medusa import MEDUSA_WEIGHTS, SHARED_OUTPUT
from foretoken.model.fields import read_json
from foretoken.model.loader import read_checkpoint, read_config
from foretoken.model.weights import EMBEDDING, WEIGHTS
from foretoken.model.weights import HEAD as OUTPUT

_IN_VLLM = [("vllm", method) for method in ("eagle", "eagle3", "medusa", "draft_model")]
_CHECKED = {
    ("llamacpp", "eagle3"): "Started with such files by us in build 0c1e570 alone",
    **dict.fromkeys(_IN_VLLM, "Started with such files by us in 0.32 alone"),
}


def export_head(
    head_folder: Path,
    target_folder: Path,
    target_name: str,
    engine: OtherEngine,
    out: Path,
    num_draft: int,
    as_speculators: bool = False,
) -> Launch:
    """Write the head in `head_folder` as `engine` reads it into `out`, which must not hold anything yet.

    `target_name` is what the launch line calls the target. `as_speculators` writes vLLM's exchange form.

    Raises:
        ConfigError: a pair that cannot work, with the reason; more draft tokens than the head makes.
        StorageError: `out` is in use or cannot be written.
        CheckpointError, MismatchError, UnsupportedModelError: see `load_head`.
    """
    target = read_config(target_folder)
    head = load_head(head_folder, target, target_folder=target_folder)
    _check(head, engine, num_draft, as_speculators)
    if (reason := target_reason(target_name, engine, has_head=True)) is not None:
        raise ConfigError("target", target_name, reason)
    name = str(out.resolve())
    launch = launch_of(head.config, engine, target_name, name, num_draft)
    if as_speculators:
        launch = Launch(("vllm", "serve", name))

    def fill(work: Path) -> None:
        if as_speculators:
            architectures = read_json(target_folder / "config.json").get("architectures") or ["LlamaForCausalLM"]
            save_speculators(head, work, target, num_draft, target_name, str(architectures[0]))
        else:
            save_head(head, work, target, target_folder, target_name if head.config.method == "medusa" else None)
            if engine.name == "sglang":
                _adapt_to_sglang(work, head)
            elif engine.name == "vllm" and isinstance(head.config, MedusaConfig) and not head.config.has_own_output:
                _add_shared_output(work, head, target_folder)

    _write(out, engine, launch, head.config.method, num_draft, fill)
    return launch


def export_plain(
    drafter: str, target_name: str, draft: str | None, engine: OtherEngine, out: Path, num_draft: int
) -> Launch:
    """Write the launch files of a drafter without a head.

    Raises:
        ConfigError: the engine or its version has no counterpart, or the draft model is not named.
        StorageError: `out` is in use or cannot be written.
    """
    launch = plain_launch(drafter, engine, target_name, draft, num_draft)
    _write(out, engine, launch, drafter, num_draft, lambda _work: None)
    return launch


def _check(head: Head, engine: OtherEngine, num_draft: int, as_speculators: bool) -> None:
    reason = refusal_reason(head.config, engine)
    if reason is not None:
        raise ConfigError("to", str(engine), reason)
    if as_speculators and engine.name != "vllm":
        raise ConfigError("speculators", True, f"only vLLM reads this form, not {engine}")
    most = head.config.max_num_draft
    if most is not None and num_draft > most:
        raise ConfigError("num_draft", num_draft, f"this head drafts at most {most} tokens")


def _add_shared_output(folder: Path, head: Head, target_folder: Path) -> None:
    """Put the target's output matrix beside Medusa heads that use it: vLLM never takes it from the target, and would
    multiply by a matrix of whatever its memory held.
    """
    tensors = load_file(folder / MEDUSA_WEIGHTS)
    dtype = next(head.parameters()).dtype
    target, weights = read_checkpoint(target_folder)
    name = EMBEDDING if target.tie_embeddings else OUTPUT
    whole = weights.read(name, (target.vocab_size, target.hidden_size))  # [V, D]
    matrix = whole[head.vocabulary.ids.cpu()].to(dtype)  # [V_d, D]
    save_file(tensors | {SHARED_OUTPUT: matrix.contiguous()}, folder / MEDUSA_WEIGHTS, metadata={"format": "pt"})


def _adapt_to_sglang(folder: Path, head: Head) -> None:
    """What SGLang reads otherwise in `config.json` and beside it."""
    path, config = folder / "config.json", head.config
    raw = read_json(path)
    if isinstance(config, BlockConfig):
        raw["dflash_config"] |= {key: raw[key] for key in CORRECTION_KEYS if key in raw}
    elif isinstance(config, EagleConfig) and config.version == 1:
        raw |= {"architectures": [ARCHITECTURE_1_BIAS], "bias": True}
        if not config.fc_bias:  # SGLang makes one in any case, and leaves a missing one random
            tensors = load_file(folder / WEIGHTS)
            zeros = torch.zeros(config.layer.hidden_size, dtype=tensors["fc.weight"].dtype)
            save_file(tensors | {"fc.bias": zeros}, folder / WEIGHTS, metadata={"format": "pt"})
    elif isinstance(config, EagleConfig) and not config.has_own_output and head.vocabulary.is_whole:
        raw.pop("draft_vocab_size")  # SGLang takes the target's matrix only without this key
    path.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def _write(
    out: Path, engine: OtherEngine, launch: Launch, method: str, num_draft: int, fill: Callable[[Path], None]
) -> None:
    """Write what `fill` puts into a folder, and the files of `launch`, under the name `out` once all are there."""
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise StorageError(f"{out} exists already; choose another folder or remove it")
        with writing_folder(out.resolve().parent, f".{out.name}.writing-") as work:
            fill(work)
            for name, text in launch.files.items():
                (work / name).write_text(text, encoding="utf-8")
            described = json.dumps(launch_json(engine, launch), indent=2)
            (work / "launch.json").write_text(described + "\n", encoding="utf-8")
            (work / "LAUNCH.md").write_text(_readable(engine, launch, method, num_draft), encoding="utf-8")
            if out.exists():
                out.rmdir()
            for file in work.iterdir():
                file.chmod(0o644)  # the engine may run as another user; safetensors writes files for this one alone
            work.chmod(0o755)
            os.replace(work, out)
    except StorageError:
        raise
    except (OSError, SafetensorError) as error:  # a full disk is an error of safetensors
        raise StorageError(f"cannot write the export to {out}: {error}") from error


def launch_json(engine: OtherEngine, launch: Launch) -> dict[str, Any]:
    """What a program needs to start the engine: `argv` runs in the folder of the files."""
    return {
        "engine": engine.name,
        "engine_version": engine.version,
        "prepare": [list(argv) for argv in launch.prepare],
        "argv": list(launch.argv),
        "env": {},  # no engine needs a variable so far
        "files": sorted(launch.files),
    }


def _readable(engine: OtherEngine, launch: Launch, method: str, num_draft: int) -> str:
    before = [*(Launch(argv).command() for argv in launch.prepare), launch.command()]
    lines = [f"# {method} in {engine}", "", f"Drafts up to {num_draft} tokens per step. Run in this folder:", ""]
    lines += ["```", *before, "```", ""]
    lines += [f"- {note}" for note in launch.notes]
    checked = _CHECKED.get((engine.name, method), "Not started with such files by us")
    lines += [f"- {checked}: compare the engine's acceptance with `foretoken eval` first."]
    for name, text in launch.files.items():
        lines += ["", f"`{name}`:", "", "```", text.rstrip(), "```"]
    return "\n".join(lines) + "\n"
