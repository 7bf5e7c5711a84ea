"""Which process this is among those that train together."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class World:
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} does not exist in a world of {self.size}")
