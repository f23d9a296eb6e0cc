"""How every subcommand complains: one line on stderr."""

from __future__ import annotations

import sys

PROGRAM = "comera-lab"


def complain(error: BaseException, code: int) -> int:
    print(f"{PROGRAM}: {' '.join(str(error).split())}", file=sys.stderr)
    return code
