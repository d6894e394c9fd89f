"""How an engine is started with a head, or with a drafter without one: argv, environment and configuration files."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field

from foretoken.errors import ConfigError
from foretoken.export.engines import NAMES, OtherEngine, target_reason
from foretoken.heads.config import BlockConfig, EagleConfig, HeadConfig
from foretoken.heads.formats.layers import are_default_taps, taps_to_outputs

_VLLM_NOTES = {
    "medusa": "vLLM runs Medusa as a chain of first choices.",
    "block": "Needs vLLM's model runner V2, which is written in Triton: vLLM's CPU build does not run it.",
}
_OLD_TRTLLM = (1, 1)  # up to here the option is written with its older name, which later releases know too


@dataclass(frozen=True)
class Launch:
    """One way to start an engine; `files` are written beside the head and named in `argv`, `prepare` runs first."""

    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    prepare: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()

    def command(self) -> str:
        """The command line, quoted for a shell."""
        env = "".join(f"{name}={shlex.quote(value)} " for name, value in self.env.items())
        return env + shlex.join(self.argv)


def launch_of(config: HeadConfig, engine: OtherEngine, target: str, head: str, num_draft: int) -> Launch:
    """How `engine` starts `target` with the head in the folder `head`, drafting `num_draft` tokens."""
    makers = {"vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm, "llamacpp": _llamacpp, "tgi": _tgi}
    return makers[engine.name](config, engine, target, head, num_draft)


def _vllm(config: HeadConfig, engine: OtherEngine, target: str, head: str, num_draft: int) -> Launch:  # noqa: ARG001
    # Without "method" vLLM infers it from the path.
    spec: dict[str, object] = {"method": config.method, "model": head, "num_speculative_tokens": num_draft}
    kind = config.kind
    if kind == "eagle":
        spec["draft_tensor_parallel_size"] = 1
    notes = (_VLLM_NOTES[kind],) if kind in _VLLM_NOTES else ()
    return Launch(("vllm", "serve", target, "--speculative-config", json.dumps(spec)), notes=notes)


def _sglang(config: HeadConfig, engine: OtherEngine, target: str, head: str, num_draft: int) -> Launch:  # noqa: ARG001
    algorithm = {"eagle": "EAGLE", "eagle3": "EAGLE3", "dflash": "DFLASH", "dspark": "DSPARK"}[config.method]
    argv = ["python", "-m", "sglang.launch_server", "--model-path", target]
    argv += ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", head]
    if isinstance(config, BlockConfig):
        return Launch((*argv, f"--speculative-{algorithm.lower()}-block-size", str(config.block_size)))
    # One draft token per place is a chain, for which SGLang asks for one token more than steps.
    argv += ["--speculative-num-steps", str(num_draft), "--speculative-eagle-topk", "1"]
    argv += ["--speculative-num-draft-tokens", str(num_draft + 1)]
    notes = ["Speculation lowers max_running_requests to 48 unless --max-running-requests is given."]
    if isinstance(config, EagleConfig) and config.draft_vocab_size < config.layer.vocab_size:
        notes.append("With a cut vocabulary SGLang refuses --speculative-use-rejection-sampling.")
    return Launch(tuple(argv), notes=tuple(notes))


def _trtllm(config: HeadConfig, engine: OtherEngine, target: str, head: str, num_draft: int) -> Launch:
    kind = {"eagle3": "Eagle3", "dflash": "DFlash", "dspark": "DSpark"}[config.method]
    lines = ["speculative_config:", f"  decoding_type: {kind}", f"  max_draft_len: {num_draft}"]
    lines.append(f"  speculative_model: {json.dumps(head)}")
    if isinstance(config, EagleConfig) and not are_default_taps(config.taps, config.target_num_layers):
        lines.append(f"  eagle3_layers_to_capture: {taps_to_outputs(config.taps)}")
    option = "--extra_llm_api_options" if engine.numbers[:2] <= _OLD_TRTLLM else "--config"
    return Launch(("trtllm-serve", target, option, "spec.yaml"), files={"spec.yaml": "\n".join(lines) + "\n"})


def _llamacpp(config: HeadConfig, engine: OtherEngine, target: str, head: str, num_draft: int) -> Launch:  # noqa: ARG001
    convert = ("python", "convert_hf_to_gguf.py")
    prepare = (
        (*convert, target, "--outtype", "bf16", "--outfile", "target.gguf"),
        (*convert, head, "--target-model-dir", target, "--outtype", "bf16", "--outfile", "head.gguf"),
    )
    argv = ["llama-server", "-m", "target.gguf", "-md", "head.gguf"]
    argv += ["--spec-type", f"draft-{config.method}", "--spec-draft-n-max", str(num_draft)]
    notes = (
        "Without --spec-type nothing is drafted, -md or not.",
        "Builds that still know --draft-max run draft models only, no trained heads.",
    )
    return Launch(tuple(argv), prepare=prepare, notes=notes)


def _tgi(config: HeadConfig, engine: OtherEngine, target: str, head: str, num_draft: int) -> Launch:  # noqa: ARG001
    notes = (
        f"The target is {target}, named by base_model_name_or_path in config.json.",
        "TGI turns Medusa off for batches of more than 128 tokens.",
    )
    return Launch(("text-generation-launcher", "--model-id", head, "--speculate", str(num_draft)), notes=notes)


# ---- drafters without a trained head: a draft model, n-gram lookup, suffixes
#
# Only a launch line is written; the draft model stays where it is.

_Maker = Callable[[str, str, int], Launch]


def plain_drafters(engine: str) -> list[str]:
    """Our drafters without a trained head that have a counterpart in `engine`."""
    return [name for name, engines in _MAKERS.items() if engine in engines]


def plain_launch(drafter: str, engine: OtherEngine, target: str, draft: str | None, num_draft: int) -> Launch:
    """How `engine` starts `target` with one of our drafters that has a counterpart there.

    Raises:
        ConfigError: it has none, or the draft model is not named.
    """
    makers = _MAKERS.get(drafter, {})
    if engine.name not in makers:
        known = ", ".join(plain_drafters(engine.name))
        raise ConfigError(
            "drafter", drafter, f"has no counterpart in {NAMES[engine.name]}; it takes {known} or a --head"
        )
    if drafter == "draft_model" and draft is None:
        raise ConfigError("draft", None, "drafter='draft_model' needs the folder or hub id of a draft model")
    for role, name in (("target", target), ("draft", draft or "")):
        if (reason := target_reason(name, engine, has_head=False)) is not None:
            raise ConfigError(role, name, reason)
    return makers[engine.name](target, draft or "", num_draft)


def _plain_vllm(**spec: object) -> _Maker:
    def make(target: str, draft: str, num_draft: int) -> Launch:
        own = {**spec, "num_speculative_tokens": num_draft, **({"model": draft} if draft else {})}
        return Launch(("vllm", "serve", target, "--speculative-config", json.dumps(own)))

    return make


def _sglang_draft(target: str, draft: str, num_draft: int) -> Launch:
    argv = ["python", "-m", "sglang.launch_server", "--model-path", target, "--speculative-algorithm", "STANDALONE"]
    argv += ["--speculative-draft-model-path", draft, "--speculative-num-steps", str(num_draft)]
    argv += ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(num_draft + 1)]
    return Launch(tuple(argv))


def _sglang_ngram(target: str, draft: str, num_draft: int) -> Launch:  # noqa: ARG001
    argv = ("python", "-m", "sglang.launch_server", "--model-path", target, "--speculative-algorithm", "NGRAM")
    return Launch((*argv, "--speculative-num-draft-tokens", str(num_draft)))


def _plain_trtllm(kind: str) -> _Maker:
    def make(target: str, draft: str, num_draft: int) -> Launch:
        lines = ["speculative_config:", f"  decoding_type: {kind}", f"  max_draft_len: {num_draft}"]
        lines += [f"  speculative_model: {json.dumps(draft)}"] if draft else []
        return Launch(("trtllm-serve", target, "--config", "spec.yaml"), files={"spec.yaml": "\n".join(lines) + "\n"})

    return make


def _llamacpp_draft(target: str, draft: str, num_draft: int) -> Launch:
    files, prepare = _as_gguf((target, "target.gguf"), (draft, "draft.gguf"))
    argv = ("llama-server", "-m", files[0], "-md", files[1], "--spec-type", "draft-simple")
    return Launch((*argv, "--spec-draft-n-max", str(num_draft)), prepare=prepare)


def _llamacpp_ngram(target: str, draft: str, num_draft: int) -> Launch:  # noqa: ARG001
    # Its own 12 tokens to look up and 48 to draft rarely match in a short answer.
    (file,), prepare = _as_gguf((target, "target.gguf"))
    argv = ("llama-server", "-m", file, "--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "4")
    return Launch((*argv, "--spec-ngram-simple-size-m", str(num_draft)), prepare=prepare)


def _as_gguf(*models: tuple[str, str]) -> tuple[list[str], tuple[tuple[str, ...], ...]]:
    """GGUF files of models, and the commands that make those that are none yet under the names beside them."""
    convert = ("python", "convert_hf_to_gguf.py")
    prepare = tuple(
        (*convert, folder, "--outtype", "bf16", "--outfile", file) for folder, file in models if not _is_gguf(folder)
    )
    return [name if _is_gguf(name) else file for name, file in models], prepare


def _is_gguf(name: str) -> bool:
    return name.endswith(".gguf")


def _tgi_ngram(target: str, draft: str, num_draft: int) -> Launch:  # noqa: ARG001
    return Launch(("text-generation-launcher", "--model-id", target, "--speculate", str(num_draft)))


def _transformers(text: str) -> _Maker:
    def make(target: str, draft: str, num_draft: int) -> Launch:
        script = text.format(target=target, draft=draft, num_draft=num_draft)
        return Launch(("python", "generate.py"), files={"generate.py": script})

    return make


# The library's defaults (20 tokens, a threshold, a schedule that adapts) are set aside: they hide what K is.
_ASSISTED = """from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{target}")
model, draft = (AutoModelForCausalLM.from_pretrained(name) for name in ("{target}", "{draft}"))
draft.generation_config.num_assistant_tokens = {num_draft}
draft.generation_config.num_assistant_tokens_schedule = "constant"
draft.generation_config.assistant_confidence_threshold = 0
print(tokenizer.decode(model.generate(**tokenizer("def ", return_tensors="pt"), assistant_model=draft)[0]))
"""
_LOOKUP = """from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{target}")
model = AutoModelForCausalLM.from_pretrained("{target}")
inputs = tokenizer("def ", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, prompt_lookup_num_tokens={num_draft})[0]))
"""
_MAKERS: dict[str, dict[str, _Maker]] = {
    "draft_model": {
        "vllm": _plain_vllm(method="draft_model"),
        "sglang": _sglang_draft,
        "trtllm": _plain_trtllm("Draft_Target"),
        "llamacpp": _llamacpp_draft,
        "transformers": _transformers(_ASSISTED),
    },
    "ngram": {
        "vllm": _plain_vllm(method="ngram", prompt_lookup_min=2, prompt_lookup_max=5),
        "sglang": _sglang_ngram,
        "trtllm": _plain_trtllm("NGram"),
        "llamacpp": _llamacpp_ngram,
        "tgi": _tgi_ngram,
        "transformers": _transformers(_LOOKUP),
    },
    "suffix": {"vllm": _plain_vllm(method="suffix"), "trtllm": _plain_trtllm("SA")},
}
