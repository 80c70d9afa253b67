"""One host's process: `host.py prefill|decode PLAN VARIANT`. Its last line is what it found, as JSON."""

from __future__ import annotations

import json
import os
import pathlib
import sys

from decode import Decode
from plan import Plan
from prefill import Prefill


def main() -> None:
    role, path, variant = sys.argv[1:]
    plan = Plan.read(pathlib.Path(path))
    host = Prefill(plan, variant) if role == "prefill" else Decode(plan, variant)
    # Mooncake says what it does on the standard output, too.
    print("\n" + json.dumps(host.run()), flush=True)
    # Threads that wait, here and in Mooncake, have nothing to say any more; what is preloaded writes its report by
    # `atexit`.
    sys.stdout.flush()
    if "LD_PRELOAD" not in os.environ:
        os._exit(0)


if __name__ == "__main__":
    main()
