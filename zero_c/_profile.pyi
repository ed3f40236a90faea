from contextlib import AbstractContextManager
from os import PathLike
from types import TracebackType
from typing import Any, NamedTuple

from zero_c._core import Communicator, Engine

class Span(NamedTuple):
    lane: str
    name: str
    begin_ns: int
    end_ns: int
    facts: dict[str, Any]

class Profile:
    spans: list[Span]
    lost: int
    def __init__(self, engine: Engine, comm: Communicator, unit_names: list[str] | None, capacity: int) -> None: ...
    def __enter__(self) -> Profile: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
    def span(self, name: str) -> AbstractContextManager[None]: ...
    def save(self, path: str | PathLike[str]) -> None: ...
