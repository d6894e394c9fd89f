"""How a decoder's matrices are held, and the memory they take: as numbers, packed for oneDNN, or in codes.

Follows `loader`: which kernel takes a matrix, which matrices are merged, and when a tied head is a copy of its own.
`format_of` gives the name of `LLM(weights=...)` for what a file or a quantiser gave them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from foretoken.model.architecture import ModelConfig
from foretoken.model.layer_tensors import EXPERTS, layer_matrices
from foretoken.model.layers import Linear, can_pack, packed_bytes
from foretoken.model.matrices.codes import BLOCK_ROWS
from foretoken.model.matrices.grouped_kernel import SPAN, GroupedWeight, MergedWeight
from foretoken.model.matrices.quant import ACTIVATIONS, grouped_bytes
from foretoken.model.weights import EMBEDDING, HEAD, TensorSource


def format_of(weight: GroupedWeight) -> str:
    """ "int4" for at most 4 bits, otherwise "int8"."""
    return "int4" if weight.bits <= 4 else "int8"


def usual_format(layers: nn.Module) -> str:
    """The format of most weights in the matrices of `layers`; "auto" is none of the quantised ones."""
    num_weights: Counter[str] = Counter()
    for module in layers.modules():
        if not isinstance(module, Linear):
            continue
        if isinstance(module.packed, GroupedWeight | MergedWeight):
            parts = module.packed.parts if isinstance(module.packed, MergedWeight) else (module.packed,)
            for part in parts:
                num_weights[format_of(part)] += part.num_rows * part.width
        else:
            num_weights["auto"] += module.in_features * module.out_features
    return num_weights.most_common(1)[0][0]


_FLOAT_BYTES = 4  # the kernel for codes takes and gives float32


class MatrixMemory:
    """The matrices of a checkpoint as they will be held; `weights` as in `open_model`.

    Reads the first rows of quantised matrices, and all scales of packed safetensors: what a kernel makes of them
    depends on the numbers.
    """

    def __init__(
        self, stored: TensorSource, config: ModelConfig, dtype: torch.dtype, device: str, weights: str
    ) -> None:
        self._stored, self._config, self._dtype = stored, config, dtype
        self._weights = weights
        self._on_cpu = device == "cpu"
        self.in_codes = False  # whether any matrix is
        self._formats: Counter[str] = Counter()  # weights of the layers' matrices by format
        table = self._bytes([EMBEDDING], is_table=True)
        head_bytes = 0
        if not config.tie_embeddings:
            head_bytes = self._bytes([HEAD])
        elif not self.in_codes and self._weights == "auto" and self._packs:
            head_bytes = packed_bytes(config.vocab_size, config.hidden_size)  # a second copy of the table
        self._formats.clear()  # the table and the head do not count
        self.total_bytes = table + head_bytes
        for names, count in _layers(config):
            self.total_bytes += count * self._bytes(names, count)

    @property
    def weight_format(self) -> str:
        """The format of most weights of the layers, as `usual_format` has it of a loaded model."""
        return self._formats.most_common(1)[0][0]

    @property
    def row_bytes(self) -> int:
        """What a row takes beside activations in a product with codes: float32 on both sides, and codes."""
        config = self._config
        widest = max(config.hidden_size, config.intermediate_size)
        query_rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        tallest = max(2 * config.intermediate_size, config.hidden_size, query_rows)
        codes = widest + -(-widest // SPAN) * _FLOAT_BYTES
        table = 5 * _FLOAT_BYTES * config.hidden_size  # a row of the table on its way from codes to numbers
        return max(_FLOAT_BYTES * (widest + tallest) + codes, table)

    @property
    def _packs(self) -> bool:
        """Whether plain matrices are packed, in which a tied head differs from the table."""
        return self._on_cpu and self._dtype == torch.bfloat16 and can_pack()

    def _bytes(self, names: Sequence[str], count: int = 1, is_table: bool = False) -> int:
        """Memory of matrices that are merged into one, which stands for `count` of them."""
        shapes = [self._stored.shape(name) for name in names]
        rows, width = sum(shape[0] for shape in shapes), shapes[0][1]
        if self._weights != "auto":
            self.in_codes = True
            self._formats[self._weights] += count * rows * width
            return grouped_bytes("int8" if is_table else self._weights, rows, width)
        samples = []
        if self._on_cpu and self._dtype in ACTIVATIONS:
            samples = [sample for name in names if (sample := self._stored.sample(name)) is not None]
        if not samples or len(samples) < len(names):
            self._formats["auto"] += count * rows * width
            return packed_bytes(rows, width) if self._packs and not is_table else rows * width * self._dtype.itemsize
        self.in_codes = True
        held = [GroupedWeight.of(sample, self._dtype) for sample in samples]
        for weight, shape in zip(held, shapes, strict=True):
            self._formats[format_of(weight)] += count * shape[0] * width
        blocks = [-(-shape[0] // BLOCK_ROWS) for shape in shapes]  # a sample is one block of the kernel's layout
        return sum(own * weight.nbytes for own, weight in zip(blocks, held, strict=True))


def _layers(config: ModelConfig) -> Iterator[tuple[list[str], int]]:
    """Names of the matrices of all layers, those that the decoder merges together, and how many there are alike: the
    experts of a layer are stored alike, and the first stands for all of them.
    """
    for layer in range(config.num_layers):
        for module, matrix in layer_matrices(config, layer).items():
            number = module.removeprefix(EXPERTS).partition(".")[0] if module.startswith(EXPERTS) else ""
            if number in ("", "0"):
                count = config.experts.num_experts if number and config.experts is not None else 1
                yield [f"{name}.weight" for name in matrix.rows], count
