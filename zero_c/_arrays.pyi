from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, NamedTuple

import numpy.typing as npt

from zero_c._core import Communicator, Export
from zero_c._profile import Profile

# An array is NumPy's, or anything with __dlpack__.
Arrays = Sequence[Any] | Mapping[str, Any]

class LastStep(NamedTuple):
    norm: float | None
    scale: float
    skipped: bool
    nonfinite: int
    steps: int
    deterministic: bool

class ShardedOptimizer:
    comm: Communicator
    loss_scale: float | None
    max_grad_norm: float | None
    param_groups: list[dict[str, Any]]
    last_step: LastStep
    def __init__(
        self,
        arrays: Arrays,
        optimizer: Literal["adamw", "adam", "sgd"] = "adamw",
        *,
        stage: Literal[0, 1, 2] = 2,
        max_grad_norm: float | None = None,
        loss_scale: float | None = None,
        skip_nonfinite: bool | None = None,
        reduce_op: Literal["mean", "sum"] = "mean",
        bucket_mb: float | None = None,
        shared_params: bool = False,
        comm: Communicator | None = None,
        in_place: bool = True,
        deterministic: bool | None = None,
        **options: Any,
    ) -> None: ...
    def __len__(self) -> int: ...
    def add_grad(self, i: int, gradient: Any) -> None: ...
    def end_backward(self) -> None: ...
    def zero_grad(self, set_to_none: bool = True) -> None: ...
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> float: ...
    def grad(self, i: int) -> npt.NDArray[Any]: ...
    def step(self) -> None: ...
    def param(self, i: int) -> npt.NDArray[Any] | Export: ...
    def param_dlpack(self, i: int) -> Export: ...
    def refresh(self, i: int | None = None) -> None: ...
    def state(self, i: int) -> dict[str, Any]: ...
    def full_state(self, i: int) -> dict[str, Any]: ...
    def memory(self) -> dict[str, int]: ...
    def traffic(self) -> dict[str, Any]: ...
    def profile(self, capacity: int = 65536) -> Profile: ...
    def save(self, path: str | PathLike[str]) -> None: ...
    def load(self, path: str | PathLike[str]) -> None: ...
