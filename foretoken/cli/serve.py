"""`foretoken serve`: an OpenAI-compatible server. This process holds no model and imports no torch: its workers do."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import typer

from foretoken.cli.common import (
    DEFAULT_MODEL,
    JsonOption,
    engine_config,
    fetch_models,
    print_json,
    routing_rules,
    text_of,
)
from foretoken.cli.flags import answering_spec, check_drafting_files, config_from, takes
from foretoken.cli.origins import SECRETS
from foretoken.config import SpecConfig
from foretoken.control.routing import RoutingRules
from foretoken.engine_config import EngineConfig
from foretoken.errors import ConfigError, install
from foretoken.files import check_file
from foretoken.printing.console import Console
from foretoken.scale.options import RayOptions
from foretoken.server.api.config import ApiConfig
from foretoken.server.config import ServerConfig
from foretoken.server.guard.config import KEY_VARIABLE, GuardConfig, is_loopback
from foretoken.server.life.config import LifeConfig
from foretoken.server.observe.config import ObserveConfig

if TYPE_CHECKING:
    from foretoken.server.run import Readiness


@takes(RayOptions)
@takes(ObserveConfig)
@takes(LifeConfig)
@takes(ApiConfig)
@takes(GuardConfig)
@takes(SpecConfig)
@takes(RoutingRules)
@takes(EngineConfig)
@takes(ServerConfig)
def serve(context: typer.Context, target: str = DEFAULT_MODEL, as_json: JsonOption = False) -> None:
    """Serve a model over an OpenAI-compatible HTTP interface; the default model is smollm2."""
    config, options = server_config(context.params), config_from(RayOptions, context.params)
    run = _runner(options)
    config.check_start()  # a mistake is found before minutes of downloading
    fetch_models(target, None if config.engine.spec is None else config.engine.spec.draft)
    if not as_json:
        Console(stderr=True).line(f"loading {target}")

    def announce(ready: Readiness) -> None:
        if as_json:
            print_json(_facts(ready, config))
        else:
            _print_block(ready, config)

    code = run(config, announce)
    if code:
        raise typer.Exit(code)


def _runner(options: RayOptions) -> Callable[[ServerConfig, Callable[[Readiness], None]], int]:
    """What serves: processes of this machine, or replicas of Ray.

    Raises:
        ConfigError: a package is missing.
    """
    if options.ray and find_spec("ray") is None:
        raise ConfigError("ray", True, f"Ray is not installed: {install('ray')}")
    try:  # late: these are in the extra `server`, which other verbs do without
        if not options.ray:
            from foretoken.server.run import run_server

            return run_server
        from foretoken.scale.run import run_on_ray
    except ModuleNotFoundError as error:
        raise ConfigError("serve", error.name, f"is not installed: {install('server')}") from error
    return lambda config, on_ready: run_on_ray(config, options, on_ready)


def server_config(given: Mapping[str, Any]) -> ServerConfig:
    """The configuration that flags mean.

    Raises:
        InputError: an invalid value; StorageError: a file cannot be read.
    """
    spec = answering_spec(given)
    if spec is not None:
        from foretoken.heads.kind import with_head_kind

        spec.for_request(None)
        spec = with_head_kind(spec)  # requests may name each part
        check_drafting_files(spec)
    if given["trace"] is not None:
        check_file("trace", given["trace"])
    specs = () if spec is None else spec.configs
    api = {"obfuscation": _pads_streams(given), "allow_lossy": given["allow_lossy"], "specs": specs}
    return config_from(
        ServerConfig,
        given,
        engine=engine_config(spec, given, routing_rules(given, spec)),
        api=config_from(ApiConfig, given, **api),
        guard=config_from(GuardConfig, given, **_keys(given)),
        observe=config_from(ObserveConfig, given),
        life=config_from(LifeConfig, given),
    )


def _keys(given: Mapping[str, Any]) -> dict[str, str | None]:
    """The keys that flags or the environment name, read from files where they say so."""
    found = {name: text_of(name, given[name]) for name in SECRETS}
    found["api_key"] = found["api_key"] or os.environ.get(KEY_VARIABLE)
    return {name: None if key is None else key.strip() for name, key in found.items()}


def _pads_streams(given: Mapping[str, Any]) -> bool:
    """Whether streams are padded by default: the sizes of events show an observer of the network what was accepted."""
    return bool(given["obfuscation"]) or not is_loopback(given["host"])


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
