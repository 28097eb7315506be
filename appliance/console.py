"""What the client commands share: how they ask the daemon, print text as it is, and fail in one sentence."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import httpx
import typer
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from appliance.settings import Settings

Url = Annotated[
    str, typer.Option(help="address of the daemon", envvar="APPLIANCE_URL", show_default=True, metavar="URL")
]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON document instead of a table")]
StateDir = Annotated[
    Path | None,
    typer.Option(help="state folder of the daemon (default: as in its settings)", metavar="DIR", show_default=False),
]
Config = Annotated[Path | None, typer.Option(help="settings of the daemon", metavar="FILE", show_default=False)]
DEFAULT_URL = "http://127.0.0.1:8080"
TOKEN_VARIABLE, CA_VARIABLE = "APPLIANCE_TOKEN", "APPLIANCE_CA"
"""Not options: a command line can be read by everybody on the machine."""

_PIPE_WIDTH = 1000
_COMMANDS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "\ufffd")
"""What a terminal would obey. Names and reasons come from devices and pictures, which may not write on its screen."""


class _Plain(Console):
    """Shows what a terminal would obey as a mark."""

    def render_str(self, text: str, **how: Any) -> Text:  # noqa: ANN401 - the base class's own options
        return super().render_str(text.translate(_COMMANDS), **how)


def plain(*, stderr: bool = False) -> Console:
    """A console that shows text as it is: no line broken unless a terminal is that narrow, no markup, no emoji."""
    console = _Plain(stderr=stderr, soft_wrap=True, markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console


def fail(message: str, code: int = 1) -> NoReturn:
    """Print `message` and exit: with 1 for what was refused or failed, with 2 for wrong usage."""
    plain(stderr=True).print(message, style="red")
    raise typer.Exit(code)


def client(url: str, *, timeout_s: float = 60.0) -> httpx.Client:
    """A client of the daemon at `url`; exits with 1 and one sentence when what it was told cannot be used.

    A token is taken from APPLIANCE_TOKEN, and the authority of the daemon's certificate from the PEM file APPLIANCE_CA.
    """
    token, authority = os.environ.get(TOKEN_VARIABLE), os.environ.get(CA_VARIABLE)
    try:
        return httpx.Client(
            base_url=url if "://" in url else f"http://{url}",
            timeout=timeout_s,
            trust_env=False,  # a proxy that the environment names knows nothing of this machine's loopback
            headers={"authorization": f"Bearer {token}"} if token else {},
            verify=ssl.create_default_context(cafile=authority) if authority else True,
        )
    except httpx.InvalidURL as error:
        fail(f"{url} is no address: {error}")
    except OSError as error:
        fail(f"{CA_VARIABLE} names {authority}, which cannot be used ({error}): give a PEM file")


def refused(url: str, error: httpx.HTTPError) -> NoReturn:
    """Print why the daemon at `url` could not be asked, or what it refused, and exit with 1."""
    fail(reason_of(url, error))


def reason_of(url: str, error: httpx.HTTPError) -> str:
    """Why the daemon at `url` could not be asked, or what it refused, and what to do."""
    if isinstance(error, httpx.HTTPStatusError):
        try:
            reason = error.response.json()["error"]
        except (ValueError, KeyError, TypeError):
            reason = error.response.text[:200]
        return f"{reason} (HTTP {error.response.status_code})"
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return (
            f"the certificate that {url} shows is not trusted ({error}): name the PEM file of its authority in "
            f"{CA_VARIABLE}, and call the daemon by a name that is in its certificate"
        )
    if isinstance(error, httpx.RemoteProtocolError) and not url.startswith("https://"):
        return f"{url} does not answer as HTTP does ({error}): if the daemon has TLS, give its https:// address"
    return f"the daemon does not answer at {url} ({error}): start it with `appliance run`, or give --url"


def ask(method: str, url: str, path: str, **request: Any) -> Any:  # noqa: ANN401 - httpx's own arguments, JSON
    """Ask the daemon; on failure print one sentence and exit with 1."""
    try:
        with client(url) as http:
            response = http.request(method, path, **request).raise_for_status()
    except httpx.HTTPError as error:
        refused(url, error)
    try:
        return response.json()
    except ValueError:
        fail(f"what answers at {url} is not the daemon: give its address with --url")


def settings_of(config: Path | None, state_dir: Path | None) -> Settings:
    """The daemon's settings, as far as a command can know them; raises ConfigError."""
    from appliance import settings  # noqa: PLC0415 - slow, and few commands need it

    return settings.load(config=config, flags={} if state_dir is None else {"state_dir": state_dir})
