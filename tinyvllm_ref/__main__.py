"""``python -m tinyvllm_ref``."""

from .cli import main

main()
