"""`foretoken serve` that cannot start: exit codes and messages. The workers run in this process, without a port."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest
import torch
from fastapi import FastAPI
from safetensors.torch import load_file, save_file

from foretoken import EngineConfig, SamplingParams, SpecConfig
from foretoken.backend.local import LocalBackend, build_engine
from foretoken.errors import CheckpointError, SpeculationWarning
from foretoken.server.api.app import create_app
from foretoken.server.api.config import ApiConfig
from foretoken.server.life import supervisor
from tests.cli.conftest import Run, clean_place, foretoken  # noqa: F401 - fixtures
from tests.helpers.foreign_tokenizers import foreign_tokenizer
from tests.helpers.http import client_of, run
from tests.helpers.workers import ProcessHere

START = ("--port", 0, "--json", "--cost-profile", "off", "--dtype", "float32", "--drafter", "none")


@pytest.fixture(autouse=True)
def workers_here(monkeypatch: pytest.MonkeyPatch) -> None:
    class Processes(ProcessHere):
        started: list[ProcessHere] = []  # noqa: RUF012 - of this test

    monkeypatch.setattr(supervisor, "WorkerProcess", Processes)


def edit_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def truncated(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def corrupt(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[8:40] = b"\xff" * 32
    (folder / "model.safetensors").write_bytes(bytes(data))


def size_mismatch(folder: Path) -> None:
    edit_config(folder, intermediate_size=13)


def wrong_dtype(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.zeros(32, dtype=torch.int64)
    save_file(weights, folder / "model.safetensors")


def missing_shard(folder: Path) -> None:
    names = list(load_file(folder / "model.safetensors"))
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def extra_key(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"model.layers.0.self_attn.extra.weight": torch.zeros(3)}, folder / "model.safetensors")


def encoder_only(folder: Path) -> None:
    edit_config(folder, model_type="bert", architectures=["BertModel"])


def config_missing(folder: Path) -> None:
    (folder / "config.json").unlink()


def remote_code(folder: Path) -> None:
    edit_config(folder, model_type="mine", auto_map={"AutoModelForCausalLM": "modeling.Mine"})


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def refused(foretoken: Run, *arguments: object) -> tuple[int, str]:  # noqa: F811
    done = foretoken("serve", *arguments)
    assert "Traceback" not in done.err
    assert done.out == ""
    return done.code, done.err


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncated, "model.safetensors"),
        (corrupt, "model.safetensors"),
        (size_mismatch, "mlp"),
        (wrong_dtype, "model.norm.weight"),
        (missing_shard, "model-00001-of-00002.safetensors"),
        (extra_key, "model.layers.0.self_attn.extra.weight"),
        (encoder_only, "bert"),
        (config_missing, "config.json"),
        (remote_code, "mine"),
    ],
)
def test_a_checkpoint_that_cannot_be_served(
    foretoken: Run,  # noqa: F811
    text_pair: SimpleNamespace,
    tmp_path: Path,
    damage: Callable[[Path], None],
    message: str,
) -> None:
    """Case 65, `model_file_truncated / corrupt / size_mismatch / wrong_dtype / missing_shard / extra_key`; case 66, no
    causal language model.
    """
    shutil.copytree(text_pair.target, tmp_path / "broken")
    damage(tmp_path / "broken")
    code, err = refused(foretoken, "-t", tmp_path / "broken", *START)
    assert (code, message in err) == (3, True), err


def test_pickle_weights_refused(foretoken: Run, text_pair: SimpleNamespace, tmp_path: Path) -> None:  # noqa: F811
    """Case 67."""
    shutil.copytree(text_pair.target, tmp_path / "broken")
    only_pickle(tmp_path / "broken")
    code, err = refused(foretoken, "-t", tmp_path / "broken", *START)
    assert code == 3
    assert "safetensors" in err


def test_offline_mode(foretoken: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Case 68: a clean message, and no socket is opened towards the network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    connected: list[object] = []
    monkeypatch.setattr(socket.socket, "connect", lambda _self, address: connected.append(address))
    code, err = refused(foretoken, "-t", "nobody/no-such-model", *START)
    assert (code, connected) == (3, [])
    assert "nobody/no-such-model" in err


def test_tokenizer_mismatch(foretoken: Run, text_pair: SimpleNamespace, tmp_path: Path) -> None:  # noqa: F811
    """Case 51: a draft that speaks other tokens ends the start, whether it is required or not."""
    shutil.copytree(text_pair.draft, tmp_path / "draft")
    foreign_tokenizer(tmp_path / "draft", "unigram", 300)
    arguments = ("--drafter", "draft_model", "--draft", tmp_path / "draft", "--draft-vocabulary", "same")
    code, err = refused(foretoken, "-t", text_pair.target, *START[:-2], *arguments)
    assert code == 3, err
    assert "tokens" in err


def test_draft_missing_and_required(foretoken: Run, text_pair: SimpleNamespace, tmp_path: Path) -> None:  # noqa: F811
    """Case 52, `draft_missing / draft_truncated` with `--draft-required`."""
    shutil.copytree(text_pair.draft, tmp_path / "cut")
    truncated(tmp_path / "cut")
    for draft, message in ((tmp_path / "nowhere", "nowhere"), (tmp_path / "cut", "model.safetensors")):
        arguments = ("--draft", draft, "--draft-required")
        code, err = refused(foretoken, "-t", text_pair.target, *START[:-2], *arguments)
        assert (code, message in err) == (3, True), err


def check_lost_drafter(app: FastAPI) -> None:
    """A request that names the drafter whose draft is missing is at fault, every time; the server does not fail."""

    async def ask(**fields: object) -> httpx2.Response:
        async with client_of(app) as client:
            return await client.post("/v1/completions", json={"prompt": "the list", "max_tokens": 4, **fields})

    for _ in range(2):
        response = run(ask(spec={"drafter": "draft_model"}))
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_feature", "spec.drafter")
        assert "could not be loaded" in error["message"]
    for name in ("ngram", "auto", None):
        assert run(ask(spec={"drafter": name})).status_code == 200


def test_draft_missing(text_pair: SimpleNamespace, tmp_path: Path) -> None:
    """Case 52: without `--draft-required` the server warns and decodes without the draft, with the same answers."""
    shutil.copytree(text_pair.draft, tmp_path / "cut")
    truncated(tmp_path / "cut")
    for draft in (tmp_path / "nowhere", tmp_path / "cut"):
        spec = SpecConfig("draft_model", str(draft))
        config = EngineConfig(text_pair.target, spec, dtype="float32", profile="off")
        with pytest.warns(SpeculationWarning, match="serving without the draft"):
            engine, missing = build_engine(config, max_waiting=4, draft_required=False)
        assert missing == str(draft)
        with engine, engine.llm as llm:
            assert "draft_model" not in llm.spec.leaves
            assert len(engine.submit("the list", SamplingParams(max_tokens=4)).result().token_ids) == 4
            check_lost_drafter(create_app(LocalBackend(engine, "m", missing), ApiConfig(specs=(spec,))))
        with pytest.raises(CheckpointError):
            build_engine(config, max_waiting=4, draft_required=True)


def test_startup_refusals(foretoken: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Case 69: a public address without a key, TLS files, unknown settings: 2; a port in use: 4."""
    (tmp_path / "cert.pem").write_text("no certificate")
    cases = {
        ("--host", "0.0.0.0"): (2, "host='0.0.0.0'"),
        ("--host", "no.such.host.invalid", "--insecure"): (2, "is no address of this machine"),
        ("--api-key", "short"): (2, "a key has 8 to 512"),
        ("--api-key", "@nowhere"): (4, "cannot read nowhere"),
        ("--keys-file", "nowhere.toml"): (4, "nowhere.toml"),
        ("--tls-cert", "cert.pem", "--tls-key", "nowhere.pem"): (2, "tls_key='nowhere.pem': cannot be read"),
        ("--tls-cert", "cert.pem"): (2, "both are needed"),
        ("--tls-cert", "cert.pem", "--tls-key", "cert.pem"): (2, "no PEM file"),
        ("--port", 70_000): (2, "port=70000"),
        ("--workers", 0): (2, "workers=0"),
        ("--watchdog-s", "nan"): (2, "watchdog_s"),
        ("--device", "tpu"): (2, "use auto, cpu, cuda or cuda:N"),
        ("--device", "cuda:99"): (2, "device"),
        ("--drafter", "ngran"): (2, "did you mean 'ngram'"),
        ("--trace", "t.jsonl", "--workers", 2): (2, "one worker"),
        ("--granularity", "often"): (2, "choose step, token or interval:MS"),
        ("--prot", 1): (2, "--port"),
    }
    for arguments, (code, message) in cases.items():
        found, err = refused(foretoken, "--target", "reference:target", *arguments)
        assert (found, message in err) == (code, True), (arguments, err)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, err = refused(foretoken, "--target", "reference:target", "--port", port)
        assert (code, f"port {port} of 127.0.0.1 is in use" in err) == (4, True)
    Path("foretoken.toml").write_text("[serve]\nprot = 1\n")
    code, err = refused(foretoken)
    assert (code, "did you mean 'port'" in err) == (2, True)
    Path("foretoken.toml").unlink()
    monkeypatch.setenv("FORETOKEN_SERVE__PROT", "1")
    code, err = refused(foretoken)
    assert (code, "did you mean FORETOKEN_SERVE__PORT" in err) == (2, True)
