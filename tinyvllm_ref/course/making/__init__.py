"""From the source of a lesson to its notebooks; :mod:`tinyvllm_ref.course.build` says how they are written."""
