"""`app`, which a Serve config names: `import_path: foretoken.serve_ray:app`. Its `args` are the flags of `foretoken
serve` by name, with underscores.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from foretoken.cli.flags import config_from
from foretoken.cli.serve import server_config
from foretoken.cli.usage import USAGE_ERROR
from foretoken.cli.verbs import LazyVerbs
from foretoken.errors import ConfigError
from foretoken.scale.options import RayOptions
from foretoken.server.config import ServerConfig


def app(args: Mapping[str, Any]) -> Any:  # noqa: ANN401 - ray.serve's Application
    """The application that `args` describe.

    Raises:
        ConfigError, InputError: a setting that cannot be honoured.
    """
    from foretoken.scale.deploy import application  # late: the checks of `configs_of` need no Ray

    return application(*configs_of(args))


def configs_of(args: Mapping[str, Any]) -> tuple[ServerConfig, RayOptions]:
    """The configurations that `args` mean, checked as `foretoken serve --ray` checks them, see `app`."""
    command = LazyVerbs()["serve"]
    settings = {
        spelling.removeprefix("--").replace("-", "_"): str(one.name)
        for one in command.params
        for spelling in (str(one.name), *one.opts)
    }
    named: dict[str, Any] = {}
    for name, value in args.items():
        if name not in settings:
            near = difflib.get_close_matches(name, settings, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(name, value, f"is no flag of serve{hint}")
        if settings[name] in named:
            raise ConfigError(name, value, f"is {settings[name]}, which is given too: leave one of them out")
        named[settings[name]] = value
    try:
        given = command.make_context("serve", [], default_map=named).params
    except USAGE_ERROR as error:
        raise ConfigError("args", dict(args), error.format_message()) from error
    config, options = server_config(given), config_from(RayOptions, given)
    config.check_start()
    options.check_with(config)
    if config.tls_cert is not None:
        raise ConfigError("tls_cert", config.tls_cert, "Ray's proxy speaks plain HTTP: end TLS at a load balancer")
    return config, options
