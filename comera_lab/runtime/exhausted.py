"""Say in words that memory has run out, whoever noticed it: Python, numpy, torch on a CPU or on a GPU."""

from __future__ import annotations

import re

_SIGNS = ("can't allocate memory", "out of memory", "Cannot allocate memory")
_ASKED = re.compile(r"tried to allocate (\d+ bytes|[\d.]+ ?[KMG]?i?B\b)", re.IGNORECASE)


def memory_words(error: BaseException) -> str | None:
    """What to do about an error that is about memory, in a sentence or two; None for any other error."""
    text = str(error)
    if not isinstance(error, MemoryError) and not (
        isinstance(error, RuntimeError | OSError) and any(sign in text for sign in _SIGNS)
    ):
        return None
    asked = _ASKED.search(text)
    more = f" for {_readable(asked[1])} more" if asked else ""
    return (
        f"There is not enough memory{more}. Choose a smaller batch, width or rank, or close other notebooks "
        "(Kernel > Shut Down All Kernels), then start again"
    )


def _readable(amount: str) -> str:
    number, _, unit = amount.partition(" ")
    return f"{int(number) / 2**20:,.0f} MiB" if unit == "bytes" else amount
