# %% [markdown]
# # 16 Capstone: train within a budget
#
# **Choose `Run > Run All Cells` in the menu**, then start at the panel.
#
# You need about an hour. Afterwards you will be able to
#
# 1. say before a training what it will take, in memory and in time;
# 2. combine tensor trains, ranks that learn and a projected optimizer within a budget;
# 3. defend your choice: three seeds, a report, and a claim that others can repeat.

# %%
from comera_lab.runtime import check_version

check_version("0.1")
import comera_lab.panels as lab

lab.BudgetPanel()

# %% [markdown]
# ## The task
#
# You have so much memory for a training step, and so many seconds of training. Read digits as well as
# you can. All you have learned may be used: dense layers or tensor trains, ranks that are fixed or
# learn, AdamW or an optimizer that keeps less.
#
# **Explore** trains one seed of your settings. When it has ended, the same button says **Register**:
# press it, and the run becomes a dot. An open dot has too few seeds: an *anecdote*. **Three seeds**
# trains what is missing, and registered again the dot is filled: a *claim*, with its spread.
#
# The dashed line is your budget. What lies beyond it may be looked at, but not claimed.

# %%
from comera_lab.teaching import check, guess, progress, saved_work

guess("16")

# %% [markdown]
# ## Rules of the game
#
# - The **clock** counts training alone, and ends a run before it would go past the budget.
# - **Memory** is all that a training step keeps, measured at its largest. Ranks that learn start open:
#   the first step counts, not the small model at the end. That one has an axis of its own.
# - You choose by **dev accuracy**, on images that no network learned from. The **test** side chooses
#   nothing; only the report shows it. Who looks at it while choosing has trained on it.
# - The first result of a seed stays. One cannot run it again until it is lucky.

# %% [markdown]
# ## Exercise: the price of a training
#
# Before anything runs, shapes tell the memory and one step tells the time.

# %% tags=["exercise:16.1"]
def price(pools, steps, step_time_ms):
    """pools {"weights": bytes, "grads": ..., "optimizer": ..., "activations": ...} -> MiB, seconds."""
    # solution
    return sum(pools.values()) / 2**20, steps * step_time_ms / 1000
    # end


check("16.1", price)

# %% [markdown]
# Here is what the panel knows before a run: the memory of a step, predicted from shapes alone.

# %%
from dataclasses import replace

from comera_lab.panels.budget_cell import settings_from

now = settings_from(lab.lab_state())
choices = [("dense", "adamw"), ("dense", "adamw-8bit"), ("dense", "coap"), ("dense", "coap-8bit"),
           ("tensor trains", "adamw"), ("learned ranks", "adamw")]  # fmt: skip
for model, optimizer in choices:
    step_mib = replace(now, model=model, optimizer=optimizer).predicted_mib
    print(f"{model:<14} {optimizer:<11} {step_mib:6.2f} MiB for a training step (predicted)")

# %% [markdown]
# An optimizer can save its own pool and no more. Below that, weights and gradients have to shrink.
# And a basis for the gradients of a core? Cores are small and have three sides: the panel says so.

# %% [markdown]
# ## Points from a cell
#
# What the buttons do, a cell can do. These two are short, so that they end at once; they stand in the
# plot above now. Yours can have more steps.

# %%
for rank in (4, 16):
    lab.budget_point(model="tensor trains", optimizer="adamw", rank=rank, steps=60)
print(lab.budget_table())

# %% [markdown]
# ## Exercise: dots worth a look
#
# After ten dots the plot is full. Which ones can be forgotten? A dot is out if another one is no larger
# and at least as accurate. Return the rest, the smallest first.

# %% tags=["exercise:16.2"]
def pareto(dots):
    """dots [(MiB, accuracy), ...] -> those that no other beats, the smallest first."""
    # solution
    best = []
    for dot in sorted(dots, key=lambda dot: (dot[0], -dot[1])):
        if not best or dot[1] > best[-1][1]:
            best.append(dot)
    return best
    # end


check("16.2", pareto)

# %% [markdown]
# ## The catch: picking the best seed
#
# Twenty runs of one configuration differ by chance alone. Report the best one, and you report your
# patience. Let us see how much patience is worth: here are the seeds of a point of yours.

# %%
point = lab.lab_state().registered[-1]
found = [row["dev_accuracy_percent"] for row in point["rows"]]
print(f"{point['name']}: {', '.join(f'{value:.1f} %' for value in found)} (measured here)")
mean = sum(found) / len(found)
print(f"mean {mean:.1f} %, best seed {max(found) - mean:.1f} points above it")

# %% [markdown]
# ## Exercise: what may be claimed
#
# A log of runs, in the order of time. Some were stopped, some seeds were run twice. What may you say?

# %% tags=["exercise:16.3"]
def claim(rows):
    """rows [{"seed", "accuracy", "finished"}, ...] -> (seeds, mean, lowest, highest)."""
    # solution
    first = {}
    for row in rows:
        if row["finished"]:
            first.setdefault(row["seed"], row["accuracy"])
    found = list(first.values())
    return len(found), sum(found) / len(found), min(found), max(found)
    # end


check("16.3", claim)

# %% [markdown] tags=["solution"]
# **Why the first?** Any rule will do that does not look at the result. "The best" and "until it is
# good" do.

# %% [markdown]
# ## Exercise: the report
#
# Now it is your turn at the panel. Make claims, choose one, and answer the three questions under the
# plot, there or here: which one, at what price, with what doubt. Then run this cell: it makes the
# report, and the check trains a seed of your point again.

# %% tags=["exercise:16.4"]
answers = {"choice": "", "price": "", "doubt": ""}
# solution
answers["choice"] = "Tensor trains: of what I tried, the best mean of three seeds in the budget."
answers["price"] = "Accuracy that a dense network has after as many steps, and some minutes of search."
answers["doubt"] = "Sixty steps are few: with more of them the order of the points may turn around."
# end

report = lab.budget_report(answers)
check("16.4", report, seconds=120)

# %%
report

# %% [markdown]
# **Export report** in the panel writes it beside this notebook: Markdown to read, JSON for whoever
# wants to check it. Both hold settings, machine, versions and every row.

# %%
saved_work()

# %%
progress("16")

# %% [markdown]
# ## What to remember
#
# - Memory is known before a training, time after one step. Plan with both.
# - What is compressed decides: optimizer state, weights and gradients, or activations.
# - A claim is all of its seeds, chosen by one side of the data and shown on another.
#
# ## Where next
#
# You have reached the end of the way. Take a model of your own: `tensorize` it, give it an optimizer by
# name, and measure a step. Lesson [01](01_where_training_memory_goes.ipynb) shows how, once more.
#
# *The text of this lesson may be reused under CC BY 4.0; its code under the MIT licence.*
