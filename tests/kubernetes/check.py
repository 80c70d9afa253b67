#!/usr/bin/env python3
"""Checks dist/kubernetes and dist/prometheus without a cluster: check.py PROGRAMS, the folder of the built programs.

Schemas are Kubernetes' own and those of the Prometheus operator. CEL is parsed, and not evaluated. What schemas don't
know is checked here: names that must match, and what the programs say of their arguments and configuration.
"""

import copy
import json
import pathlib
import re
import subprocess
import sys
import tempfile

import celpy
import kubernetes_validate
import yaml
from cloudcoil.models.prometheus_operator import v1 as operator
from helm_python.errors import HelmError
from render import DIST, rendered, variants

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
                found = (re.search(r":(\d+)$", argument) for argument in container.get("args", []))
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


def check_programs(items: list[dict]) -> None:
    """Runs each program with the container's arguments and configuration, to show the configuration in effect."""
    values = {"HOST_ADDRESS": "192.0.2.1", "NODE_NAME": "node-1", "POD_NAME": "laxity-coordinator-2"}
    configs = {item["metadata"]["name"]: item["data"] for item in items if item["kind"] == "ConfigMap"}
    for _, template in pods(items):
        container = template["spec"]["containers"][0]
        given = {each["name"] for each in container["env"]}
        program = PROGRAMS / pathlib.PurePath(container["command"][0]).name
        with tempfile.TemporaryDirectory() as folder:
            for name, text in configs[program.name].items():
                pathlib.Path(folder, name).write_text(text)
            arguments = []
            for argument in container["args"]:
                for name in re.findall(r"\$\((\w+)\)", argument):
                    assert name in given, f"{name} is not in the environment"
                    argument = argument.replace(f"$({name})", values[name])
                arguments.append(argument.replace("/etc/laxity/config", folder))
            shown = subprocess.run([program, *arguments, "--show-config"], capture_output=True, text=True)
        assert shown.returncode == 0, f"{program.name} {arguments}: {shown.stderr}"
        expected = 'metrics = "192.0.2.1:7475"' if program.name == "laxityd" else "0.0.0.0:9472"
        assert expected in shown.stdout, shown.stdout
        if "[etcd]" in shown.stdout:
            advertised = 'advertise = "laxity-coordinator-2.laxity-coordinators.laxity.svc:7471"'
            assert advertised in shown.stdout, shown.stdout


def check_injection(items: list[dict]) -> None:
    for item in items:
        if item["kind"] == "MutatingAdmissionPolicy":
            spec = item["spec"]
            texts = [each["expression"] for each in spec["variables"]]
            texts += [each["applyConfiguration"]["expression"] for each in spec["mutations"]]
            for text in texts:
                celpy.CELParser().parse(text)


def promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=PROMETHEUS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def main() -> None:
    for name, text in variants().items():
        committed = (DIST / name / "laxity.yaml").read_text()
        assert committed == text, f"{name} is not what the chart gives: run `make kubernetes`"
        listed = yaml.safe_load((DIST / name / "kustomization.yaml").read_text())["resources"]
        assert listed == ["laxity.yaml"]
        items = list(yaml.safe_load_all(text))
        for item in items:
            validate(item)
            refuses({**copy.deepcopy(item), "speck": {}})
        check_names(items)
        check_programs(items)
        check_injection(items)
        rules = [item["spec"] for item in items if item["kind"] == "PrometheusRule"]
        alerts = yaml.safe_load((PROMETHEUS / "alerts.yaml").read_text())
        assert rules == ([alerts] if name == "full" else []), "the chart has other rules than promtool tests"
        print(f"{name}: {len(items)} objects")
    for path in sorted((DIST / "examples").glob("*.yaml")):
        for item in yaml.safe_load_all(path.read_text()):
            validate(item)

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

    promtool("check", "rules", "alerts.yaml")
    promtool("test", "rules", "alerts-test.yaml")
    tested = (PROMETHEUS / "alerts-test.yaml").read_text()
    for group in alerts["groups"]:
        for rule in group["rules"]:
            assert f'alertname="{rule["alert"]}"' in tested, f"{rule['alert']} has no test"
    print("alerts: tested")


if __name__ == "__main__":
    main()
