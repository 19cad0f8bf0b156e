"""Settings of the Jupyter server that `make lab` starts: its terminal says nothing that would alarm a newcomer.

Each takes away the cause of a warning. The user's own settings stay as they are: these come in front of them.
"""

import os
import shutil

import zmq
from jupyter_client.manager import KernelManager

c = get_config()  # noqa: F821  (Jupyter defines it here)

# What goes between the server and a kernel is encrypted; else each kernel warns that it is not.
if hasattr(KernelManager, "transport_encryption") and zmq.has("curve"):
    c.KernelManager.transport_encryption = "auto"

# The answer to a ping may take as long as the time between two; the default is three times that, which tornado refuses.
c.ServerApp.tornado_settings = {"ws_ping_interval": 30_000, "ws_ping_timeout": 30_000}

# The course needs no language servers, and a list of nineteen that are not installed helps nobody.
c.LanguageServerManager.autodetect = False

# A login shell would begin with a PATH of its own, and `tinyvllm` would not be found.
c.ServerApp.terminado_settings = {
    "shell_command": [os.environ.get("SHELL") or shutil.which("sh") or "/bin/sh"]
}
