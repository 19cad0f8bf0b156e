"""Whether what a check was given comes from the answer cell."""

import pytest

from tinyvllm_ref.course.answers import same_answer
from tinyvllm_ref.course.cells import run_alone

FUNCTION = """
def decode(text):
    found = [json.loads(line) for line in text.splitlines()]
    return json.dumps(found), sorted(found, key=lambda one: -one)
"""


def made(source: str, **given):
    return run_alone(source, "a cell", given)["decode"]


def test_an_import_above_a_function_makes_no_other_answer():
    """A notebook compiles statement by statement, and Python calls a module it has just seen imported otherwise."""
    import json

    in_one_piece, in_a_notebook = made("import json\n" + FUNCTION), made(FUNCTION, json=json)
    assert same_answer(in_a_notebook, in_one_piece)
    assert in_one_piece("3\n4") == in_a_notebook("3\n4")  # and once they have run
    assert same_answer(in_a_notebook, in_one_piece)


CHANGES = [
    ("dumps", "loads"),
    ("-one", "one"),
    ("-one", "+one"),
    ("splitlines", "split"),
    ("found, key", "found"),
]


@pytest.mark.parametrize(("old", "new"), CHANGES)
def test_another_function_is_another_answer(old, new):
    assert not same_answer(made(FUNCTION), made(FUNCTION.replace(old, new, 1)))
