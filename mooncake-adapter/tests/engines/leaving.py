"""The end of a process of tests that used UCX: NIXL 1.5.1 crashes there, with and without us, so that a run that is
all well would look like one that is not. Once a test says so, the process leaves without what crashes."""

import os
import sys

at_once = False
status = 1


def now():
    if at_once:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
