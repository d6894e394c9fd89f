"""A batch as numbers on the device, which the paged attention kernel (`paged_triton`) reads, and the sizes that whoever
lays them out and the kernel agree on.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# Keys are summed in spans of this many columns, counted from the beginning of the text, and the sums of spans are added
# in their order: the same sum of a row, whoever else is in the batch and however many programs share its spans.
SPAN_COLUMNS = 512
# What a program holds must fit into registers (`interpreted/test_compiled.py`): numbers of its float32 sums, and bytes
# of keys, by their itemsize; float32 is multiplied without matrix instructions.
_MAX_LINES, _MAX_SUMS = 32, 4096
_TILE_BYTES = {2: 16384, 4: 8192}
SEGMENT_FIELDS = 8  # past, columns, rows, first row, first block, first distance or -1, spans per part, first part row
TILE_FIELDS = 2  # segment, first of its rows
ALIGNED = 4  # numbers; Triton compiles another kernel for vectors that do not begin at a multiple of 16 bytes
MERGE_FIELDS = 4  # row, its place in the first part, step to its place in the next part, parts


@dataclass(frozen=True)
class PagedWork:
    """The batch in int32 vectors on the device.

    A segment is cut into tiles of rows, and its columns into parts of whole spans. Distances between new rows of a
    tree, -1 where one does not see the other, are a matrix [rows, columns - past] in `distances`. A segment without
    columns and a row without parts are padding: nothing of them is read or written.
    """

    segments: Tensor  # [n * SEGMENT_FIELDS]
    tiles: Tensor  # [m * TILE_FIELDS]
    merged: Tensor  # [r * MERGE_FIELDS] rows whose columns have several parts
    blocks: Tensor  # block tables, one behind another
    positions: Tensor  # [T]
    distances: Tensor
    num_tiles: int
    num_parts: int  # most of a segment
    num_merged: int
    num_part_rows: int  # over all parts
    has_trees: bool


def tile_lines(heads_per_group: int, head_dim: int) -> int:
    """Query rows of a program, a power of two: the heads of one key group at as many positions as fit, at least one.

    It follows from the model alone: matrix instructions of another size may round a row's sums elsewhere.
    """
    return max(16, min(_MAX_LINES, _MAX_SUMS // padded(head_dim)), 1 << (heads_per_group - 1).bit_length())


def tile_columns(head_dim: int, itemsize: int) -> int:
    """Keys that are multiplied at once, 16 at least and 64 at most: a divisor of a span."""
    return min(64, max(16, _TILE_BYTES[itemsize] // (padded(head_dim) * itemsize)))


def padded(head_dim: int) -> int:
    """The power of two that holds a head, at least what matrix instructions take."""
    return max(16, 1 << (head_dim - 1).bit_length())
