"""How an engine is started with a head, or with a drafter without one: argv and configuration files."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from foretoken.errors import ConfigError
from foretoken.export.engines import NAMES, OtherEngine, target_reason, version_reason
from foretoken.heads.config import BlockConfig, EagleConfig, HeadConfig
from foretoken.heads.formats.layers import are_default_taps, taps_to_outputs

_VLLM_NOTES = {
    "medusa": "vLLM runs Medusa as a chain of first choices.",
    "block": "Needs vLLM's model runner V2, which is written in Triton: vLLM's CPU build does not run it.",
}
_OLD_TRTLLM = (1, 1)  # up to here the option is written with its older name, which later releases know too
# By drafter, the engines that have a counterpart, with its name there.
COUNTERPARTS: Mapping[str, Mapping[str, str]] = {
    "draft_model": {
        "vllm": "draft_model",
        "sglang": "STANDALONE",
        "trtllm": "Draft_Target",
        "llamacpp": "draft-simple",
        "transformers": "assistant_model",
    },
    "ngram": {
        "vllm": "ngram",
        "sglang": "NGRAM",
        "trtllm": "NGram",
        "llamacpp": "ngram-simple",
        "tgi": "speculate",
        "transformers": "prompt_lookup_num_tokens",
    },
    "suffix": {"vllm": "suffix", "trtllm": "SA"},
}
# The library's defaults (20 tokens, a threshold, a schedule that adapts) are set aside: they hide what K is.
_ASSISTED = """from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({target!r})
model, draft = (AutoModelForCausalLM.from_pretrained(name) for name in ({target!r}, {draft!r}))
draft.generation_config.num_assistant_tokens = {num_draft}
draft.generation_config.num_assistant_tokens_schedule = "constant"
draft.generation_config.assistant_confidence_threshold = 0
print(tokenizer.decode(model.generate(**tokenizer("def ", return_tensors="pt"), assistant_model=draft)[0]))
"""
_LOOKUP = """from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({target!r})
model = AutoModelForCausalLM.from_pretrained({target!r})
inputs = tokenizer("def ", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, prompt_lookup_num_tokens={num_draft})[0]))
"""


@dataclass(frozen=True)
class Launch:
    """One way to start an engine; `files` are written beside the head and named in `argv`, `prepare` runs first."""

    argv: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)
    prepare: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()

    def command(self) -> str:
        """The command line, quoted for a shell."""
        return shlex.join(self.argv)


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
    return _vllm_serve(target, spec, (_VLLM_NOTES[kind],) if kind in _VLLM_NOTES else ())


def _vllm_serve(target: str, spec: dict[str, object], notes: tuple[str, ...] = ()) -> Launch:
    return Launch(("vllm", "serve", target, "--speculative-config", json.dumps(spec)), notes=notes)


def _sglang(config: HeadConfig, engine: OtherEngine, target: str, head: str, num_draft: int) -> Launch:  # noqa: ARG001
    algorithm = {"eagle": "EAGLE", "eagle3": "EAGLE3", "dflash": "DFLASH", "dspark": "DSPARK"}[config.method]
    if isinstance(config, BlockConfig):
        size = (f"--speculative-{algorithm.lower()}-block-size", str(config.block_size))
        return Launch(_sglang_argv(target, algorithm, "--speculative-draft-model-path", head, *size))
    notes = ["Speculation lowers max_running_requests to 48 unless --max-running-requests is given."]
    if isinstance(config, EagleConfig) and config.draft_vocab_size < config.layer.vocab_size:
        notes.append("With a cut vocabulary SGLang refuses --speculative-use-rejection-sampling.")
    return Launch(_sglang_chain(target, algorithm, head, num_draft), notes=tuple(notes))


def _sglang_argv(target: str, algorithm: str, *options: str) -> tuple[str, ...]:
    launch = ("python", "-m", "sglang.launch_server", "--model-path", target)
    return (*launch, "--speculative-algorithm", algorithm, *options)


def _sglang_chain(target: str, algorithm: str, draft: str, num_draft: int) -> tuple[str, ...]:
    """One draft token per place is a chain, for which SGLang asks for one token more than steps."""
    steps = ("--speculative-num-steps", str(num_draft), "--speculative-eagle-topk", "1")
    tokens = ("--speculative-num-draft-tokens", str(num_draft + 1))
    return _sglang_argv(target, algorithm, "--speculative-draft-model-path", draft, *steps, *tokens)


def _trtllm(config: HeadConfig, engine: OtherEngine, target: str, head: str, num_draft: int) -> Launch:
    kind = {"eagle3": "Eagle3", "dflash": "DFlash", "dspark": "DSpark"}[config.method]
    lines = [f"  speculative_model: {json.dumps(head)}"]
    if isinstance(config, EagleConfig) and not are_default_taps(config.taps, config.target_num_layers):
        lines.append(f"  eagle3_layers_to_capture: {taps_to_outputs(config.taps)}")
    return _trtllm_serve(engine, target, kind, num_draft, lines)


def _trtllm_serve(engine: OtherEngine, target: str, kind: str, num_draft: int, lines: list[str]) -> Launch:
    lines = ["speculative_config:", f"  decoding_type: {kind}", f"  max_draft_len: {num_draft}", *lines]
    option = "--extra_llm_api_options" if engine.numbers[:2] <= _OLD_TRTLLM else "--config"
    return Launch(("trtllm-serve", target, option, "spec.yaml"), files={"spec.yaml": "\n".join(lines) + "\n"})


def _llamacpp(config: HeadConfig, engine: OtherEngine, target: str, head: str, num_draft: int) -> Launch:  # noqa: ARG001
    prepare = (_to_gguf(target, "target.gguf"), _to_gguf(head, "head.gguf", "--target-model-dir", target))
    argv = ("llama-server", "-m", "target.gguf", "-md", "head.gguf")
    notes = (
        "Without --spec-type nothing is drafted, -md or not.",
        "Builds that still know --draft-max run draft models only, no trained heads.",
    )
    spec = ("--spec-type", f"draft-{config.method}", "--spec-draft-n-max", str(num_draft))
    return Launch((*argv, *spec), prepare=prepare, notes=notes)


def _to_gguf(folder: str, file: str, *options: str) -> tuple[str, ...]:
    """The command that makes the GGUF file of a model."""
    return ("python", "convert_hf_to_gguf.py", folder, *options, "--outtype", "bf16", "--outfile", file)


def _tgi(config: HeadConfig, engine: OtherEngine, target: str, head: str, num_draft: int) -> Launch:  # noqa: ARG001
    notes = (
        f"The target is {target}, named by base_model_name_or_path in config.json.",
        "TGI turns Medusa off for batches of more than 128 tokens.",
    )
    return Launch(("text-generation-launcher", "--model-id", head, "--speculate", str(num_draft)), notes=notes)


def plain_drafters(engine: str) -> list[str]:
    """Our drafters without a trained head that have a counterpart in `engine`."""
    return [name for name, engines in COUNTERPARTS.items() if engine in engines]


def plain_launch(drafter: str, engine: OtherEngine, target: str, draft: str | None, num_draft: int) -> Launch:
    """How `engine` starts `target` with one of our drafters that has a counterpart there.

    Raises:
        ConfigError: it has none, the draft model is not named, or the version is too old.
    """
    if (reason := version_reason(engine)) is not None:
        raise ConfigError("to", str(engine), reason)
    method = COUNTERPARTS.get(drafter, {}).get(engine.name)
    if method is None:
        known = ", ".join(plain_drafters(engine.name))
        remedy = f"has no counterpart in {NAMES[engine.name]}; it takes {known} or a --head"
        raise ConfigError("drafter", drafter, remedy)
    if drafter == "draft_model" and draft is None:
        raise ConfigError("draft", None, "drafter='draft_model' needs the folder or hub id of a draft model")
    for role, name in (("target", target), ("draft", draft or "")):
        if (reason := target_reason(name, engine, has_head=False)) is not None:
            raise ConfigError(role, name, reason)
    if engine.name == "trtllm":
        lines = [f"  speculative_model: {json.dumps(draft)}"] if draft else []
        return _trtllm_serve(engine, target, method, num_draft, lines)
    makers = {
        "vllm": _plain_vllm,
        "sglang": _plain_sglang,
        "llamacpp": _plain_llamacpp,
        "tgi": _plain_tgi,
        "transformers": _transformers,
    }
    return makers[engine.name](method, target, draft or "", num_draft)


def _plain_vllm(method: str, target: str, draft: str, num_draft: int) -> Launch:
    lookup = {"prompt_lookup_min": 2, "prompt_lookup_max": 5} if method == "ngram" else {}
    model = {"model": draft} if draft else {}
    return _vllm_serve(target, {"method": method, **lookup, "num_speculative_tokens": num_draft, **model})


def _plain_sglang(method: str, target: str, draft: str, num_draft: int) -> Launch:
    if method == "NGRAM":
        return Launch(_sglang_argv(target, method, "--speculative-num-draft-tokens", str(num_draft)))
    return Launch(_sglang_chain(target, method, draft, num_draft))


def _plain_llamacpp(method: str, target: str, draft: str, num_draft: int) -> Launch:
    models = {"-m": (target, "target.gguf")}
    if method == "ngram-simple":
        # Its own 12 tokens to look up and 48 to draft rarely match in a short answer.
        spec = ["--spec-ngram-simple-size-n", "4", "--spec-ngram-simple-size-m", str(num_draft)]
    else:
        models["-md"], spec = (draft, "draft.gguf"), ["--spec-draft-n-max", str(num_draft)]
    argv, prepare = ["llama-server"], []
    for option, (name, file) in models.items():
        is_gguf = name.lower().endswith(".gguf")
        argv += [option, name if is_gguf else file]
        prepare += [] if is_gguf else [_to_gguf(name, file)]
    return Launch((*argv, "--spec-type", method, *spec), prepare=tuple(prepare))


def _plain_tgi(method: str, target: str, draft: str, num_draft: int) -> Launch:  # noqa: ARG001
    return Launch(("text-generation-launcher", "--model-id", target, "--speculate", str(num_draft)))


def _transformers(method: str, target: str, draft: str, num_draft: int) -> Launch:
    text = _ASSISTED if method == "assistant_model" else _LOOKUP
    script = text.format(target=target, draft=draft, num_draft=num_draft)
    return Launch(("python", "generate.py"), files={"generate.py": script})
