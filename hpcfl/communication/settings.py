"""The keys under `comm.*`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from hpcfl.settings import Settings

CodecName = Literal["none", "float16", "int8", "topk"]
Direction = Literal["down", "up"]

DEFAULT_KEEP = 0.1


class CommConfig(Settings):
    """The keys under `comm.*`: how numbers are coded on their way between server and clients."""

    codec: CodecName = "none"
    """How numbers are coded on their way.

    none: they travel as they are. float16: as float16, within its range. int8: as whole numbers from
    -127 to 127 and a scale for each layer; in uploads, the difference to what the client received. topk: in
    uploads, the largest differences to what the client received, with their indices."""
    directions: Literal["both", "up", "down"] | None = None
    """Which messages are coded; default: both, or with topk up, the only direction it has."""
    keep: float | None = Field(None, gt=0, le=1)
    """Share of a layer's numbers that topk sends; default: 0.1."""
    memory: bool | None = None
    """Whether clients remember what topk did not send and add it to their next differences (error feedback);
    default: true. pFedLA learns nothing with it."""

    def codes(self, direction: Direction) -> bool:
        """Return whether messages in a direction are coded."""
        directions = self.directions or ("up" if self.codec == "topk" else "both")
        return self.codec != "none" and directions in ("both", direction)

    @property
    def share(self) -> float:
        """Share of a layer's numbers that topk sends."""
        return DEFAULT_KEEP if self.keep is None else self.keep

    @property
    def remembers(self) -> bool:
        """Whether clients remember what topk did not send."""
        return self.memory is not False

    def in_use(self) -> dict[str, Any]:
        """Return what affects a run, with the values that the run uses; two runs that agree code alike."""
        coded = [direction for direction in ("down", "up") if self.codes(direction)]
        of_topk = {} if self.remembers else {"memory": False}
        return {
            "codec": self.codec,
            "directions": coded,
            "keep": self.share if self.codec == "topk" else None,
        } | of_topk
