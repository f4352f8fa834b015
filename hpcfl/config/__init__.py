"""The configuration of a run: YAML and key=value in, one validated, frozen object out."""

from hpcfl.config.keys import (
    ENVIRONMENT,
    GROUPS,
    RESULT_NEUTRAL,
    ClientsConfig,
    CommConfig,
    Config,
    DataConfig,
    PrivacyConfig,
    RunConfig,
    ServerConfig,
    TrainConfig,
    flatten,
)
from hpcfl.config.load import differences, read_yaml
from hpcfl.config.registry import DEFAULT_METHOD, DEFAULT_SOURCE

__all__ = [
    "DEFAULT_METHOD",
    "DEFAULT_SOURCE",
    "ENVIRONMENT",
    "GROUPS",
    "RESULT_NEUTRAL",
    "ClientsConfig",
    "CommConfig",
    "Config",
    "DataConfig",
    "PrivacyConfig",
    "RunConfig",
    "ServerConfig",
    "TrainConfig",
    "differences",
    "flatten",
    "read_yaml",
]
