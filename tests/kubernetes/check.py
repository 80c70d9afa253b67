#!/usr/bin/env python3
"""Checks dist/kubernetes and dist/prometheus without a cluster: check.py PROGRAMS, the folder of the built programs.

Schemas are Kubernetes' own and those of the Prometheus operator. What schemas don't know is checked here: names that
must match, whether the programs accept their arguments and configuration, what kustomize builds from the manifests,
and how the admission policy changes a pod.
"""

import copy
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import kubernetes_validate
import yaml
from cloudcoil.models.prometheus_operator import v1 as operator
from helm_python import lint
from helm_python.errors import HelmError
from injection import check_injection
from render import DIST, rendered, variants
from scrape import check_update

PROMETHEUS = DIST.parent / "prometheus"
# The oldest release that Chart.yaml names, the first with injection, and the newest that has a schema.
VERSIONS = ["1.30", "1.36", "1.37"]
PROGRAMS = pathlib.Path(sys.argv[1])


def validate(item: dict) -> None:
    """Raises an error unless schemas know all fields and accept their values."""
    if item["apiVersion"].startswith("monitoring.coreos.com/"):
        seen = getattr(operator, item["kind"]).model_validate(item)
        # The model drops what it doesn't know.
        kept = json.loads(seen.model_dump_json(by_alias=True, exclude_unset=True))
        assert kept == item, f"unknown fields: {kept} is not {item}"
        return
    for version in VERSIONS:
        if item["kind"].startswith("MutatingAdmission") and version == "1.30":
            continue
        kubernetes_validate.validate(item, version, strict=True)


def refuses(item: dict) -> None:
    """Fails if the schemas accept an object that has a mistake."""
    try:
        validate(item)
    except Exception:
        return
    raise AssertionError(f"a mistake in {item['kind']} is accepted: the check checks nothing")


def run(*command, **options) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pods(items: list[dict]):
    for item in items:
        if item["kind"] in ("DaemonSet", "StatefulSet"):
            yield item, item["spec"]["template"]


def check_names(items: list[dict]) -> None:
    """Checks what refers to what: selectors, accounts, configuration, volumes and ports."""
    names = {(item["kind"], item["metadata"]["name"]) for item in items}
    assert len(names) == len(items), "two objects have one name"
    labelled = [template["metadata"]["labels"] for _, template in pods(items)]
    services = [item["metadata"]["labels"] for item in items if item["kind"] == "Service"]

    def selects(selector: dict, among: list[dict]) -> bool:
        return any(selector.items() <= labels.items() for labels in among)

    for item in items:
        spec = item.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector") or {}
        wanted = selector.get("matchLabels", selector)
        among = services if item["kind"] == "ServiceMonitor" else labelled
        assert selects(wanted, among) or not wanted, f"{item['metadata']['name']} selects nothing: {wanted}"
    for owner, template in pods(items):
        spec = template["spec"]
        assert ("ServiceAccount", spec["serviceAccountName"]) in names
        assert owner["kind"] == "DaemonSet" or ("Service", owner["spec"]["serviceName"]) in names
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        used = set()
        for container in spec["containers"] + spec.get("initContainers", []):
            used |= {mount["name"] for mount in container["volumeMounts"]}
            ports = {port["name"] for port in container.get("ports", [])}
            if spec.get("hostNetwork"):
                # With a port of the node, the next daemon could not be placed beside the running one.
                assert not ports and owner["spec"]["updateStrategy"]["rollingUpdate"]["maxUnavailable"] == 0
                found = (re.search(r":(\d+)$", each.get("value", "")) for each in container.get("env", []))
                ports = {int(match[1]) for match in found if match}
            for probe in ("livenessProbe", "readinessProbe"):
                action = container.get(probe, {})
                target = action.get("httpGet") or action.get("tcpSocket")
                assert not target or target["port"] in ports, f"{probe}: {target}"
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["securityContext"]["readOnlyRootFilesystem"]
        assert used == volumes.keys(), f"{used} of {volumes.keys()}"
        for volume in volumes.values():
            config = volume.get("configMap")
            assert not config or ("ConfigMap", config["name"]) in names


FIELDS = {"status.hostIP": "192.0.2.1", "spec.nodeName": "node-1", "metadata.name": "laxity-coordinator-2"}


def expanded(text: str, environment: dict) -> str:
    """Replaces $(NAME) as the kubelet does, which keeps unknown names."""
    text = re.sub(r"\$\((\w+)\)", lambda match: environment.get(match[1], match[0]), text)
    assert "$(" not in text, f"{text}: not in the environment before"
    return text


