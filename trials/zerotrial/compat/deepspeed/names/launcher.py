"""``deepspeed.launcher.runner``."""

__all__ = ["DEEPSPEED_ENVIRONMENT_NAME"]

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
