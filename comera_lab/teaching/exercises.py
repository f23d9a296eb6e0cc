"""Every exercise of every lesson, by id."""

from comera_lab.teaching import (
    exercises_00_01,
    exercises_02,
    exercises_03,
    exercises_04,
    exercises_05,
    exercises_06,
)
from comera_lab.teaching.exercise import Exercise

EXERCISES: dict[str, Exercise] = {
    exercise.id: exercise
    for group in (exercises_00_01, exercises_02, exercises_03, exercises_04, exercises_05, exercises_06)
    for exercise in group.EXERCISES
}
