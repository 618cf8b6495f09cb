"""What a view of a run needs to know besides its tables: a coordinator has it, and so has the folder of a finished run."""

from collections.abc import Callable
from typing import Protocol

from shoal.swarm.coordinator.config import CoordinatorConfig
from shoal.wire.run_spec import RunSpec


class Terms(Protocol):
    @property
    def config(self) -> CoordinatorConfig: ...

    @property
    def spec(self) -> RunSpec: ...

    @property
    def clock(self) -> Callable[[], float]: ...
