"""Writes a GGUF file as a checkpoint folder: its weights as numbers, its tokenizer, its chat template.

    python -m studies.equal_answers.folder --target smollm2 --dtype bfloat16 --out out/smollm2-bf16

In float32 the folder holds the numbers of the file's codes. transformers and this engine load the same folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from foretoken.errors import InputError
from foretoken.model.gguf.header import is_gguf
from foretoken.model.gguf.parts import read_header
from foretoken.model.loader import load_decoder
from foretoken.model.names import model_folder
from foretoken.model.saving import save_checkpoint
from foretoken.text.gguf_tokenizer import read_tokenizer
from studies.command import exit_code_of


def main() -> int:
    """Write the folder."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.equal_answers.folder",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", default="smollm2", help="a GGUF file, or the name of one")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    options = parser.parse_args()
    return exit_code_of(lambda: write(options.target, options.dtype, options.out))


def write(target: str, dtype: str, out: Path) -> int:
    """Write `target` to the folder `out`; 0.

    Raises:
        InputError: no GGUF file.
        ForetokenError: a file that cannot be read, or a folder that cannot be written.
    """
    path = model_folder(target)
    if not is_gguf(path):
        raise InputError("target", target, "name a GGUF file")
    decoder = load_decoder(path, dtype="float32", pack=False)
    save_checkpoint(decoder, decoder.config, out, dtype=dtype)
    found = read_tokenizer(read_header(path))
    if found is not None:
        tokenizer, settings = found
        tokenizer.save(str(out / "tokenizer.json"))
        content = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **settings}, indent=1, ensure_ascii=False)
        (out / "tokenizer_config.json").write_text(content + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
