"""Verdicts on exercises, questions that ask for a guess first, and the two editions of the lessons."""

from comera_lab.teaching.checks import Verdict, check, hint, progress
from comera_lab.teaching.questions import guess
from comera_lab.teaching.saved import saved_work

__all__ = ["Verdict", "check", "guess", "hint", "progress", "saved_work"]
