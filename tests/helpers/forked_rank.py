"""Take a rank's place under mpirun for a process that a test forks; see `processes.run_ranks`.

The argument is the name of the test's socket. The test gets this process's environment, folder and open
files, and sends the exit code: that of a signal is negative.
"""

from __future__ import annotations

import json
import os
import socket
import sys

if __name__ == "__main__":
    # the last one leads to the launcher
    descriptors = [0, 1, 2, *(int(os.environ[name]) for name in ("PMI_FD",) if name in os.environ)]
    place = json.dumps([descriptors, os.getcwd(), dict(os.environ)]).encode()
    with socket.socket(socket.AF_UNIX) as line:
        line.connect("\0" + sys.argv[1])
        socket.send_fds(line, [place], descriptors)
        line.shutdown(socket.SHUT_WR)
        code = int(line.recv(8) or 1)
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)
