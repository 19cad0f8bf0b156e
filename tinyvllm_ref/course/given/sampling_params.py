"""What a request asks for; in ``my_engine/`` this is a copy of ``tinyvllm_ref/sampling_params.py``."""

from tinyvllm_ref.sampling_params import SamplingParams

__all__ = ["SamplingParams"]
