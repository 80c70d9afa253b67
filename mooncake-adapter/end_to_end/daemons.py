"""A laxityd per host, what it says of itself, and traces."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
import time
from typing import Any

START_WITHIN_S = 30.0


def plain_environment(**more: str) -> dict[str, str]:
    """The environment of this process, without the caller's settings of Laxity."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("LAXITY_")}
    return {**kept, **more}


class Daemon:
    def __init__(self, binaries: pathlib.Path, folder: pathlib.Path, inside: list[str], nic: str) -> None:
        folder.mkdir(parents=True)
        self._binaries = binaries
        self.socket, self._control = folder / "laxityd.sock", folder / "control.sock"
        self._log = folder / "laxityd.log"
        config = folder / "laxityd.toml"
        config.write_text(
            f'socket = "{self.socket}"\ncontrol = "{self._control}"\nmetrics = ""\n'
            # Both hosts and all their processes share this machine's processors.
            f"[scheduler]\nspin_us = 0\n[[nic]]\n{nic}\n",
            encoding="utf-8",
        )
        self._tracer: subprocess.Popen[str] | None = None
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [*inside, str(binaries / "laxityd"), "--config", str(config)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=plain_environment(),
            )
        self._until("starts", self._answers)

    def _until(self, what: str, holds: Any) -> None:
        give_up = time.monotonic() + START_WITHIN_S
        while not holds():
            if self._process.poll() is not None or time.monotonic() > give_up:
                sys.exit(f"end_to_end: not so: laxityd {what}\n" + self._log.read_text())
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            self.status()
        except OSError:
            return False
        return True

    def status(self) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(START_WITHIN_S)
            connection.connect(str(self._control))
            connection.sendall(b'{"v": 1, "op": "status"}\n')
            answer: dict[str, Any] = json.loads(connection.makefile().readline())
        return answer

    def bytes_by_stage(self) -> dict[str, dict[str, int]]:
        """Permitted bytes, by direction and stage."""
        return {
            port["direction"]: {
                entry["stage"]: entry["permitted_bytes"]
                for entry in port["stages"]
                if entry["permitted_bytes"]
            }
            for port in self.status()["ports"]
        }

    def trace(self, path: pathlib.Path) -> None:
        """Records until the daemon ends."""
        command = [
            str(self._binaries / "laxity"), "trace", "--control", str(self._control), "--for", "600s",
            "--out", str(path), "--", "sh", "-c", "read line; true",
        ]
        self._tracer = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._until("begins a trace", lambda: "a trace begins" in self._log.read_text())

    def close(self) -> str:
        """What the tracer said."""
        said = ""
        if self._tracer is not None:
            said, _ = self._tracer.communicate("\n", timeout=60)
            if self._tracer.returncode:
                sys.exit("end_to_end: " + said)
        self._process.terminate()
        self._process.wait()
        return said
