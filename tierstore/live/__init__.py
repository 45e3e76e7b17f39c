"""What a process tells whoever looks at its runs while they go on: ``tierstore top``.

1. A process with something to show has one socket and one thread, which is blocked until somebody connects:
   nothing is computed, and nobody wakes, while nobody looks.  A thread and not the training loop answers, so
   that a run that hangs can be looked at, too.
2. Who connects is sent one snapshot, and that is all: nothing that it says is read.
3. Only the same user can connect: the socket is of mode 0600 in a directory of mode 0700, and both ends ask
   the kernel who the other one is.
4. That nothing can be shown harms no run: it is logged at DEBUG.
5. In the child of a fork nothing is shown but what is made there.
"""

from tierstore.live.client import LiveProcess, LiveRun, read
from tierstore.live.places import folders, sockets
from tierstore.live.server import LiveView, Shown, show

__all__ = ["LiveProcess", "LiveRun", "LiveView", "Shown", "folders", "read", "show", "sockets"]
