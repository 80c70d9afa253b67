"""Python runs this at the start of each process under ``python -m laxity.sglang`` (``laxity/sglang/__main__.py``)."""

import importlib.machinery
import importlib.util
import os
import sys


def _hidden() -> None:
    """Runs the sitecustomize that this module hides."""
    here = os.path.dirname(os.path.abspath(__file__))
    rest = [entry for entry in sys.path if os.path.abspath(entry or os.getcwd()) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_hidden()

try:
    import laxity.sglang
except ImportError as missing:
    # This is another Python than the one in which Laxity is installed.
    print(f"laxity.sglang: not in {sys.executable}: {missing}; it runs unchanged", file=sys.stderr)
else:
    laxity.sglang.install()
