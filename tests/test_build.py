"""From one source to two editions: stubs, ids, drift, and marks that are refused with file and line."""

import json
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import pytest

from comera_lab.teaching.build import SourceError, build_all, build_lesson, check_drift, notebooks_folder, read_cells

GOOD = '''\
# %% [markdown]
# # A title
#
# Some text.

# %%
print("as it is")

# %% tags=["exercise:03.1"]
def tt_params(modes, ranks):
    """Counts."""
    # solution
    pairs = zip(ranks, modes, ranks[1:])
    return sum(a * mode * b for a, mode, b in pairs)
    # end


check("03.1", tt_params)

# %% tags=["exercise:00.1"]
times_smaller = dense / small  # solution
check("00.1", times_smaller)

# %% tags=["exercise:03.5"]
for mode in (1, 2):
    # solution
    core = U.reshape(1)
    rest = S * Vh
    # end
check("03.5", tt_svd)

# %% [markdown] tags=["solution"]
# Why it works.
'''


def _checkout(folder: Path, text: str = GOOD) -> Path:
    source = folder / "notebooks" / "source" / "07_demo.py"
    source.parent.mkdir(parents=True)
    source.write_text(text, encoding="utf-8")
    return source


def _code(notebook: dict[str, Any]) -> list[str]:
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_the_student_reads_dots_and_the_solution_reads_answers(tmp_path: Path) -> None:
    editions = build_lesson(_checkout(tmp_path))
    plain, function, value, loop = _code(editions.student)
    assert plain == 'print("as it is")'
    assert function == 'def tt_params(modes, ranks):\n    """Counts."""\n    return ...\n\n\ncheck("03.1", tt_params)'
    assert value == 'times_smaller = ...\ncheck("00.1", times_smaller)'
    assert loop == 'for mode in (1, 2):\n    core = ...\n    rest = ...\ncheck("03.5", tt_svd)'
    solution = "\n".join(_code(editions.solution))
    assert "return sum(" in solution and "times_smaller = dense / small\n" in solution
    assert "# solution" not in solution and "# end" not in solution


def test_cells_tagged_solution_are_in_the_solution_edition_only(tmp_path: Path) -> None:
    editions = build_lesson(_checkout(tmp_path))
    assert len(editions.solution["cells"]) == len(editions.student["cells"]) + 1
    assert "Solution edition" in "".join(editions.solution["cells"][0]["source"])
    assert "Solution edition" not in "".join(editions.student["cells"][0]["source"])


def test_both_editions_are_valid_clean_and_share_their_ids(tmp_path: Path) -> None:
    editions = build_lesson(_checkout(tmp_path))
    for notebook in (editions.student, editions.solution):
        nbformat.validate(nbformat.from_dict(notebook))
        assert notebook["metadata"]["kernelspec"]["name"] == "python3"
        assert "widgets" not in notebook["metadata"]
        assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in notebook["cells"])
    ids = [cell["id"] for cell in editions.solution["cells"]]
    assert len(set(ids)) == len(ids)
    assert {cell["id"] for cell in editions.student["cells"]} <= set(ids)


def test_equal_cells_get_different_ids(tmp_path: Path) -> None:
    notebook = build_lesson(_checkout(tmp_path, "# %%\n1\n\n# %%\n1\n")).student
    assert len({cell["id"] for cell in notebook["cells"]}) == 2


def test_jupytext_reads_the_same_cells(tmp_path: Path) -> None:
    source = _checkout(tmp_path)
    theirs = jupytext.read(source)
    ours = read_cells(source)
    assert [cell.source for cell in theirs.cells] == ["\n".join(cell.lines) for cell in ours]
    assert [cell.metadata.get("tags", []) for cell in theirs.cells] == [list(cell.tags) for cell in ours]


def test_building_twice_changes_nothing(tmp_path: Path) -> None:
    _checkout(tmp_path)
    assert [path.name for path in build_all(tmp_path)] == ["07_demo.ipynb", "07_demo.ipynb"]
    assert build_all(tmp_path) == []
    assert check_drift(tmp_path) == []


def test_drift_is_named(tmp_path: Path) -> None:
    source = _checkout(tmp_path)
    assert len(check_drift(tmp_path)) == 2 and "is missing" in check_drift(tmp_path)[0]
    build_all(tmp_path)
    source.write_text(GOOD.replace("Some text", "Other text"), encoding="utf-8")
    assert ["differs from its source" in problem for problem in check_drift(tmp_path)] == [True, True]
    build_all(tmp_path)
    orphan = tmp_path / "notebooks" / "solutions" / "08_gone.ipynb"
    orphan.write_text("{}", encoding="utf-8")
    assert check_drift(tmp_path) == [
        "solutions/08_gone.ipynb has no source in notebooks/source. Delete it, or add its source."
    ]


def test_an_edited_notebook_is_drift(tmp_path: Path) -> None:
    _checkout(tmp_path)
    student = build_all(tmp_path)[0]
    notebook = json.loads(student.read_text(encoding="utf-8"))
    notebook["cells"][1]["execution_count"] = 3
    student.write_text(json.dumps(notebook), encoding="utf-8")
    assert "07_demo.ipynb differs" in check_drift(tmp_path)[0]


HEAD = '# %% tags=["exercise:03.1"]\n'
CHECK = 'check("03.1", f)\n'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("print(1)\n", "line 1: text before the first cell mark"),
        ("# %% [markdwon]\n# text\n", "line 1: cannot read the cell mark"),
        ("# %% tags=['a']\n1\n", "line 1: cannot read the cell mark"),
        ("#%%\n1\n", "line 1: cannot read the cell mark"),
        ("# %%\n\n# %%\n1\n", "line 1: an empty cell"),
        ("# %% [markdown]\n# text\ncode()\n", "line 3: a line of a text cell"),
        (HEAD + "# solution\nx = 1\n" + CHECK, "line 2: # solution without an # end"),
        (HEAD + "# end\n" + CHECK, "line 2: # end without a # solution"),
        (HEAD + "# solution\nx = 1\n# solution\n# end\n" + CHECK, "line 4: a second # solution"),
        (HEAD + "# solution\n# end\n" + CHECK, "line 2: an empty solution"),
        (HEAD + "# solution\nx = = 1\n# end\n" + CHECK, "line 3: the solution is not Python"),
        (HEAD + "# Solution\nx = 1\n# end\n" + CHECK, "line 2: cannot read the mark"),
        (HEAD + "x = 1 # solution\n" + CHECK, "line 2: cannot read the mark"),
        (HEAD + "x = 1\n" + CHECK, "line 2: exercise 03.1 has no # solution"),
        (HEAD + "x = 1  # solution\n", r'line 2: exercise 03.1 does not call check\("03.1"'),
        ('# %% tags=["exercise:99.9"]\nx = 1  # solution\n', "line 2: exercise 99.9 is not registered"),
        ("# %%\nx = 1  # solution\n", "line 2: a solution outside an exercise"),
        ((HEAD + "x = 1  # solution\n" + CHECK) * 2, "line 5: exercise 03.1 is already in this lesson"),
    ],
)
def test_a_malformed_mark_is_refused_with_file_and_line(tmp_path: Path, text: str, problem: str) -> None:
    source = _checkout(tmp_path, text)
    with pytest.raises(SourceError, match=f"07_demo.py, {problem}"):
        build_lesson(source)


def test_without_a_checkout_it_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="Run this inside a checkout"):
        notebooks_folder(tmp_path)
