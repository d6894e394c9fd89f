"""A random mixture of experts as a GGUF file, whose speed is compared with llama.cpp's on the same file.

    python -m studies.moe_file SmolLM2-135M-Instruct.Q4_1.gguf moe.gguf
    python -m studies.moe_file SmolLM2-135M-Instruct.Q4_1.gguf moe.gguf --experts 128 --layers 24

The shape is Qwen3-MoE's, by default with 16 layers, 1,024 channels and 8 of 64 experts of 768 channels: 2.6 billion
weights, 0.4 billion of them in a step of one row. The tokenizer is that of the first file. Codes are drawn at random
and scales put the numbers at a width at which neither the residual stream nor the router's scores run away, so that
rows choose different experts. Its text makes no sense: the file is for times alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

from foretoken.errors import InputError
from foretoken.printing.console import Console
from studies.command import exit_code_of

_BLOCK = 32  # weights that share a scale in the types below
# Bytes of a block's codes behind its float16 scale, and the deviation of a code that is drawn uniformly.
_KINDS = {"Q4_0": (16, 4.6), "Q8_0": (32, 73.9)}
_ARCHITECTURE = "qwen3moe"


@dataclass(frozen=True)
class Shape:
    """Of the mixture; `expert_width` is the intermediate size of one expert."""

    layers: int = 16
    width: int = 1024
    heads: int = 16
    groups: int = 4
    head_dim: int = 64
    experts: int = 64
    active: int = 8
    expert_width: int = 768
    context: int = 4096


def main() -> int:
    """Write the file and say how large it is."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.moe_file", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tokenizer", type=Path, help="a GGUF file, whose tokenizer is copied")
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", choices=sorted(_KINDS), default="Q4_0")
    parser.add_argument("--seed", type=int, default=0)
    for name, value in vars(Shape()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    return exit_code_of(lambda: _run(parser.parse_args()))


def _run(options: argparse.Namespace) -> int:
    given = {name: getattr(options, name) for name in vars(Shape())}
    write(options.out, options.tokenizer, Shape(**given), options.kind, options.seed)
    Console().line(f"{options.out}: {options.out.stat().st_size / 1e9:.2f} GB")
    return 0


def write(path: Path, tokenizer: Path, shape: Shape, kind: str = "Q4_0", seed: int = 0) -> Path:
    """Write the file; `tokenizer` is a GGUF file whose tokenizer it gets.

    Raises:
        InputError: a width that is no whole number of blocks, or more active experts than there are.
    """
    for name in ("width", "expert_width"):
        if getattr(shape, name) % _BLOCK:
            raise InputError(name, getattr(shape, name), f"take a multiple of {_BLOCK}, which share a scale")
    if not 0 < shape.active <= shape.experts:
        raise InputError("active", shape.active, f"a row goes to at least one expert, at most to {shape.experts}")
    writer = gguf.GGUFWriter(path, _ARCHITECTURE, use_temp_file=True)
    vocab_size = _copy_tokenizer(writer, tokenizer)
    _add_shape(writer, shape)
    random = np.random.default_rng(seed)
    for name, tensor in _tensors(shape, vocab_size):
        if name.endswith("_norm.weight"):
            writer.add_tensor(name, np.ones(tensor, np.float32))
        elif name.endswith("ffn_gate_inp.weight"):  # scores of deviation 1 for a row of a norm's output
            writer.add_tensor(name, random.normal(0, tensor[-1] ** -0.5, tensor).astype(np.float32))
        else:
            blocks = _random_blocks(random, kind, tensor)
            writer.add_tensor(name, blocks, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(shape: Shape, vocab_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor, in llama.cpp's words."""
    width, wide, experts = shape.width, shape.expert_width, shape.experts
    q, kv = shape.heads * shape.head_dim, shape.groups * shape.head_dim
    yield "token_embd.weight", (vocab_size, width)
    for layer in range(shape.layers):
        inner: dict[str, tuple[int, ...]] = {
            "attn_norm": (width,),
            "attn_q": (q, width),
            "attn_k": (kv, width),
            "attn_v": (kv, width),
            "attn_output": (width, q),
            "attn_q_norm": (shape.head_dim,),
            "attn_k_norm": (shape.head_dim,),
            "ffn_norm": (width,),
            "ffn_gate_inp": (experts, width),
            "ffn_gate_exps": (experts, wide, width),
            "ffn_up_exps": (experts, wide, width),
            "ffn_down_exps": (experts, width, wide),
        }
        yield from ((f"blk.{layer}.{name}.weight", tensor) for name, tensor in inner.items())
    yield "output_norm.weight", (width,)
    yield "output.weight", (vocab_size, width)


def _random_blocks(random: np.random.Generator, kind: str, tensor: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Blocks of a matrix, or of several, whose products with rows of deviation 1 have deviation 1."""
    size, deviation = _KINDS[kind]
    blocks = (*tensor[:-1], tensor[-1] // _BLOCK)
    scale = np.array([tensor[-1] ** -0.5 / deviation], np.float16).view(np.uint8)
    out = np.empty((*blocks, 2 + size), np.uint8)
    out[..., :2] = scale
    out[..., 2:] = random.integers(0, 256, (*blocks, size), np.uint8)
    return out.reshape(*tensor[:-1], -1)


def _add_shape(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.active * shape.expert_width)
    writer.add_expert_feed_forward_length(shape.expert_width)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.active)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.groups)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)


def _copy_tokenizer(writer: gguf.GGUFWriter, source: Path) -> int:
    """Copy all that a file says of its tokenizer; the number of its tokens."""
    num_tokens = 0
    for name, field in gguf.GGUFReader(source).fields.items():
        if not name.startswith("tokenizer."):
            continue
        value: Any = field.contents()
        kinds = field.types
        writer.add_key_value(name, value, kinds[0], kinds[-1] if len(kinds) > 1 else None)
        if name == "tokenizer.ggml.tokens":
            num_tokens = len(value)
    return num_tokens


if __name__ == "__main__":
    sys.exit(main())
