"""Verdicts on exercises, and the two editions of the lessons."""

from comera_lab.teaching.checks import Verdict, check, hint, progress

__all__ = ["Verdict", "check", "hint", "progress"]
