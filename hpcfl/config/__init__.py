"""The configuration of a run: YAML and key=value in, one validated, frozen object out."""

from hpcfl.config.choices import DEFAULT_METHOD, DEFAULT_SOURCE
from hpcfl.config.resolving import differences, load_config, resolve
from hpcfl.config.schema import ENVIRONMENT, GROUPS, RESULT_NEUTRAL, Config, DataConfig, RunConfig
from hpcfl.config.trees import flatten, lay_over, read_yaml

__all__ = [
    "DEFAULT_METHOD",
    "DEFAULT_SOURCE",
    "ENVIRONMENT",
    "GROUPS",
    "RESULT_NEUTRAL",
    "Config",
    "DataConfig",
    "RunConfig",
    "differences",
    "flatten",
    "lay_over",
    "load_config",
    "read_yaml",
    "resolve",
]
