from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Counted", "Listed", "Machine", "Param", "Plan", "Settings", "StagePlan", "StepTime", "Unit", "counted",
           "largest_model", "main", "plan"]

@dataclass(frozen=True)
class Settings:
    optimizer: str = "adamw"
    amsgrad: bool = False
    momentum: bool = False
    bucket_mb: float | None = None
    prefetch: int = 1
    shared_params: bool = False
    device: str = "cpu"
    backwards: int = 1
    @property
    def states(self) -> int: ...
    @property
    def stages(self) -> tuple[int, ...]: ...
    @property
    def bucket_bytes(self) -> int: ...
    @property
    def slots(self) -> int: ...

@dataclass(frozen=True)
class Param:
    elements: int
    dtype: str = "float32"
    unit: int = 0
    frozen: bool = False

@dataclass(frozen=True)
class Unit:
    name: str = ""
    level: int = 1
    resident: bool = False

@dataclass(frozen=True)
class Listed:
    params: tuple[Param, ...]
    units: tuple[Unit, ...] = ...
    outside_bytes: int = 0
    @property
    def elements(self) -> int: ...

@dataclass(frozen=True)
class Counted:
    elements: int
    dtype: str = "float32"
    largest_unit: int = 1
    root: int = 0
    def unit_sizes(self) -> list[tuple[int, int]]: ...

@dataclass(frozen=True)
class Machine:
    latency_s: float
    reduce_bandwidth: float
    gather_bandwidth: float
    memory_bandwidth: float
    hops: str = "ring"
    overlap: bool = True

@dataclass(frozen=True)
class StepTime:
    compute: float
    reduce: float
    gather: float
    update: float
    forward: float
    backward: float
    step: float
    @property
    def total(self) -> float: ...
    @property
    def waiting(self) -> float: ...

@dataclass(frozen=True)
class StagePlan:
    memory: dict[str, int]
    traffic: dict[str, Any]
    backward_bytes: int
    outside_bytes: int
    paper_bytes: float | None = None
    time: StepTime | None = None
    @property
    def peak_bytes(self) -> int: ...

@dataclass(frozen=True)
class Plan:
    model: Counted | Listed
    ranks: int
    settings: Settings
    stages: dict[int, StagePlan]

def plan(
    model: Counted | Listed,
    ranks: int,
    *,
    rank: int = 0,
    machine: Machine | None = None,
    forward_seconds: float | None = None,
    backward_seconds: float | None = None,
    **settings: Any,
) -> Plan: ...
def counted(elements: float, dtype: str = "float32", largest_unit: float | None = None, root: float = 0) -> Counted: ...
def largest_model(
    memory_bytes: float,
    ranks: int,
    stage: Literal[0, 1, 2, 3],
    *,
    dtype: str = "float32",
    largest_unit: float | None = None,
    root: float = 0,
    **settings: Any,
) -> int: ...
def main(argv: Sequence[str] | None = None) -> None: ...
