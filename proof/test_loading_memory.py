"""Peak memory of loading 4- and 8-bit files, in a process of its own: the codes, and little beside them.

Linux only, where a process can reset its own peak.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from tests.helpers.gguf_files import finish

HIDDEN, WIDE, LAYERS, VOCAB, HEADS = 1024, 4096, 36, 16_384, 8  # a file that is large beside what does not grow with it
MOST = 1.2  # times the file
BUFFERS_BYTES = 24 * 2**20  # beside that: pieces under way and the allocator's rests, whatever the file's size

_LOAD = """
import sys
from pathlib import Path
from foretoken.model.matrices.grouped_kernel import kernel
from foretoken.model.loader import load_decoder

def status(key):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024

kernel()
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
decoder = load_decoder(Path(sys.argv[1]))
print(status("VmHWM") - before)
"""


def write_large(path: Path, kind: str) -> Path:
    """A Llama of random codes, all its scales 0.01."""
    block, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    writer, rng = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)

    def matrix(name: str, rows: int, columns: int) -> None:
        raw = rng.integers(0, 256, (rows, columns // block, size), np.uint8)
        raw[:, :, :2] = np.full(1, 0.01, np.float16).view(np.uint8)
        writer.add_tensor(name, raw.reshape(rows, -1), raw_dtype=GGMLQuantizationType[kind])

    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    matrix("token_embd.weight", VOCAB, HIDDEN)
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(f"blk.{layer}.{name}.weight", HIDDEN, HIDDEN)
        for name in ("ffn_gate", "ffn_up"):
            matrix(f"blk.{layer}.{name}.weight", WIDE, HIDDEN)
        matrix(f"blk.{layer}.ffn_down.weight", HIDDEN, WIDE)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    matrix("output.weight", VOCAB, HIDDEN)
    finish(writer)
    return path


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux resets a peak")
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_loading_takes_little_more_than_the_file(tmp_path: Path, kind: str) -> None:
    path = write_large(tmp_path / "model.gguf", kind)
    done = subprocess.run([sys.executable, "-c", _LOAD, str(path)], capture_output=True, text=True, check=True)
    peak, size = int(done.stdout.split()[-1]), path.stat().st_size
    print(f"{kind}: {peak:,} bytes of memory for a file of {size:,}: {peak / size:.2f}x")
    assert peak <= MOST * size + BUFFERS_BYTES
