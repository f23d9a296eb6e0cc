"""Exercises of lesson 13: floors, fused bytes, launches in a queue, a step that a graph can replay, an honest clock."""

import itertools
from collections.abc import Callable
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from comera_lab.experiments.tape import TapeCapture
from comera_lab.teaching.exercise import Exercise, Mistake

Clock = Callable[[], float]


def floor_ms(flops: float, moved: float, flops_per_s: float, bytes_per_s: float) -> float:
    """Milliseconds that a kernel takes at least: arithmetic and memory work at the same time."""
    return 1e3 * max(flops / flops_per_s, moved / bytes_per_s)


def bytes_moved(rows: int, inputs: int, outputs: int, rank: int, size: int) -> tuple[int, int]:
    """Bytes of gelu((x A) B + b): four kernels one after the other, and all in one."""
    return _four_kernels(rows, inputs, outputs, rank, size), _one_kernel(rows, inputs, outputs, rank, size)


def _four_kernels(rows: int, inputs: int, outputs: int, rank: int, size: int) -> int:
    first = rows * inputs + inputs * rank + rows * rank
    second = rows * rank + rank * outputs + rows * outputs
    bias = rows * outputs + outputs + rows * outputs
    gelu = 2 * rows * outputs
    return size * (first + second + bias + gelu)


def _one_kernel(rows: int, inputs: int, outputs: int, rank: int, size: int) -> int:
    return size * (rows * inputs + inputs * rank + rank * outputs + outputs + rows * outputs)


def finish_us(device_us: list[float], launch_us: float) -> float:
    """Microseconds until the last kernel is done: launch k is out after k launches, kernels run one after another."""
    done = 0.0
    for number, busy in enumerate(device_us, start=1):
        done = max(done, number * launch_us) + busy
    return done


def graph_step(weight: Tensor, gradient: Tensor, rate: Tensor) -> None:
    """weight <- weight - rate gradient, in place, `rate` (0-d) read on the device."""
    weight.sub_(rate * gradient)


def honest_ms(call: Callable[[Any], object], buffers: list[Any], clock: Clock) -> float:
    """Median milliseconds of a call, after warming up, on buffers in turn."""
    turn = itertools.cycle(buffers)
    for _ in range(5):
        call(next(turn))
    samples = []
    for _ in range(20):
        buffer = next(turn)
        began = clock()
        call(buffer)
        samples.append(clock() - began)
    return 1e3 * median(samples)


def _floor_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    flops, moved = torch.rand(2, generator=generator).tolist()
    return [
        (2e12, 1e9, 9e14, 4e12), (1e9, 4e9, 9e14, 4e12), (1e12 * (1 + flops), 1e9 * (1 + moved), 3e14, 2e12),
    ]  # fmt: skip


def _byte_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    rows = int(torch.randint(100, 900, (1,), generator=generator))
    return [(16_384, 4096, 4096, 64, 2), (rows, 768, 3072, 30, 4), (64, 128, 32, 8, 2)]


def _queue_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    some = [round(1 + 20 * value, 1) for value in torch.rand(9, generator=generator).tolist()]
    return [([2.0] * 40, 5.0), ([50.0, 50.0, 50.0], 5.0), ([1.0, 60.0, 1.0, 1.0, 1.0], 5.0), (some, 8.0)]


def _graph_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    def case(size: int) -> tuple[Any, ...]:
        weight, *gradients = (torch.randn(size, generator=generator) for _ in range(4))
        return weight, gradients, [0.1, 0.05, 0.01]

    return [case(4), case(7)]


def _replayed(answer: Callable[[Tensor, Tensor, Tensor], object], args: tuple[Any, ...]) -> Tensor:
    """The weight after a step that was captured, and replays of it with other gradients and rates."""
    start, gradients, rates = args
    weight: Tensor = start.clone()
    gradient, rate = gradients[0].clone(), torch.tensor(rates[0])

    def step() -> None:
        answer(weight, gradient, rate)

    try:
        replay = TapeCapture().record(step)
    except RuntimeError as error:
        if "the host reads a tensor" not in str(error):
            raise
        return torch.zeros(0)
    replay()
    for new_gradient, new_rate in zip(gradients[1:], rates[1:], strict=True):
        gradient.copy_(new_gradient)
        rate.fill_(new_rate)
        replay()
    return weight


