"""deploy/kubernetes: valid by Kubernetes' own schemas, and in step with the server's settings, metrics and health."""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pyruntime.config import ENV_PREFIX, Settings
from pyruntime.service.health import LIVENESS
from pyruntime.telemetry import site
from pyruntime.telemetry.catalog import METRICS
from tests.deploy.replicas import ROOT
from tests.tools import missing

KUBERNETES = ROOT / "deploy/kubernetes"
BASE = KUBERNETES / "base"
COMPONENTS = sorted(path.name for path in (KUBERNETES / "components").iterdir())
# Not settings, but read by the server's cache, the client and the build.
OTHER_VARIABLES = {"PYRUNTIME_CACHE_DIR", "PYRUNTIME_TARGET", "PYRUNTIME_CUDA"}
# Custom resources, by the module that has a model of each, made from its own schema.
CUSTOM = {
    "PodMonitor": "cloudcoil.models.prometheus_operator.v1",
    "ScaledObject": "cloudcoil.models.keda.v1alpha1",
    "DestinationRule": "cloudcoil.models.istio.networking.v1",
    "VirtualService": "cloudcoil.models.istio.networking.v1",
}
# Files of other programs.
FOREIGN = {"Kustomization", "Component", None}
# Native sleep in preStop is on by default from 1.30.
VERSIONS = ["1.30", "1.37"]


def documents(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document]


