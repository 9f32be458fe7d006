"""`python -m gpumesh.network.tunnels.ngrok TCP HTTP`: a tunnel of ngrok to this machine, until standard input ends.

A process of its own: pyngrok blocks while it works, and the tunnel closes however the coordinator ended. It prints one JSON object a line:

    {"url": "tcp://..."}       open; it leads to the address TCP. Or "https://...", which leads to the address HTTP
    {"error": "..."}           it cannot be opened, and what to do
    {"ended": "..."}           it was open, and ngrok has ended by itself
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import threading
from typing import Any, Dict, List, Optional, Tuple

_NO_TCP = "8013"  # The account may open no TCP endpoints until it has a card.
_ADVICE: Dict[str, str] = {
    "4018": "ngrok wants an account; sign up for one, and then once: ngrok config add-authtoken ..., or set NGROK_AUTHTOKEN",
    "105": "the authtoken is not one of ngrok's; copy it again from its dashboard into NGROK_AUTHTOKEN",
    "107": "ngrok does not know the authtoken; copy it again from its dashboard into NGROK_AUTHTOKEN",
    "108": "the account has as many ngrok sessions open as it may; end another one, as its dashboard shows them",
    "120": "this ngrok is too old; update it: ngrok update",
    "121": "this ngrok is too old; update it: ngrok update",
    "334": "the same endpoint is open already; end the other ngrok",
}
_REQUEST_SECONDS = 20.0  # For ngrok's own program to open an endpoint, over a slow line.
_END_SECONDS = 1.0  # For a killed ngrok to be gone.
_MAX_TEXT = 300


def open_tunnel(tcp: str, http: str) -> Tuple[str, Any]:
    """Open one, TCP if the account may.

    Args:
        tcp: `host:port` for bytes as they are.
        http: The same for HTTP, with WebSockets.

    Returns:
        Its public URL, and the process of ngrok.

    Raises:
        RuntimeError: It cannot be opened; the message says what to do.
    """
    try:
        from pyngrok import conf, exception, ngrok, process
    except ImportError:
        raise RuntimeError('pyngrok is not installed; install it with: pip install "gpumesh[tunnel]"') from None

    config = conf.PyngrokConfig(startup_timeout=20, request_timeout=_REQUEST_SECONDS)
    config.auth_token = None  # ngrok finds NGROK_AUTHTOKEN by itself; as an argument everybody here could see it.
    try:
        try:
            target = f"tcp://{tcp}" if getattr(config, "config_version", "2") == "3" else tcp
            url = ngrok.connect(target, "tcp", pyngrok_config=config).public_url
        except exception.PyngrokNgrokHTTPError as error:
            if not _forbids_tcp(error):
                raise
            url = ngrok.connect(f"http://{http}", "http", pyngrok_config=config).public_url
        return str(url), process.get_process(config).proc
    except exception.PyngrokNgrokInstallError as error:
        close()
        raise RuntimeError(
            f"ngrok's program is not here and cannot be fetched ({_short(error)}); install it, and name it in PYNGROK_NGROK_PATH"
        ) from None
    except (exception.PyngrokError, OSError) as error:
        close()
        raise RuntimeError(explain(_everything(error))) from None


def close() -> None:
    """End ngrok's process, if there is one."""
    from pyngrok import conf, ngrok

    with contextlib.suppress(OSError):
        ngrok.kill(conf.PyngrokConfig())


def explain(text: str) -> str:
    """What went wrong, by the code in what ngrok says: a clause, `;`, and what to do."""
    code = _code(text)
    if code in _ADVICE:
        return f"no tunnel: {_ADVICE[code]} (ERR_NGROK_{code})"
    if "authtoken" in text.lower() or "authentication failed" in text.lower():
        return f"no tunnel: {_ADVICE['4018']}"
    return f"no tunnel: ngrok says: {_short(text)}; see whether `ngrok http 8000` works here"


def _forbids_tcp(error: Any) -> bool:
    text = _everything(error)
    return _code(text) == _NO_TCP or bool(re.search(r"tcp (endpoint|tunnel|address)", text, re.IGNORECASE))


def _everything(error: BaseException) -> str:
    parts: List[Optional[str]] = [str(error), getattr(error, "ngrok_error", None), getattr(error, "body", None)]
    return " ".join(part for part in parts if part)


def _code(text: str) -> str:
    match = re.search(r"ERR_NGROK_(\d+)", text)
    return match[1] if match else ""


def _short(text: object) -> str:
    shown = re.sub(r"\s+", " ", "".join(letter if letter.isprintable() else " " for letter in str(text))).strip()
    return shown if len(shown) <= _MAX_TEXT else f"{shown[:_MAX_TEXT]}..."


def _tell(**fields: str) -> None:
    sys.stdout.write("\n" + json.dumps(fields) + "\n")  # pyngrok's progress, while it fetches ngrok, ends no line.
    sys.stdout.flush()


def main(arguments: List[str]) -> int:
    """Open, tell, and wait for the end, which may come at any time."""
    logging.getLogger("pyngrok").addHandler(logging.NullHandler())  # Its errors come back as exceptions.
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        url, process = open_tunnel(*arguments)
    except RuntimeError as error:
        _tell(error=str(error))
        return 1
    _tell(url=url)
    code = process.wait()
    _tell(ended=f"ngrok has ended with exit code {code}")
    return 1


def _end_with_stdin() -> None:
    """Whoever wants the tunnel is gone: so are we, and ngrok, even where pyngrok still waits for it to begin."""
    import psutil

    sys.stdin.read()
    children = psutil.Process().children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, _END_SECONDS)  # In a container nobody else may do so.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
