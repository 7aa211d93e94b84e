"""Errors of the engine side that a caller can act on; any other exception is a fatal bug."""

from __future__ import annotations


class EngineError(Exception):
    """Base of every error that `replicas` raises on purpose."""


class InvalidRequestError(EngineError):
    """A request that can never run in its present form; no work was done for it.

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
    """A device that cannot be used or that rejected a call; names it and says what to do."""


class EngineStartError(EngineError):
    """Failure of an engine process before it was ready."""


class EngineDeadError(EngineError):
    """Loss of an engine process; every request that it held ends with this error."""


class GangLostError(EngineError):
    """Loss of one rank of a gang, which ends all its ranks: forward passes need every one."""


class EngineStalledError(EngineError):
    """Engine alive but too long in one step; move the request if another engine has room."""


class EngineLeavingError(EngineError):
    """Engine about to stop or change its role; move the request if another engine has room."""


class EngineQuietError(EngineError):
    """Engine silent for a while; it may be dead or may recover."""


class EngineLateError(EngineError):
    """Engine that makes progress but missed a deadline; messages to it may be lost."""


class UnreadableMessageError(EngineError):
    """Bytes that are not a message of this protocol.

    Attributes:
        request_id: Id of the request in an unreadable `AddRequest`, where it can be decoded.
    """

    def __init__(self, message: str, request_id: str | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id


class RequestRefusedError(EngineError):
    """Refusal of a request by an engine; another engine, or this one later, may accept it.

    Attributes:
        reason: One of `replicas.messages.RefusalReason`.
        request_id: The refused request.
    """

    def __init__(self, reason: str, message: str, request_id: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.request_id = request_id


class RequestFailedError(EngineError):
    """Accepted request that ended without finishing, for example because its KV never arrived."""
