"""Generators whose device hangs, in the ways that a device's driver can, or is only slow."""

import ctypes
import os
import subprocess
import threading
import time

from replicas.generators.torch.generator import TorchGenerator
from replicas.tt.triage import COMMAND

HANGS_AT = 5
"""The first forward pass, warm-up aside, that does not return."""

SLOW_STEP_S = 0.4
LATE_S = 7.0
"""Longer than a turn may take that has been short so far."""
MANY_TOKENS = 4000
"""Of which a first turn may take three times as long."""


class _Counting(TorchGenerator):
    num_passes = 0

    def _forward(self, *args, is_warm_up=False, **kwargs):
        if not is_warm_up:
            self.num_passes += 1
            self.delay()
        return super()._forward(*args, is_warm_up=is_warm_up, **kwargs)


class Waiting(_Counting):
    """A generator that waits for its device correctly, so that other threads run."""

    def delay(self):
        if self.num_passes == HANGS_AT:
            threading.Event().wait()


class Holding(_Counting):
    """A generator that waits for its device inside a call that holds the interpreter's lock."""

    def delay(self):
        if self.num_passes == HANGS_AT:
            ctypes.PyDLL(None).pause()


class Locked(_Counting):
    """The same as `Holding`, in a call that no signal interrupts."""

    def delay(self):
        if self.num_passes == HANGS_AT:
            mutex, libc = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
            libc.pthread_mutex_lock(mutex)
            libc.pthread_mutex_lock(mutex)


def _time_out() -> None:
    """End a call as ttnn does if its device makes no progress."""
    subprocess.run(["/bin/sh", "-c", os.environ[COMMAND]], check=True)
    raise RuntimeError("TIMEOUT: device timeout, potential hang detected")


class TimesOut(_Counting):
    """A generator whose device hangs, of which ttnn tells."""

    def delay(self):
        if self.num_passes == HANGS_AT:
            _time_out()


class TimesOutInStart(TorchGenerator):
    """A generator whose device hangs in the warm-up, of which ttnn tells."""

    def warmup_model_prefill(self, **_):
        _time_out()


class Late(_Counting):
    """A generator that waits once too long for its device, and then continues."""

    def delay(self):
        if self.num_passes == HANGS_AT:
            time.sleep(LATE_S)


class LateWithMany(TorchGenerator):
    """A generator that takes long over a pass of many tokens, which is allowed."""

    def _forward(self, batch, *args, **kwargs):
        if len(batch.input_ids) >= MANY_TOKENS:
            time.sleep(LATE_S)
        return super()._forward(batch, *args, **kwargs)


class HangsServing(TorchGenerator):
    """Does not return from the fifth time that it serves other ranks of its gang."""

    num_served = 0

    def forward_idle(self):
        self.num_served += 1
        if self.num_served == HANGS_AT:
            threading.Event().wait()
        super().forward_idle()


class Slow(_Counting):
    """A generator that takes long over every pass, and holds the interpreter for half of it."""

    def delay(self):
        ctypes.PyDLL(None).usleep(int(SLOW_STEP_S / 2 * 1e6))
        time.sleep(SLOW_STEP_S / 2)


class Unhurried(_Counting):
    """A generator of 100 tokens in two seconds."""

    def delay(self):
        time.sleep(0.02)


class HangsInStart(TorchGenerator):
    """A generator that never becomes ready."""

    def warmup_model_prefill(self, **_):
        threading.Event().wait()
