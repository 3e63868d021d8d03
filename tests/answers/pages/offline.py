"""A page in a Chromium of this machine, and what it asks of the network."""

import re
import shutil
import socket
import subprocess
import threading

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def opened(page, profile):
    """The page's document after its scripts have run, and what it asked of the network (all goes to our socket)."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        asked: list[str] = []
        threading.Thread(target=_note_requests, args=(proxy, asked), daemon=True).start()
        flags = [
            "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
            "--disable-component-update", "--disable-sync", "--disable-quic", "--virtual-time-budget=8000",
            f"--user-data-dir={profile}", f"--proxy-server=127.0.0.1:{proxy.getsockname()[1]}",
            "--proxy-bypass-list=<-loopback>",
        ]  # fmt: skip
        command = [CHROMIUM, *flags, "--dump-dom", page.as_uri()]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    return shown, [each for each in asked if not re.search(r"google|gstatic|chrome", each)]  # the browser's own


def _note_requests(proxy, asked):
    while True:
        try:
            connection, _ = proxy.accept()
        except OSError:
            return
        with connection:
            connection.settimeout(20)
            try:
                asked += connection.recv(4096).decode(errors="replace").splitlines()[:1]  # none: a browser that ended
            except OSError:
                asked.append("a connection without a request")
