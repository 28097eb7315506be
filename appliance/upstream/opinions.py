"""Second opinions: a larger or unquantized model reads the doubtful pictures of devices again.

It is asked by the Open Inference Protocol (v2, with its binary extension): BYTES `image` [N] in, BYTES `result` [N]
with predict documents out, as a bundle of this daemon takes and gives them; Triton and KServe speak the same. A queue,
not a hot path: samples wait in the database, any replica takes some, and one that ends before its answer leaves them to
another.
"""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import orjson
import structlog
import urllib3

from appliance.adapters.outbound import Pools, bearer, why
from appliance.adapters.tls import Calling
from appliance.core.opinion import corrected
from models.answers import found
from models.errors import BadInput, Unavailable
from models.spec import pack_bytes
from models.sync import Opinion, Sample

if TYPE_CHECKING:
    from appliance.settings import Opinions as Settings
    from appliance.upstream.samples import Samples

log = structlog.get_logger()

_AT_ONCE = 4
"""Samples of one round: the others of a replica's claim must not wait long."""
_CONNECT_S, _READ_S = 5.0, 30.0
_ROUND_S, _REST_S = 5.0, 20.0
_OK, _NEVER = 200, (400, 413, 415, 422)
"""Of HTTP; what is neither may be mended by an operator, and the sample waits for that."""
_HEADER = "inference-header-content-length"


class Opinions:
    """Has the pictures of one database read again."""

    def __init__(self, samples: Samples, config: Settings, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Take from and answer in `samples`."""
        self._samples, self._config, self._monotonic = samples, config, monotonic
        self._pools: Pools | None = None
        self._rests_until = monotonic()

    def work(self) -> None:
        """Read some of what waits; blocks.

        A sample whose model cannot be reached waits on: it is free for everybody again when its claim has run out.
        Raises Unavailable where the database, or the model, does not answer; the model then has some rest.
        """
        now = self._monotonic()
        if now < self._rests_until:
            return
        until, self._rests_until = now + _ROUND_S, now + _REST_S
        while self._monotonic() < until and (taken := self._samples.waiting(_AT_ONCE)):
            for sample in taken:
                self._samples.answered(self._opinion(sample))
        self._rests_until = now

    def _opinion(self, sample: Sample) -> Opinion:
        model = self._config.models.get(sample.model, sample.model)
        given: dict[str, Any] = {"source": sample.source, "at": sample.at, "by": model}
        try:
            pictures = [base64.b64decode(part.picture, validate=True) for part in sample.parts]
            by, results = self._read(model, pictures)
            result, agrees = corrected(sample.parts, results)
        except (BadInput, binascii.Error, KeyError, TypeError, ValueError) as error:
            log.warning("no_second_opinion", model_id=model, sample=sample.sample_id, reason=str(error))
            reason = f"{model} cannot read it again: {error}"
            return Opinion(sample.sample_id, sample.model, sample.version, **given, reason=reason)
        log.info("second_opinion", model_id=by, of=f"{sample.model} {sample.version}", agrees=agrees)
        return Opinion(
            sample.sample_id, sample.model, sample.version, **{**given, "by": by}, result=result, agrees=agrees
        )

    def _read(self, model: str, pictures: Sequence[bytes]) -> tuple[str, list[dict[str, Any]]]:
        """Who read, and the predict documents; raises BadInput where it never will, Unavailable where it may later."""
        content = pack_bytes(pictures)
        head = orjson.dumps(
            {
                "inputs": [
                    {
                        "name": "image",
                        "datatype": "BYTES",
                        "shape": [len(pictures)],
                        "parameters": {"binary_data_size": len(content)},
                    }
                ],
                "outputs": [{"name": "result", "parameters": {"binary_data": False}}],
            }
        )
        headers = {"content-type": "application/octet-stream", _HEADER: str(len(head))}
        url = f"{self._config.url.rstrip('/')}/v2/models/{quote(model, safe='')}/infer"
        try:
            if self._config.token_file:
                headers["authorization"] = bearer(self._config.token_file)
            self._pools = self._pools or Pools(_AT_ONCE, Calling(self._config.ca).context())
            timeout = urllib3.Timeout(connect=_CONNECT_S, read=_READ_S)
            answer = self._pools.to(url).request(
                "POST", url, body=head + content, headers=headers, timeout=timeout, retries=False, redirect=False
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            msg = f"{url} does not answer ({why(error)}): see opinions.url"
            raise Unavailable(msg) from error
        if answer.status in _NEVER:
            msg = f"it answers with {answer.status} ({answer.data[:200]!r})"
            raise BadInput(msg)
        if answer.status != _OK:
            msg = f"{url} answers with {answer.status} ({answer.data[:200]!r}): it is asked again later"
            raise Unavailable(msg)
        document = orjson.loads(answer.data)
        (result,) = (one for one in document["outputs"] if one["name"] == "result")
        results = [orjson.loads(text) for text in result["data"]]
        if not all(isinstance(one, dict) and found(one)[0] for one in results):
            raise BadInput("its answer is no predict document")
        by = f"{document.get('model_name', model)} {document.get('model_version', '')}".strip()
        return by, results
