"""What an exercise is: a reference answer, seeded inputs, and the mistakes the checker knows by name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


class WrongAnswer(Exception):
    """Raised by a `view` or a `cost` when an answer cannot be right; the text is shown to the learner."""

    def __init__(self, stage: str, message: str) -> None:
        super().__init__(message)
        self.stage = stage
        self.message = message


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A wrong answer people really give. `answer` behaves like it, `message` names the misconception."""

    name: str
    answer: Any
    message: str


def unchanged(output: Any, args: tuple[Any, ...]) -> Any:
    """The default view: compare what came back as it is."""
    return output


def plain_call(answer: Any, args: tuple[Any, ...]) -> Any:
    """The default call: the answer is a function of the arguments."""
    return answer(*args)


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """One checked exercise.

    `reference` is a function when `cases` is given, else the value itself. `cases(generator)` returns the
    argument tuples both are called with, and `call(answer, args)` calls an answer that is no plain function.
    `view(output, args)` turns an output into what is compared (singular vectors have free signs, for example).
    `cost(answer, args)` returns a sentence when the values are right but the way to them is too dear, else None.
    """

    id: str
    title: str
    wants: str
    reference: Any
    right: str
    hints: tuple[str, str, str]
    mistakes: tuple[Mistake, ...]
    cases: Callable[[torch.Generator], list[tuple[Any, ...]]] | None = None
    call: Callable[[Any, tuple[Any, ...]], Any] = plain_call
    view: Callable[[Any, tuple[Any, ...]], Any] = unchanged
    cost: Callable[[Callable[..., Any], tuple[Any, ...]], str | None] | None = None

    @property
    def lesson(self) -> str:
        """The two digits of the lesson this belongs to."""
        return self.id.partition(".")[0]
