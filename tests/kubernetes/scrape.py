"""Asks a real Prometheus what it scrapes while a rolling update has two daemons on one node."""

import json
import pathlib
import socket
import subprocess
import tempfile
import time
import urllib.request

import yaml

# What the Prometheus operator writes for an endpoint of a ServiceMonitor, before the monitor's own relabelings.
OPERATOR = [
    {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
    {"source_labels": ["__meta_kubernetes_service_name"], "target_label": "service"},
    {"source_labels": ["__meta_kubernetes_pod_name"], "target_label": "pod"},
    {"source_labels": ["__meta_kubernetes_pod_container_name"], "target_label": "container"},
    {"source_labels": ["__meta_kubernetes_service_label_app_kubernetes_io_name"], "target_label": "job"},
]
KEYS = {"sourceLabels": "source_labels", "targetLabel": "target_label"}


def endpoint(node: str, pod: str) -> dict:
    """Returns a pod of the service as Prometheus discovers it. Pods in the host's network have the node's address."""
    meta = {
        "namespace": "laxity",
        "service_name": "laxityd",
        "service_label_app_kubernetes_io_name": "laxityd",
        "pod_name": pod,
        "pod_container_name": "laxityd",
        "pod_node_name": node,
    }
    labels = {f"__meta_kubernetes_{name}": value for name, value in meta.items()}
    # Nobody listens there, which does not matter here.
    return {"targets": [f"127.0.0.{node[-1]}:1"], "labels": labels}


def targets(monitor: dict, endpoints: list[dict]) -> list[dict]:
    """Returns the labels of each target that a Prometheus with this monitor scrapes."""
    own = [{KEYS.get(key, key): value for key, value in rule.items()}
           for rule in monitor["spec"]["endpoints"][0]["relabelings"]]
    job = {"job_name": "daemons", "static_configs": endpoints, "relabel_configs": OPERATOR + own}
    with socket.socket() as free, tempfile.TemporaryDirectory() as temporary:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        folder = pathlib.Path(temporary)
        (folder / "prometheus.yml").write_text(yaml.safe_dump({"scrape_configs": [job]}))
        options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
                   f"--web.listen-address={address}"]
        with (folder / "log").open("w") as log:
            server = subprocess.Popen(["prometheus", *options], stderr=log)
        try:
            for _ in range(600):
                try:
                    with urllib.request.urlopen(f"http://{address}/api/v1/targets", timeout=5) as answer:
                        seen = json.load(answer)["data"]["activeTargets"]
                except OSError:
                    seen = []
                if seen:
                    return [target["labels"] for target in seen]
                time.sleep(0.1)
            raise AssertionError((folder / "log").read_text())
        finally:
            server.kill()
            server.wait()


def check_update(items: list[dict]) -> int:
    """Fails if Prometheus takes the two pods that a node has in an update for two daemons. Returns the number of
    monitors."""
    monitors = [item for item in items if item["kind"] == "ServiceMonitor" and item["metadata"]["name"] == "laxityd"]
    for item in monitors:
        pods = [endpoint("node-1", "laxityd-a"), endpoint("node-1", "laxityd-b"), endpoint("node-2", "laxityd-c")]
        seen = sorted(targets(item, pods), key=lambda labels: labels["instance"])
        common = {"job": "laxityd", "namespace": "laxity", "service": "laxityd"}
        assert seen == [{**common, "instance": "node-1"}, {**common, "instance": "node-2"}], seen
    return len(monitors)
