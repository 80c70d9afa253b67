"""Single files of packages that were released on PyPI, without the package.

A wheel of vLLM is 400 MB, and the facts are in a few files of Python. pip says where the wheel of a version is, and
``remotezip`` reads members of it by range requests. What was read is kept in a folder, so that tests ask once.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterable


class Unreachable(RuntimeError):
    """PyPI can't be asked, or the tools for it are not there. The text says which."""


def folder() -> pathlib.Path:
    """Where files are kept: ``LAXITY_RELEASED``, or below the build folder."""
    chosen = os.environ.get("LAXITY_RELEASED")
    if chosen:
        return pathlib.Path(chosen)
    target = os.environ.get("CARGO_TARGET_DIR")
    root = pathlib.Path(target) if target else pathlib.Path(__file__).resolve().parents[2] / "target"
    return root / "released"


def files(package: str, version: str, wanted: Iterable[str]) -> pathlib.Path:
    """The folder with the Python files of a release whose names begin as one of ``wanted`` does. Raises
    :class:`Unreachable`."""
    wanted = sorted(wanted)
    there = folder() / f"{package}-{version}"
    stamp = there / "read.json"
    read = set(json.loads(stamp.read_text())) if stamp.exists() else set()
    missing = [prefix for prefix in wanted if prefix not in read]
    if missing:
        _read(package, version, missing, there)
        stamp.write_text(json.dumps(sorted(read | set(missing))))
    return there


def newest(package: str) -> str:
    """The newest version. Raises :class:`Unreachable`."""
    return str(_report(package)["metadata"]["version"])


def _read(package: str, version: str, prefixes: list[str], there: pathlib.Path) -> None:
    try:
        from remotezip import RemoteIOError, RemoteZip
    except ImportError:
        raise Unreachable("remotezip is not installed (pip install remotezip)") from None
    url = _report(f"{package}=={version}")["download_info"]["url"]
    there.mkdir(parents=True, exist_ok=True)
    try:
        with RemoteZip(url) as wheel:
            for name in wheel.namelist():
                if name.endswith(".py") and name.startswith(tuple(prefixes)) and ".." not in name:
                    # First beside its place: a test that is stopped leaves no half of a file.
                    target = there / name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    part = target.with_suffix(".part")
                    with wheel.open(name) as source, part.open("wb") as sink:
                        shutil.copyfileobj(source, sink)
                    part.replace(target)
    except (RemoteIOError, OSError) as broken:
        raise Unreachable(f"{url}: {broken}") from None


def _report(requirement: str) -> dict:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
    done = subprocess.run(
        [*command, "--report", "-", requirement], capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode != 0:
        raise Unreachable(f"pip finds no {requirement}: {done.stderr.strip()[-300:]}")
    return json.loads(done.stdout)["install"][0]
