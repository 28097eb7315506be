"""The kustomization of docs/kubernetes fits the daemon that it starts."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped] # its stubs are a package of their own

from appliance import settings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.unit

FOLDER = Path(__file__).parent.parent.parent / "docs" / "kubernetes"


def resources() -> dict[str, Any]:
    """All of them by kind and name."""
    names = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
    found = [one for name in names for one in yaml.safe_load_all((FOLDER / name).read_text())]
    return {f"{one['kind']}/{one['metadata']['name']}": one for one in found}


def test_the_daemon_takes_its_settings_and_listens_where_probes_and_services_look(tmp_path: Path) -> None:
    found = resources()
    (container,) = found["StatefulSet/appliance"]["spec"]["template"]["spec"]["containers"]
    config = settings.load(profile="a100", config=FOLDER / "config.toml", flags={"state_dir": tmp_path})
    (port,) = container["ports"]
    assert port["containerPort"] == config.http.port
    scripts = {container[probe]["exec"]["command"][2] for probe in ("startupProbe", "livenessProbe", "readinessProbe")}
    (script,) = scripts
    assert re.findall(r"127\.0\.0\.1:(\d+)", script) == [str(config.http.port)]
    targets = [one["spec"]["ports"][0]["targetPort"] for kind, one in found.items() if kind.startswith("Service/")]
    assert targets == [port["name"]] * 2
    grace_s = found["StatefulSet/appliance"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > config.shutdown_grace_s


def test_what_is_mounted_is_there_and_the_card_that_is_asked_for_is_the_one_of_the_profile() -> None:
    spec = resources()["StatefulSet/appliance"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    volumes = {one["name"] for one in pod["volumes"]} | {
        one["metadata"]["name"] for one in spec["volumeClaimTemplates"]
    }
    assert {one["name"] for one in container["volumeMounts"]} == volumes
    profile = tomllib.loads((settings.PROFILES / "a100.toml").read_text())
    sizes = [re.fullmatch(r"nvidia\.com/mig-1g\.(\d+)gb", name) for name in container["resources"]["limits"]]
    (gigabytes,) = [int(size[1]) for size in sizes if size]
    assert profile["gpu"]["memory_bytes"] < gigabytes * 10**9
