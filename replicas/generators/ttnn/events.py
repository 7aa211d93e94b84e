"""Events of a device: what an engine waits for before it looks at an output on its way."""

from __future__ import annotations

import ttnn

from replicas.errors import DeviceError
from replicas.generators.ttnn.mesh import ttnn_message


def wait_for_event(event: object) -> None:
    """Wait for an event of ``read_decode_output``.

    Raises:
        DeviceError: The device did not get there.
    """
    try:
        ttnn.event_synchronize(event)
    except RuntimeError as error:
        raise DeviceError(f"waiting for the device: {ttnn_message(error)}") from error
