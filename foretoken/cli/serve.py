"""`foretoken serve`: an OpenAI-compatible server. This process holds no model and imports no torch: its workers do."""

# ruff: noqa: ARG001 - most options are read from the context

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.common import (
    DEFAULT_MODEL,
    DEVICE_HELP,
    DTYPE_HELP,
    AdaptOption,
    CacheOption,
    CacheReserveOption,
    CostProfileOption,
    JsonOption,
    MaxBatchSizeOption,
    MaxPromptTokensOption,
    MaxStepTokensOption,
    NumericsOption,
    TargetOption,
    WeightsOption,
    engine_config,
    fetch_models,
    print_json,
)
from foretoken.cli.serve_options import keys_from, pads_streams, server_part, with_server_flags
from foretoken.cli.spec_options import answering_spec, with_spec_flags
from foretoken.control.queue import SchedulerConfig
from foretoken.engine_config import EngineConfig
from foretoken.errors import ConfigError
from foretoken.files import check_file, check_readable
from foretoken.printing.console import Console
from foretoken.server.api.config import ApiConfig
from foretoken.server.config import ServerConfig
from foretoken.server.guard.config import GuardConfig
from foretoken.server.life.config import LifeConfig
from foretoken.server.observe.config import ObserveConfig

if TYPE_CHECKING:
    from foretoken.server.run import Readiness


@with_spec_flags
@with_server_flags
def serve(
    context: typer.Context,
    target: TargetOption = DEFAULT_MODEL,
    port: Annotated[int, typer.Option(help="The port to listen on; 0 = a free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="What clients call the model; without it, its own name.")] = None,
    draft_required: Annotated[
        bool, typer.Option("--draft-required", help="End with an error where the draft is missing or broken.")
    ] = False,
    tls_cert: Annotated[str | None, typer.Option(help="Certificate for HTTPS, a PEM file.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="Its key, a PEM file.")] = None,
    dtype: Annotated[str, typer.Option(help=DTYPE_HELP)] = "auto",
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "auto",
    cache_tokens: CacheOption = None,
    cache_reserve: CacheReserveOption = EngineConfig.cache_reserve,
    max_batch_size: MaxBatchSizeOption = SchedulerConfig.max_batch_size,
    max_prompt_tokens: MaxPromptTokensOption = SchedulerConfig.max_prompt_tokens,
    max_step_tokens: MaxStepTokensOption = None,
    numerics: NumericsOption = "default",
    weights: WeightsOption = "auto",
    cost_profile: CostProfileOption = "auto",
    adapt: AdaptOption = False,
    shadow_rate: Annotated[
        float, typer.Option(help="Share of answers that the target scores again, to check their distribution.")
    ] = EngineConfig.shadow_rate,
    trace: Annotated[Path | None, typer.Option(help="Append one line per event to this .jsonl file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Serve a model over HTTP, OpenAI-compatible; with nothing named, smollm2."""
    config = server_config(context.params)
    try:  # late: these are in the extra `server`, which other verbs do without
        from foretoken.server.run import run_server
    except ModuleNotFoundError as error:
        raise ConfigError("serve", error.name, "is not installed: pip install 'foretoken[server]'") from error
    config.check_start()  # a mistake is found before minutes of downloading
    fetch_models(target, None if config.engine.spec is None else config.engine.spec.draft)
    if not as_json:
        Console(stderr=True).line(f"loading {target}")

    def announce(ready: Readiness) -> None:
        if as_json:
            print_json(_facts(ready, config))
        else:
            _print_block(ready, config)

    code = run_server(config, announce)
    if code:
        raise typer.Exit(code)


def server_config(given: Mapping[str, Any]) -> ServerConfig:
    """The configuration that flags mean.

    Raises:
        InputError: a value that makes no sense.
        StorageError: a file cannot be read.
    """
    spec = answering_spec(given)
    if spec is not None:
        from foretoken.heads.kind import with_head_kind

        spec.for_request(None)
        spec = with_head_kind(spec)  # requests may name each part
        if spec.corpus is not None:
            check_readable("corpus", Path(spec.corpus))
    if given["trace"] is not None:
        check_file("trace", given["trace"])
    return ServerConfig(
        engine=engine_config(given["target"], spec, given),
        name=given["name"],
        port=given["port"],
        draft_required=given["draft_required"],
        tls_cert=given["tls_cert"],
        tls_key=given["tls_key"],
        api=server_part(
            ApiConfig,
            given,
            obfuscation=pads_streams(given),
            allow_lossy=given["allow_lossy"],
            specs=() if spec is None else spec.configs,
        ),
        guard=server_part(GuardConfig, given, **keys_from(given)),
        observe=server_part(ObserveConfig, given),
        life=server_part(LifeConfig, given),
    )


def _facts(ready: Readiness, config: ServerConfig) -> dict[str, Any]:
    return {
        "url": ready.url,
        "model": ready.info.name,
        "target": str(config.engine.model),
        "drafters": list(ready.drafters),
        "key": _has_key(config),
        "workers": ready.num_workers,
        "load_s": ready.load_s,
        "max_model_len": ready.info.max_model_len,
    }


def _print_block(ready: Readiness, config: ServerConfig) -> None:
    rows = {
        "address": f"{ready.url}/v1",
        "page": f"{ready.url}/",
        "model": f"{ready.info.name} ({config.engine.model}), context of {ready.info.max_model_len} tokens",
        "drafters": ", ".join(ready.drafters) or "none: plain decoding",
        "key": "needed" if _has_key(config) else "none: every program on this machine may use it",
        "workers": str(ready.num_workers),
    }
    console = Console()
    console.line(f"ready after {ready.load_s:.1f} s of loading", style="bold")
    for label, text in rows.items():
        console.line(f"  {label:<9}{text}")


def _has_key(config: ServerConfig) -> bool:
    guard = config.guard
    return guard.api_key is not None or guard.admin_key is not None or guard.keys_file is not None
