"""What all groups of keys have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A group of keys: frozen once validated, of known names and finite values.

    Each key has a docstring below it, which `hpcfl list keys` prints.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
