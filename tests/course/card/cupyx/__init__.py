"""The stand-in's ``cupyx``; see the ``cupy`` beside it."""

from cupy.cupyx import empty_like_pinned, empty_pinned, scatter_add, zeros_like_pinned, zeros_pinned

__all__ = ["empty_like_pinned", "empty_pinned", "scatter_add", "zeros_like_pinned", "zeros_pinned"]
