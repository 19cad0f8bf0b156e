"""What a cell puts out: a report as HTML with plain text beside it in a notebook, plain text elsewhere."""

from __future__ import annotations

from typing import Any

from . import front_end, store
from .exercise import Lesson


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this, so that HTML is seen."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    shell = get_ipython()
    return shell is not None and hasattr(shell, "kernel")


def display(thing: Any) -> None:
    """Show an object that has ``_repr_html_`` and ``__str__``."""
    if not in_notebook():
        print(thing)
        return
    _publish({"text/plain": str(thing), "text/html": thing._repr_html_()}, {})


def display_png(png: bytes, alt: str) -> None:
    """Show a picture alone, at half its pixels (it is made for dense screens); nbval does not compare these."""
    if in_notebook():
        width = int.from_bytes(png[16:20], "big") // 2  # of the PNG's header
        if front_end.in_vscode():
            _publish({"text/html": front_end.sized_picture(png, alt, width), "text/plain": alt}, {})
            return
        _publish({"image/png": png}, {"image/png": {"alt": alt, "width": width}})


def _publish(data: dict[str, Any], metadata: dict[str, Any]) -> None:
    import IPython.display

    publish: Any = IPython.display.publish_display_data
    publish(data, metadata)


def celebrate(lesson: Lesson) -> None:
    """A banner for a lesson whose last exercise passed: a picture, so that nothing compares it."""
    if not in_notebook():
        return
    from .course_map import completion_banner
    from .exercises import lessons

    everything = list(lessons().values())
    later = [other for other in everything if other.number > lesson.number]
    done = store.read()
    complete = [
        all(done.get(exercise.id, {}).get("passed") for exercise in other.exercises if not exercise.stretch)
        for other in everything
    ]
    png = completion_banner(
        lesson.number, lesson.title, later[0].title if later else "", sum(complete), len(everything), complete
    )
    display_png(
        png,
        f"Lesson {lesson.number}, {lesson.title}, is complete: {sum(complete)} of {len(everything)} lessons.",
    )
