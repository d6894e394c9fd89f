"""The study of loading memory on a small checkpoint, and on what cannot be loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretoken.errors import ForetokenError
from studies.loading_memory import measure
from tests.helpers.checkpoints import tiny_checkpoint


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells a peak")
def test_bytes_of_a_checkpoint(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "target", "llama")
    row = measure(folder)
    assert row["file_bytes"] == (folder / "model.safetensors").stat().st_size
    assert row["peak_bytes"] >= row["kept_bytes"] > 0
    assert row["weight_bytes"] > 0
    (folder / "config.json").write_text("{")
    with pytest.raises(ForetokenError, match=r"target cannot be loaded: .*config\.json"):
        measure(folder)
