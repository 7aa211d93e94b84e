"""Events of a device, which an engine waits for before it reads a copied output."""

from __future__ import annotations

import ttnn

from replicas.errors import DeviceError
from replicas.generators.ttnn.mesh import ttnn_message


def wait_for_event(event: object) -> None:
    """Wait for an event of ``read_decode_output``.

    Raises:
        DeviceError: The device failed before the event.
    """
    try:
        ttnn.event_synchronize(event)
    except RuntimeError as error:
        raise DeviceError(f"the device failed during a step: {ttnn_message(error)}") from error
