"""Tests of the engine's kernels, in the emulation and on a card."""
