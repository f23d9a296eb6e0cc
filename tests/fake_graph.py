"""CUDA graphs without CUDA, for tests of the code that captures and replays."""

from comera_lab.experiments.tape import TapeCapture as FakeCapture

__all__ = ["FakeCapture"]
