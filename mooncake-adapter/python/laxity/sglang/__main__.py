"""Starts a command and calls :func:`laxity.sglang.install` in each of its Python processes. Releases of SGLang without
plugins need it.

SGLang starts its scheduler and workers with ``spawn``, so they inherit only the environment. This module puts a
``sitecustomize`` module first on ``PYTHONPATH``. That module then runs the ``sitecustomize`` that it hides.
"""

from __future__ import annotations

import os
import shutil
import sys

USAGE = "usage: python -m laxity.sglang -- COMMAND [ARGUMENT...]"


def main(arguments: list[str]) -> int:
    """Replaces this process by the command."""
    command = arguments[1:] if arguments[:1] == ["--"] else arguments
    if not command or command[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if command else sys.stderr)
        return 0 if command else 2
    found = shutil.which(command[0])
    if found is None:
        print(f"laxity.sglang: there is no command {command[0]!r}; {USAGE}", file=sys.stderr)
        return 127
    site = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_site")
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([site, before] if before else [site])
    sys.stdout.flush()
    try:
        os.execv(found, command)
    except OSError as refused:
        print(f"laxity.sglang: {found} can't be executed: {refused}", file=sys.stderr)
        return 126


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
