"""Every error this project raises, split by whose fault it is.

    ApplianceError
    ├── CallerError            the request is wrong: sending it again unchanged fails again
    │   ├── BadInput             a tensor, a picture or a field cannot be used
    │   ├── TooLarge             over a size limit
    │   ├── NotFound             no such model, version, graph or command
    │   ├── Conflict             what is there already does not allow it
    │   ├── Unauthenticated      whoever asks has not shown who they are
    │   └── Forbidden            whoever asks may not do this
    ├── Unavailable            the request is fine, the appliance cannot serve it now: retry later
    │   ├── Overloaded           the queue is full, or its wait too long
    │   │   └── TooMany            this client, or all together, ask for more than they may
    │   ├── InsufficientMemory   the memory budget does not hold it
    │   ├── NotReady             the model is loading, restarting or quarantined
    │   ├── WorkerLost           the worker died or hung while it held the request
    │   └── DeadlineExceeded     the caller's own deadline passed first
    ├── ModelError             the model or its runtime failed on a valid request
    ├── BundleError            what was packed is damaged, foreign or not for this device
    ├── UpdateError            a device does not get, or must not take, what is published
    │   ├── Unreachable          the repository does not answer, or the disk is full: try again later
    │   └── UntrustedUpdate      what it answers is not signed, not fresh, or not what was signed
    ├── IdentityError          a device has no certificate that counts, or is not given one
    ├── ConfigError            the operator's settings or command line
    └── WorkshopError          provisioning could not do what was asked
        ├── SourceError          the checkpoint or the labelled data is missing or unusable
        └── GateFailed           the result was measured and is not good enough

A message says what happened, why, and what to do, in one or two sentences.
Doors (HTTP, MQTT, command line) map classes to their own answers; nothing else does.
"""

from __future__ import annotations

__all__ = [
    "ApplianceError",
    "BadInput",
    "BundleError",
    "CallerError",
    "ConfigError",
    "Conflict",
    "DeadlineExceeded",
    "Forbidden",
    "GateFailed",
    "IdentityError",
    "InsufficientMemory",
    "ModelError",
    "NotFound",
    "NotReady",
    "Overloaded",
    "SourceError",
    "TooLarge",
    "TooMany",
    "Unauthenticated",
    "Unavailable",
    "Unreachable",
    "UntrustedUpdate",
    "UpdateError",
    "WorkerLost",
    "WorkshopError",
    "error_from_name",
]


class ApplianceError(Exception):
    """Base of all errors of this project."""


class CallerError(ApplianceError):
    """The caller's fault; the same request will fail again."""


class BadInput(CallerError):
    """An input cannot be used: wrong name, shape, type, or not a picture."""


class TooLarge(CallerError):
    """An input is over a stated limit of bytes, pixels or elements."""


class NotFound(CallerError):
    """The named model, version, graph or command does not exist here."""


class Conflict(CallerError):
    """What is there already does not allow it: a name is taken, or something has ended or not."""


class Unauthenticated(CallerError):
    """No token or certificate that is known here came with the request, and it needs one."""


class Forbidden(CallerError):
    """The caller is known, or comes from another site's page, and may not do this."""


class Unavailable(ApplianceError):
    """The appliance's state, not the request, is the reason; retry after `retry_after_s`."""

    retry_after_s: float = 1.0

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        """Say what is the matter, and when a retry may help."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Overloaded(Unavailable):
    """The queue of this model is full, or a request would wait too long in it."""


class TooMany(Overloaded):
    """A limit of requests a second or at once, of one client or of all, is reached."""


class InsufficientMemory(Unavailable):
    """A model or a batch does not fit into the memory budget, now or ever."""

    def __init__(
        self, message: str, *, need_bytes: int = 0, have_bytes: int = 0, would_evict: tuple[str, ...] = ()
    ) -> None:
        """Say with `message` what the three figures are; they are 0 when only a worker knows."""
        super().__init__(message)
        self.need_bytes, self.have_bytes, self.would_evict = need_bytes, have_bytes, would_evict


class NotReady(Unavailable):
    """The model is loading, restarting or quarantined."""


class WorkerLost(Unavailable):
    """The worker process died or hung while it held this request."""


class DeadlineExceeded(Unavailable):
    """The deadline that the caller set passed before an answer existed."""


class ModelError(ApplianceError):
    """The model or its runtime failed on a request that passed every check."""


class BundleError(ApplianceError):
    """A bundle is damaged, of a format we do not know, or not for this device."""


class UpdateError(ApplianceError):
    """A device does not get, or must not take, what is published."""


class Unreachable(UpdateError):
    """The repository does not answer as it should, or there is no room for what it has; later that may be better."""


class UntrustedUpdate(UpdateError):
    """What the repository answers is not signed, not fresh, or not what was signed."""


class IdentityError(ApplianceError):
    """A device has no certificate that counts, or is not given one."""


class ConfigError(ApplianceError):
    """The operator's settings or command line cannot be used."""


class WorkshopError(ApplianceError):
    """Provisioning could not do what was asked."""


class SourceError(WorkshopError):
    """A source model or labelled data is missing or unusable."""


class GateFailed(WorkshopError):
    """A result was measured and missed a limit of its recipe."""


def _tree(root: type[ApplianceError]) -> dict[str, type[ApplianceError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


def error_from_name(name: str, message: str) -> ApplianceError:
    """Rebuild an error that crossed a process boundary; unknown names become `ModelError`."""
    return _tree(ApplianceError).get(name, ModelError)(message)
