#!/usr/bin/env bash
# Makes the environment that renders the chart and checks its output: setup.sh FOLDER. Says why if it can't.
set -euo pipefail
folder="$1"
here="$(realpath "$(dirname "$0")")"
for tool in promtool prometheus kubectl; do
    command -v "$tool" >/dev/null || { echo "there is no $tool (make setup-kubernetes)" >&2; exit 1; }
done
cmp -s "$here/requirements.txt" "$folder/requirements.txt" && exit 0
python3 -m venv "$folder"
"$folder/bin/pip" install --quiet --disable-pip-version-check -r "$here/requirements.txt"
cp "$here/requirements.txt" "$folder/requirements.txt"
