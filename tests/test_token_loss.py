"""Cross-entropy in chunks equals that of all logits, gradients included, and never holds more than it may."""

from __future__ import annotations

import pytest
import torch
from tolerances import RELATIVE, relative_error
from torch.utils._python_dispatch import TorchDispatchMode

from comera_lab.objectives import token_loss as module
from comera_lab.objectives.token_loss import IGNORE, naive_token_loss, token_loss, token_scores
from comera_lab.shapes import ShapeError

ROWS, TOKENS, WIDTH, VOCABULARY = 3, 7, 5, 11


def inputs(dtype=torch.float64, ignored=0.3):
    draw = torch.Generator().manual_seed(1)
    hidden, weight, bias = (
        torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((ROWS, TOKENS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    )
    targets = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=draw)
    targets[torch.rand(ROWS, TOKENS, generator=draw) < ignored] = IGNORE
    return hidden, weight, targets, bias


def errors(dtype=torch.float64, biased=True, rows=4, **options):
    """Relative errors of loss and gradients against the float64 twin on the same rounded inputs."""
    hidden, weight, targets, bias = inputs(dtype, **options)
    given = [hidden, weight, *([bias] if biased else [])]
    loss = token_loss(hidden, weight, targets, bias if biased else None, chunk_elements=rows * VOCABULARY)
    exact = [part.detach().double().requires_grad_() for part in given]
    wanted = naive_token_loss(exact[0], exact[1], targets, exact[2] if biased else None)
    pairs = zip(torch.autograd.grad(3 * loss, given), torch.autograd.grad(3 * wanted, exact), strict=True)
    return [relative_error(loss, wanted), *(relative_error(got, want) for got, want in pairs)]


@pytest.mark.parametrize("rows", [1, 4, 21, 100])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("ignored", [0.0, 0.3])
def test_the_loss_in_chunks_equals_that_of_all_logits(rows, biased, ignored):
    assert max(errors(biased=biased, rows=rows, ignored=ignored)) < RELATIVE[torch.float64]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_stays_within_its_rounding(dtype):
    assert max(errors(dtype)) < RELATIVE[dtype]


def test_a_chunk_that_is_weighed_wrongly_is_found(monkeypatch):
    whole = module._chunks
    monkeypatch.setattr(module, "_chunks", lambda hidden, targets, rows: whole(1.01 * hidden, targets, rows))
    assert max(errors()) > 100 * RELATIVE[torch.float64]


def test_never_more_logits_than_allowed_in_either_pass():
    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            for part in made if isinstance(made, tuple | list) else (made,):
                if isinstance(part, torch.Tensor):
                    self.numbers = max(self.numbers, part.numel())
            return made

    hidden = torch.randn(512, 4, requires_grad=True)
    weight = torch.randn(300, 4, requires_grad=True)
    targets = torch.randint(300, (512,))
    for loss, allowed in ((lambda: token_loss(hidden, weight, targets, chunk_elements=3000), 3000),
                          (lambda: naive_token_loss(hidden, weight, targets), 512 * 300)):  # fmt: skip
        with Largest() as largest:
            loss().backward()
        assert largest.numbers == allowed
    with Largest() as largest:
        token_scores(hidden, weight, targets, chunk_elements=3000)
    assert largest.numbers <= 3000


def test_scores_are_sums_that_add_up_over_batches():
    hidden, weight, targets, bias = inputs()
    whole = token_scores(hidden, weight, targets, bias, chunk_elements=30)
    parts = sum(token_scores(hidden[k : k + 1], weight, targets[k : k + 1], bias) for k in range(ROWS))
    torch.testing.assert_close(whole, parts)
    loss, hits, count = whole.tolist()
    assert count == (targets != IGNORE).sum() and loss / count == pytest.approx(
        naive_token_loss(hidden, weight, targets, bias).item()
    )
    best = torch.nn.functional.linear(hidden, weight, bias).argmax(-1)
    assert hits == (best == targets).sum()


def test_sizes_that_do_not_fit_are_refused():
    hidden, weight, targets, bias = inputs()
    for wrong in ((hidden, weight[:, :3], targets, bias), (hidden, weight, targets[:2], bias),
                  (hidden, weight, targets, bias[:3])):  # fmt: skip
        with pytest.raises(ShapeError, match="one target for each hidden state"):
            token_loss(*wrong)
    assert torch.isnan(token_loss(hidden, weight, torch.full_like(targets, IGNORE), bias)), "as in torch"
