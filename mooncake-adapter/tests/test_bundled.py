"""The programs and libraries that the wheel has beside Python."""

import subprocess
import sys

from conftest import environment


def laxity(*words, daemon=None):
    command = [sys.executable, "-m", "laxity", *words]
    return subprocess.run(command, env=environment(daemon), capture_output=True, text=True, timeout=60)


def test_a_command_runs_under_the_library_of_the_wheel(daemon):
    folder = laxity("libraries").stdout.strip()
    done = laxity("run", "--", "cat", "/proc/self/maps", daemon=daemon)
    assert done.returncode == 0, done.stderr
    assert f"{folder}/liblaxity.so" in done.stdout
    assert laxity("run", "--", "sh", "-c", "exit 7", daemon=daemon).returncode == 7


def test_doctor_finds_the_daemon_and_the_library_of_the_wheel(daemon):
    done = laxity("doctor", "--control", str(daemon.control), daemon=daemon)
    assert f"{laxity('libraries').stdout.strip()}/liblaxity.so" in done.stdout, done.stdout + done.stderr


def test_nccl_can_load_the_plugin_of_the_wheel():
    folder = laxity("libraries").stdout.strip()
    loads = f"import ctypes; ctypes.CDLL('{folder}/libnccl-net-laxity.so').ncclNetPlugin_v8"
    subprocess.run([sys.executable, "-c", loads], check=True, timeout=60)
