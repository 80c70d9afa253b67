"""The command `laxity` of the wheel: `python -m laxity run -- COMMAND`, `python -m laxity doctor`.

`python -m laxity libraries` prints the folder with `liblaxity.so`, `liblaxity_mooncake.so`, `liblaxity_nixl.so` and
`libnccl-net-laxity.so`.
"""

import os
import pathlib
import sys

BUNDLED = pathlib.Path(__file__).parent / "bundled"


def main() -> None:
    if sys.argv[1:] == ["libraries"]:
        print(BUNDLED)
        return
    program = BUNDLED / "laxity"
    if not program.exists():
        sys.exit("laxity: this wheel was built without the programs; install one of `make wheel`, or Laxity's packages")
    os.execv(program, ["laxity", *sys.argv[1:]])


if __name__ == "__main__":
    main()
