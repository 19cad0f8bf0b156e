"""The engine's kernels: one pair of files each, NAME.cu (CUDA C++) and NAME.py (its checked launch).

The functions have the contracts of the parts (:mod:`tinyvllm_ref.parts`). Import each from its own module:

>>> from tinyvllm_ref.kernels.rms_norm import rms_norm  # doctest: +SKIP
"""
