"""Every exercise of every lesson, by id."""

from comera_lab.teaching import (
    exercises_00_01,
    exercises_02,
    exercises_03,
    exercises_04,
    exercises_05,
    exercises_06,
    exercises_07,
    exercises_08,
    exercises_09,
    exercises_10,
    exercises_11,
    exercises_12,
    exercises_13,
    exercises_14,
    exercises_15,
    exercises_16,
    exercises_T0,
)
from comera_lab.teaching.exercise import Exercise

_LESSONS = (
    exercises_00_01, exercises_02, exercises_03, exercises_04, exercises_05, exercises_06,
    exercises_07, exercises_08, exercises_09, exercises_10, exercises_11,
    exercises_12, exercises_13, exercises_14, exercises_15, exercises_16, exercises_T0,
)  # fmt: skip
EXERCISES: dict[str, Exercise] = {exercise.id: exercise for group in _LESSONS for exercise in group.EXERCISES}
