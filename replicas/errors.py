"""Errors of the engine side that a caller can act on; anything else is a bug, and fatal."""

from __future__ import annotations


class EngineError(Exception):
    """Base of every error that `replicas` raises on purpose."""


class InvalidRequestError(EngineError):
    """A request that can never run as it stands; nothing was done for it.

    Attributes:
        param: The offending field, as the caller spelled it.
    """

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class ConfigError(EngineError):
    """An engine or model configuration that cannot work; says which values and what to change."""


class ModelLoadError(ConfigError):
    """A model folder that cannot be loaded; names the folder and what is missing or unexpected."""


class FaultPlanError(ConfigError):
    """A fault plan that cannot work; names the entry and says what to do."""


class UnknownGeneratorError(ConfigError):
    """No generator is registered under the given name."""


class DeviceError(EngineError):
    """A device that cannot be used, or that refused a call; says which and what to do."""


class EngineStartError(EngineError):
    """The engine process ended, or said that it failed, before it was ready."""


class EngineDeadError(EngineError):
    """The engine process is gone; every request that it held has ended with this error."""


class GangLostError(EngineError):
    """A rank of the engine's gang is no more, and no other can go on without it."""


class EngineStalledError(EngineError):
    """The engine lives and is in one step for too long; whoever can go elsewhere should."""


class EngineLeavingError(EngineError):
    """The engine will soon be gone; whoever can go elsewhere should."""


class EngineQuietError(EngineError):
    """The engine has sent nothing for a while: it may be gone, and may speak again."""


class EngineLateError(EngineError):
    """The engine does not stall and has not answered in time: it may not hear what it is told."""


class UnreadableMessageError(EngineError):
    """Bytes that are no message of this protocol.

    Attributes:
        request_id: Of the request that they were to add, where that much can be read.
    """

    def __init__(self, message: str, request_id: str | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id


class RequestRefusedError(EngineError):
    """The engine did not take the request; another engine, or the same one later, may.

    Attributes:
        reason: One of `replicas.messages.RefusalReason`.
        request_id: Which request.
    """

    def __init__(self, reason: str, message: str, request_id: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.request_id = request_id


class RequestFailedError(EngineError):
    """A request that was accepted ended without finishing (for one: its remote KV never came)."""
