"""A freshly flashed board calls home: `python -m appliance.callhome`, at its first boot, as root.

It tells the workshop what it is, and what its daemon answers to the ticket's question, until the workshop accepts that.
Then it lets the workshop's key for this board log in, and the ticket goes. Only a client of the local daemon.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from appliance.adapters import host
from models import schema
from models.callhome import PROOF, TICKET, Reply, Report, Ticket, proves, reply_proof, report_proof
from models.folder import write_file

KEYS = "etc/ssh/authorized_keys.d"
_DAEMON = "http://127.0.0.1:8080"
_RETRY_S = 10.0
_PATIENCE_S = 300.0
"""A daemon that does not answer for so long is reported as it is."""
_ASK_S = 60.0


class CallHome:
    """One board's call."""

    def __init__(
        self,
        root: Path = Path("/"),
        daemon_url: str = _DAEMON,
        *,
        now: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        """Read the ticket; raises OSError, ValueError when that cannot be."""
        self._root, self._file, self._now, self._wait = root, root / TICKET, now, wait
        self._ticket = schema.load(Ticket, json.loads(self._file.read_bytes()))
        self._daemon_url = daemon_url

    def run(self) -> int:
        """Call until the workshop accepts; 0 then. It stops only with the service."""
        began_at = self._now()
        while True:
            report = self.report()
            if report.answer or self._now() - began_at >= _PATIENCE_S:
                reply = self.tell(report)
                if reply and reply.accepted:
                    self._let_in(reply.authorized_key)
                    self._file.unlink()
                    print("the workshop has accepted this board", flush=True)
                    return 0
                if reply:
                    print(f"the workshop does not accept this board yet: {reply.reason}", flush=True)
            self._wait(_RETRY_S)

    def report(self) -> Report:
        """What there is to say now."""
        board = host.board(self._root)
        answer, reason, status = None, "", {}
        try:
            status = self._ask("GET", "/v1/status")
            question = self._ticket.question
            answer = self._ask("POST", f"/v2/models/{question.model}/infer", json=dict(question.body))
        except (httpx.HTTPError, ValueError) as error:
            reason = str(error) or type(error).__name__
        return Report(
            run=self._ticket.run,
            serial=board.get("serial", ""),
            model=board.get("model", ""),
            l4t=board.get("l4t", ""),
            slots=board.get("slots", {}),
            appliance=status.get("appliance", ""),
            bundles=tuple({key: one[key] for key in ("name", "version", "digest")} for one in status.get("models", ())),
            answer=answer,
            reason=reason,
        )

    def tell(self, report: Report) -> Reply | None:
        """Tell the first workshop that answers; None when none does, or none that knows the nonce."""
        content = json.dumps(schema.dump(report)).encode()
        for url in self._ticket.urls:
            with contextlib.suppress(httpx.HTTPError, ValueError):
                challenge = httpx.get(url, timeout=_ASK_S, trust_env=False).text
                if not challenge.isalnum():
                    continue  # nobody of ours
                asked = report_proof(self._ticket.nonce, content, challenge)
                headers = {PROOF: asked, "content-type": "application/json"}
                response = httpx.post(url, content=content, headers=headers, timeout=_ASK_S, trust_env=False)
                wanted = reply_proof(self._ticket.nonce, response.content, asked)
                if proves(response.headers.get(PROOF, ""), wanted):
                    return schema.load(Reply, response.json())
        return None

    def _ask(self, method: str, path: str, **request: Any) -> dict[str, Any]:  # noqa: ANN401 - httpx's own arguments
        response = httpx.request(method, f"{self._daemon_url}{path}", timeout=_ASK_S, trust_env=False, **request)
        answer: dict[str, Any] = response.json()
        if response.is_error:
            raise ValueError(str(answer.get("error", response.status_code)))
        return answer

    def _let_in(self, authorized_key: str) -> None:
        """Let one more key log in as the ticket's user, where the image's SSH server looks for keys."""
        file = self._root / KEYS / self._ticket.user
        known = file.read_text().splitlines() if file.exists() else []
        if authorized_key and authorized_key not in known:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_file(file, "".join(f"{line}\n" for line in (*known, authorized_key)).encode(), mode=0o644)


def main() -> int:
    """Call home if there is a ticket; 0 done, 1 with a reason."""
    try:
        return CallHome().run()
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as error:
        print(f"callhome: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
