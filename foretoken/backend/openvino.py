"""OpenVINO GenAI beside us: a GGUF file, or a folder in OpenVINO's own format; plain, with a draft model, or with
prompt lookup.

The package is an extra (`foretoken[openvino]`). A pipeline drafts in one way only, so each way is a pipeline with
weights of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from foretoken.backend.answering import (
    Answer,
    AnsweringBackend,
    Capabilities,
    Drafting,
    Question,
    answer_in_pieces,
    as_messages,
    check_question,
)
from foretoken.backend.registry import BackendOptions
from foretoken.errors import ForetokenError, InputError, StorageError, UnsupportedModelError, install
from foretoken.model.gguf.header import is_gguf
from foretoken.model.names import model_folder

OPENVINO = "openvino"
_DRAFT_MODEL, _LOOKUP = "draft_model", "prompt_lookup"
_COUNTERPARTS = {_DRAFT_MODEL: "draft_model", _LOOKUP: "ngram"}
# What its documentation suggests: n-grams for lookups, their draft tokens, and the confidence at which a draft ends.
_NGRAM_TOKENS, _LOOKUP_TOKENS, _CONFIDENCE = 3, 5, 0.4
_AUTO = "auto"  # a draft ends where its model becomes unsure
_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
_IR_FILE = "openvino_model.xml"


def _package() -> ModuleType:
    """openvino_genai.

    Raises:
        InputError: it is not installed.
    """
    try:
        import openvino_genai
    except ImportError as error:
        remedy = f"needs the package openvino-genai ({error}): {install('openvino')}"
        raise InputError("backends", OPENVINO, remedy) from None
    package: ModuleType = openvino_genai
    return package


@contextmanager
def _as_ours() -> Iterator[None]:
    """Errors of OpenVINO, which has one type for all, as one of ours."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, ForetokenError):
            raise
        raise ForetokenError(f"openvino failed: {' '.join(str(error).split())[-300:]}") from error


class OpenVinoBackend(AnsweringBackend):
    """Pipelines of OpenVINO GenAI on one model, each opened when it is first asked."""

    name = OPENVINO
    capabilities = Capabilities(
        plain=True, drafting=True, sampling=True, token_ids=True, draft_counts="none", conversations=True
    )

    def __init__(self, package: ModuleType, target: Path, draft: Path | None, properties: Mapping[str, Any]) -> None:
        self._package, self._target, self._draft, self._properties = package, target, draft, dict(properties)
        self._pipelines: dict[str | None, Any] = {}

    def version(self) -> str:
        """Of the package."""
        return str(self._package.__version__)

    def draftings(
        self, num_drafts: Sequence[int], lookup_num_drafts: Sequence[int] | None = None
    ) -> Sequence[Drafting]:
        """A draft model, where there is one, until it becomes unsure and at each number; lookups at each number."""
        lookups = num_drafts if lookup_num_drafts is None else lookup_num_drafts
        ways: list[tuple[str, Sequence[int | str]]] = [(_LOOKUP, sorted({*lookups, _LOOKUP_TOKENS}))]
        if self._draft is not None:
            ways.insert(0, (_DRAFT_MODEL, (_AUTO, *num_drafts)))
        return [
            Drafting(kind, number, "", _COUNTERPARTS[kind], is_free=kind == _LOOKUP)
            for kind, numbers in ways
            for number in numbers
        ]

    def notes(self) -> Sequence[str]:
        """What a pipeline is."""
        return ("openvino holds the target's weights once for each of its ways to draft, and once for plain decoding.",)

    def answer(self, question: Question, drafting: Drafting) -> Answer:
        """Answer one question; times are those at which tokens came.

        Raises:
            InputError: a way to draft that it does not have; see `AnsweringBackend.answer`.
            ForetokenError: OpenVINO failed.
        """
        check_question(self.name, question, drafting, self.capabilities)
        with _as_ours():
            pipeline = self._pipeline(drafting.kind)
            tokenizer = pipeline.get_tokenizer()
            config = self._config(pipeline, question, drafting)
            inputs = _encode(tokenizer, question)
            streamer, pieces = _streamer(self._package)
            start = time.perf_counter()
            result = pipeline.generate(inputs, config, streamer)
            stop = time.perf_counter()
            ids = tuple(result.tokens[0])
            text = str(tokenizer.decode(list(ids)))
        if not pieces:
            raise ForetokenError("openvino gave no token")
        counted = result.extended_perf_metrics  # None without a draft model
        drafted = None if counted is None else (counted.get_num_draft_tokens(), counted.get_num_accepted_tokens())
        return answer_in_pieces(ids, text, pieces, start, stop, drafted)

    def close(self) -> None:
        """Free the pipelines."""
        self._pipelines.clear()

    def _pipeline(self, kind: str | None) -> Any:  # noqa: ANN401 - openvino_genai has no types
        if kind not in self._pipelines:
            self._pipelines[kind] = self._package.LLMPipeline(str(self._target), "CPU", **self._options(kind))
        return self._pipelines[kind]

    def _options(self, kind: str | None) -> dict[str, Any]:
        if kind is None:
            return self._properties
        if kind == _LOOKUP:
            return self._properties | {"prompt_lookup": True}
        if kind == _DRAFT_MODEL and self._draft is not None:
            folder = draft_folder(self._package, self._draft)
            return self._properties | {"draft_model": self._package.draft_model(str(folder), "CPU", **self._properties)}
        remedy = "needs a draft" if kind == _DRAFT_MODEL else f"choose from {', '.join(_COUNTERPARTS)}"
        raise InputError("drafting", kind, remedy)

    def _config(self, pipeline: Any, question: Question, drafting: Drafting) -> Any:  # noqa: ANN401
        config = pipeline.get_generation_config()
        config.max_new_tokens, config.ignore_eos = question.max_tokens, question.ignore_eos
        config.do_sample, config.apply_chat_template = question.temperature > 0, False
        config.repetition_penalty = 1.0  # the model's own settings may have one
        if question.temperature > 0:
            config.temperature, config.top_p, config.top_k = question.temperature, 1.0, 2**31 - 1
            config.rng_seed = question.seed or 0
        if drafting.kind == _LOOKUP:
            config.max_ngram_size = _NGRAM_TOKENS
            config.num_assistant_tokens = int(drafting.num_draft or _LOOKUP_TOKENS)
        elif drafting.kind == _DRAFT_MODEL and drafting.num_draft in (None, _AUTO):
            config.assistant_confidence_threshold = _CONFIDENCE
        elif drafting.kind == _DRAFT_MODEL:
            config.num_assistant_tokens = int(drafting.num_draft or 0)
        return config


