# %% [markdown]
# # 11 COAP for convolutions
#
# **Choose `Run > Run All Cells` in the menu**, then start at the panel.
#
# You need about an hour. Afterwards you will be able to
#
# 1. project the gradient of a convolution with two bases (Tucker-2), and count what that saves;
# 2. say how a diffusion model draws, and judge its pictures by a number;
# 3. compare optimizers on one task without fooling yourself.

# %%
from comera_lab.runtime import check_version

check_version("0.1")
import comera_lab.panels as lab

lab.DiffusionPanel()

# %% [markdown]
# ## Digits out of noise
#
# Press **Train**. All pictures start from the same noise, so you watch one model grow. Press **Stop**
# whenever you like: the digits stay, **Resume** goes on.
#
# Then choose **adamw** and train again. Compare three columns: the MiB of the optimizer, the noise
# error, and the milliseconds of an update. Which of them changes most?

# %%
from comera_lab.teaching import check, guess, progress

guess("11")

# %% [markdown]
# ## A kernel has two kinds of channel
#
# The gradient of a convolution has four sizes: out channels, in channels, and a small window. The
# window is a few pixels wide, there is nothing to save. The channels are many, and often say the same.
# So COAP takes **two** bases: one for the out channels, one for the in channels. The moments live in
# the small *core* between them. This is a Tucker decomposition of two sides, Tucker-2.

# %% [markdown]
# ## Exercise: project a kernel's gradient
#
# `G` is (out, in, k, k), the bases are (out, r_out) and (in, r_in). Give the core.

# %% tags=["exercise:11.1"]
def project_kernel(G, U_out, U_in):
    """-> (r_out, r_in, k, k)."""
    # solution
    import torch

    return torch.einsum("oikl,or,is->rskl", G, U_out, U_in)
    # end


check("11.1", project_kernel)

# %% [markdown]
# ## Exercise: what a kernel costs
#
# Rank ratio `ratio` means: the core has so many times fewer numbers. Each side takes its share, the
# root of the ratio, and is rounded down. How many numbers does COAP keep for one kernel, moments and
# bases?

# %% tags=["exercise:11.2"]
def kernel_numbers(out_channels, in_channels, side, ratio):
    """-> whole number."""
    # solution
    out_rank, in_rank = int(out_channels / ratio**0.5), int(in_channels / ratio**0.5)
    return 2 * out_rank * in_rank * side**2 + out_channels * out_rank + in_channels * in_rank
    # end


check("11.2", kernel_numbers)

# %% [markdown]
# Move **rank ratio** in the panel and watch the predicted MiB. From some ratio on hardly anything more
# is saved: what is left are bases, and tensors too small to project.
#
# Counting is exact. These are the optimizer sizes that the authors of COAP published, and what shapes
# alone say:

# %%
from comera_lab.memory import PUBLISHED, mib

for size in PUBLISHED:
    counted = mib(size.count().published)
    print(f"{size.model:<16} {size.optimizer:<27} published {size.mib:8.2f} MiB, counted {counted:.2f}")

# %% [markdown]
# ## A basis that is never renewed
#
# Bases age. In one released program the basis of a convolution is made at the first step and never
# again, and what is lifted back is the raw gradient, not the update: its results on convolutions say
# nothing about the method. The `galore` of this kit renews its bases. Does it matter? Real gradients
# of a kernel from a network in training:

# %%
import torch

from comera_lab.experiments.diffusion import DiffusionConfig, DiffusionTrainer
from comera_lab.models.unet import UNet
from comera_lab.optimizers.tucker import captured_energy, hosvd_bases, refresh_bases

model = UNet((16, 32), generator=torch.Generator().manual_seed(0))
trainer = DiffusionTrainer(model, DiffusionConfig(steps=60))
kernel = model.middle.conv1.weight
trainer.step()
first = followed = hosvd_bases(kernel.grad, (8, 8))
while not trainer.done:
    trainer.step()
    if trainer.steps_done % 20 == 0:
        followed = refresh_bases(kernel.grad, followed)
        best = hosvd_bases(kernel.grad, (8, 8))
        kept = [captured_energy(kernel.grad, bases) for bases in (first, followed, best)]
        print(f"step {trainer.steps_done}: energy of the gradient in the first bases {kept[0]:.0%}, "
              f"in refreshed ones {kept[1]:.0%}, in new ones {kept[2]:.0%}")

