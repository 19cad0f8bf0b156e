"""One request on its way; in ``my_engine/`` this is a copy of ``tinyvllm_ref/request.py``."""

from tinyvllm_ref.request import Request, RequestState

__all__ = ["Request", "RequestState"]
