"""How an engine is started with a head: argv, environment and configuration files, by engine and version."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field

from foretoken.export.engines import OtherEngine
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
