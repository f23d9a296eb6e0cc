# %% [markdown]
# # 14 Pre-training a code model
#
# **Choose `Run > Run All Cells` in the menu**, then start at the panel.
#
# You need about an hour and a half. Afterwards you will be able to
#
# 1. turn a folder of programs into batches for a language model, without a leak between its sides;
# 2. read a loss in nats, turn it into a perplexity without fooling yourself, and set marks for it;
# 3. put CoMERA and COAP into one model and one memory table, and say what each of them saves.

# %%
from comera_lab.runtime import check_version

check_version("0.1")
import comera_lab.panels as lab

lab.CodeModelPanel()

# %% [markdown]
# ## A model that reads this machine's Python
#
# Press **Train**. A decoder of a million weights, built like LLaMA, reads the standard library of the
# Python that runs this notebook. Under the chart it writes on from the text in the box, again and
# again while it learns: bytes first, then names and brackets, then lines that look like Python. They
# do not *mean* anything yet: it has read for half a minute.
#
# Then type something into the box, `class ` or `    return self.` for example, and press **Complete**.
# The small table says how sure the model is of its next token.

# %%
from comera_lab.teaching import check, guess, progress

guess("14")

# %% [markdown]
# ## From files to tokens
#
# The corpus is read where it is installed. Whole files go to one side, by a hash of their name; equal
# files count once. So nothing that the model is asked about has been read in training.
#
# The pieces are *byte-pair codes*: begin with bytes, merge the most frequent pair, again and again.
# Merges are learned on the training side alone.

# %%
from comera_lab.experiments.language_model import language_config, prepare, read_corpus

corpus = read_corpus("stdlib")
print(corpus)

config = language_config("code-small")
streams, data = prepare(config)
print(f"{len(streams.train):,} tokens to train, {len(streams.validation):,} to validate, "
      f"{streams.characters_per_token:.2f} characters each (counted here)")
tokenizer = streams.tokenizer
print([tokenizer.decode([i]) for i in tokenizer.encode("for name in sorted(names):")])

# %% [markdown]
# ## Exercise: blocks of tokens
#
# A side is one long row of tokens. Cut it into rows of `tokens`; `y` holds, for every place, the token
# that comes next.

# %% tags=["exercise:14.1"]
def blocks(stream, tokens):
    """stream (n,) -> x and y, both (rows, tokens), as many rows as fit."""
    # solution
    rows = (len(stream) - 1) // tokens
    x = stream[: rows * tokens].reshape(rows, tokens)
    y = stream[1 : rows * tokens + 1].reshape(rows, tokens)
    return x, y
    # end


check("14.1", blocks)

# %% [markdown]
# CodeBERT learns another game: some tokens are covered, and it tells them from both sides. Of the 15 %
# that are asked for, most read `<mask>`, some another token, some themselves, so that no place is safe.

# %%
import torch

from comera_lab.experiments.tokens import masked_batch

read, asked = masked_batch(data.train_x[:1], len(tokenizer), torch.Generator().manual_seed(0))
print("given  ", repr(tokenizer.decode(data.train_x[0, :32])))
print("read   ", repr("".join(tokenizer.decode([i]) if i != 1 else " ? " for i in read[0, :32])))
print("asked  ", [tokenizer.decode([i]) for i in asked[0, :32] if i >= 0])

# %% [markdown]
# ## Marks
#
# Is a loss of 5 nats good? A loss alone says little, so set marks. A model that knows nothing takes
# all tokens for equally likely. One that only counts knows how often each token comes, and the next
# one knows what follows each token. The dotted lines in the panel are these three.

# %%
import math

from comera_lab.experiments.ngrams import marks

found = marks(streams, data)
for name, loss in found._asdict().items():
    print(f"{name:<8} {loss:.3f} nats per token, perplexity {math.exp(loss):6.0f}, "
          f"{loss / streams.characters_per_token:.3f} nats per character (computed here)")

# %% [markdown]
# The last column is there because tokens differ: with a larger vocabulary a token is longer and harder
# to tell. Losses of two tokenizers can only be compared by the character.

# %% [markdown]
# ## Exercise: perplexity of a whole set
#
# An evaluation comes in batches, and the last one is smaller. `losses` holds their mean losses,
# `tokens` how many tokens each has.

# %% tags=["exercise:14.2"]
def perplexity(losses, tokens):
    """Lists of equal length -> one number, exp of the mean loss over all tokens."""
    # solution
    return math.exp(sum(loss * count for loss, count in zip(losses, tokens, strict=True)) / sum(tokens))
    # end


check("14.2", perplexity)

# %% [markdown] tags=["solution"]
# **Why it matters.** Two public training scripts count their batches from 1 and divide by one too
# many. With 100 batches a true perplexity of 16.0 is printed as 15.6, a difference as large as those
# that papers argue about.

# %% [markdown]
# ## The largest tensor
#
# For every token the head gives a number for **every** word of the vocabulary: the logits. With the
# batches of the public LLaMA-1B runs:

# %%
rows, tokens, vocabulary = 64, 256, 32_000
gib = rows * tokens * vocabulary * 4 / 2**30
print(f"{gib:.2f} GiB of logits on one GPU in fp32, and as much again for their gradient (predicted)")

# %% [markdown]
# None of it is needed at once. A few rows of logits, their loss, their gradient: then they can go.

# %% [markdown]
# ## Exercise: a loss without all logits

# %% tags=["exercise:14.3"]
def chunked_loss(hidden, weight, targets, rows):
    """hidden (n, width), weight (vocabulary, width), targets (n,): mean loss, `rows` rows at a time."""
    from torch.nn.functional import cross_entropy

    # solution
    total = 0.0
    for h, t in zip(hidden.split(rows), targets.split(rows), strict=True):
        total = total + cross_entropy(h @ weight.T, t, reduction="sum")
    return total / len(targets)
    # end


