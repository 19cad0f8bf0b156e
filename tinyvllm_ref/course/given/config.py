"""What a model is and how an engine runs it; in ``my_engine/`` this is a copy of ``tinyvllm_ref/config.py``."""

from tinyvllm_ref.config import ConfigError, EngineConfig, ModelConfig

__all__ = ["ConfigError", "EngineConfig", "ModelConfig"]
