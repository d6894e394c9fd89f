"""Tokenizer files that are read and do not work: refused by name when they are opened."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers

from foretoken import LLM, SamplingParams
from foretoken.errors import CheckpointError, MismatchError
from foretoken.text.tokenizer import load_tokenizer
from tests.helpers.checkpoints import tiny_checkpoint, tiny_tokenizer
from tests.text.test_tokenizer import MESSAGES


def edit_tokenizer(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(
            model={"type": "WordLevel", "vocab": {"x": 0}, "unk_token": "<unk>"}
        ),  # every text is unknown
        lambda content: content.update(
            post_processor={"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}]}
        ),
        lambda content: content["model"].update(merges=[["a", "nothing"]]),
        lambda content: content["model"].update(vocab=["a"]),
        lambda content: content.update(model=None),
        lambda content: content.update(decoder={"type": "x"}),
        lambda content: content.update(added_tokens=[{"id": -1, "content": "x"}]),
        lambda content: content.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    ],
)
def test_c9_a_tokenizer_that_does_not_work_is_refused_when_it_is_opened(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    folder = tiny_tokenizer(tmp_path)
    edit_tokenizer(folder, change)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json|the tokenizer in"):
        load_tokenizer(folder)


class PanicException(BaseException):
    """As the library's: raised by its Rust code, no `Exception`."""


def test_c9_a_panic_of_the_library_is_a_broken_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_tokenizer(tmp_path)

    def panic(*_: object, **__: object) -> None:
        raise PanicException("index out of bounds")

    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    monkeypatch.setattr(tokenizer._backend, "_inner", SimpleNamespace(encode=panic, decode=panic))
    for use in (lambda: tokenizer.encode("a"), lambda: tokenizer.decode([1])):
        with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot .*index out of bounds"):
            use()
    monkeypatch.setattr(tokenizers, "Tokenizer", SimpleNamespace(from_file=panic))
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.json cannot be read \(the library failed: index out of bounds\)"
    ):
        load_tokenizer(folder)


def test_c9_an_interrupt_is_no_broken_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_path: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tokenizers, "Tokenizer", SimpleNamespace(from_file=interrupt))
    with pytest.raises(KeyboardInterrupt):
        load_tokenizer(tiny_tokenizer(tmp_path))


def test_c9_a_huge_id_takes_no_memory(tmp_path: Path) -> None:
    """Writing the tokenizer out again would list every id up to this one."""
    folder = tiny_tokenizer(tmp_path)
    edit_tokenizer(
        folder, lambda content: content["model"]["vocab"].update({next(iter(content["model"]["vocab"])): 2**31})
    )
    code = (
        "import resource, sys; from pathlib import Path; from foretoken.text.tokenizer import load_tokenizer as load; "
    )
    code += "resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30)); print(load(Path(sys.argv[1])).decoder['type'])"
    run = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "ByteLevel"


def test_c9_a_template_that_is_not_text_is_named(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_tokenizer(tmp_path))
    assert tokenizer is not None
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja cannot be read as UTF-8"):
        tokenizer.apply_chat_template(MESSAGES)


def test_c9_a_token_that_the_model_lacks_is_named(tmp_path: Path) -> None:
    """More tokens than columns: texts without such a token are answered, others blame the pair, not the user."""
    folder = tiny_checkpoint(tmp_path, "llama", vocab_size=260)
    tokenizer = load_tokenizer(tiny_tokenizer(folder, vocab_size=300))
    assert tokenizer is not None
    with LLM(folder, cache_tokens=128, profile="off") as llm:
        assert llm.generate("q", SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids
        beyond = next(text for text in ("return", "class", "the", "list", "self") if max(tokenizer.encode(text)) >= 260)
        with pytest.raises(MismatchError, match=r"writes token 2\d\d .*, and the model's vocabulary ends at 259"):
            llm.generate(beyond)
