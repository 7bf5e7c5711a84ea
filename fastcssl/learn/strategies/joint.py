"""Joint training: one task, the union of all. What continual learners are measured against."""

from dataclasses import dataclass

from fastcssl.learn.strategies import StrategyConfig
from fastcssl.learn.strategies.finetune import Finetune


@dataclass(frozen=True, slots=True, kw_only=True)
class JointConfig(StrategyConfig):
    pass


class Joint(Finetune):
    name = "joint"
    Config = JointConfig
    union = True


STRATEGY = Joint
