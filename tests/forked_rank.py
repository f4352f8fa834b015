"""Take a rank's place under mpirun for a process that the test forks: started by `conftest.run_forked_ranks`.

The argument is the name of the test's socket. The test gets this process's environment and open files, and
sends the exit code.
"""

from __future__ import annotations

import json
import os
import socket
import sys

if __name__ == "__main__":
    # the last one leads to the launcher
    descriptors = [0, 1, 2, *(int(os.environ[name]) for name in ("PMI_FD",) if name in os.environ)]
    with socket.socket(socket.AF_UNIX) as line:
        line.connect("\0" + sys.argv[1])
        socket.send_fds(line, [json.dumps([descriptors, dict(os.environ)]).encode()], descriptors)
        line.shutdown(socket.SHUT_WR)
        code = line.recv(8)
    sys.exit(int(code or 1))
