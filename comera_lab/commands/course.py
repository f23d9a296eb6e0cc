"""`comera-lab course`: a course from one YAML file, and the ways through the lessons."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from comera_lab.commands.messages import PROGRAM


def add(commands: Any) -> None:
    course = commands.add_parser("course", help="build a course from one YAML file; list routes through the lessons")
    actions = course.add_subparsers(required=True, metavar="action")
    build = actions.add_parser("build", help="plan, zips for students and teacher, assignments for graders")
    build.add_argument("file", type=Path, help="for example course.yml; lesson T0 shows what may stand in it")
    build.add_argument("--out", type=Path, help="a new or empty folder (default: the title, beside the file)")
    build.set_defaults(run=run_build)
    plan = actions.add_parser("plan", help="print the plan with its minutes, and write nothing")
    plan.add_argument("file", type=Path)
    plan.set_defaults(run=run_plan)
    routes = actions.add_parser("routes", help="print the routes through the lessons with their minutes")
    routes.set_defaults(run=run_routes)


def run_build(options: argparse.Namespace) -> int:
    from comera_lab.teaching.course import CourseError, read_course
    from comera_lab.teaching.course_build import build_course
    from comera_lab.teaching.plan import plan_text

    try:
        course = read_course(options.file)
        out = options.out or options.file.parent / course.slug
        built = build_course(course, out)
    except CourseError as error:
        return _complain(error.problems)
    print(f"{plan_text(course)}\n{built}")
    return 0


def run_plan(options: argparse.Namespace) -> int:
    from comera_lab.teaching.course import CourseError, read_course
    from comera_lab.teaching.plan import plan_text

    try:
        print(plan_text(read_course(options.file)), end="")
    except CourseError as error:
        return _complain(error.problems)
    return 0


def run_routes(options: argparse.Namespace) -> int:
    from comera_lab.teaching.lessons import lessons
    from comera_lab.teaching.routes import ROUTES, route_text

    known = lessons()
    print("\n\n".join(route_text(route, known) for route in ROUTES.values()))
    return 0


def _complain(problems: tuple[str, ...]) -> int:
    """A line for each problem: a teacher mends them all at once."""
    for problem in problems:
        print(f"{PROGRAM}: {' '.join(problem.split())}", file=sys.stderr)
    return 2
