# %% [markdown]
# # T0 For teachers
#
# **Choose `Run > Run All Cells` in the menu**, then start at the panel.
#
# You need about forty minutes. Afterwards you will be able to
#
# 1. put a course together, from a route or from single lessons, and hand it out;
# 2. let a grader mark it, on other inputs than those that learners see;
# 3. lay the results of a whole class over each other, without names and without a network.

# %%
from comera_lab.runtime import check_version

check_version("0.1")
import comera_lab.teaching.course_panel as lab

lab.CoursePanel()

# %%
from comera_lab.teaching import check, guess, progress

guess("T0")

# %% [markdown]
# ## What Build writes
#
# - `plan.md`: every meeting with its minutes, every exercise with its own, deadlines, seeds;
# - a zip for students: lessons, the kit itself and its data, so that a room without a network can work;
# - a zip for each student, the same lessons with a seed of their own: curves differ, exercises do not;
# - a zip for you: the instructor edition, all solutions, the class board.
#
# ## Ways through the lessons
#
# Minutes are added up from what each lesson names in its first cell. In a terminal:
# `comera-lab course routes`.

# %%
from comera_lab.teaching.lessons import lessons
from comera_lab.teaching.routes import ROUTES, route_text

known = lessons()
print(route_text(ROUTES["half-day"], known))

# %% [markdown]
# ## The same as a file
#
# A file can do more than the panel: set where sliders start, lock them, name deadlines, ask for
# graders.
# Save it as `course.yml`, then `comera-lab course build course.yml`.

# %%
import tempfile
from pathlib import Path

from comera_lab.teaching.course import make_course
from comera_lab.teaching.course_build import build_course

given = {
    "title": "Low rank in a morning",
    "lessons": [
        "00",
        {"lesson": "02", "presets": {"energy_percent": 95}, "locked": ["energy_percent"]},
    ],
    "deadline": "2027-01-15",
    "solutions": "after-deadline",
    "students": 3,
}
course = make_course(given, known)
folder = Path(tempfile.mkdtemp())
print(str(build_course(course, folder / "built")).partition("\n")[2])

# %% [markdown]
# `after-deadline` keeps solutions out of the students' zip: they are in yours, to hand out when the
# day has
# come. What is misspelt is told all at once, a line for each:

# %%
from comera_lab.teaching.course import CourseError

try:
    make_course({"title": "T", "lessons": ["99"], "locked": ["rnk"], "deadline": "soon"}, known)
except CourseError as error:
    for problem in error.problems:
        print("-", problem[:96])

# %% [markdown]
# ## Exercise: how many meetings?
#
# Lessons are taken in order, and a lesson is not cut in two. How many meetings does a course need?


# %% tags=["exercise:T0.1"]
def sessions_needed(minutes, session):
    """Meetings of `session` minutes for lessons of these minutes, in order."""
    # solution
    count, left = 0, 0
    for lesson in minutes:
        if lesson > left:
            count, left = count + 1, session
        left -= lesson
    return count
    # end


check("T0.1", sessions_needed)

# %% [markdown] tags=["solution"]
# **Why.** The sum of the minutes divided by the length of a meeting is only a lower bound: what is
# left at the end
# of a meeting may be too short for the next lesson.

# %% [markdown]
# ## What you have beside each exercise
#
# The instructor edition is the solution edition with a note after every exercise: aim, minutes,
# what people get
# wrong and what the card tells them, and something to draw on the board.

# %%
from comera_lab.teaching.exercises import EXERCISES
from comera_lab.teaching.instructor import exercise_note

print(exercise_note(EXERCISES["00.1"]))

# %% [markdown]
# ## Let a grader mark it
#
# `grading: [otter, nbgrader]` in the file writes assignments for both, from the same source as the
# lessons
# (`pip install "comera_lab[course]"`). Each exercise has two tests:
#
# - the **announced** one: the same inputs and the same threshold as the card under the exercise;
# - a **hidden** one: other inputs, drawn from a seed, and a threshold that is a fifth looser, so
#   that nobody fails
#   by rounding who passed the announced one.
#
# A loop that never ends is stopped by the test. Students need no grader: what they hand in is the
# notebook.
#
# nbgrader adds a menu of its own to JupyterLab; this hides it:
# `jupyter labextension disable @jupyter/nbgrader`.
#
# In a terminal: `otter run 02_low_rank.ipynb -a otter/02_low_rank/dist/autograder/*.zip`, or,
# inside the folder
# `nbgrader`, `nbgrader autograde 02_low_rank`.

# %%
from comera_lab.teaching.grading import LOOSER, NotPassed, require_right

answers = {
    "right": lambda left, mode, right: left * mode * right,
    "wrong": lambda left, mode, right: left + mode + right,
}
for name, answer in answers.items():
    try:
        require_right("00.3", answer, seed=4711, looser=LOOSER)
        print(f"{name}: one point")
    except NotPassed as verdict:
        print(f"{name}: none. {verdict}")

# %% [markdown]
# ## The class board
#
# At the end of a lesson a student runs `from comera_lab.teaching.board import save_result;
# save_result()` and hands
# in a small file: exercises, runs, and a random sign instead of a name. You put all files into one
# folder.
#
# The three students here are invented, so that you see a board before you have a class.

# %%
import json

from comera_lab.teaching.board import KIND, ClassBoard

results = folder / "results"
results.mkdir(exist_ok=True)
for who, right, accuracy in (("one", 2, 91.0), ("two", 1, 93.5), ("three", 0, 88.0)):
    words = {f"00.{k}": {"word": "Right" if k <= right else "Not yet"} for k in (1, 2, 3)}
    words["00.3"]["mistake"] = "adds"
    runs = [{"lane": "invented", "parameters": 2000 * (right + 1), "accuracy_percent": accuracy}]
    result = {"kind": KIND, "schema_version": 1, "who": who, "exercises": words, "runs": runs}
    (results / f"{who}.json").write_text(json.dumps(result))
board = ClassBoard.read(results)
print(board)

# %%
board.bars()

# %% [markdown]
# ## Exercise: what did the class get wrong?
#
# An answer is a word and the name of the mistake, or `None` where there is none or none that the
# checker knows.
# Which mistake is the commonest?


# %% tags=["exercise:T0.2"]
def commonest_mistake(answers):
    """The name of the mistake that most answers share."""
    # solution
    from collections import Counter

    return Counter(name for word, name in answers if name is not None).most_common(1)[0][0]
    # end


check("T0.2", commonest_mistake)

# %% [markdown] tags=["solution"]
# **Why.** `None` is by far the commonest entry of a class that does well. Leave it out before you
# count.

# %%
progress("T0")

# %% [markdown]
# ## Pages and apps
#
# - `comera-lab export notebooks/02_low_rank.ipynb --html` gives one page with text, results and
#   figures whose
#   sliders work: for a learner without Python, offline, on a phone.
# - `voila notebooks/02_low_rank.ipynb` serves a lesson as an app, panels alive, code hidden
#   (`pip install "comera_lab[apps]"`).
# - `notebooks/TIMES.md` says how long each lesson computes on one core.
#
# ## What to remember
#
# - One file makes a course: plan, zips, instructor edition, assignments.
# - Hidden tests draw other inputs and are looser, never stricter.
# - The class board needs no names and no network.
#
# ## Where next
#
# [00 Start here](00_start_here.ipynb): take the lesson once as your students will.
#
# *The text of this lesson may be reused under CC BY 4.0; its code under the MIT licence.*
