#!/usr/bin/env python3
"""Renders the Helm chart: render.py FOLDER writes FOLDER/{base,full}/laxity.yaml, as dist/kubernetes has them."""

import pathlib
import sys

import yaml
from helm_python import Chart

DIST = pathlib.Path(__file__).resolve().parents[2] / "dist/kubernetes"
HEADER = "# The chart's output. Do not edit: `make kubernetes` writes it.\n"


def rendered(values: dict) -> str:
    """Returns all objects of the chart, in the order of their files."""
    with Chart.load(DIST / "chart") as chart:
        files = chart.render(values, name="laxity", namespace="laxity", is_install=True)
    texts = (files[name].strip() for name in sorted(files, key=lambda name: ("namespace" not in name, name)))
    return HEADER + "".join(f"---\n{text}\n" for text in texts if text)


def variants() -> dict[str, str]:
    """Returns the text of each kustomize base by its name."""
    full = yaml.safe_load((DIST / "full/values.yaml").read_text())
    return {
        "base": rendered({"createNamespace": True}),
        "full": rendered({"createNamespace": True, **full}),
    }


if __name__ == "__main__":
    for name, text in variants().items():
        pathlib.Path(sys.argv[1], name, "laxity.yaml").write_text(text)
