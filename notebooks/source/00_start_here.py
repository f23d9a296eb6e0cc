# %% [markdown]
# # 00 Start here
#
# **Run this lesson now: choose `Run > Run All Cells` in the menu.** Then scroll back up to the panel.
#
# You need a quarter of an hour. Afterwards you will be able to
#
# 1. drive a panel: drag, type, train, stop, resume;
# 2. say in one sentence what a tensor train does to a layer;
# 3. answer an exercise, ask for a hint, and save your work.

# %%
from comera_lab.runtime import check_version

check_version("0.1")
import comera_lab.panels as lab

lab.StartPanel()

# %% [markdown]
# ## What you are looking at
#
# A neural network is made of layers, and a layer is mostly one big table of numbers, its **weights**.
# The layer above turns an image of 784 pixels into 512 features. As a table it would be 784 wide and
# 512 high.
#
# Here the table is not stored. It is replaced by a chain of small blocks, the **cores**. Neighbours
# share a **rank**: the thickness of the link between them. That chain is a *tensor train*.
#
# Drag the slider (or type a number beside it) and watch the blocks and the read-out under them.

# %% [markdown]
# ## A bet before you drag
#
# Every lesson has one. Guessing wrong is fine: it is what makes the answer stick.

# %%
from comera_lab.teaching import check, guess, progress, saved_work

guess("00")

# %% [markdown]
# ## Let it learn
#
# Press **Train** in the panel. The layer learns to read handwritten digits, on your machine, while you
# watch. You can press **Stop** at any step and **Resume** later; nothing is lost.
#
# Three numbers tell the story. They are *measured here*, not promised:
#
# - **loss**: how surprised the model is by the right answer, in nats; lower is better;
# - **accuracy**: the share of digits it reads right among images it never trained on;
# - **ms a step**: the time for one small batch of images.
#
# Try rank 1, then rank 32. What do you gain, and what does it cost?

# %% [markdown]
# ## First doubt: is the big table still there, somewhere?
#
# A fair question. Let us look inside such a layer and list everything it holds.

# %%
from comera_lab import TTLinear

layer = TTLinear(784, 512, rank=8)
for name, tensor in layer.named_parameters():
    print(f"{name:8} {tuple(tensor.shape)!s:14} {tensor.numel():6,} numbers")

# %% [markdown]
# Six small cores and a bias, nothing else. When an image arrives it is multiplied with the cores, one
# group after the other; the big table is never built. Lesson 04 shows how.

# %% [markdown]
# ## Your first exercise
#
# Replace the three dots with an expression that uses `dense` and `small`, then press `Shift + Enter`.
# The card under the cell tells you how it went. Not there yet? It has three hints to unfold.

# %% tags=["exercise:00.1"]
dense = layer.shape.dense_params  # numbers in the table of 784 x 512
small = layer.shape.params  # numbers in the six cores

times_smaller = dense / small  # solution

check("00.1", times_smaller)

# %% [markdown] tags=["solution"]
# **Why.** "Times smaller" compares two counts: the large one over the small one. Upside down it would be the
# share that is left; one minus that share is the saving in per cent. Three ways to say one thing, easily mixed up.

# %% [markdown]
# ## What does it weigh?
#
# The last tile of the panel shows the bytes of the cores. Compute them yourself: a float32 number has
# 4 bytes, a MiB has 2**20 bytes.

# %% tags=["exercise:00.2"]
mib = small * 4 / 2**20  # solution

check("00.2", mib)

# %% [markdown]
# ## Where do the numbers sit?
#
# Every box in the panel carries three numbers: left rank, mode, right rank. How many numbers are in it?

# %% tags=["exercise:00.3"]
def core_size(left, mode, right):
    """Numbers in a core with these three sides."""
    # solution
    return left * mode * right
    # end


check("00.3", core_size)

# %% [markdown] tags=["solution"]
# **Why.** A core holds one matrix, left rank x right rank, for each value of its mode. Twice the rank makes
# four times the numbers in the middle of the train, and twice at its ends.

# %% [markdown]
# ## Is this machine ready?
#
# The doctor looks at Python, memory, cores and widgets, and says what to do if something is missing.

# %%
from comera_lab.runtime import doctor

doctor()

# %% [markdown]
# ## Save your work, ask for help
#
# - **On your own machine** the notebook is a file: `File > Save Notebook`.
# - **Answers** that you check are kept in a small file on this machine, and come back after a restart.
#   The card below says where. Its button downloads the file.
# - **On Binder** the machine forgets everything when you stay away for some minutes. Before a break
#   choose `File > Download`; next time, drag the file into the list on the left.
# - **Something odd?** `Kernel > Restart Kernel and Run All Cells` puts every cell back in order.
# - **Still odd?** Report it on the project page. Paste the text of `print(doctor())` with it.
# - **Stuck?** Unfold the hints, or open the same lesson in the folder `solutions`.

# %%
saved_work()

# %%
progress("00")

# %% [markdown]
# ## What to remember
#
# - A tensor train replaces one big table by a chain of small cores.
# - The rank is the dial: more rank, more numbers, more freedom.
# - Every number in this kit says whether it is *predicted*, *measured here* or *recorded* elsewhere.
#
# ## Where next
#
# - **One evening**: [01 Where training memory goes](01_where_training_memory_goes.ipynb), then
#   [04 A TT layer that trains](04_a_tt_layer_that_trains.ipynb).
# - **The whole way**: 01, then [02 Low rank](02_low_rank.ipynb),
#   [03 Tensor trains by hand](03_tensor_trains_by_hand.ipynb), 04.
# - **You teach**: [T0 For teachers](T0_for_teachers.ipynb).
#
# *The text of this lesson may be reused under CC BY 4.0; its code under the MIT licence.*
