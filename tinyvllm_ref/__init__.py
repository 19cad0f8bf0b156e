"""An LLM inference engine to read, to import and to learn from."""