# %% [markdown]
# A refresh is one cheap product on each side, from the bases that are there. New bases from nothing
# (HOSVD) are nearly the best that two bases can do, and cost eigenvectors of every kernel.

# %% [markdown]
# ## How a diffusion model draws
#
# Training: mix a real digit with noise, and ask the network **what the noise was**. The share of the
# digit that is left runs from nearly all to nearly nothing. Drawing: start from pure noise, take away
# a little of what the network calls noise, and repeat.

# %% [markdown]
# ## Exercise: mix an image with noise
#
# `x` and `noise` have variance 1, and so must the mix. Of its energy, `share` comes from the image.

# %% tags=["exercise:11.3"]
def noisy(x, noise, share):
    """-> a tensor of the same shape."""
    # solution
    return share**0.5 * x + (1 - share) ** 0.5 * noise
    # end


check("11.3", noisy)

# %% [markdown]
# The chart of the panel shows how well the network tells the noise: 1 is knowing nothing. It can never
# reach 0, for where only noise is left, there is no telling.

# %% [markdown]
# ## How good are the pictures?
#
# By eye? Everybody sees what they hope for. So a judge: a classifier, trained here in seconds, turns
# each picture into 32 features. Real digits are one cloud of points, generated ones another. The
# **Frechet distance** says how far the clouds are apart, in their centres and in their spread. It has
# no unit: read it between held-out real digits and pure noise, which the panel names. (The FID of
# papers is the same with another judge.)

# %% [markdown]
# ## Exercise: how far apart are two clouds?
#
# For features that do not depend on each other, each with its mean and standard deviation: sum up the
# squared differences of both.

# %% tags=["exercise:11.4"]
def frechet(mean_a, std_a, mean_b, std_b):
    """Means and deviations (n,) of two clouds -> their distance, a number."""
    # solution
    return float(((mean_a - mean_b) ** 2).sum() + ((std_a - std_b) ** 2).sum())
    # end


check("11.4", frechet)

# %% [markdown] tags=["solution"]
# **Why the spread counts.** A model that draws one perfect 3 again and again fools the eye, and has a
# tiny spread. The distance of real threes from all real digits is many times that of held-out digits.

# %% [markdown]
# ## A fair race
#
# One training each proves little: another seed gives another number. The recorded study below has
# three seeds a method. Each method got the rate that did best on a held-out part of the *training*
# digits, because a rate that suits one of them would decide the race. The test digits chose nothing.

# %%
from comera_lab.experiments.results import data_file
from comera_lab.experiments.studies_diffusion import recorded_table

print(recorded_table(data_file("results/ddpm_digits_cpu.jsonl")))

# %% [markdown]
# Read it in four steps. **Rates**: galore multiplies its updates by a quarter, so take a quarter of its
# rate before you compare. **Bytes**: what does the projection save? **Quality**: do the ranges of the
# seeds overlap? If they do, the study does not tell the methods apart. **Time**: the update of a
# projected optimizer is work, and beside a network this small it shows.

# %%
progress("11")

# %% [markdown]
# ## What to remember
#
# - A kernel has two sides with many channels: two bases, one small core, moments in the core.
# - A projection must be renewed. A program that forgets it measures something else.
# - A picture needs a judge, a judge needs marks, and a race needs seeds and a rate for each.
#
# ## Where next
#
# Take `make_optimizer("coap", model.named_parameters(), rate, rank_ratio=4)` to a network of your own
# and print its `report()`. COAP is by J. Xiao and others (CVPR 2025, arXiv 2412.00071), GaLore by J.
# Zhao and others (ICML 2024, arXiv 2403.03507), DDPM by J. Ho and others (arXiv 2006.11239), the
# sampler follows DDIM (J. Song and others, arXiv 2010.02502), the distance M. Heusel and others (arXiv
# 1706.08500).
#
# *The text of this lesson may be reused under CC BY 4.0; its code under the MIT licence.*
