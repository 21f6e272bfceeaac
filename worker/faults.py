"""Why this worker gives up: one exception that carries a code of the failure table."""

from veloxquant.supervisor.failures import FAILURES, fault
from veloxquant.supervisor.messages import Fault


class WorkerFault(Exception):
    """Raised where the worker cannot go on; `code` names the row of the failure table."""

    def __init__(self, code: str, detail: str = "") -> None:
        super().__init__(f"{code}: {detail}" if detail else code)
        self.code = code
        self.detail = detail

    @property
    def exit_code(self) -> int:
        """The status this process leaves with."""
        return FAILURES[self.code].exit_code

    @property
    def fault(self) -> Fault:
        """What the supervisor is told."""
        return fault(self.code, self.detail)
