"""Grading a class: a judge that draws the inputs and compares, and a contained process that runs the answer.

``docs/instructors.md`` is the guide; :mod:`tinyvllm_ref.course.grade` is the front door.
"""
