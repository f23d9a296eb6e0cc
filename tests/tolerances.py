"""Every tolerance of the test suite. Loosening one needs a measured reason, written beside it."""

from __future__ import annotations

import torch

# Relative Frobenius error against the float64 reference on the same rounded inputs, for 3+3 cores up to
# 4096 x 4096 at rank 48 on a CPU: 1e-15, 5e-7, 5e-4 and 4e-3 were seen.
RELATIVE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}

# Under autocast each half-chain is itself rounded to a half type three times; complaint I03 allows 2e-2.
AUTOCAST = 2e-2


# Central differences of step 1e-6 in float64 lose about half of the 16 digits; 1e-8 was seen.
DIFFERENCES = 1e-6

# 50 training steps replayed from a graph against eager ones, in float64: only the eight numbers of the update, which
# lie on the device in float32, are rounded otherwise; 2e-7 was seen.
GRAPH = 1e-5
# With 8-bit moments such a rounding can move a value across the border of two codes: 8e-4 was seen in float32.
GRAPH_CODED = 5e-3

# Scores of a two-block transformer whose matrices of known TT rank went through a TT-SVD, in float32.
REBUILT = 2e-5


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Frobenius norm of `got - want` over that of `want`, in float64. A zero `want` gives the plain norm."""
    difference = torch.linalg.vector_norm(got.detach().double() - want.detach().double())
    scale = torch.linalg.vector_norm(want.detach().double())
    return float(difference / scale) if scale > 0 else float(difference)

# The same batches in one process and in several, in float64: sums over rows are added in another order, and the cut
# of an eigenbasis magnifies that where two eigenvalues are near each other; 3e-7 was seen in the weights, COAP's alone.
PROCESSES = 1e-5