def check_programs(items: list[dict]) -> None:
    """Runs each program with the container's arguments and configuration, to show the configuration in effect."""
    configs = {item["metadata"]["name"]: item["data"] for item in items if item["kind"] == "ConfigMap"}
    for _, template in pods(items):
        container = template["spec"]["containers"][0]
        program = PROGRAMS / pathlib.PurePath(container["command"][0]).name
        environment = {}
        with tempfile.TemporaryDirectory() as folder:
            for name, text in configs[program.name].items():
                pathlib.Path(folder, name).write_text(text)
            for each in container["env"]:
                value = each.get("value") or FIELDS[each["valueFrom"]["fieldRef"]["fieldPath"]]
                environment[each["name"]] = expanded(value, environment).replace("/etc/laxity/config", folder)
            arguments = [expanded(argument, environment).replace("/etc/laxity/config", folder)
                         for argument in container["args"]]
            shown = run(program, *arguments, "--show-config", env=environment)
            # `laxity support-bundle` asks so, and then gets the metrics from the address.
            by_environment = run(program, "--show-config", env=environment)
        expected = 'metrics = "192.0.2.1:7475"' if program.name == "laxityd" else "0.0.0.0:9472"
        assert expected in shown, shown
        assert program.name != "laxityd" or expected in by_environment, by_environment
        if "[etcd]" in shown:
            advertised = 'advertise = "laxity-coordinator-2.laxity-coordinators.laxity.svc:7471"'
            assert advertised in shown, shown


def by_name(items: list[dict]) -> dict:
    return {(item["kind"], item["metadata"]["name"]): item for item in items}


def kustomized(folder: pathlib.Path) -> list[dict]:
    return list(yaml.safe_load_all(run("kubectl", "kustomize", folder)))


def check_kustomize(name: str, items: list[dict]) -> None:
    """Builds a base, and an overlay of it that sets the image as docs/kubernetes.md says."""
    assert by_name(kustomized(DIST / name)) == by_name(items), f"kustomize makes other objects of {name}"
    version = json.loads(run("kubectl", "version", "--client", "--output=json"))["clientVersion"]
    # Debian 12 has an old one, whose resources are files only.
    folders = "bases" if int(version["minor"].rstrip("+")) < 21 else "resources"
    with tempfile.TemporaryDirectory() as folder:
        overlay = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            folders: [os.path.relpath(DIST / name, os.path.realpath(folder))],
            "images": [{"name": "localhost/laxity", "newName": "registry.example/laxity", "newTag": "1.2.3"}],
        }
        pathlib.Path(folder, "kustomization.yaml").write_text(yaml.safe_dump(overlay))
        built = kustomized(pathlib.Path(folder))
    assert by_name(built).keys() == by_name(items).keys()
    for item in built:
        validate(item)
    check_names(built)
    check_programs(built)
    for _, template in pods(built):
        for container in template["spec"]["containers"] + template["spec"].get("initContainers", []):
            assert container["image"] == "registry.example/laxity:1.2.3", container["image"]


def main() -> None:
    for values in ({}, yaml.safe_load((DIST / "full/values.yaml").read_text())):
        # Helm wants an icon, which is of no use here.
        said = [message for message in lint(DIST / "chart", values, namespace="laxity")["messages"]
                if "icon is recommended" not in message["error"]]
        assert not said, said
    examples = {path.stem: yaml.safe_load(path.read_text()) for path in (DIST / "examples").glob("*.yaml")}
    for item in examples.values():
        validate(item)
    for name, text in variants().items():
        committed = (DIST / name / "laxity.yaml").read_text()
        assert committed == text, f"{name} is not what the chart gives: run `make kubernetes`"
        items = list(yaml.safe_load_all(text))
        for item in items:
            validate(item)
            refuses({**copy.deepcopy(item), "speck": {}})
        check_names(items)
        check_programs(items)
        policies = check_injection(items, examples["job"], examples["job-by-hand"], validate)
        check_kustomize(name, items)
        assert (policies, check_update(items)) == ((1, 1) if name == "full" else (0, 0)), f"{name}: {policies} policies"
        rules = [item["spec"] for item in items if item["kind"] == "PrometheusRule"]
        alerts = yaml.safe_load((PROMETHEUS / "alerts.yaml").read_text())
        assert rules == ([alerts] if name == "full" else []), "the chart has other rules than promtool tests"
        print(f"{name}: {len(items)} objects")

    # Without etcd, and without TLS.
    try:
        rendered({"coordinator": {"enabled": True}})
    except HelmError as error:
        assert "etcd.endpoints" in str(error), error
    else:
        raise AssertionError("three coordinators without etcd")
    alone = {"enabled": True, "replicas": 1, "tls": {"enabled": False}}
    nics = [{"name": "mlx5_0", "rate": "400Gbit"}]
    alone = list(yaml.safe_load_all(rendered({"coordinator": alone, "daemon": {"nics": nics, "mode": "enforce"}})))
    for item in alone:
        validate(item)
    check_names(alone)
    check_programs(alone)

    run("promtool", "check", "rules", "alerts.yaml", cwd=PROMETHEUS)
    run("promtool", "test", "rules", "alerts-test.yaml", cwd=PROMETHEUS)
    tested = (PROMETHEUS / "alerts-test.yaml").read_text()
    for group in alerts["groups"]:
        for rule in group["rules"]:
            assert f'alertname="{rule["alert"]}"' in tested, f"{rule['alert']} has no test"
    print("alerts: tested")


if __name__ == "__main__":
    main()