def _encode(tokenizer: Any, question: Question) -> Any:  # noqa: ANN401 - openvino_genai has no types
    if not question.messages:
        return tokenizer.encode(question.text)
    text = tokenizer.apply_chat_template(as_messages(question.messages), add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def _streamer(package: Any) -> tuple[Any, list[tuple[float, int]]]:  # noqa: ANN401
    """A streamer, and the (time, tokens) of every piece that it was given."""
    pieces: list[tuple[float, int]] = []

    class Clock(package.StreamerBase):  # type: ignore[misc]
        def write(self, tokens: int | Sequence[int]) -> Any:  # noqa: ANN401
            pieces.append((time.perf_counter(), 1 if isinstance(tokens, int) else len(tokens)))
            return package.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    return Clock(), pieces


def draft_folder(package: Any, draft: Path) -> Path:  # noqa: ANN401 - openvino_genai has no types
    """A draft as a folder in OpenVINO's format, which alone it takes as one: a GGUF file is written as such a folder
    beside it, once.

    Raises:
        StorageError: the folder cannot be written.
    """
    if not is_gguf(draft):
        return draft
    folder = draft.with_name(f"{draft.stem}-openvino")
    if not (folder / _IR_FILE).is_file():
        link = folder / draft.name
        try:
            folder.mkdir(exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(draft.resolve())
            package.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
            link.unlink()
        except OSError as error:
            raise StorageError(f"cannot write {folder}: {error}") from error
    return folder


def _checked(name: str) -> Path:
    """A model that it reads."""
    path = model_folder(name)
    if not is_gguf(path) and not (path / _IR_FILE).is_file():
        raise UnsupportedModelError(
            f"{path} is neither a GGUF file nor a folder with {_IR_FILE}, which openvino reads: make one with "
            "optimum-cli export openvino"
        )
    return path


def open_openvino(options: BackendOptions) -> OpenVinoBackend:
    """OpenVINO GenAI on a GGUF file or a folder in its own format, on the CPU.

    Raises:
        InputError: the package is missing, or an option that it does not have; ModelError: no such model, or one in
            another format.
    """
    if options.device not in ("auto", "cpu"):
        raise InputError("device", options.device, "openvino is measured on the CPU; give cpu, or leave it out")
    package = _package()
    properties: dict[str, Any] = {}
    if options.threads is not None:
        properties["INFERENCE_NUM_THREADS"] = options.threads
    if options.dtype != "auto":
        if options.dtype not in _DTYPES:
            raise InputError("dtype", options.dtype, f"openvino computes in {', '.join(_DTYPES)}")
        properties["INFERENCE_PRECISION_HINT"] = _DTYPES[options.dtype]
    draft = None if options.draft is None else _checked(options.draft)
    return OpenVinoBackend(package, _checked(options.model), draft, properties)