def rendered(folder: Path, components: list[str]) -> list[dict[str, Any]]:
    """What kubectl would apply: the base with ``components``."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed, and no registry that is used here has a current one")
    overlay = folder / "kubernetes" / "overlay"
    shutil.copytree(KUBERNETES, folder / "kubernetes", dirs_exist_ok=True)
    overlay.mkdir()
    content = {"resources": ["../base"], "components": [f"../components/{name}" for name in components]}
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(content))
    made = subprocess.run([kubectl, "kustomize", overlay], check=False, capture_output=True, text=True, timeout=60)
    assert made.returncode == 0, made.stderr
    return documents(made.stdout)


def validate(found: list[dict[str, Any]], versions: list[str]) -> None:
    try:
        import kubernetes_validate
    except ImportError:
        missing("kubernetes-validate is not installed: pip install kubernetes-validate")
    for document in found:
        if document.get("kind") in CUSTOM:
            validate_custom(document)
        elif document.get("kind") not in FOREIGN:
            for version in versions:
                kubernetes_validate.validate(document, version, strict=True)


def validate_custom(document: dict[str, Any]) -> None:
    """Values of the right types, and no field that the schema lacks: a model drops those that it does not know."""
    try:
        module = importlib.import_module(CUSTOM[document["kind"]])
    except ImportError:
        missing("the models of custom resources are not installed: pip install pyruntime[deploy]")
    read = getattr(module, document["kind"]).model_validate(document)
    assert read.model_dump(by_alias=True, exclude_unset=True, mode="json") == document


def deployment(found: list[dict[str, Any]]) -> dict[str, Any]:
    return next(document for document in found if document["kind"] == "Deployment")


def raw(name: str) -> dict[str, Any]:
    return yaml.safe_load((BASE / name).read_text())


def settings() -> Settings:
    return Settings.load(["--config", str(BASE / "settings.yaml")], {})


def test_the_base_is_valid():
    for path in BASE.glob("*.yaml"):
        if path.name != "settings.yaml":
            validate(documents(path.read_text()), VERSIONS)
    listed = raw("kustomization.yaml")["resources"]
    assert {*listed, "kustomization.yaml", "settings.yaml"} == {path.name for path in BASE.glob("*.yaml")}


def custom_resources() -> Iterator[dict[str, Any]]:
    for path in KUBERNETES.rglob("*.yaml"):
        yield from (each for each in documents(path.read_text()) if each.get("kind") in CUSTOM)


def test_custom_resources_are_valid_by_their_own_schemas():
    found = list(custom_resources())
    assert {each["kind"] for each in found} == CUSTOM.keys()
    for each in found:
        validate_custom(each)


def test_a_custom_resource_with_a_slip_is_found():
    for each in custom_resources():
        with pytest.raises(AssertionError):
            validate_custom({**each, "spec": each["spec"] | {"noSuchField": 1}})
        with pytest.raises(ValueError, match="validation error"):
            validate_custom({**each, "spec": "text"})


@pytest.mark.parametrize("component", COMPONENTS)
def test_each_component_is_valid_on_the_base(component: str, tmp_path: Path):
    found = rendered(tmp_path, [component])
    validate(found, VERSIONS[-1:])
    for container in deployment(found)["spec"]["template"]["spec"]["containers"]:
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            kinds = {"grpc", "httpGet", "exec"} & container[probe].keys()
            assert len(kinds) == 1, (probe, kinds)


def test_components_go_together(tmp_path: Path):
    found = rendered(tmp_path, ["prometheus", "autoscaling", "tls", "tokens", "cuda"])
    validate(found, VERSIONS[-1:])
    pod = deployment(found)["spec"]["template"]["spec"]
    assert {"tls", "tokens", "settings"} <= {volume["name"] for volume in pod["volumes"]}
    names = [each["name"] for each in pod["containers"][0]["env"]]
    assert len(set(names)) == len(names) == 7
    # The settings of the file and of the environment together are allowed.
    environment = {each["name"]: each["value"] for each in pod["containers"][0]["env"]}
    loaded = Settings.load(["--config", str(BASE / "settings.yaml")], environment)
    assert loaded.tls_certificate and not loaded.insecure and loaded.token_file


def test_ports_and_times_are_those_of_the_settings():
    pod = raw("deployment.yaml")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {"grpc": settings().port, "metrics": settings().metrics_port}
    for service in documents((BASE / "service.yaml").read_text()):
        assert [each["targetPort"] for each in service["spec"]["ports"]] == ["grpc"]
    ingress = raw("networkpolicy.yaml")["spec"]["ingress"]
    assert [each["port"] for rule in ingress for each in rule["ports"]] == list(ports.values())
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] >= pause + settings().drain_grace_s + 10
    assert container["readinessProbe"]["periodSeconds"] * container["readinessProbe"]["failureThreshold"] < pause


def test_probes_ask_for_health_that_there_is():
    (container,) = raw("deployment.yaml")["spec"]["template"]["spec"]["containers"]
    assert container["livenessProbe"]["grpc"]["service"] == LIVENESS
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[name]["grpc"]["port"] == settings().port
    assert "service" not in container["readinessProbe"]["grpc"]


def test_service_links_are_off():
    """Else Kubernetes sets PYRUNTIME_PORT for the service of that name, to something that is no port."""
    pod = raw("deployment.yaml")["spec"]["template"]["spec"]
    assert pod["enableServiceLinks"] is False
    names = {service["metadata"]["name"] for service in documents((BASE / "service.yaml").read_text())}
    assert "pyruntime" in names
    with pytest.raises(SystemExit):
        Settings.load([], {"PYRUNTIME_PORT": "tcp://10.0.0.1:50051"})


def deploy_files() -> Iterator[Path]:
    for path in (ROOT / "deploy").rglob("*"):
        if path.is_file() and path.suffix not in (".binpb", ".png"):
            yield path


def test_every_variable_that_is_set_exists():
    known = {ENV_PREFIX + name.upper() for name in Settings.model_fields} | {ENV_PREFIX + "CONFIG"} | OTHER_VARIABLES
    found = {name for path in deploy_files() for name in re.findall(r"PYRUNTIME_[A-Z_]+[A-Z]", path.read_text())}
    assert found and not found - known, found - known


def test_every_metric_that_is_asked_for_exists():
    known = {metric.name for metric in METRICS}
    made = {"pyruntime_queue_seconds_mean"}  # by prometheus-adapter-values.yaml
    for path in (KUBERNETES / "components").rglob("*.yaml"):
        for name in re.findall(r"pyruntime_[a-z_]+[a-z]", path.read_text()):
            assert re.sub("_(sum|count|bucket)$", "", name) in known or name in made, f"{path}: {name}"


def test_probes_over_http_ask_for_pages_that_there_are():
    pod = yaml.safe_load((KUBERNETES / "components/tls/deployment.yaml").read_text())["spec"]["template"]["spec"]
    probes = [pod["containers"][0][name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert [probe["path"] for probe in probes] == ["/readyz", "/livez", "/readyz"]
    assert all(f'"{probe["path"]}"' in inspect.getsource(site) for probe in probes)
