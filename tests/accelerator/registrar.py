"""Page-locks host memory for the simulated accelerator, where the pinned pool asks for it."""

from __future__ import annotations

from tests.accelerator import native
from tierstore.errors import BackendError

_REFUSALS = {
    1: "it is not mapped",
    2: "it is registered already",
    3: "it is not registered",
}


class HostRegistrar:
    """Registers memory with the simulated device."""

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock.

        Raises:
            BackendError: not all of it is mapped, or it is registered already.
        """
        self._check(native.register_host(address, nbytes))

    def unregister(self, address: int) -> None:
        """Undo `register`.

        Raises:
            BackendError: nothing is registered there.
        """
        self._check(native.unregister_host(address))

    @staticmethod
    def _check(code: int) -> None:
        if code != 0:
            raise BackendError(f"the simulated accelerator refuses the memory: {_REFUSALS[code]}")
