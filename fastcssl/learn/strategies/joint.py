"""Joint training: trains the union of all tasks as one task. Continual learners are compared with it."""

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