check("14.3", chunked_loss)

# %% [markdown]
# Yours saves memory until autograd comes, which keeps every piece for the backward pass. The kit's
# loss finishes the gradients while it is at it, piece by piece, and keeps only those:

# %%
from comera_lab.memory import mib, predict
from comera_lab.objectives.token_loss import naive_token_loss, token_loss

hidden = torch.randn(2048, 128, requires_grad=True)
weight = torch.nn.Parameter(0.02 * torch.randn(8192, 128))
targets = torch.randint(8192, (2048,))


class Head(torch.nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.loss, self.weight = loss, weight

    def forward(self, x, y):
        return self.loss(x, self.weight, y)


for name, loss in (("all logits", naive_token_loss), ("in pieces", token_loss)):
    kept = predict(Head(loss), (hidden, targets)).activations
    print(f"{name:<11} loss {float(loss(hidden, weight, targets).detach()):.4f}, "
          f"keeps {mib(kept):6.1f} MiB for backward (predicted)")

# %% [markdown]
# ## CoMERA and COAP together
#
# CoMERA makes the weights small: what is a tensor train needs little of everything, moments included.
# But a part stays dense, here the head of the decoder. COAP makes the *moments* of dense matrices
# small. So: cores and gates under AdamW, the dense rest under COAP. It is one optimizer with a rule
# for each group.

# %% [markdown]
# ## Exercise: CoMERA and COAP in one table
#
# How many numbers does that optimizer keep? `projected` holds the shapes of the dense matrices under
# COAP, `cores` and `rest` are counts.

# %% tags=["exercise:14.4"]
def optimizer_numbers(cores, projected, rest, rank):
    """-> whole number: moments and bases."""
    # solution
    low = sum((2 * max(shape) + min(shape)) * rank for shape in projected)
    return 2 * cores + low + 2 * rest
    # end


check("14.4", optimizer_numbers)

# %% [markdown]
# One real step of each, and one table each:

# %%
from comera_lab.experiments.language_costs import memory_table, trainer_of

for name in ("code-small", "code-small-coap", "code-small-comera", "code-small-comera-coap"):
    trainer = trainer_of(language_config(name), data)
    trainer.step()
    inner = getattr(trainer, "trainer", trainer)
    print(f"{name}\n{memory_table(inner.model, inner.optimizer)}\n")

# %% [markdown]
# Who saves what? COAP leaves weights and gradients as they are. CoMERA shrinks all three, and a good
# part of what is left is the dense head: that is what COAP takes. Activations are in no table here;
# you know from the guess above how much they are.
#
# At scale the balance turns. The public LLaMA sizes, counted from their configurations without
# allocating anything:

# %%
from comera_lab.memory import StateSettings, optimizer_bytes
from comera_lab.models.decoder import decoder_config

quarter = StateSettings(rank_ratio=4.0, state_dtype=torch.bfloat16)
for name in ("llama-60m", "llama-350m", "llama-1b", "llama-7b"):
    with torch.device("meta"):
        whole = decoder_config(name).build()
    inside = [p for block in whole.blocks for p in block.parameters() if p.ndim == 2]
    chosen = {id(p) for p in inside}
    outside = [p for p in whole.parameters() if id(p) not in chosen]
    adamw = optimizer_bytes([*inside, *outside], "adamw", torch.bfloat16).total
    coap = optimizer_bytes(inside, "coap", torch.bfloat16, quarter).total
    coap += optimizer_bytes(outside, "adamw", torch.bfloat16).total
    print(f"{name:<11} {whole.parameter_count():>13,} weights; optimizer state in bf16: "
          f"AdamW {adamw / 2**30:6.2f} GiB, COAP {coap / 2**30:6.2f} GiB (predicted)")

# %% [markdown]
# ## A recorded study
#
# Half a minute proves nothing. In the study below every method got the same decoder, the same batches
# and a rate of its own: of rates that double, the one with the lowest loss on held-out files of the
# **training** side after half the steps. Methods that learn their ranks took the best rate of fixed
# ranks. The validation side chose nothing.

# %%
from comera_lab.experiments.results import data_file
from comera_lab.experiments.studies_lm import recorded_table

print(recorded_table(data_file("results/lm_code_cpu.jsonl")))

# %% [markdown]
# Read it in four steps. **Loss**: who learns the most from the same tokens, and how many seeds say so?
# **Bytes**: which pool does each method shrink? **Time**: is a compressed model of this width faster?
# **Claim**: the abstract of CoMERA reports a code model at a compression of 4.23, in half the time. What
# of it can a run of minutes on one core support, and what would you have to run to find out the rest?

# %%
progress("14")

# %% [markdown]
# ## What to remember
#
# - Split by file, learn the tokenizer on one side, count equal files once: then a loss means something.
# - A mean over tokens is one sum and one division; exp comes last. Marks from counting give it a scale.
# - Logits need not exist at once. CoMERA shrinks what is tensorised, COAP the moments of the rest.
# - A small model trained for minutes compares methods at small scale, and says so.
#
# ## Where next
#
# `comera-lab train code-small --steps 4000` trains longer in a terminal. Lesson 15 goes beyond one
# machine.
#
# LLaMA: arXiv 2302.13971; its small configurations are those of ReLoRA, GaLore and COAP. CodeBERT: Z.
# Feng and others, arXiv 2002.08155. CoMERA: Z. Yang and others, NeurIPS 2024, arXiv 2405.14377. COAP:
# J. Xiao and others, CVPR 2025, arXiv 2412.00071. The standard library is under the PSF licence; it is
# read, never copied.
#
# *The text of this lesson may be reused under CC BY 4.0; its code under the MIT licence.*
