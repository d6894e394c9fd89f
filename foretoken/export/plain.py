"""Drafters without a trained head in other engines: a draft model, n-gram lookup, suffixes. Only a launch line is
written; the draft model stays where it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from foretoken.errors import ConfigError
from foretoken.export.engines import NAMES, OtherEngine, target_reason
from foretoken.export.launch import Launch

_Maker = Callable[[str, str, int], Launch]


def plain_launch(drafter: str, engine: OtherEngine, target: str, draft: str | None, num_draft: int) -> Launch:
    """How `engine` starts `target` with one of our drafters that has a counterpart there.

    Raises:
        ConfigError: it has none, or the draft model is not named.
    """
    makers = _MAKERS.get(drafter, {})
    if engine.name not in makers:
        known = [name for name, engines in _MAKERS.items() if engine.name in engines]
        raise ConfigError(
            "drafter", drafter, f"has no counterpart in {NAMES[engine.name]}; it takes {', '.join(known)} or a --head"
        )
    if drafter == "draft_model" and draft is None:
        raise ConfigError("draft", None, "drafter='draft_model' needs the folder or hub id of a draft model")
    for field, name in (("target", target), ("draft", draft or "")):
        if (reason := target_reason(name, engine, has_head=False)) is not None:
            raise ConfigError(field, name, reason)
    return makers[engine.name](target, draft or "", num_draft)


def _vllm(**spec: object) -> _Maker:
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


def _trtllm(kind: str) -> _Maker:
    def make(target: str, draft: str, num_draft: int) -> Launch:
        lines = ["speculative_config:", f"  decoding_type: {kind}", f"  max_draft_len: {num_draft}"]
        lines += [f"  speculative_model: {json.dumps(draft)}"] if draft else []
        return Launch(("trtllm-serve", target, "--config", "spec.yaml"), files={"spec.yaml": "\n".join(lines) + "\n"})

    return make


def _llamacpp_draft(target: str, draft: str, num_draft: int) -> Launch:
    convert = ("python", "convert_hf_to_gguf.py")
    models = ((target, "target.gguf"), (draft, "draft.gguf"))
    prepare = tuple(
        (*convert, folder, "--outtype", "bf16", "--outfile", file) for folder, file in models if not _is_gguf(folder)
    )
    files = [name if _is_gguf(name) else file for name, file in models]
    argv = ("llama-server", "-m", files[0], "-md", files[1], "--spec-type", "draft-simple")
    return Launch((*argv, "--spec-draft-n-max", str(num_draft)), prepare=prepare)


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
        "vllm": _vllm(method="draft_model"),
        "sglang": _sglang_draft,
        "trtllm": _trtllm("Draft_Target"),
        "llamacpp": _llamacpp_draft,
        "transformers": _transformers(_ASSISTED),
    },
    "ngram": {
        "vllm": _vllm(method="ngram", prompt_lookup_min=2, prompt_lookup_max=5),
        "sglang": _sglang_ngram,
        "trtllm": _trtllm("NGram"),
        "tgi": _tgi_ngram,
        "transformers": _transformers(_LOOKUP),
    },
    "suffix": {"vllm": _vllm(method="suffix"), "trtllm": _trtllm("SA")},
}
