"""Tiny checkpoints, broken at random: each is refused by name or answers as transformers does on the same folder.

`python -m tests.helpers.broken_checkpoints FOLDER FIRST LAST` tries the cases FIRST .. LAST and prints one JSON object
for each that did neither, then how many there were of each outcome.
"""

from __future__ import annotations

import copy
import json
import random
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from foretoken import LLM, SamplingParams
from foretoken.errors import ContextLengthError, ModelError, NumericsError
from tests.helpers.broken_runs import try_cases
from tests.helpers.checkpoints import tiny_checkpoint, tiny_tokenizer

BASES = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "phi3")
NEW_TOKENS = 5
GOOD = ("refused", "exact", "not finite", "no room", "not read")

_DEEP: Any = "x"
for _ in range(200):
    _DEEP = [_DEEP]
_VALUES: tuple[Any, ...] = (
    *(None, True, False, "", "x", "0", "1e3", "../../etc/passwd", "/dev/zero", "\0", "a" * 5000, "\ud800"),
    *(-1, 0, 1, 2, 3, 7, 64, 97, 1000, 10**6, 10**9, 2**31, 2**53, 2**63, 10**30, 10**400),
    *(0.0, -0.0, 0.5, -1.5, 1e-300, 1e308, float("nan"), float("inf"), float("-inf")),
    *([], {}, [None], [0], [-1], [10**9], ["x"], [[]], {"x": {}}, [1] * 1000, _DEEP),
)
_KEYS = (
    *(
        "quantization_config",
        "rope_scaling",
        "rope_parameters",
        "rope_theta",
        "layer_types",
        "sliding_window",
        "use_sliding_window",
    ),
    *(
        "max_window_layers",
        "head_dim",
        "num_key_value_heads",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "hidden_act",
        "dtype",
    ),
    *(
        "torch_dtype",
        "eos_token_id",
        "bos_token_id",
        "pad_token_id",
        "partial_rotary_factor",
        "per_layer_config",
        "auto_map",
        "text_config",
    ),
    *(
        "architectures",
        "is_encoder_decoder",
        "transformers_weights",
        "max_position_embeddings",
        "original_max_position_embeddings",
    ),
    *(
        "num_labels",
        "id2label",
        "torchscript",
        "attn_implementation",
        "n_inner",
        "activation_function",
        "scale_attn_weights",
        "chat_template",
    ),
    *(
        "eos_token",
        "bos_token",
        "model_max_length",
        "added_tokens_decoder",
        "truncation",
        "padding",
        "normalizer",
        "post_processor",
    ),
)
# transformers checks the types of all keys; these have no part in what the native decoder computes.
_NOT_READ = {
    "use_cache",
    "auto_map",
    "pretraining_tp",
    "attention_dropout",
    "initializer_range",
    "pad_token_id",
    "id2label",
    "num_labels",
    "attn_implementation",
    "metadata",
    "transformers_version",
}
_ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
    {
        "rope_type": "llama3",
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    {
        "rope_type": "longrope",
        "short_factor": [1.0] * 6,
        "long_factor": [2.0] * 6,
        "original_max_position_embeddings": 32,
    },
    {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
)


def make_bases(folder: Path) -> None:
    """Write the checkpoints that cases start from: tied and not, sharded and not, with windows and scaled rope, each
    with a tokenizer.
    """
    options: dict[str, dict[str, Any]] = {
        "llama": {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
        "mistral": {"sliding_window": 7, "head_dim": 12},
        "qwen2": {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
        "qwen3": {},
        "gpt2": {"vocab_size": 300},
        "phi3": {
            "max_position_embeddings": 128,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 6,
                "long_factor": [2.0] * 6,
            },
        },
    }
    for name in BASES:
        shape: dict[str, Any] = {} if name == "gpt2" else {"vocab_size": 300, "num_hidden_layers": 2, "pad_token_id": 0}
        tiny_checkpoint(
            folder / name, name, shard_size="40KB" if name in ("qwen3", "gpt2") else "5GB", **(shape | options[name])
        )
        tiny_tokenizer(folder / name)


def mutate(folder: Path, rng: random.Random) -> str:
    """Break one file of a checkpoint; say what was done."""
    names = sorted(file.name for file in folder.iterdir() if file.suffix in (".json", ".safetensors"))
    weighted = [
        name
        for name in names
        for _ in range(6 if name == "config.json" else 2 if name != "generation_config.json" else 1)
    ]
    file = folder / rng.choice(weighted)
    if file.suffix == ".safetensors":
        return f"{file.name}: {_break_header(file, rng)}"
    if rng.random() < 0.15:
        return f"{file.name}: {_break_bytes(file, rng)}"
    content = json.loads(file.read_text())
    done = [_break_json(content, rng, file.name) for _ in range(rng.choice([1, 1, 1, 2]))]
    file.write_bytes(json.dumps(content).encode())
    return f"{file.name}: {'; '.join(done)}"


def _break_json(content: Any, rng: random.Random, name: str) -> str:
    if name == "config.json" and rng.random() < 0.15:
        key, value = rng.choice(["rope_scaling", "rope_parameters"]), copy.deepcopy(rng.choice(_ROPES))
        if rng.random() < 0.5:
            inner = rng.choice(list(value))
            value[inner] = copy.deepcopy(rng.choice(_VALUES))
        content[key] = value
        return f"{key}={value!r:.200}"
    node, path = content, []
    while True:
        keys: list[Any] = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = rng.choice(keys)
        path.append(str(key))
        if not isinstance(node[key], dict | list) or not node[key] or rng.random() < 0.2:
            break
        node = node[key]
    kind = rng.choice(["value", "value", "near", "delete", "add", "swap"])
    if kind == "delete":
        del node[key]
    elif kind == "add" and isinstance(node, dict):
        key = rng.choice(_KEYS)
        node[key] = copy.deepcopy(rng.choice(_VALUES))
        path[-1] = key
    elif kind == "swap":
        other = rng.choice(keys)
        node[key], node[other] = node[other], node[key]
    elif kind == "near":
        node[key] = _near(node[key], rng)
    else:
        node[key] = copy.deepcopy(rng.choice(_VALUES))
    after = node.get(key, "gone") if isinstance(node, dict) else "..."
    return f"{kind} {'.'.join(path)} -> {after!r:.60}"


def _near(value: Any, rng: random.Random) -> Any:
    """A value close to the right one, or the right one in another type."""
    if isinstance(value, bool) or value is None:
        return rng.choice([not value, int(bool(value)), str(value)])
    if isinstance(value, int | float):
        return rng.choice(
            [value + 1, value - 1, -value, value * 2, value * 10**6, float(value), str(value), [value], value / 3]
        )
    if isinstance(value, str):
        return rng.choice([value.upper(), value + "x", value[:-1], [value], "../" + value, value * 3])
    if isinstance(value, list):
        return rng.choice([value[:-1], value + value, value[::-1], value[0] if value else 0, tuple(value) * 50])
    return list(value.items())


def _break_bytes(file: Path, rng: random.Random) -> str:
    data = file.read_bytes()
    place = rng.randrange(len(data))
    kinds: dict[str, Callable[[], bytes]] = {
        "truncated": lambda: data[:place],
        "flipped": lambda: data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :],
        "not UTF-8": lambda: data[:place] + b"\xff\xfe" + data[place:],
        "a mark in front": lambda: b"\xef\xbb\xbf" + data,
        "empty": lambda: b"",
        "a list": lambda: b"[" + data + b"]",
        "deep": lambda: b'{"x":' * 3000 + b"0" + b"}" * 3000,
        "deep lists": lambda: b"[" * 100_000 + b"]" * 100_000,
        "a key twice": lambda: (
            data.rstrip()[:-1] + b', "hidden_size": 3, "hidden_size": 4, "version": "2", "version": "1"}'
        ),
        "a long number": lambda: data.rstrip()[:-1] + b', "hidden_size_2": ' + b"9" * 10_000 + b"}",
        "two objects": lambda: data + data,
    }
    kind = rng.choice(sorted(kinds))
    file.write_bytes(kinds[kind]())
    return kind


def _break_header(file: Path, rng: random.Random) -> str:
    """Change the header of a safetensors file, whose tensors stand behind it."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + size]), data[8 + size :]
    if rng.random() < 0.3:
        kind = rng.choice(["length", "bytes", "cut", "longer"])
        if kind == "length":
            wrong = rng.choice([0, 1, size - 1, size + 1, 2**40, 2**63, 2**64 - 1, 100_000_001])
            file.write_bytes(wrong.to_bytes(8, "little") + data[8:])
        elif kind == "bytes":
            place = rng.randrange(8, 8 + size)
            file.write_bytes(data[:place] + bytes([rng.randrange(256)]) + data[place + 1 :])
        else:
            file.write_bytes(data[: rng.randrange(len(data))] if kind == "cut" else data + bytes(1000))
        return kind
    name = rng.choice([key for key in header if key != "__metadata__"])
    entry = header[name]
    kind = rng.choice(["shape", "dtype", "offsets", "rename", "delete", "copy", "anything"])
    if kind == "shape":
        place = rng.randrange(len(entry["shape"]))
        entry["shape"][place] = rng.choice([0, -1, 1, entry["shape"][place] + 1, 10**9, 2**62, 2**64, "x", None, 1.5])
    elif kind == "dtype":
        entry["dtype"] = rng.choice(["F64", "BF16", "F16", "I32", "U8", "BOOL", "F8_E4M3", "C64", "x", 5])
    elif kind == "offsets":
        entry["data_offsets"] = rng.choice([[0, 0], [0, 2**62], [-1, 4], [8, 4], [0], "x", [len(rest), len(rest)]])
    elif kind == "rename":
        header[rng.choice(["", "x", "lm_head.weight", "model.norm.weight", "__metadata__", "../x"])] = header.pop(name)
    elif kind == "delete":
        del header[name]
    elif kind == "copy":
        header[name + "x"] = dict(entry)
    else:
        header[name] = copy.deepcopy(rng.choice(_VALUES))
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + rest)
    return f"{kind} {name}"


def try_case(bases: Path, work: Path, seed: int) -> tuple[str, str]:
    """("refused" | "exact" | "wrong" | ..., what was done and what came of it) for the case `seed`."""
    rng = random.Random(seed)
    shutil.rmtree(work, ignore_errors=True)
    name = BASES[seed % len(BASES)]
    shutil.copytree(bases / name, work)
    done = f"{seed} {name} {mutate(work, rng)}"
    try:
        llm = LLM(work, dtype="float32", cache_tokens=128, profile="off")
    except ModelError as error:
        return "refused", f"{done}: {error}"
    with llm:
        return _answer(llm, work, rng, done)


def _answer(llm: LLM, folder: Path, rng: random.Random, done: str) -> tuple[str, str]:
    room = min(8, llm.target.max_context_tokens - NEW_TOKENS)
    if room < 1:
        return "no room", done
    ids = [rng.randrange(llm.target.vocab_size) for _ in range(room)]
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    if llm.tokenizer is not None:
        with suppress(ModelError, ContextLengthError):  # tokens that the model does not have, or too many of them
            llm.generate("def f(self):\n", SamplingParams(max_tokens=2))
    out = llm.generate([ids], params)[0]
    expected = _transformers_logits(folder, [*ids, *out.token_ids])
    if isinstance(expected, str):
        named = re.findall(r"Field '(\w+)'", expected) or re.findall(r"\w+", done)
        unread = set(named) & _NOT_READ or "expected float, got int" in expected  # a whole number is a number
        return ("not read" if unread else "transformers refuses"), f"{done}: {expected}"
    if isinstance(out.error, NumericsError):
        return ("not finite" if not expected.isfinite().all() else "wrong"), done
    if out.error is not None or len(out.token_ids) != NEW_TOKENS:
        return "wrong", f"{done}: {out.error!r} {out.token_ids}"
    rows = expected[len(ids) - 1 : -1]
    behind = rows.max(-1).values - rows.gather(1, torch.tensor(list(out.token_ids))[:, None])[:, 0]
    return ("exact" if float(behind.max()) < 1e-4 else "wrong"), f"{done}: {behind.tolist()}"


def _transformers_logits(folder: Path, ids: list[int]) -> torch.Tensor | str:
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", use_safetensors=True
        ).eval()
        with torch.inference_mode():
            logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    except Exception as error:  # noqa: BLE001 - whatever it says
        return f"{type(error).__name__}: {str(error)[:200]}"
    return logits


def main(folder: Path, first: int, last: int) -> None:
    """`try_cases` without transformers' messages."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try_cases(try_case, GOOD, folder, first, last)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