class _World:
    """A device that compiles at first, remembers the buffer it saw last, and is disturbed at times; its own clock."""

    def __init__(self, cost_ms: float) -> None:
        self._now = 0.0
        self._pattern = itertools.cycle([1.0, 1.0, 0.8, 1.0, 7.0, 1.0, 1.0, 0.8, 1.0, 1.0])
        self._cost_ms, self._calls, self._last = cost_ms, 0, -1

    def clock(self) -> float:
        """Seconds."""
        return self._now

    def call(self, buffer: int) -> None:
        self._calls += 1
        share = 40.0 if self._calls <= 3 else next(self._pattern)
        cached = 0.2 if buffer == self._last else 1.0
        self._last = buffer
        self._now += 1e-3 * self._cost_ms * share * cached


def _world_cases(generator: torch.Generator) -> list[tuple[Any, ...]]:
    return [(cost, buffers) for cost, buffers in ((1.3, 4), (0.25, 8), (6.0, 3))]


def _in_world(answer: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    cost_ms, count = args
    world = _World(cost_ms)
    return answer(world.call, list(range(count)), world.clock)


def _timed(call: Callable[[Any], object], buffers: list[Any], clock: Clock, settle: int = 5) -> list[float]:
    """Milliseconds of 20 calls after `settle` others."""
    turn, samples = itertools.cycle(buffers), []
    for number in range(settle + 20):
        began = clock()
        call(next(turn))
        if number >= settle:
            samples.append(1e3 * (clock() - began))
    return samples


EXERCISES = (
    Exercise(
        id="13.1",
        title="The least time of a kernel",
        wants="a function floor_ms(flops, moved, flops_per_s, bytes_per_s) that returns milliseconds",
        reference=floor_ms,
        cases=_floor_cases,
        right="The larger of two times. Which one it is tells you what to save: FLOPs or bytes.",
        hints=(
            "How long does the arithmetic take alone? And the moving alone?",
            "A GPU does both at the same time, so the longer one decides.",
            "`1000 * max(flops / flops_per_s, moved / bytes_per_s)`",
        ),
        mistakes=(
            Mistake(name="added", answer=lambda f, m, c, b: 1e3 * (f / c + m / b),
                    message="The two are added. They overlap: while numbers are on their way, others are multiplied."),
            Mistake(name="the shorter", answer=lambda f, m, c, b: 1e3 * min(f / c, m / b),
                    message="That is the shorter one. Both have to be done: the longer one is the floor."),
            Mistake(name="seconds", answer=lambda f, m, c, b: max(f / c, m / b),
                    message="Right, in seconds. Wanted are milliseconds."),
            Mistake(name="arithmetic alone", answer=lambda f, m, c, b: 1e3 * f / c,
                    message="Only the FLOPs count here. A kernel that hardly computes still has to move its bytes."),
        ),
    ),
    Exercise(
        id="13.2",
        title="What fusion spares",
        wants="a function bytes_moved(rows, inputs, outputs, rank, size) that returns two numbers of bytes",
        reference=bytes_moved,
        cases=_byte_cases,
        right="What one kernel writes and the next one reads is spared twice. x A is thin; y is what counts.",
        hints=(
            "Write down what each of the four kernels reads and what it writes.",
            "x A: rows x inputs, inputs x rank, rows x rank. Its result is read again by the next kernel.",
            "In one kernel: x, A, B and b are read once, y is written once. Times `size` for bytes.",
        ),
        mistakes=(
            Mistake(name="written, not read", answer=lambda r, i, o, k, s: (
                s * (r * i + i * k + r * k + k * o + r * o + o + r * o + r * o), _one_kernel(r, i, o, k, s)),
                message="The second is right. In the first, results are written but never read by the next kernel."),
            Mistake(name="numbers", answer=lambda r, i, o, k, s: (
                _four_kernels(r, i, o, k, 1), _one_kernel(r, i, o, k, 1)),
                message="Those are numbers, not bytes: times `size`."),
            Mistake(name="weights forgotten", answer=lambda r, i, o, k, s: (
                s * (r * i + 2 * r * k + 5 * r * o), s * (r * i + r * o)),
                message="A, B and b are forgotten. They are read as well, once each."),
            Mistake(name="x A kept", answer=lambda r, i, o, k, s: (
                _four_kernels(r, i, o, k, s), _one_kernel(r, i, o, k, s) + s * r * k),
                message="In one kernel x A stays in registers: nothing of it is written."),
            Mistake(name="other order", answer=lambda r, i, o, k, s: bytes_moved(r, i, o, k, s)[::-1],
                    message="Both are right, in the other order: four kernels first, then the fused one."),
        ),
    ),
    Exercise(
        id="13.3",
        title="Launches in a queue",
        wants="a function finish_us(device_us, launch_us) that returns microseconds",
        reference=finish_us,
        cases=_queue_cases,
        right="Short kernels wait for the host, long ones hide it. A graph takes the host out of the sum.",
        hints=(
            "When is launch number k out? When is the device free for it?",
            "A kernel begins at the later of the two, and ends its own time after that.",
            "`done = max(done, k * launch_us) + busy` for k = 1, 2, ...",
        ),
        mistakes=(
            Mistake(name="no overlap", answer=lambda device, launch: sum(device) + len(device) * launch,
                    message="Here the host waits for every kernel. It does not: while one runs, the next is launched."),
            Mistake(name="larger of the sums", answer=lambda device, launch: max(sum(device), len(device) * launch),
                    message="Nearly: the larger of two sums. But the device cannot begin before the first launch, nor "
                    "catch up on time that it spent waiting."),
            Mistake(name="free launches", answer=lambda device, launch: sum(device),
                    message="Launches cost nothing here. With many short kernels the device waits for the host."),
            Mistake(name="host alone", answer=lambda device, launch: len(device) * launch + device[-1],
                    message="That is when the host is done, plus the last kernel. A long kernel may still be running."),
        ),
    ),
    Exercise(
        id="13.4",
        title="A step that a graph can replay",
        wants="a function graph_step(weight, gradient, rate) that changes weight in place",
        reference=graph_step,
        cases=_graph_cases,
        call=_replayed,
        right="Everything that changes lies in a tensor, and everything that must stay is written in place.",
        hints=(
            "A graph replays operations on the same memory. Which tensors are looked at afterwards?",
            "`weight` has to change in place. `rate` is a tensor: leave it one.",
            "`weight.sub_(rate * gradient)`",
        ),
        mistakes=(
            Mistake(name="read on the host", answer=lambda w, g, rate: w.sub_(g, alpha=float(rate)),
                    message="`float(rate)` or `.item()` reads the device: a capture refuses that, since the number "
                    "would stay what it was. Multiply by the tensor instead."),
            Mistake(name="a new tensor", answer=lambda w, g, rate: w - rate * g,
                    message="The result is a new tensor, and `weight` never changes. Write in place: sub_, or -=."),
            Mistake(name="uphill", answer=lambda w, g, rate: w.add_(rate * g),
                    message="The sign is wrong: this walks uphill."),
            Mistake(name="no rate", answer=lambda w, g, rate: w.sub_(g),
                    message="The rate is not used."),
        ),
    ),
    Exercise(
        id="13.5",
        title="An honest clock",
        wants="a function honest_ms(call, buffers, clock) that returns the median in milliseconds",
        reference=honest_ms,
        cases=_world_cases,
        call=_in_world,
        right="Warmed up, buffers in turn, and a median of many. And the spread belongs beside it.",
        hints=(
            "Three things: calls that are not timed, buffers in turn, and the median of at least 20 samples.",
            "`itertools.cycle(buffers)` gives them in turn. Time one call: clock before, clock after.",
            "`samples.append(clock() - began)`, and at the end `1000 * statistics.median(samples)`.",
        ),
        mistakes=(
            Mistake(name="the first call", answer=lambda call, buffers, clock: _timed(call, buffers, clock, 0)[0],
                    message="That is the first call: it compiles and allocates. Let some calls pass untimed."),
            Mistake(name="mean", answer=lambda call, buffers, clock: mean(_timed(call, buffers, clock)),
                    message="A mean: one disturbance moves it. Take the median."),
            Mistake(name="one buffer", answer=lambda call, buffers, clock: median(_timed(call, buffers[:1], clock)),
                    message="Always the same buffer: after the first call it lies in the cache, and no real step finds "
                    "it there. Take the buffers in turn."),
            Mistake(name="fastest", answer=lambda call, buffers, clock: min(_timed(call, buffers, clock)),
                    message="That is the fastest call of all, a lucky one. Take the median."),
            Mistake(name="seconds",
                    answer=lambda call, buffers, clock: median(_timed(call, buffers, clock)) / 1e3,
                    message="Right, in seconds. Wanted are milliseconds."),
        ),
    ),
)  # fmt: skip
