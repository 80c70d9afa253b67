"""The stubs say what is there: to mypy, and compared with the compiled module."""

import subprocess
import sys


def run(*arguments):
    done = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_package_is_typed(tmp_path):
    # Of a program that uses it, since a package that is installed is not checked for its own sake.
    program = tmp_path / "program.py"
    program.write_text(
        "import laxity\n"
        "from laxity import Flow, Stage\n"
        "number: int = laxity.request_begin('r', slo_ttft_s=0.4)\n"
        "grant: laxity.Grant = laxity.submit(Stage.P2D, 10, request='r').wait()\n"
        "maybe: laxity.Grant | None = Flow(Stage.P2D, 10).submit().wait(0.1)\n"
        "total: int = sum(grant.bytes for grant in Flow(Stage.P2D, 10).grants())\n"
    )
    run("mypy", "--strict", "--no-incremental", "--cache-dir=/dev/null", str(program))


def test_the_stubs_agree_with_the_compiled_module():
    run("mypy.stubtest", "laxity._laxity", "--ignore-disjoint-bases")
