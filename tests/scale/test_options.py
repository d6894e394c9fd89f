"""Settings of replicas: what Ray is told, what is refused, and the configurations in deploy/. Without Ray."""

from __future__ import annotations

import pkgutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from foretoken.control.autoscaling import DOWN_SHARE
from foretoken.errors import InputError
from foretoken.scale.options import RayOptions, engine_options, front_options
from foretoken.serve_ray import configs_of
from foretoken.server.guard.config import KEY_VARIABLE

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def test_ray_is_told_what_the_flags_say() -> None:
    given = {"target": "m", "workers": 2, "max_waiting": 10, "drain_s": 7.0, "replica_cpus": 3.0}
    config, options = configs_of(given)
    found = engine_options(config, options)
    assert (found["num_replicas"], found["graceful_shutdown_timeout_s"]) == (2, 7.0)
    assert "autoscaling_config" not in found  # Ray refuses it beside a number
    assert found["max_ongoing_requests"] > 10  # the engine refuses first, with 429
    assert found["ray_actor_options"] == {"num_cpus": 3.0, "num_gpus": 0.0}
    assert front_options(config, options)["max_ongoing_requests"] >= 2 * found["max_ongoing_requests"]
    large = engine_options(*configs_of(given | {"max_batch_size": 1024}))
    assert large["max_ongoing_requests"] > 1024 + 10  # its batches fill, too
    ranks, options = configs_of(given | {"tensor_parallel": 2, "replica_gpus": 1.0})
    assert configs_of(given | {"tp": 2, "replica_gpus": 1.0}) == (ranks, options)  # the flag's own name
    assert engine_options(ranks, options)["ray_actor_options"] == {"num_cpus": 6.0, "num_gpus": 2.0}
    config, options = configs_of(given | {"max_replicas": 5, "replica_tokens": 99, "scale_down_s": 1.5})
    scaling = engine_options(config, options)["autoscaling_config"]
    assert "num_replicas" not in engine_options(config, options)
    assert (scaling["min_replicas"], scaling["max_replicas"], scaling["downscale_delay_s"]) == (2, 5, 1.5)
    assert scaling["downscaling_factor"] == DOWN_SHARE
    assert scaling["policy"]["policy_kwargs"] == {"metric": "queued_tokens", "aim": 99, "usual": 99}
    config, options = configs_of(given | {"max_replicas": 5, "max_batch_size": 7})
    policy = engine_options(config, options)["autoscaling_config"]["policy"]
    assert policy == {
        "policy_function": "foretoken.scale.decide:ReplicaLoad",
        "policy_kwargs": {"metric": "batches", "aim": 0.8, "usual": 1 / 7},
    }
    for one in (scaling["policy"], policy):
        assert callable(pkgutil.resolve_name(one["policy_function"])(**one["policy_kwargs"]))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_replica": 3}, "did you mean max_replicas"),
        ({"tp": 2, "tensor_parallel": 2}, "is tensor_parallel, which is given too"),
        ({"workers": 3, "max_replicas": 2}, "at least workers, which is 3"),
        ({"devices": ["cuda:0"]}, "--replica-gpus"),
        ({"trace": "events.jsonl"}, "foretoken serve"),
        ({"host": "0.0.0.0"}, "key"),
        ({"replica_tokens": 0}, "replica_tokens"),
        ({"replica_cpus": 0}, "replica_cpus"),
        ({"workers": "many"}, "many"),
        ({"num_draft": 3, "drafter": "none"}, "num_draft"),
    ],
)
def test_what_replicas_cannot_do_is_refused(
    given: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=words):
        configs_of({"target": "m", **given})


def test_a_configuration_has_the_checks_of_the_command_line() -> None:
    config, options = configs_of({"target": "m", "draft": "d", "num_draft": 4, "api_key": "a-long-secret"})
    assert config.engine.spec is not None
    assert (config.engine.spec.drafter, config.engine.spec.num_draft) == ("draft_model", 4)
    assert (config.model_name, config.guard.api_key) == ("m", "a-long-secret")
    assert options == RayOptions()
    with pytest.raises(InputError, match="max_replicas"):
        RayOptions(max_replicas=0)


def test_configurations_of_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "a-long-secret")
    service = yaml.safe_load((DEPLOY / "ray-service.yaml").read_text())
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    group = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    for config in (
        yaml.safe_load((DEPLOY / "ray-serve.yaml").read_text()),
        yaml.safe_load(service["spec"]["serveConfigV2"]),
    ):
        (application,) = config["applications"]
        assert application["import_path"] == "foretoken.serve_ray:app"
        server, options = configs_of(application["args"])
        assert options.max_replicas == group["maxReplicas"]
        assert server.life.workers == group["minReplicas"] == group["replicas"]
        (container,) = group["template"]["spec"]["containers"]
        assert options.replica_cpus <= int(container["resources"]["limits"]["cpu"])
        assert server.life.drain_s < group["template"]["spec"]["terminationGracePeriodSeconds"]


def test_every_option_has_a_help() -> None:
    assert all(one.metadata for one in fields(RayOptions))
